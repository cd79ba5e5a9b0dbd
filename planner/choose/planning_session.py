"""What one planning has tried: the baseline, recordings and cases, and certified choices. Each is made once."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable

import torch

from planner.choose.candidates import Candidates, ChunkedCandidates, optimizer_ns
from planner.choose.certificates import Certificates
from planner.choose.chooser import Bounds, Choice, Chooser, LeastUpdate
from planner.choose.recordings import Recordings
from planner.estimate import roofline
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import Measured, measure, smallest_capacity_bytes
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import (
    Checkpoint,
    ChunkedLoss,
    Decision,
    Freeze,
    Offload,
    Optimizer,
    OptimizerKernel,
    Replay,
    StepInBackward,
    micro_batches_of,
)
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import Category, Op, Phase, StepGraph
from planner.space.lm_head import loss_in_chunks
from planner.space.lower_bounds import TrainedParameters, lower_bound_bytes
from planner.space.outer_choices import SearchSpace, offer
from planner.virtual_gpu.forked_process import Child
from planner.workload.eight_bit import least_state_bytes
from planner.workload.torch_optimizers import kind_of, moves_all_its_state
from planner.workload.workload import Workload

_FIRST_SLACK = 0.01
"""Share of the budget that is left to the allocator at first."""

StartWhatIf = Callable[[tuple[Decision, ...], tuple[int, ...]], Child]
"""Begin a what-if rehearsal of one primed step, rewritten by decisions, with these micro-batch sizes."""
StartUpdate = Callable[[tuple[Decision, ...], tuple[str, ...]], Child]
"""Begin to rehearse the update alone, rewritten by decisions, of parameters with these names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified:
    """A choice whose rewritten step was rehearsed."""

    choice: Choice
    graph: StepGraph
    measured: Measured


class PlanningSession:
    """Everything that is known while one workload is planned for one card and budget."""

    def __init__(
        self,
        work: Workload,
        card: DeviceProfile,
        *,
        vram_bytes: int | None,
        start_what_if: StartWhatIf,
        start_update: StartUpdate,
        certificates: Certificates,
    ) -> None:
        self.work, self.card, self.vram_bytes = work, card, vram_bytes
        self._certificates = certificates
        self._recordings = Recordings(
            start_what_if,
            lambda decisions: start_update(decisions, self.baseline_graph.trained),
            self._with_workspaces,
        )
        self._cases = Candidates(self._recordings, card, batch_bytes=work.batch_bytes)
        self._choosers: list[tuple[Constraints, Chooser]] = []
        self._floors: dict[tuple[Decision, ...], int] = {}

    def offer(self, constraints: Constraints) -> SearchSpace:
        """What may be chosen from, now that the baseline is known."""
        graph = self.baseline_graph
        return offer(
            self.work,
            self.card,
            constraints,
            batch_statistics=graph.batch_statistics,
            chunks=loss_in_chunks(graph, self.work.model, vram_bytes=self.vram_bytes),
        )

    def expect(self, constraints: Constraints) -> None:
        """Begin the recording that is most likely needed first, beside the baseline's."""
        if constraints.force(ChunkedLoss) or constraints.force(StepInBackward):
            return  # nothing is known of the one, and the other is not for every choice
        offered = offer(self.work, self.card, constraints, batch_statistics=(), chunks=None)
        self._cases.prefetch(offered.precisions[-1], offered.splits[:1])

    def close(self) -> None:
        """End recordings that nobody asked for."""
        self._certificates.forget()
        self._recordings.close()

    def under(self, vram_bytes: int) -> PlanningSession:
        """The same, for another budget: what was recorded is shared."""
        _ = self.baseline_graph  # made before the copy, so that both have it
        other = copy.copy(self)
        other.vram_bytes = vram_bytes
        other.__dict__.pop("baseline", None)
        return other

    @functools.cached_property
    def baseline_graph(self) -> StepGraph:
        """A recording of the step as it is."""
        return self._certificates.of(())

    @functools.cached_property
    def baseline(self) -> Certified:
        """The step as it is, on the card."""
        graph = self.baseline_graph
        measured = measure(graph, self.card, vram_bytes=self.vram_bytes, micro_batches=1)
        step_ns, peak_bytes = measured.footprint.step_ns, measured.curve_bytes
        choice = Choice(decisions=(), peak_bytes=peak_bytes, step_ns=step_ns, status="not needed", gap=0.0)
        return Certified(choice=choice, graph=graph, measured=measured)

    def certify(self, choice: Choice, *, then: Choice | None = None) -> Certified:
        """Rehearse the step that the choice rewrites to, and begin with the one that will be asked for then."""
        if not choice.decisions:
            return dataclasses.replace(self.baseline, choice=choice)
        graph = self._certificates.of(choice.decisions, then=None if then is None else then.decisions)
        count = micro_batches_of(choice.decisions)
        measured = measure(graph, self.card, vram_bytes=self.vram_bytes, micro_batches=count)
        return Certified(choice=choice, graph=graph, measured=measured)

    def chooser(self, offered: SearchSpace, constraints: Constraints) -> Chooser:
        """A chooser among what is offered."""
        frozen = any(isinstance(decision, Freeze) for decision in offered.precisions[0])
        graph = self.baseline_graph
        times = roofline.op_times_ns(graph, self.card, 1)
        forward_ns = sum(ns for op, ns in zip(graph.ops, times, strict=True) if op.phase is Phase.FORWARD)
        bounds = Bounds(
            step_ns=forward_ns if frozen else sum(times),
            optimizer_ns=0 if frozen else optimizer_ns(graph, times),
            loss_ns=sum(ns for op, ns in zip(graph.ops, times, strict=True) if _is_of_logits(graph, op)),
            updates=self._least_updates(frozen),
            lower_bound_bytes=self.lower_bound_bytes,
        )
        chooser = Chooser(
            offered,
            ChunkedCandidates(self._cases.under(offered.recompute), offered.chunks),
            bounds,
            self._certificates,
            force_recompute=any(constraints.force(kind) for kind in (Checkpoint, Replay, Offload)),
            slowest_ns=self._slowest_ns(constraints),
        )
        self._choosers.append((constraints, chooser))
        return chooser

    def _least_updates(self, frozen: bool) -> dict[type[Decision], LeastUpdate]:
        """Nothing is said where a prefix is frozen: how much of it is trained differs."""
        if frozen:
            return {Optimizer: LeastUpdate(ns=0, state_bytes=0), OptimizerKernel: LeastUpdate(ns=0, state_bytes=None)}
        eight_bit_bytes = least_state_bytes(self.work.model, self._trained.with_state)
        whole = moves_all_its_state(kind_of(self.work.optimizer))
        as_it_is_bytes = whole * self.baseline_graph.bytes_of(Category.OPTIMIZER_STATE)
        once = sum(3 * p.numel() * p.itemsize for p in self._trained.with_state)

        def ns(state_bytes: int) -> int:
            """State is read and written, gradients are read, parameters both."""
            return roofline.transfer_ns(once + 2 * state_bytes, self.card)

        return {
            Optimizer: LeastUpdate(ns=ns(eight_bit_bytes), state_bytes=eight_bit_bytes),
            OptimizerKernel: LeastUpdate(ns=ns(as_it_is_bytes), state_bytes=None),
        }

    def quick_enough(self, certified: Certified, constraints: Constraints) -> bool:
        """Whether its rehearsed step keeps the slowdown that the rules allow."""
        return certified.measured.footprint.step_ns <= self._slowest_ns(constraints)

    @property
    def budget_bytes(self) -> int:
        """For tensors: what the context leaves of the budget, less a first guess of the allocator's slack."""
        return self.capacity_bytes - (round(self.capacity_bytes * _FIRST_SLACK) if self.card.allocator else 0)

    @property
    def capacity_bytes(self) -> int:
        """What the context leaves of the budget."""
        return self.vram_bytes - self.card.context_bytes

    def measure_at_smallest_budget(self, certified: Certified) -> Certified:
        """The same choice measured under the budget, or under the smallest larger total in which it gets through."""
        count = micro_batches_of(certified.choice.decisions)
        total_bytes = max(self.vram_bytes, self.smallest_budget_bytes(certified))
        measured = measure(certified.graph, self.card, vram_bytes=total_bytes, micro_batches=count)
        fits = total_bytes <= self.vram_bytes
        return dataclasses.replace(certified, measured=dataclasses.replace(measured, fits=fits))

    def smallest_budget_bytes(self, certified: Certified) -> int:
        """The smallest total in which a certified step gets through."""
        return smallest_capacity_bytes(certified.graph, self.card)

    def lower_bound_bytes(self, outer: tuple[Decision, ...]) -> int:
        """Bytes that no plan with this outer choice goes below."""
        if outer not in self._floors:
            self._floors[outer] = lower_bound_bytes(
                self.work,
                self._trained,
                optimizer_peak_bytes=self._optimizer_peak_bytes,
                state_bytes=self.baseline_graph.bytes_of(Category.OPTIMIZER_STATE),
                outer=outer,
            )
        return self._floors[outer]

    @property
    def solve_seconds(self) -> float:
        return sum(chooser.solve_seconds for _, chooser in self._choosers)

    @property
    def undecided(self) -> int:
        """Programs that hit their time limit without an answer."""
        return sum(chooser.undecided for _, chooser in self._choosers)

    def dropped(self, constraints: Constraints) -> tuple[str, ...]:
        """What these rules allow and could not be rehearsed, in words."""
        choosers = [chooser for under, chooser in self._choosers if under == constraints]
        errors = {outer: error for chooser in choosers for outer, error in chooser.dropped.items()}
        return tuple(
            f"left out ({', '.join(decision.describe() for decision in outer) or 'no outer choice'}): {error}"
            for outer, error in errors.items()
        )

    def _slowest_ns(self, constraints: Constraints) -> float:
        allowed = constraints.max_slowdown
        return math.inf if allowed is None else allowed * self.baseline.measured.footprint.step_ns

    @functools.cached_property
    def _trained(self) -> TrainedParameters:
        return TrainedParameters.of(self.work, self.baseline_graph.trained)

    @functools.cached_property
    def _optimizer_peak_bytes(self) -> int:
        """Largest number of bytes alive while the baseline's optimizer steps."""
        graph = self.baseline_graph
        ticks = [op.tick + 1 for op in graph.ops if op.phase is Phase.OPTIMIZER]
        return int(graph.live_bytes()[ticks].max()) if ticks else 0

    def _with_workspaces(self, graph: StepGraph) -> StepGraph:
        return with_workspaces(graph, self.card, torch.__version__)


def _is_of_logits(graph: StepGraph, op: Op) -> bool:
    """Whether the op only moves logits about: the loss in chunks may move less."""
    touched = (*op.inputs, *op.outputs)
    return not op.flops and any(graph.storages[index].category is Category.LOGITS for index in touched)
