"""Finds the smallest total memory in which a recorded step runs, by replays of its allocations under several limits.

The total is the limit of the allocator plus the memory of the CUDA context and of NCCL. When the allocator reaches its
limit, it frees cached segments, so a step can run in fewer bytes than it reserves without a limit. The smallest limit
is found by bisection. If a replay fits, the upper end of the interval becomes the peak of the bytes that it reserved.
This may be well below the tried limit, but with this peak as its limit the allocator would answer every request in the
same way.

A recording usually has two steps. The later steps of a training run repeat the last recorded step, and may reserve more
memory than the recorded steps. A replay that repeats that step until nothing changes takes several times as long as a
replay of the recording alone. So the bisection first replays only the recorded steps. The limit that it finds is then
checked with repeated steps. If they run out of memory under this limit, larger limits are tried, and a bisection
follows.

The bisection assumes that a step that runs under one limit also runs under every larger limit. A caching allocator does
not guarantee this, so an even smaller total may exist. The step runs in the returned total in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.allocator.options import without_limit
from planner.allocator.settings import AllocatorSettings
from planner.estimate.footprint import AllocatingStep, settings_on
from planner.plan_types.decision_base import Decision
from planner.plan_types.sizes import MIB
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.step_graph import StepGraph

_FIRST_INCREMENT = 4
"""The first increment of a limit that is too small, as a multiple of the accuracy of the result."""
_TOLERANCE_BYTES = 2 * MIB
"""A plan is not predicted to fail by this number of bytes or fewer, the size of a small segment of the allocator."""


def smallest_total_bytes(
    graph: StepGraph,
    card: DeviceProfile,
    decisions: Iterable[Decision] = (),
    *,
    within_bytes: int = MIB,
    fastest: bool = False,
    below_bytes: int | None = None,
    watch: Watch | None = None,
) -> int:
    """Returns a total in bytes in which the step runs, at most `within_bytes` above the smallest such total.

    Args:
        graph: a recording to which workspaces have been added (`with_workspaces`).
        decisions: the decisions of the step, which may set options of the allocator.
        fastest: True if each convolution must run its first algorithm. Otherwise it takes the one that fits.
        below_bytes: a known total, which is returned unless the step runs in a total that is smaller by `within_bytes`.
        watch: the search checks it before each replay; None for no time limit.

    Raises:
        TimeIsUp: the time of the watch is up. (`smallest_of` returns the total that it has found by then.)
    """
    step = AllocatingStep(graph, card, fastest=fastest, watch=watch or Watch())
    search = _Search(step, [tuple(decisions)], within_bytes)
    if below_bytes is None or not card.allocator:
        return search.smallest_total_bytes()
    reserved_bytes = search.reserved_bytes(below_bytes - within_bytes)
    return below_bytes if reserved_bytes is None else search.smallest_total_bytes(0, reserved_bytes)


def smallest_of(
    graph: StepGraph,
    card: DeviceProfile,
    alternatives: Iterable[tuple[Decision, ...]],
    *,
    fastest: bool = False,
    within_bytes: int = MIB,
    until: Watch | None = None,
) -> int:
    """Returns the smallest total in bytes in which the step runs with any of the alternatives for its decisions.

    The alternatives differ in the options of the allocator. The other arguments are those of `smallest_total_bytes`.

    Args:
        until: when its time is up, the search ends, and the smallest total that it has found is returned. None for no
            time limit.

    Raises:
        ValueError: there is no alternative.
    """
    possible = list(alternatives)
    if not possible:
        raise ValueError("there is no alternative: give at least one, which may have no decision")
    step = AllocatingStep(graph, card, fastest=fastest)
    return _Search(step, possible, within_bytes, until).smallest_total_bytes()


def predicted_missing_bytes(
    graph: StepGraph,
    card: DeviceProfile,
    vram_bytes: int,
    alternatives: Sequence[tuple[Decision, ...]],
    fastest: bool,
    watch: Watch | None = None,
) -> int:
    """Returns the number of bytes that a step lacks by a prediction; 0 if it lacks at most 2 MiB.

    Like the result of `missing_bytes`, it may be too large.

    Args:
        graph: the predicted allocations (`planner.recompute.selected_step`).
        vram_bytes: the budget in bytes.
        alternatives, fastest: as in `smallest_of`.
        watch: is checked before each replay; None for no time limit.

    Raises:
        TimeIsUp: the time of the watch is up.
    """
    step = AllocatingStep(graph, card, fastest=fastest, watch=watch or Watch())
    enough_bytes = vram_bytes + _TOLERANCE_BYTES
    if not card.allocator or any(step.runs_within(enough_bytes, decisions) for decisions in alternatives):
        return 0
    return _TOLERANCE_BYTES + missing_bytes(step, enough_bytes, alternatives)


def missing_bytes(step: AllocatingStep, vram_bytes: int, alternatives: Sequence[tuple[Decision, ...]]) -> int:
    """Returns the number of bytes that a step lacks to run within a budget, at least 1.

    The result may be too large by 1/1024 of the budget, or by 1 MiB for a budget below 1 GiB.

    Args:
        step: a step that does not run within the budget.
        vram_bytes: the budget in bytes, in which the step does not run.
        alternatives: as in `smallest_of`.

    Raises:
        TimeIsUp: the time of the step's watch is up.
    """
    search = _Search(step, alternatives, _error_bytes(vram_bytes))
    return max(search.smallest_total_bytes(vram_bytes) - vram_bytes, 1)


def approximate_smallest_of(
    graph: StepGraph, card: DeviceProfile, alternatives: Sequence[tuple[Decision, ...]], *, vram_bytes: int
) -> int:
    """Returns a total in bytes in which a step runs, at most 1/1024 of the budget (or 1 MiB) above the smallest one.

    If the step runs within the budget, the result does not exceed the budget. A convolution runs a slower algorithm if
    the workspace of its first one does not fit.

    Args:
        vram_bytes: the budget in bytes.
        graph, card, alternatives: as in `smallest_of`.
    """
    search = _Search(AllocatingStep(graph, card), alternatives, _error_bytes(vram_bytes))
    reserved_bytes = search.reserved_bytes(vram_bytes) if card.allocator else None
    if reserved_bytes is None:
        return search.smallest_total_bytes(vram_bytes)
    return search.smallest_total_bytes(0, reserved_bytes)


def _error_bytes(vram_bytes: int) -> int:
    """Returns the maximum error in bytes of an approximate total: 1/1024 of the budget, but at least 1 MiB."""
    return max(MIB, vram_bytes >> 10)


class _Search:
    """Searches for the smallest total of a step with several alternatives for the options of the allocator."""

    def __init__(
        self,
        step: AllocatingStep,
        alternatives: Sequence[tuple[Decision, ...]],
        within_bytes: int,
        until: Watch | None = None,
    ) -> None:
        self._step, self._within_bytes, self._until = step, within_bytes, until or Watch()
        self._settings = [without_limit(settings_on(step.card, decisions)) for decisions in alternatives]
        """Allocator settings of the alternatives. The alternative with which the latest replay ran comes first, because
        the step probably runs under a smaller limit with it, too."""

    def reserved_bytes(self, total_bytes: int) -> int | None:
        """Returns how many bytes the allocator reserves within a total; None if the step does not run."""
        return self._reserved_bytes(self._settings, total_bytes - self._step.card.outside_bytes)

    def smallest_total_bytes(self, above_bytes: int = 0, reserved_bytes: int | None = None) -> int:
        """Returns the smallest total in bytes.

        Args:
            above_bytes: a total in which the step is known not to run; 0 if none is known.
            reserved_bytes: peak of the bytes reserved in a replay that did not run out of memory, without the CUDA
                context and NCCL's memory; None if no such replay is known.
        """
        step, within_bytes = self._step, self._within_bytes
        if not step.card.allocator:
            return int(step.graph.live_bytes().max()) + step.card.outside_bytes
        high = self._reserved_without_limit() if reserved_bytes is None else reserved_bytes
        low = max(step.least_bytes - 1, above_bytes - step.card.outside_bytes)
        first, *others = self._settings
        found = self._bisected([first], low, high, repeats=False)
        for settings in others:  # bisected only if the step runs with it in less
            if found - within_bytes <= low or self._is_over:
                break
            less_bytes = self._reserved_bytes([settings], found - within_bytes, repeats=False)
            if less_bytes is not None:
                found = self._bisected([settings], low, less_bytes, repeats=False)
                _move_to_front(self._settings, settings)
        if step.has_repeated_steps and found < high:
            repeated_bytes = self._reserved_bytes(self._settings, found)
            found = self._repeated(found, high) if repeated_bytes is None else repeated_bytes
        return found + step.card.outside_bytes

    @property
    def _is_over(self) -> bool:
        """True if the time is up: the limits that are known to be large enough are not lowered any more."""
        return self._until.left_seconds <= 0

    def _reserved_without_limit(self) -> int:
        """Returns the bytes that the step reserves without a limit, or a little more if algorithms are tried out."""
        high = self._step.replay(None, self._settings[0], tries=False).peak_reserved_bytes
        if self._step.searches_algorithms:  # each search for an algorithm empties the cache, which changes what follows
            while self._reserved_bytes(self._settings[:1], high) is None:
                high += max(high // 16, self._within_bytes)
        return high

    def _repeated(self, low: int, high: int) -> int:
        """Returns a limit under which the repeated steps run, at most `within_bytes` above one that is too small.

        The limit is first raised from `low`, each time by twice the increment before: the result is usually close to
        `low`, and a replay that runs out of memory ends early.

        Args:
            low: a limit that is too small.
            high: a limit that is large enough.
        """
        increment = _FIRST_INCREMENT * self._within_bytes
        while low + increment < high and not self._is_over:
            reserved_bytes = self._reserved_bytes(self._settings, low + increment)
            if reserved_bytes is not None:
                high = reserved_bytes
                break
            low, increment = low + increment, 2 * increment
        return self._bisected(self._settings, low, high)

    def _bisected(self, possible: list[AllocatorSettings], low: int, high: int, *, repeats: bool = True) -> int:
        """Returns the limit that is found by bisection, between one that is too small and one that is large enough."""
        while high - low > self._within_bytes and not self._is_over:
            middle = (low + high) // 2
            reserved_bytes = self._reserved_bytes(possible, middle, repeats=repeats)
            low, high = (middle, high) if reserved_bytes is None else (low, reserved_bytes)
        return high

    def _reserved_bytes(
        self, possible: list[AllocatorSettings], limit_bytes: int, *, repeats: bool = True
    ) -> int | None:
        """Returns how many bytes the allocator reserves under a limit; None if the step does not run.

        Args:
            possible: settings of the allocator, tried in order. The first ones with which the step runs give the result
                and are moved to the front of this list.
            limit_bytes: maximum number of bytes that the allocator may reserve.
            repeats: as in `AllocatingStep.replay`.
        """
        for settings in possible:
            outcome = self._step.replay(limit_bytes, settings, repeats=repeats)
            if outcome.out_of_memory_event is None:
                _move_to_front(possible, settings)
                return outcome.peak_reserved_bytes
        return None


def _move_to_front(possible: list[AllocatorSettings], preferred: AllocatorSettings) -> None:
    possible.sort(key=lambda each: each is not preferred)
