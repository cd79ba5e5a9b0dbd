"""Which settings or techniques would have let the request through: each is replayed in the simulated allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.allocator.settings import PYTORCH_DEFAULTS, AllocatorSettings
from planner.plan_types.decision_base import ALLOCATOR_VARIABLE
from planner.plan_types.sizes import MIB
from planner.snapshot.explain.moment import Moment
from planner.snapshot.explain.program import Order, Outcome, Program, what_if
from planner.snapshot.result import ReplayResult

_SPLIT_LIMITS_MB = (32, 64, 128, 256, 512, 1024)
"""Values of max_split_size_mb that are tried."""
_THRESHOLDS = (0.6, 0.8)
"""Values of garbage_collection_threshold that are tried."""
_FINENESS = 128
"""The smallest sufficient limit is found to this fraction of the limit, or to 2 MiB."""
_MOST_OPERATIONS = 50_000
"""Number of requests and frees up to which the memory to spare is searched for, which takes several replays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting or technique, and what the replay with it gives."""

    name: str
    """The change, such as 'PYTORCH_ALLOC_CONF=expandable_segments:True'."""
    passes: bool
    """True if every request of the record up to the moment fits, whatever the order of the addresses of new segments:
    as recorded, rising or falling."""
    spare_bytes: int | None
    """Memory that could be missing, and every request would still fit; None without a limit, or if one does not fit."""
    peak_reserved_bytes: int
    """Most memory that the allocator reserved in the replay."""
    is_setting: bool = True
    """True for a setting, which changes neither results nor the memory of tensors."""


class Trials:
    """Replays of one record up to one moment, under several settings.

    Args:
        program: What the recorded program did.
        replayed: The replay of the record under its own settings; None if it could not be replayed.
        settings: The settings of the record.
        moment: The moment that is explained.
        until: Index of the last event of the replays.
        steps: Events after which training steps begin.
    """

    def __init__(
        self,
        program: Program,
        replayed: ReplayResult | None,
        settings: AllocatorSettings,
        moment: Moment,
        *,
        until: int,
        steps: Sequence[int],
    ) -> None:
        self._program, self._settings, self._moment, self._until = program, settings, moment, until
        self._start = () if replayed is None else replayed.start
        self._steps = [step for step in steps if step < until]

    def unchanged(self) -> Outcome:
        """Returns the outcome under the recorded settings. It should fail if the record does."""
        return self._run(self._settings, self._moment.limit_bytes, [Order.RECORDED])

    def recorded(self) -> Trial:
        """Returns the trial of the recorded settings."""
        return self._trial("as recorded", self._settings)

    def settings(self) -> list[Trial]:
        """Returns the trials of settings, those that pass with the most memory to spare first."""
        trials = [self._trial(name, settings) for name, settings in self._candidates()]
        for name, moments in (
            ("torch.cuda.empty_cache() before the step", self._steps[-1:]),
            ("torch.cuda.empty_cache() before every step", self._steps if len(self._steps) > 1 else ()),
        ):
            if moments:
                trials.append(self._trial(name, self._settings, empty_at=moments))
        best: dict[str, Trial] = {}
        for trial in sorted(trials, key=_worth, reverse=True):  # Of several values of an option the best one stays.
            best.setdefault(trial.name.rpartition(":")[0] or trial.name, trial)
        return list(best.values())

    def smaller_batches(self) -> list[Trial]:
        """Returns trials in which the tensors of the last step, except gradients, have a part of their size."""
        found: list[Trial] = []
        for parts in (2, 4, 8):
            found += self.scaled(f"micro-batches of 1/{parts} of the size (gradient accumulation)", 1 / parts)
            if any(trial.passes for trial in found):
                break
        return found

    def scaled(self, name: str, factor: float) -> list[Trial]:
        """Returns the trial in which the tensors of the last step, except gradients, are `factor` as large.

        The list is empty if it is not known where the step begins.
        """
        if not self._steps:
            return []
        sizes, asked_bytes = self._scaled(factor)
        return [self._trial(name, self._settings, sizes=sizes, asked_bytes=asked_bytes, is_setting=False)]

    def without(self, name: str, blocks: Collection[int], *, asked_bytes: int | None = None) -> Trial:
        """Returns the trial in which the program does not allocate some blocks, which are given by number."""
        sizes = dict.fromkeys(blocks, 0)
        return self._trial(name, self._settings, sizes=sizes, asked_bytes=asked_bytes, is_setting=False)

    def more_memory_bytes(self) -> int | None:
        """Returns the additional memory with which every request would fit; None without a limit.

        The result is at most 2 MiB larger than necessary, or a small part of the limit in a long record.
        """
        limit_bytes = self._moment.limit_bytes
        if limit_bytes is None:
            return None
        free = self._run(self._settings, None, tuple(Order))
        fineness = 2 * MIB if len(self._program.operations) <= _MOST_OPERATIONS else None
        smallest = self._smallest_limit(
            lambda limit, orders: self._run(self._settings, limit, orders), limit_bytes, free, fineness
        )
        return smallest - limit_bytes

    def _candidates(self) -> Iterator[tuple[str, AllocatorSettings]]:
        """Yields the settings to try with their names, without those of the record."""
        recorded, limit_bytes = self._settings, self._moment.limit_bytes
        if recorded != PYTORCH_DEFAULTS:
            yield f"{ALLOCATOR_VARIABLE} not set", PYTORCH_DEFAULTS
        if recorded.expandable_segments:
            return
        yield (
            f"{ALLOCATOR_VARIABLE}=expandable_segments:True",
            dataclasses.replace(recorded, expandable_segments=True, max_split_size_bytes=None),
        )
        for limit_mb in _SPLIT_LIMITS_MB:
            if limit_mb * MIB not in (recorded.max_split_size_bytes, recorded.large_segment_bytes):
                yield (
                    f"{ALLOCATOR_VARIABLE}=max_split_size_mb:{limit_mb}",
                    dataclasses.replace(recorded, max_split_size_bytes=limit_mb * MIB),
                )
        for threshold in _THRESHOLDS if limit_bytes is not None else ():
            yield (
                f"torch.cuda.set_per_process_memory_fraction(1.0) and {ALLOCATOR_VARIABLE}="
                f"garbage_collection_threshold:{threshold}",
                dataclasses.replace(recorded, garbage_collection_threshold=threshold, allowed_bytes=limit_bytes),
            )

    def _trial(
        self,
        name: str,
        settings: AllocatorSettings,
        *,
        empty_at: Collection[int] = (),
        sizes: Mapping[int, int] | None = None,
        asked_bytes: int | None = None,
        is_setting: bool = True,
    ) -> Trial:
        def run(limit: int | None, orders: Collection[Order]) -> Outcome:
            limited = settings if settings.allowed_bytes is None else dataclasses.replace(settings, allowed_bytes=limit)
            return self._run(limited, limit, orders, empty_at=empty_at, sizes=sizes, asked_bytes=asked_bytes)

        limit_bytes = self._moment.limit_bytes
        outcome = run(limit_bytes, tuple(Order))
        passes = outcome.failed_event is None
        spare_bytes = None
        if limit_bytes is not None and passes and len(self._program.operations) <= _MOST_OPERATIONS:
            spare_bytes = limit_bytes - self._smallest_limit(run, self._moment.allocated_bytes, outcome)
        return Trial(
            name=name,
            passes=passes,
            spare_bytes=spare_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            is_setting=is_setting,
        )

    def _smallest_limit(
        self,
        run: Callable[[int, Collection[Order]], Outcome],
        low: int,
        passing: Outcome,
        fineness: int | None = None,
    ) -> int:
        """Returns a limit with which a replay passes, and which is at most `fineness` larger than necessary.

        Args:
            run: The replay with a limit, and with orders of addresses.
            low: A limit with which it fails, or the smallest one to try.
            passing: The outcome of a replay that passes.
            fineness: Size in bytes; None for a small part of the result.
        """
        high = passing.peak_reserved_bytes
        low = min(low, high)
        fineness = max(2 * MIB, high // _FINENESS) if fineness is None else fineness
        for orders in ((Order.RECORDED,), tuple(Order)):  # Most limits that pass in one order pass in all of them.
            if orders == tuple(Order) and run(high, orders).failed_event is None:
                break
            low, high = (low, high) if len(orders) == 1 else (high, passing.peak_reserved_bytes)
            while high - low > fineness:
                middle = (low + high) // 2
                if run(middle, orders).failed_event is None:
                    high = middle
                else:
                    low = middle
        return high

    def _run(
        self, settings: AllocatorSettings, limit_bytes: int | None, orders: Iterable[Order], **changes: Any
    ) -> Outcome:
        """Returns the worst outcome over the orders in which a card may give addresses to new segments."""
        # A state with blocks that were split is impossible under a smaller limit of splitting.
        can_adopt = settings.max_split_size_bytes in (None, self._settings.max_split_size_bytes)
        start = self._start if can_adopt else ()
        worst = None
        for order in [Order.RECORDED] if settings.expandable_segments else orders:
            outcome = what_if(
                self._program, settings, limit_bytes, until=self._until, start=start, order=order, **changes
            )
            if outcome.failed_event is not None:
                return outcome
            if worst is None or outcome.peak_reserved_bytes > worst.peak_reserved_bytes:
                worst = outcome
        assert worst is not None
        return worst

    def _scaled(self, factor: float) -> tuple[dict[int, int], int]:
        """Returns the sizes of the last step's blocks with another batch, by number, and that of the failed request.

        Blocks as large as one that was alive before the step count as gradients, which keep their size. Blocks half as
        large count as its copies in a lower precision, and keep their size, too.
        """
        begin = self._steps[-1]
        before = {
            block.requested_bytes
            for block in self._program.blocks
            if block.born <= begin and (block.freed is None or block.freed > begin)
        }
        before |= {size_bytes // 2 for size_bytes in before}
        sizes = {
            number: max(round(block.requested_bytes * factor), 1)
            for number, block in enumerate(self._program.blocks)
            if begin < block.born <= self._until and block.requested_bytes not in before
        }
        asked_bytes = self._moment.asked_bytes
        return sizes, asked_bytes if asked_bytes in before else round(asked_bytes * factor)


def _worth(trial: Trial) -> tuple[bool, int]:
    """Orders trials: first those that pass, then by the memory to spare, or by the reserved memory without a limit."""
    return trial.passes, -trial.peak_reserved_bytes if trial.spare_bytes is None else trial.spare_bytes
