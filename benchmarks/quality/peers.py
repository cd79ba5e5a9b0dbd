"""Common methods: checkpoint blocks, checkpoint selectively, or set `activation_memory_budget`."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Step = Callable[[], torch.Tensor]

_aten = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
KNOB = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def stepping(module: nn.Module, forward: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...]) -> Step:
    """Returns a training step without optimizer state, so that only activations and gradients are counted."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peers(
    model: nn.Module, batch: tuple[torch.Tensor, ...], is_block: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, Step]]:
    """Yields the name, a copy of the model and a step for each method."""
    ways: dict[str, Callable[[nn.Module], None]] = {"eager": lambda module: None}
    if any(map(is_block, model.modules())):
        ways["checkpoint every block"] = lambda module: _checkpointed(module, is_block, every=1)
        ways["checkpoint every second block"] = lambda module: _checkpointed(module, is_block, every=2)
        keeping = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        ways["save products of every block"] = lambda module: _checkpointed(
            module, is_block, every=1, context_fn=keeping
        )
    for name, change in ways.items():
        module = copy.deepcopy(model)
        change(module)
        yield name, module, stepping(module, module, batch)
    yield from _knob(model, batch)


def _checkpointed(module: nn.Module, is_block: Callable[[nn.Module], bool], *, every: int, **options: object) -> None:
    blocks = [part for part in module.modules() if is_block(part)]
    for block in blocks[::every]:

        def forward(self: nn.Module, *args: object, plain: Callable = block.forward, **kwargs: object) -> object:
            return checkpoint(plain, *args, use_reentrant=False, **options, **kwargs)

        block.forward = types.MethodType(forward, block)


def _knob(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, nn.Module, Step]]:
    """Yields steps with `activation_memory_budget` and the min-cut partitioner, whose graphs run op by op.

    Normalisation layers have no running statistics here: without Dynamo they cannot be updated inside the graph.
    """
    import torch._functorch.config as config
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_module
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    before = config.activation_memory_budget
    try:
        for budget in KNOB:
            module = copy.deepcopy(model)
            for norm in module.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
            config.activation_memory_budget = budget
            traced = aot_module(
                module,
                fw_compiler=boxed_nop,
                bw_compiler=boxed_nop,
                partition_fn=min_cut_rematerialization_partition,
            )
            yield f"activation_memory_budget {budget}", module, stepping(module, traced, batch)
    finally:
        config.activation_memory_budget = before
