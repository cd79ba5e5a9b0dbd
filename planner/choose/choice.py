"""`Choice`: a plan before its certificate, which the chooser returns. `Certified`: a plan with its certificate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from planner.estimate.footprint import Measured
from planner.estimate.smallest_total import predicted_missing_bytes
from planner.plan_types.decision_base import Decision, Role, fidelity_of, with_roles, without_roles
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import StepGraph
from planner.space.configurations import Config

TIE = 1.05
"""Factor between predicted step times below which two plans count as equally fast."""


class Prediction:
    """Predicts how many bytes a plan lacks to fit, before the plan is rehearsed. Each answer is computed once."""

    def __init__(self, predicted_steps: Callable[[], StepGraph], watch: Watch | None = None) -> None:
        """
        Args:
            predicted_steps: function that returns the predicted allocations of two steps of the plan.
            watch: is checked before each replay of the allocator; None for no time limit.
        """
        self._predicted_steps, self._watch = predicted_steps, watch
        self._missing_bytes: dict[tuple[DeviceProfile, int, tuple[Config, ...], bool], int] = {}

    def missing_bytes(
        self, card: DeviceProfile, vram_bytes: int, alternatives: tuple[Config, ...], fastest: bool
    ) -> int:
        """Returns how many bytes the plan lacks; 0 if it may fit. For the arguments see `predicted_missing_bytes`.

        Raises:
            TimeIsUp: the time of the watch is up.
        """
        asked = card, vram_bytes, alternatives, fastest
        if asked not in self._missing_bytes:
            self._missing_bytes[asked] = predicted_missing_bytes(self._predicted_steps(), *asked, self._watch)
        return self._missing_bytes[asked]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan before its certificate, with the peak and the step time that it promises (that the chooser predicts)."""

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_ns: int
    status: str
    """Status of the solver: 'optimal', 'time limit' or 'not needed', as in `SolverFacts`."""
    gap: float
    """Maximum fraction of the step time by which another selection of units could be faster."""
    allocators: tuple[Config, ...] = ((),)
    """Alternatives for the options of the allocator, in order of preference. The certificate decides between them."""
    config: Config = ()
    """The configuration of the plan. Its number of loss chunks is the number for the whole batch, even if the plan
    splits the batch and `decisions` have fewer chunks."""
    prediction: Prediction | None = dataclasses.field(default=None, compare=False, repr=False)
    """Predicts how many bytes the plan lacks, before the plan is rehearsed. None if there is no prediction."""
    passed_over: Choice | None = None
    """A choice that is faster by less than the factor `TIE`, but less faithful or with more decisions."""

    @property
    def rehearsed_decisions(self) -> tuple[Decision, ...]:
        """The decisions without the options of the allocator, which do not change what a rehearsal records."""
        return without_roles(self.decisions, Role.ALLOCATOR)

    @property
    def with_each_allocator(self) -> tuple[Config, ...]:
        """The decisions of the plan once with each of `allocators`, in order of preference."""
        return tuple((*self.rehearsed_decisions, *allocator) for allocator in self.allocators)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key among equally fast plans: fidelity (0 is exact), number of decisions, step time. The least wins."""
        return fidelity_of(self.decisions), len(self.decisions), self.step_ns


def given_choice(decisions: Config) -> Choice:
    """Returns a choice with the given decisions, without those that shard the model.

    Its promised peak and step time are 0. After the choice is certified, call `Certified.with_measured_promise` to
    replace them.
    """
    return Choice(
        decisions=without_roles(decisions, Role.SHARDING),
        peak_bytes=0,
        step_ns=0,
        status="not needed",
        gap=0.0,
        allocators=(with_roles(decisions, Role.ALLOCATOR),),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certified:
    """A choice with its certificate: the recording of its rewritten step, and the footprint of that step."""

    choice: Choice
    graph: StepGraph
    measured: Measured
    more_bytes: int = 0
    """Bytes by which the promise is too low, because it counts smaller workspaces (`with_slower_algorithms`)."""

    @property
    def is_as_promised(self) -> bool:
        """True if the peak of the certificate is what the choice promised."""
        return self.choice.peak_bytes + self.more_bytes == self.measured.curve_bytes

    def with_measured_promise(self, gap: float = 0.0) -> Certified:
        """Returns the plan with its certified peak in bytes and its step time in nanoseconds as its promise.

        Use it for plans whose decisions were given, not searched for.

        Args:
            gap: maximum fraction of the step time by which another plan may be faster.
        """
        peak_bytes, step_ns = self.measured.curve_bytes, self.measured.footprint.step_ns
        promised = dataclasses.replace(
            self.choice, peak_bytes=peak_bytes, step_ns=step_ns, status="not needed", gap=gap
        )
        return dataclasses.replace(self, choice=promised, more_bytes=0)

    @property
    def time_rank(self) -> tuple[int, tuple[int, int, int]]:
        """Sort key: step time in nanoseconds of the certificate, then `Choice.rank`. The least is the fastest plan."""
        return self.measured.footprint.step_ns, self.choice.rank


@dataclasses.dataclass
class BestPlans:
    """The best of the plans that were certified so far. The others are not kept, because each holds a recording."""

    fastest: Certified | None = None
    """The fastest plan that fits; None if none does."""
    smallest: Certified | None = None
    """The plan with the smallest peak of its tensors; None if there is no plan."""

    def add(self, plan: Certified) -> None:
        """Keep a plan if it is the fastest one that fits, or the smallest one. Among equal plans, the first is kept."""
        if plan.measured.fits and (self.fastest is None or plan.time_rank < self.fastest.time_rank):
            self.fastest = plan
        if self.smallest is None or plan.measured.curve_bytes < self.smallest.measured.curve_bytes:
            self.smallest = plan


def simplest_in_tie(found: Sequence[Choice]) -> Choice:
    """Returns the choice with the best rank among those that take at most `TIE` times as long as the fastest one.

    If it is not the fastest one, its `passed_over` is the fastest one.
    """
    fastest = min(found, key=lambda choice: choice.step_ns)
    chosen = min(
        (choice for choice in found if choice.step_ns <= TIE * fastest.step_ns), key=lambda choice: choice.rank
    )
    return chosen if chosen is fastest else dataclasses.replace(chosen, passed_over=fastest)
