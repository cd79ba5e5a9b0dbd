"""What-if recordings: recordings of one step as if decisions were applied, made in child processes on demand.

Each step is recorded once, and many steps need no recording of their own. For splits into several micro-batches,
recordings with micro-batches of two small sizes are extrapolated to the size asked for. A model that cannot run them,
because it needs groups of samples, is recorded at each size that is asked for. For a configuration with another
optimizer, only the update is recorded, and it replaces the update in the recording of the step (`graft_update`), unless
the update is part of the backward. If a model has many identical layers, only a few of them are recorded, provided that
the baseline shows the same events (`Shortening`), and the recording is lengthened (`lengthen`). An update after the
backward is then recorded for all layers.

A recording with all layers may take hundreds of megabytes. Recordings are therefore extrapolated while they are short.
Only then are layers added, the update replaced, and workspaces added. The result is a `DerivedGraph`: it may leave
memory, and is then derived again from the short recordings.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import cast

from planner.derive.extrapolate import BASE_SIZES, extrapolate
from planner.derive.graft_optimizer import can_be_grafted, graft_update
from planner.derive.graph_cache import DerivedGraph, GraphCache
from planner.derive.same_step import is_same_step
from planner.derive.shortening import Shortening, with_all_layers
from planner.errors import StepError, WorkloadError
from planner.plan_types.decision_base import Decision, Role, has_role, without_roles
from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import StepGraph
from planner.space.configurations import Config
from planner.space.micro_batches import MicroBatching
from planner.space.refused_sizes import RefusedSizes
from planner.virtual_gpu.forked_process import Running, end_all

Start = Callable[[tuple[Decision, ...], tuple[int, ...], tuple[LayerRun, ...]], Running]
"""Starts a child process that records one step.

Arguments: the decisions, the micro-batch sizes, and runs of identical layers, most of which are not recorded.
"""

StartUpdate = Callable[[tuple[Decision, ...]], Running]
"""Starts a child process that records the optimizer update alone, with these decisions."""

_Key = tuple[tuple[Decision, ...], tuple[int, ...]]
"""Decisions and micro-batch sizes of a recording. Without sizes, it is a recording of the update alone."""


class _IrregularError(Exception):
    """A recording cannot be extrapolated (`extrapolate` returns None)."""


class Recordings:
    """What-if recordings of a workload, by configuration and split."""

    def __init__(
        self,
        start: Start,
        start_update: StartUpdate | None,
        finish: Callable[[StepGraph], StepGraph],
        *,
        is_last_different: bool = False,
        shortening: Shortening | None = None,
    ) -> None:
        """
        Args:
            start: starts the recording of a step.
            start_update: starts the recording of an optimizer update; None if a step cannot be recorded without it.
            finish: adds the workspaces of kernels to a recording, which does not contain them.
            is_last_different: True if the last micro-batch differs from the others of its size: only its backward
                reduces gradients over several cards.
            shortening: decides of which runs only a few layers are recorded; None if all layers are recorded.
        """
        self.shortening = shortening or Shortening()
        self._start, self._start_update = start, start_update
        self._finish = finish
        self._most_parts = 3 if is_last_different else 2
        """Maximum number of micro-batches in a recording."""
        self._recorded: dict[_Key, StepGraph] = {}
        """Recordings as the children made them: some have only a few layers."""
        self._running: dict[_Key, Running] = {}
        self._steps: dict[tuple[tuple[_Key, ...], int | None], DerivedGraph] = {}
        """Steps with all layers and their own updates, by their recordings and the extrapolated size (None without)."""
        self._finished: dict[tuple[bool, _Key], DerivedGraph] = {}
        """Steps with their updates and with the workspaces of kernels."""
        self._caches: tuple[GraphCache[object], GraphCache[object]] = GraphCache(), GraphCache()
        """One cache for the graphs of `_steps`, and one for those of `_finished`."""
        self._irregular: set[tuple[Decision, ...]] = set()
        """Configurations with a recording that cannot be extrapolated. Those that were extrapolated before are kept."""
        self._with_all_layers: set[_Key] = set()
        """Recordings that cannot be lengthened: they have all layers."""
        self._compared: set[_Key] = set()
        """Lengthened recordings that equal recordings of all layers."""
        self._failed: dict[_Key, StepError] = {}
        """Errors of the recordings that failed."""
        self._sizes = RefusedSizes()

    def prefetch(self, config: Config, splits: Iterable[MicroBatching], *, updates_only: bool = False) -> None:
        """Start the recordings that `of()` will need for these splits.

        Args:
            updates_only: True to start only the recordings of updates, for steps that have been recorded.
        """
        splits = tuple(splits)
        if any(split.micro_batches == 1 for split in splits):
            self._prefetch((config, (max(s.size for s in splits if s.micro_batches == 1),)), updates_only)
        is_predicted = any(split.micro_batches > 1 and split.size >= BASE_SIZES[0] for split in splits)
        sizes = BASE_SIZES if is_predicted else (1,)
        if not self._sizes.are_refused(sizes):
            for size, parts in itertools.product(sizes, self._parts_of(splits)):
                self._prefetch(_accumulated(config, (size,) * parts), updates_only)

    def _parts_of(self, splits: Iterable[MicroBatching]) -> list[int]:
        """Returns the numbers of micro-batches in the recordings of these splits, without that of the whole batch."""
        return sorted({min(split.micro_batches, self._most_parts) for split in splits} - {1})

    def of(self, config: tuple[Decision, ...], split: MicroBatching) -> DerivedGraph:
        """Returns a function that returns the recording of a step with this split, recorded or predicted.

        It has one micro-batch (the whole batch), or two, of which the second stands for all others. If the last one
        differs, a third micro-batch stands for it. It does not change if recordings are dropped later.
        """
        if split.micro_batches == 1:
            whole = config, (split.size,)
            graph = self._get(whole, (whole,))
            self._sizes.ran_whole(config)
            return graph
        if split.last is not None:
            return self._in_parts(config, (split.size, split.last))
        (parts,) = self._parts_of([split])
        if split.size >= BASE_SIZES[0] and config not in self._irregular:
            predicted = self._predicted(config, split.size, parts)
            if predicted is not None:
                return predicted
            self._irregular.add(config)
        return self._in_parts(config, (split.size,) * parts)

    def _predicted(self, config: tuple[Decision, ...], size: int, parts: int) -> DerivedGraph | None:
        """Returns the recording that is extrapolated from the base sizes; None if it cannot be."""
        small = {(base,) * parts: _accumulated(config, (base,) * parts) for base in BASE_SIZES}
        try:
            self._sizes.check(*small)
            self._begin_all(small.values())
            for sizes, key in small.items():
                with self._sizes.named(config, sizes):
                    self._result(self._parts(key)[0])
            return self._get(_accumulated(config, (size,) * parts), tuple(small.values()), size)
        except (WorkloadError, _IrregularError):  # the model may need groups of samples
            return None

    def _in_parts(self, config: tuple[Decision, ...], sizes: tuple[int, ...]) -> DerivedGraph:
        """Returns the recording of a step with micro-batches of these sizes. Raises as `RefusedSizes.named`."""
        key = _accumulated(config, sizes)
        with self._sizes.named(config, sizes):
            return self._get(key, (key,))

    def trained(self, config: tuple[Decision, ...], split: MicroBatching) -> tuple[str, ...]:
        """Returns the names of the parameters that get a gradient in a step that runs the whole batch."""
        return self._step(self._parts((config, (split.size,)))[:1])().trained

    def finished_by(self, finish: Callable[[StepGraph], StepGraph]) -> Recordings:
        """Returns the same recordings with other workspaces of kernels."""
        other = copy.copy(self)
        other._finish, other._finished = finish, {}
        return other

    def close(self) -> None:
        """End the recordings that are still running."""
        end_all(self._running.values())
        self._running.clear()
        self.shortening.close()

    def _prefetch(self, key: _Key, updates_only: bool) -> None:
        step, update = self._parts(key)
        is_whole = step in self._recorded and not can_be_grafted(self._recorded[step])
        if updates_only and (step not in self._recorded or is_whole):
            return
        if is_whole:
            step, update = key, None
        self._begin(step)
        if update is not None and has_role(key[0], Role.OPTIMIZER):  # other updates need the recording of the baseline
            self._begin(update)

    def _get(self, key: _Key, keys: tuple[_Key, ...], size: int | None = None) -> DerivedGraph:
        """Returns the recording of `key`, with the workspaces of kernels.

        Args:
            keys: one recording; with `size`, the two from which the recording is extrapolated.
            size: number of samples in each micro-batch of the extrapolated recording.

        Raises:
            StepError: a step or an update cannot be recorded.
            _IrregularError: the recording cannot be extrapolated.
        """
        known = self.is_dropped, key
        if known not in self._finished:
            joined, finish = self._joined(keys, size), self._finish
            # Workspaces are not affine in the number of samples: they are added to the extrapolated recording.
            self._finished[known] = DerivedGraph(lambda: finish(joined()), self._caches[1])
        return self._finished[known]

    def _joined(self, keys: tuple[_Key, ...], size: int | None) -> Callable[[], StepGraph]:
        """Returns a function that returns a recording with its update. For arguments and errors see `_get`."""
        self._begin_all(keys)
        for key in keys:
            self._result(self._parts(key)[0])
        # An update is None if all layers are recorded with the step's own update, or if it is part of the backward.
        parts, updates = zip(*map(self._parts, keys), strict=True)
        step = self._step(parts, size)
        if updates[0] is None:
            return step
        if not all(can_be_grafted(self._result(part)) for part in parts):
            return self._step(keys, size)
        update = self._result(updates[0])
        return lambda: graft_update(step(), update)

    def _step(self, parts: tuple[_Key, ...], size: int | None = None) -> Callable[[], StepGraph]:
        """Returns a function that returns a recording with the update that `parts` have. Raises as `_get`."""
        recorded = [self._result(part) for part in parts]
        if (parts, size) in self._steps:
            return self._steps[parts, size]
        few = [part for part in parts if self._is_lengthened(part)]
        runs = self.shortening.runs if few else ()
        if size is None and not few:
            return lambda: recorded[0]

        def derive() -> StepGraph | None:
            graph = recorded[0] if size is None else extrapolate(recorded[0], recorded[1], size)
            if graph is None:
                raise _IrregularError
            return with_all_layers(graph, runs)

        graph = derive() if len(few) in (0, len(parts)) else None
        if graph is None:
            self._record_all_layers(few)
            return self._step(parts, size)
        self._steps[parts, size] = DerivedGraph(lambda: cast(StepGraph, derive()), self._caches[0], graph)
        return self._steps[parts, size]

    def _record_all_layers(self, parts: Iterable[_Key]) -> None:
        """Drop recordings of a few layers that cannot be lengthened. They will be made with all layers."""
        for part in parts:
            self._with_all_layers.add(part)
            self._recorded.pop(part, None)

    def _begin_all(self, keys: Iterable[_Key]) -> None:
        """Start the steps and the updates of these recordings."""
        for part in itertools.chain.from_iterable(map(self._parts, keys)):
            if part is not None:
                self._begin(part)

    def _begin(self, part: _Key) -> None:
        if part not in self._recorded and part not in self._running and part not in self._failed:
            if not part[1] and self._start_update is not None:
                self._running[part] = self._start_update(part[0])
            elif self._is_lengthened(part):
                self._running[part] = self._start(*part, self.shortening.runs)
                if not self.shortening.is_assumed:
                    self.shortening.begin()
            else:
                self._running[part] = self._start(*part, ())

    def _parts(self, key: _Key) -> tuple[_Key, _Key | None]:
        """Returns the keys of the two recordings from which the recording of `key` can be put together.

        The first is the step with the baseline's optimizer, the second the update that replaces the step's update. If
        the decisions keep the baseline's update and all layers are recorded, or the update is part of the backward, the
        result is `key` and None.
        """
        decisions, sizes = key
        has_other = has_role(decisions, Role.OPTIMIZER) or self._may_be_lengthened(key)
        if self._start_update is None or not has_other or any(decision.steps_in_backward for decision in decisions):
            return key, None
        step = without_roles(decisions, Role.OPTIMIZER), sizes
        update = without_roles(decisions, Role.MICRO_BATCHING, Role.LOSS)
        if not any(decision.needs_gradient_scaler for decision in update):
            update = without_roles(update, Role.PRECISION)  # weights, gradients and state keep their precision
        return step, (update, ())

    def _may_be_lengthened(self, key: _Key) -> bool:
        """True if only a few of the identical layers are recorded, unless this recording turns out to need all."""
        decisions, sizes = key
        return (
            bool(self.shortening.runs and sizes)
            and self._start_update is not None
            and not has_role(decisions, Role.FREEZING)
        )

    def _is_lengthened(self, part: _Key) -> bool:
        """True if only a few of the identical layers are recorded for this part of a recording."""
        return self._may_be_lengthened(part) and part not in self._with_all_layers

    def _result(self, part: _Key) -> StepGraph:
        """Returns a recording as the child made it: of a few layers, if it is lengthened."""
        if part in self._failed:
            raise self._failed[part]
        if part not in self._recorded:
            self._begin(part)
            is_lengthened = self._is_lengthened(part)
            if is_lengthened and not self._may_lengthen():
                return self._result(part)
            try:
                self._recorded[part] = self._running.pop(part).result()
            except StepError as error:
                if is_lengthened:
                    self._record_all_layers([part])
                    return self._result(part)  # raises the error again if the reason is not that layers are missing
                self._failed[part] = error
                raise
        return self._recorded[part]

    # ---- are lengthened recordings right? ----------------------------------------------------------------------------

    def confirm(self) -> None:
        """Compare the recordings of the baseline. If no recording may be lengthened, all that were made are dropped."""
        self._may_lengthen()

    def _may_lengthen(self) -> bool:
        """True if recordings may be lengthened. If it turns out that they may not, all are dropped."""
        if self.shortening.runs:
            is_right = False
            try:
                is_right = self.shortening.is_right()
            finally:  # also if the time is up
                if not is_right:
                    self._drop_all()
        return bool(self.shortening.runs)

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """Runs of identical layers of which only a few layers are recorded; empty if all layers are recorded."""
        return self.shortening.runs

    @property
    def is_dropped(self) -> bool:
        """True if recordings were dropped, because they had been lengthened wrongly."""
        return self.shortening.is_dropped

    def drop_if_wrong(self, decisions: tuple[Decision, ...]) -> bool:
        """Compares the lengthened recordings of a configuration with recordings of all layers.

        It is called if a certificate is not what was promised. If a recording differs, all recordings are dropped, and
        all layers are recorded from now on.

        Args:
            decisions: the decisions of a plan with this configuration.

        Returns:
            True if recordings were dropped.
        """
        config = _step_config(decisions)
        lengthened = self._lengthened_parts() - self._compared
        parts = [part for part in self._recorded if part in lengthened]
        children = {part: self._start(*part, ()) for part in parts if _step_config(part[0]) == config}
        try:
            for part in tuple(children):
                try:
                    full = children.pop(part).result()
                except StepError:  # a step that cannot be recorded must not be promised
                    full = None
                longer = with_all_layers(self._recorded[part], self.shortening.runs)
                if longer is None or not is_same_step(full, longer):
                    self._drop_all()
                    return True
                self._compared.add(part)
        finally:
            end_all(children.values())
        return False

    def _lengthened_parts(self) -> set[_Key]:
        """Returns the recordings of a few layers that were lengthened."""
        return {part for parts, _ in self._steps for part in parts if self._is_lengthened(part)}

    def _drop_all(self) -> None:
        """Drop all recordings.

        Recordings of optimizer updates are dropped, too, because the names of the trained parameters may come from a
        lengthened recording.
        """
        end_all(self._running.values())
        if self._lengthened_parts():
            self.shortening.is_dropped = True
        self.shortening.end()
        self._sizes.forget_whole()
        known = self._running, self._recorded, self._steps, self._finished, self._failed, self._irregular
        for each in known:
            each.clear()


def _step_config(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Returns the decisions on which the recording of a step depends, without its sizes and its update."""
    others = Role.SHARDING, Role.RECOMPUTE, Role.ALLOCATOR, Role.OPTIMIZER, Role.MICRO_BATCHING
    return without_roles(decisions, *others)


def _accumulated(config: tuple[Decision, ...], sizes: tuple[int, ...]) -> _Key:
    """Returns the key of a recording with micro-batches of these sizes, of which only the last one may be smaller."""
    return (*config, *MicroBatching(micro_batches=len(sizes), size=sizes[0]).decisions()), sizes
