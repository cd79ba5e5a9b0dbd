"""Train a model under a memory cap by a common method, in its own process.

    python -m benchmarks.card.peer_run CASE WAY MICRO_BATCH RESULT.json [--cap BYTES]

Uses bf16 autocast, AdamW with torch's default kernels, and gradient accumulation over micro-batches of MICRO_BATCH
samples. RESULT has the time and memory of a step, or says that memory ran out.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.card.budgets import CASES, Case
from planner.rewrite.on_gpu.cuda import Cuda, Device
from planner.rewrite.portable.batch_slicing import samples_between
from planner.workload.call_convention import loss_of
from planner.workload.loading import load_workload
from planner.workload.workload import Workload, map_batch

STEPS, TIMED_STEPS = 3, 5
COMPILE_BUDGETS = (0.7, 0.3)


def baseline(model: nn.Module) -> nn.Module:
    """Change nothing."""
    return model


def gradient_checkpointing(model: nn.Module) -> nn.Module:
    """Checkpoint every layer by transformers' switch, or every repeated block of a model without that switch."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    for block in repeated_blocks(model):

        def forward(self: nn.Module, *args: object, plain: Callable = block.forward, **kwargs: object) -> object:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        block.forward = types.MethodType(forward, block)
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the most frequent class that has submodules, without those nested in another of them."""
    kinds: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        if name and any(module.children()):
            kinds.setdefault(type(module), []).append(name)
    kinds = {kind: names for kind, names in kinds.items() if kind is not nn.Sequential}
    names = max(kinds.values(), key=len, default=[])
    return [model.get_submodule(name) for name in names if not any(name.startswith(f"{other}.") for other in names)]


def compiled(budget: float, model: nn.Module) -> Callable:
    """Compile with `activation_memory_budget`."""
    import torch._functorch.config as config

    config.activation_memory_budget = budget
    return torch.compile(model)


WAYS: dict[str, Callable[[nn.Module], Callable]] = {
    "gradient checkpointing": gradient_checkpointing,
    "baseline": baseline,
    **{f"torch.compile, budget {share}": functools.partial(compiled, share) for share in COMPILE_BUDGETS},
}
"""Methods by name. Each changes the model and returns the function to call instead of it."""


def run(case: Case, way: str, micro_batch: int, device: Device, *, cap_bytes: int | None) -> dict[str, Any]:
    """Returns 'step_ms', 'allocated_bytes' and 'reserved_bytes' of a step, or 'out_of_memory' with torch's message.

    Raises:
        MeasurementError: there is no CUDA card.
    """
    torch.manual_seed(0)
    work = load_workload(
        case.reference, batch_size=case.batch_size, seq_len=case.seq_len, optimizer="adamw", with_weights=True
    )
    try:
        device.begin(cap_bytes)
        return _trained(work, WAYS[way], micro_batch, device)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": " ".join(str(error).split())}


def _trained(work: Workload, change: Callable, micro_batch: int, device: Device) -> dict[str, Any]:
    model = work.model.to(device.name)
    batch = map_batch(lambda tensor: tensor.to(device.name), work.batch)
    called, optimizer, losses = change(model), torch.optim.AdamW(model.parameters()), []

    def step() -> None:
        total = 0.0
        for start in range(0, work.batch_size, micro_batch):
            end = min(start + micro_batch, work.batch_size)
            part = samples_between(start, end, batch, work.batch_size)
            with torch.autocast(device.name, dtype=torch.bfloat16):
                loss = loss_of(work.calling.call(called, part), part, work.loss_fn)
            loss = loss * ((end - start) / work.batch_size)
            loss.backward()
            total = total + loss.detach()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))

    for _ in range(STEPS):
        step()
    allocated_bytes, reserved_bytes = device.peaks()
    times = [device.milliseconds(step) for _ in range(TIMED_STEPS)]
    return {
        "step_ms": round(statistics.median(times), 3),
        "step_ms_spread": round(max(times) - min(times), 3),
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "losses": losses[:STEPS],
    }


def main(arguments: list[str], device: Device) -> None:
    """Run the method and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("micro_batch", type=int)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--cap", type=int)
    options = parser.parse_args(arguments)
    case = CASES[options.case]
    found = run(case, options.way, options.micro_batch, device, cap_bytes=options.cap)
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:], Cuda())
