"""Finds out how many calls of the user's own training step have to be recorded until the calls repeat.

A step may update in every n-th call, keep its last outputs, or fill a cache later than in its first call. Two calls
take the same *course* if they allocate and free storages of the same sizes in the same order. Storages that
an earlier call made are matched by their age in calls and by their place among the storages of that call.

After each call, the numbers and strings in the function and in the model, and the memory that is held, are compared
with those after earlier calls. If they are equal, all later calls repeat the calls in between. Most steps take two
calls to show this. If a number changes in each call, such as a counter, any later call may do something else, so that
`MOST_CALLS` calls are watched.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

import torch

from planner.recording.module_state import changed_state, optimizer_state, plain_state
from planner.recording.step_graph import TWO_STEPS, Schedule
from planner.recording.storage_table import StorageTable

MOST_CALLS = 16
"""Maximum number of calls that are watched."""


Course = tuple[tuple[object, ...], ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    first_storage: int
    """Number of storages before the call."""
    start: int
    """Last tick before the call."""
    end: int
    """Last tick of the call."""
    held_bytes: int
    """Bytes of all storages after the call."""
    state: dict[str, object]
    """Numbers and text that the step function and the model hold after the call."""
    of_optimizers: dict[str, object]
    """Numbers and text in attributes of the user's own optimizers after the call. They are not compared to find
    repetitions, but only for a note."""


class Repetition:
    """Compares the calls of a step.

    Args:
        table: the storages of the recording.
    """

    def __init__(self, table: StorageTable) -> None:
        self._table = table
        self._calls: list[_Call] = []
        self._courses: dict[int, Course] = {}
        self._began = (0, 0)

    def starts(self) -> None:
        """Notes that a call begins."""
        self._began = len(self._table.storages), self._table.tick

    def ends(
        self, model: torch.nn.Module, function: tuple[object, str], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Notes that a call has ended, with the numbers and text that the model, function and optimizers hold now.

        Args:
            function: the step function or the loss function (None if there is none), and its name in messages.
        """
        states = plain_state(model, *function), optimizer_state(optimizers)
        self._calls.append(_Call(*self._began, self._table.tick, self._table.held_bytes(), *states))

    @property
    def changed_state(self) -> str | None:
        """The state that the last call changed; None if it changed none, or if there was only one call."""
        return changed_state(self._calls[-2].state, self._calls[-1].state) if len(self._calls) > 1 else None

    @property
    def changed_optimizer(self) -> str | None:
        """The attribute of an optimizer that the last call changed; None if it changed none, or if it is the first."""
        last = [call.of_optimizers for call in self._calls[-2:]]
        return changed_state(*last) if len(last) > 1 else None

    @property
    def is_certain(self) -> bool:
        """True if the state and the memory after the last call are those after an earlier one."""
        last = len(self._calls) - 1
        # The first call may create state of optimizers, so that the second one takes another course.
        return any(
            self._calls[number].held_bytes == self._calls[last].held_bytes
            and self._calls[number].state == self._calls[last].state
            and (last == 1 or self._course(number) == self._course(last))
            for number in range(last)
        )

    def schedule(self) -> Schedule:
        """Returns the calls that have to be recorded to cover all that were watched."""
        watched, is_certain = len(self._calls), self.is_certain
        if watched == 2 and is_certain:
            return TWO_STEPS
        held = [call.held_bytes for call in self._calls]
        # The period that explains most calls, and the shortest of those.
        start, period = min((self._repeats_from(period), period) for period in range(1, watched))
        if start < watched:
            has_round = start > period and held[start - 1] == held[start - 1 - period]
            calls = start if has_round else min(start + period, watched)
            return Schedule(calls=calls, period=period, watched=watched, is_certain=is_certain)
        half = watched // 2
        growth_bytes = max((held[-1] - held[-1 - half]) // half, 0)
        return Schedule(calls=watched, watched=watched, is_certain=False, repeats=False, growth_bytes=growth_bytes)

    def _repeats_from(self, period: int) -> int:
        """Returns the number of the first call from which on all calls repeat those of a period before."""
        start = len(self._calls)
        while start > period and self._is_alike(start - 1, start - 1 - period):
            start -= 1
        return start

    def _is_alike(self, one: int, other: int) -> bool:
        return self._calls[one].held_bytes == self._calls[other].held_bytes and self._course(one) == self._course(other)

    def _course(self, number: int) -> Course:
        """Returns the births and deaths of a call, in their order."""
        if number in self._courses:
            return self._courses[number]
        call, firsts = self._calls[number], [call.first_storage for call in self._calls]
        events: list[tuple[int, tuple[object, ...]]] = []
        for index, birth, death in self._table.lives():
            if call.start < birth <= call.end:
                events.append((birth, ("born", self._table.storages[index].size_bytes)))
            if death is not None and call.start < death <= call.end:
                of_call = bisect.bisect_right(firsts, index) - 1
                age, place = (number - of_call, index - firsts[of_call]) if of_call >= 0 else (None, index)
                events.append((death, ("died", age, place)))
        self._courses[number] = tuple(event for _, event in sorted(events, key=lambda pair: pair[0]))
        return self._courses[number]
