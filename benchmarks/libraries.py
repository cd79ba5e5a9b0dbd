"""Compare techniques of this project with PyTorch's functions for the same purpose.

    python -m benchmarks.libraries

Each row measures one forward and backward on the CPU. The columns are the peak bytes of all allocations by ops
(PyTorch's allocator, as in `planner.rewrite.on_cpu.allocations`), the CPU seconds (smallest of 5 runs) divided by those
without a technique, and the largest relative difference of a gradient from its reference (norm of the difference
divided by the norm). The tables are:

- loss: compares `chunked_loss` with `F.linear_cross_entropy`, for the logits of a language-model head and their cross
  entropy. The reference is the gradient in float64.
- selective: compares `checkpoint` with `create_selective_checkpoint_contexts`, for a stack of blocks that keeps some
  products. The reference is the gradient without a technique.
- offload: compares `offload` with `torch.autograd.graph.save_on_cpu`, for the same stack. The step does not run, but is
  rehearsed on a virtual RTX 3060. The columns are the rehearsed peak and step time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import planner
from planner.assemble import versions
from planner.rewrite.on_cpu.allocations import AllocationRecord
from planner.rewrite.portable.module_forward import forward_function
from planner.rewrite.rules import checkpoint as own_checkpoint
from planner.rewrite.rules import offload as own_offload
from planner.rewrite.rules.chunked_loss import logits_in_chunks

Run = Callable[[], list[Tensor]]
"""A function that runs a forward and a backward, and returns the gradients."""
TOKENS, HIDDEN, VOCABULARY, CHUNKS = 2048, 256, 16384, 16
BLOCKS, BATCH, WIDTH = 8, 512, 512
OFFLOAD_BATCH, OFFLOAD_CARD = 32768, "rtx-3060-12gb"
REPEATS = 5
KEPT = (0, 2)
"""Numbers of the products of a block whose results are kept."""


class Block(nn.Module):
    """Products with other ops in between: a linear layer, GELU, a linear layer, GELU, a linear layer, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.third(F.gelu(self.second(F.gelu(self.first(x)))))


def losses(dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    """Yield the ways to compute the loss, the plain one first. Weights have `dtype`; logits are used in float32."""
    torch.manual_seed(0)
    hidden, head = torch.randn(TOKENS, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))

    def run(loss: Callable[[nn.Linear, Tensor, Tensor], Tensor]) -> list[Tensor]:
        layer = copy.deepcopy(head).to(dtype)
        states = hidden.to(dtype, copy=True).requires_grad_()
        loss(layer, states, labels).backward()
        return [states.grad, layer.weight.grad]

    def plain(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(layer(states).to(torch.promote_types(dtype, torch.float32)), labels)

    def own(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
        layer.forward = types.MethodType(logits_in_chunks(CHUNKS), layer)
        return F.cross_entropy(layer(states).float(), labels)

    def of_torch(layer: nn.Linear, states: Tensor, labels: Tensor, policy: str) -> Tensor:
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=TOKENS // CHUNKS,
            chunking_method=None,
            acc_policy=policy,
            acc_dtype=torch.promote_types(dtype, torch.float32),
        )
        return F.linear_cross_entropy(states, layer.weight, labels, options=options)

    yield "F.cross_entropy of all logits", functools.partial(run, plain)
    if dtype is not torch.float64:
        yield f"chunked_loss, {CHUNKS} chunks", functools.partial(run, own)
        for policy in ("accurate", "balanced", "compact"):
            yield (
                f"F.linear_cross_entropy, {CHUNKS} chunks, {policy}",
                functools.partial(run, functools.partial(of_torch, policy=policy)),
            )


def stacks(wrapped: dict[str, Callable[[nn.Module], None]]) -> Iterator[tuple[str, Run]]:
    """Yield the plain stack of blocks, and stacks whose blocks were changed by each function."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(BATCH, WIDTH)

    def run(change: Callable[[nn.Module], None]) -> list[Tensor]:
        stack = copy.deepcopy(model)
        for block in stack:
            change(block)
        stack(inputs.clone().requires_grad_()).square().mean().backward()
        return [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]

    for name, change in {"plain": lambda block: None, **wrapped}.items():
        yield name, functools.partial(run, change)


def selective_by_torch(block: nn.Module) -> None:
    """Checkpoint a block with PyTorch's contexts, and a policy that counts the products."""

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        counts: Counter[bool] = Counter()

        def policy(context, op, *args, **kwargs):
            if op not in own_checkpoint.PRODUCTS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = counts[context.is_recompute]
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if number in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    plain = block.forward
    block.forward = lambda x: checkpoint(plain, x, use_reentrant=False, context_fn=contexts)


def selective(block: nn.Module) -> None:
    """Checkpoint a block by the project's rule."""
    contexts = functools.partial(own_checkpoint.keeping, KEPT)
    block.forward = types.MethodType(own_checkpoint.recomputed(forward_function(block), contexts), block)


def offload_by_torch(block: nn.Module) -> None:
    """Keep all that autograd saves in the block in host memory, by `save_on_cpu`."""
    plain = block.forward

    def forward(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return plain(x)

    block.forward = forward


def offload(block: nn.Module) -> None:
    """Keep what autograd saves in the block in host memory, by the project's rule."""
    forward = own_offload.in_host_memory(forward_function(block), of_inputs=False, from_bytes=2**20)
    block.forward = types.MethodType(forward, block)


def main() -> None:
    console = Console(width=120)
    for dtype in (torch.float32, torch.bfloat16):
        reference = next(losses(torch.float64))[1]()
        show(console, f"loss, {str(dtype).removeprefix('torch.')}", list(losses(dtype)), reference)
    ways = list(stacks({"create_selective_checkpoint_contexts": selective_by_torch, "checkpoint": selective}))
    show(console, f"selective, keeps products {KEPT} of 3", ways, ways[0][1]())
    show_offload(console)
    console.print(versions())


def show(console: Console, title: str, ways: list[tuple[str, Run]], reference: list[Tensor]) -> None:
    """Measure each way and print a table."""
    table = Table("way", "peak MiB", "CPU time, plain = 1", "error of gradients", title=title)
    seconds: list[float] = [float("inf")] * len(ways)
    for _ in range(REPEATS):  # the ways take turns, so that a busy machine slows all of them down
        for number, (_, run) in enumerate(ways):
            began = time.process_time()
            run()
            seconds[number] = min(seconds[number], time.process_time() - began)
    for (name, run), spent in zip(ways, seconds, strict=True):
        record = AllocationRecord()
        with record.recording(), record.step():
            gradients = run()
        peak = record.peaks(recorded_ops=())[0].tensor_bytes
        error = max(relative(got, exact) for got, exact in zip(gradients, reference, strict=True))
        table.add_row(name, f"{peak / 2**20:,.1f}", f"{spent / seconds[0]:.2f}", f"{error:.1e}")
    console.print(table)


def show_offload(console: Console) -> None:
    """Rehearse the offloaded stacks on a virtual card and print a table."""
    table = Table("way", "peak MiB", "step ms", title=f"offload, rehearsed on {OFFLOAD_CARD}")
    ways = {"plain": lambda block: None, "save_on_cpu": offload_by_torch, "offload": offload}
    for name, change in ways.items():
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        for block in model:
            change(block)
        plan = planner.plan(
            model,
            torch.empty(OFFLOAD_BATCH, WIDTH),
            loss_fn=lambda output, _: output.square().mean(),
            optimizer=torch.optim.SGD,
            vram=None,
            gpu=OFFLOAD_CARD,
        )
        table.add_row(name, f"{plan.baseline.allocated_bytes / 2**20:,.1f}", f"{plan.baseline.step_ns / 1e6:,.1f}")
    console.print(table)


def relative(got: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference divided by the norm of `exact`."""
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


if __name__ == "__main__":
    main()
