"""Compare memory and FLOPs of a training step by our plans and by common methods, each run on the CPU.

    python -m benchmarks.quality [--only TEXT] [--shares 0.7 0.5 ...] [--without-peers]

Peak: the bytes alive in one step (forward, backward, SGD) above those alive before it, so gradients count. It is
counted op by op, and by the CPU's allocator, which includes the scratch memory of kernels. All columns are relative to
the eager step of the same model, counted in the same process. Our plans may use every exact technique except
accumulation and offloading (all memory here is host memory). They are computed for a budget and a card that counts only
bytes and FLOPs, before the step has ever run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.quality.counting import Counted, counted
from benchmarks.quality.models import CASES, Case
from benchmarks.quality.peers import peers
from planner import profiles, rewrite
from planner.assemble import versions
from planner.pipeline import plan_workload
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Fidelity
from planner.plan_types.plan import Plan
from planner.workload.workload import workload

SHARES = (0.9, 0.8, 0.7, 0.67, 0.6, 0.5, 0.4, 0.3, 0.23, 0.18, 0.12)


def known(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers(), *batch]


CARD = dataclasses.replace(profiles.bare(), launch_ns=1, memory_bandwidth_bytes_per_s=10**16)
"""A card on which only FLOPs take time, so that the planner minimises what is counted here."""
NO_RULES = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=())
RULES = Constraints(fidelity=Fidelity.EXACT, forced=("step-in-backward",), forbidden=("accumulation", "offload"))
"""The optimizer step inside backward is forced: SGD does the same there, but a plan without it would be preferred."""


def ours(model: nn.Module, batch: tuple[torch.Tensor, ...], share: float) -> tuple[Plan, Counted]:
    """Returns a plan for a share of the step's own memory, and the counts of its step."""
    work = workload(model, batch, optimizer="sgd")
    start_bytes = sum(tensor.nbytes for tensor in known(model, batch))
    baseline = plan_workload(
        work, CARD, vram_bytes=None, constraints=dataclasses.replace(RULES, forced=())
    ).baseline.total_bytes
    budget_bytes = start_bytes + int(share * (baseline - start_bytes))
    plan = plan_workload(work, CARD, vram_bytes=budget_bytes, constraints=RULES)
    module = copy.deepcopy(model)
    result = rewrite.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=1e-3))
    return plan, counted(lambda: result.step(batch), known(module, batch))


def rows(case: Case, shares: tuple[float, ...], with_peers: bool) -> Iterator[tuple[str, ...]]:
    torch.manual_seed(0)
    model, batch = case.build()
    eager = None
    for name, module, step in peers(model, batch, case.is_block):
        try:
            step()  # compiles now
            found = counted(step, known(module, batch))
        except Exception as error:  # the table shows why a method did not run
            if eager is None:
                raise
            yield name, "-", "-", "-", "", f"did not run: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        eager = eager or found
        yield (name, *relative(found, eager), "", "")
        if not with_peers:
            break
    for share in shares:
        plan, found = ours(model, batch, share)
        levers = "; ".join(decision.describe() for decision in plan.decisions) or "nothing"
        missed = "" if plan.fits else " (does not fit: the smallest)"
        seconds = f"{plan.solver.seconds:.2f} of {plan.seconds:.1f}"
        yield f"ours at {share:.2f}{missed}", *relative(found, eager), seconds, levers
        if not plan.fits:
            break


def relative(found: Counted, eager: Counted) -> tuple[str, str, str]:
    allocator = f"{found.allocator_bytes / eager.allocator_bytes:.3f}"
    return f"{found.peak_bytes / eager.peak_bytes:.3f}", allocator, f"{found.flops / eager.flops - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--without-peers", action="store_true", help="run only the eager step and our plans")
    options = parser.parse_args()
    console = Console(width=160)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name, case in CASES.items():
        if options.only not in name:
            continue
        table = Table(title=name)
        for column in ("way", "peak", "allocator's", "FLOPs", "search s", "levers"):
            numbers = column in ("peak", "allocator's", "FLOPs")
            table.add_column(column, justify="right" if numbers else "left", overflow="fold")
        with contextlib.nullcontext() if case.is_attention_fused else sdpa_kernel(SDPBackend.MATH):
            for row in rows(case, tuple(options.shares), not options.without_peers):
                table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
