"""Lists the techniques that the planner offers for a case: its search space and recompute units, as decisions of plans.

Three thresholds that keep plans for large models small are lowered, because the models of the cases are tiny: the
minimum size of offloaded storages, of logits in chunks, and of forwards that are cut into segments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock as mock
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.parity.case import Case, default_dtype
from planner import profiles
from planner.assemble import versions
from planner.errors import PlannerError
from planner.estimate.footprint import measure
from planner.estimate.roofline import HostCopies, op_times_ns
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Decision,
    Fidelity,
    OptimizerKernel,
    Precision,
    StepInBackward,
    conflict,
)
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import Plan, SolverFacts
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.recompute import divided_calls, offload_cost
from planner.recompute import units as recompute_units
from planner.recompute.units import Unit, Units, units_of
from planner.recording.step_graph import StepGraph
from planner.rewrite.rehearse import certifying_graph, start_rehearsal
from planner.space import lm_head
from planner.space.carried_state import carried_state
from planner.space.micro_batches import MicroBatching
from planner.space.search_space import SearchSpace, search_space
from planner.workload.workload import Workload, workload

CARD = profiles.load("rtx-3090")
"""A card with native bf16."""
CONSTRAINTS = Constraints(fidelity=Fidelity.ROUNDED, forced=(), forbidden=())

RECOMPUTE = (
    "checkpoint",
    "checkpoint, inner",
    "checkpoint, kept outputs",
    "segments",
    "segments, inner",
    "segments, kept outputs",
    "segments, divided",
    "segments, divided behind kept outputs",
    "offload",
    "offload of inputs",
)
SINGLE = (
    *RECOMPUTE,
    "chunked loss",
    "accumulation 4+3",
    "accumulation 3+3+1",
    "accumulation 7x1",
    "accumulation, loss_weight",
    "step in backward",
    "fused kernel",
    "for-loop kernel",
    "bf16",
    "fp16",
)
"""Names of all techniques, in the order of the table."""


@dataclasses.dataclass(frozen=True)
class Technique:
    """One way to rewrite the step."""

    name: str
    decisions: tuple[Decision, ...]
    states_weight: bool = False
    """True if the user states the weights of micro-batches (`loss_weight`)."""

    @property
    def autocast(self) -> str | None:
        """Dtype of autocast, 'bf16' or 'fp16'; None without."""
        return next((d.autocast_dtype for d in self.decisions if d.autocast_dtype is not None), None)

    def dtype_for(self, case: Case) -> torch.dtype:
        """Dtype of the model: autocast needs fp32 weights."""
        return case.dtype if self.autocast is None else torch.float32

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a micro-batch; None if the batch is not split."""
        return next((d.micro_batch_size for d in self.decisions if isinstance(d, Accumulation)), None)

    @property
    def kernel_options(self) -> dict[str, bool]:
        """Options of torch's optimizer for the planned kernel."""
        kernel = next((d.kernel for d in self.decisions if isinstance(d, OptimizerKernel)), None)
        return {"fused": {"fused": True}, "for-loop": {"foreach": False}}.get(kernel or "", {})

    @property
    def steps_in_backward(self) -> bool:
        return any(isinstance(decision, StepInBackward) for decision in self.decisions)

    @property
    def reorders_sums(self) -> bool:
        return any(decision.reorders_sums for decision in self.decisions)


@dataclasses.dataclass(frozen=True)
class Offer:
    """A plan without decisions for a case, and the techniques that the planner offers for it."""

    plan: Plan
    techniques: tuple[Technique, ...]

    def plan_with(self, technique: Technique, model: torch.nn.Module) -> Plan:
        """Returns the plan of a technique for this model, whose dtype may be another one than the planned one."""
        facts = dataclasses.replace(self.plan.model, fingerprint=fingerprint(model))
        return dataclasses.replace(self.plan, model=facts, decisions=technique.decisions)


def offer(case: Case) -> Offer:
    """Record the step of a case as the planner does, and return what it offers.

    Raises:
        PlannerError: if the step cannot be planned.
    """
    with default_dtype(case.dtype), _for_tiny_models():
        work = _workload(case, case.dtype)
        baseline = certifying_graph(work, (), CARD)
        sizes = (work.batch_size,)
        graph = start_rehearsal(work, (), CARD, sizes=sizes, steps=1, primed=True, what_if=True).result()
        copies = HostCopies(card=dataclasses.replace(CARD, host_link_bytes_per_s=10**18, launch_ns=0), repeats=(1,))
        units = units_of(
            graph, op_times_ns(graph, CARD, 1), granularity_bytes=1, kinds=(Checkpoint, Replay, Offload),
            host_copies=copies,
        )  # fmt: skip
        chunks = lm_head.loss_in_chunks(baseline, work.model, vram_bytes=CARD.vram_bytes)
        facts = {"batch_statistics": baseline.batch_statistics, "carried": carried_state(baseline)}
        space = search_space(work, CARD, CONSTRAINTS, chunks=chunks, **facts)
    found = [*_recomputing(units), *_of_space(space, case), *_kernels(work)]
    if case.single:
        with default_dtype(torch.float32):
            single = _workload(case, torch.float32)
            precise = search_space(single, CARD, CONSTRAINTS, chunks=None, **facts).precisions
        if any(precise):
            found += [Technique(dtype, (Precision(dtype=dtype),)) for dtype in ("bf16", "fp16")]
    order = {name: number for number, name in enumerate(SINGLE)}
    return Offer(_plan(work, baseline), tuple(sorted(found, key=lambda technique: order[technique.name])))


def why_not_certified(case: Case, technique: Technique) -> str | None:
    """Returns why the planner cannot certify the rewritten step, and so makes no such plan; None if it can."""
    with default_dtype(technique.dtype_for(case)):
        try:
            certifying_graph(_workload(case, technique.dtype_for(case)), technique.decisions, CARD)
        except PlannerError as why:
            return str(why).splitlines()[0][:230]
    return None


def pairs(techniques: Iterable[Technique], case: str, count: int | None) -> list[Technique]:
    """Returns pairs of techniques that the planner may combine.

    Args:
        case: name of the case, which decides which pairs are taken.
        count: number of pairs; None for all.
    """
    techniques = list(techniques)
    found = [
        Technique(f"{a.name} + {b.name}", (*a.decisions, *b.decisions), a.states_weight or b.states_weight)
        for number, a in enumerate(techniques)
        for b in techniques[number + 1 :]
        if len({*map(type, a.decisions)} & {*map(type, b.decisions)}) == 0
        and not (a.name in RECOMPUTE and b.name in RECOMPUTE)
        and conflict((*a.decisions, *b.decisions)) is None
    ]
    if count is None:
        return found
    return sorted(found, key=lambda pair: zlib.crc32(f"{case}: {pair.name}".encode()))[:count]


def _workload(case: Case, dtype: torch.dtype) -> Workload:
    model, loss = case.built(dtype)
    return workload(model, case.batches()[0], loss_fn=loss, optimizer=case.optimizer(model))


def _recomputing(units: Units) -> Iterator[Technique]:
    """Yields techniques that recompute or offload, each with as many units as can be selected together."""
    wanted: dict[str, tuple[Callable[[Unit], Any], bool]] = {
        "checkpoint": (lambda u: _is_module(u) and not u.kept, False),
        "checkpoint, inner": (lambda u: _is_module(u) and not u.kept, True),
        "checkpoint, kept outputs": (lambda u: _is_module(u) and u.kept, False),
        "segments": (lambda u: u.segment and not u.kept and not u.split_points, False),
        "segments, inner": (lambda u: u.segment and not u.kept and not u.split_points, True),
        "segments, kept outputs": (lambda u: u.segment and u.kept and not u.split_points, False),
        "segments, divided": (lambda u: u.segment and u.split_points and not u.kept, False),
        "segments, divided behind kept outputs": (lambda u: u.segment and u.split_points and u.kept, False),
        "offload": (lambda u: u.on_host and not u.runs_again, False),
        "offload of inputs": (lambda u: u.on_host and u.runs_again, False),
    }
    seen = set()
    for name, (matches, inner) in wanted.items():
        numbers = _together(units, [n for n, unit in enumerate(units.units) if matches(unit)], inner)
        decisions = units.decisions(numbers)
        if decisions and decisions not in seen:
            seen.add(decisions)
            yield Technique(name, decisions)


def _is_module(unit: Unit) -> bool:
    return unit.segment is None and unit.runs_again and not unit.on_host


def _together(units: Units, numbers: list[int], inner: bool) -> list[int]:
    """Returns units that may be selected together, the outermost first, or the innermost first."""

    def size(number: int) -> tuple[int, int]:
        unit = units.units[number]
        length = unit.segment[1] - unit.segment[0] if unit.segment else 0
        return -unit.module.count("."), length

    chosen: list[int] = []
    for number in sorted(numbers, key=lambda number: (size(number), number), reverse=not inner):
        if not any(number in path and set(chosen) & set(path) for path in units.problem.paths):
            chosen.append(number)
    return sorted(chosen)


def _of_space(space: SearchSpace, case: Case) -> Iterator[Technique]:
    """Yields the offered splits, the loss in chunks and the step in backward."""
    splits: dict[int, MicroBatching] = {split.size: split for split in space.splits if split.micro_batches > 1}
    for size, name in ((4, "accumulation 4+3"), (3, "accumulation 3+3+1"), (1, "accumulation 7x1")):
        if size in splits:
            yield Technique(name, splits[size].decisions())
    if case.terms is not None and 3 in splits:
        yield Technique("accumulation, loss_weight", splits[3].decisions(), states_weight=True)
    for loss in space.losses:
        for decision in loss:
            if isinstance(decision, ChunkedLoss):
                yield Technique("chunked loss", (dataclasses.replace(decision, chunks=3),))
    if any(space.updates):
        yield Technique("step in backward", (StepInBackward(),))


def _kernels(work: Workload) -> Iterator[Technique]:
    from planner.workload.torch_optimizers import why_no_kernel

    for kernel in ("fused", "for-loop"):
        if why_no_kernel(kernel, work.optimizer, work.model) is None:
            yield Technique(f"{kernel} kernel", (OptimizerKernel(kernel=kernel),))


def _plan(work: Workload, baseline: StepGraph) -> Plan:
    footprint = measure(baseline, CARD, vram_bytes=None).footprint
    return Plan(
        model=work.model_facts(), workload=work.facts(), card=CARD.name, card_source=CARD.source, vram_bytes=None,
        fidelity="rounded", forced=(), forbidden=(), baseline=footprint, peak=footprint, decisions=(), fits=True,
        certified=True, shortfall=None, notes=(), versions=versions(), seconds=0.0,
        solver=SolverFacts(
            status="not needed", gap=0.0, seconds=0.0, promised_bytes=footprint.allocated_bytes,
            certified_bytes=footprint.allocated_bytes,
        ),
    )  # fmt: skip


@contextlib.contextmanager
def _for_tiny_models() -> Iterator[None]:
    """Lowers the thresholds below which the planner offers nothing."""
    with (
        mock.patch.object(lm_head, "_SMALLEST_LOGITS_BYTES", 0),
        mock.patch.object(offload_cost, "FROM_BYTES", 1),
        mock.patch.object(recompute_units, "FROM_BYTES", 1),
        mock.patch.object(divided_calls, "_MIN_OWN_OPS", 3),
        mock.patch.object(divided_calls, "_MIN_SUBMODULE_CALLS", 3),
    ):
        yield
