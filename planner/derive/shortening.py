"""Decides whether what-if recordings may have only a few of many identical layers.

The baseline is recorded with all layers and with a few. Recordings may have only a few layers if the short recording of
the baseline, after lengthening, has the same events as the full one. A difference between layers that occurs only in
another precision or with micro-batches does not show in the baseline. It is detected if it makes the peak of a
certificate differ from the promised peak (`Recordings.drop_if_wrong`). The difference is not detected if the lengthened
recording needs too much memory, so that none of its plans is certified. Then a slower plan may be chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from planner.derive.lengthen import lengthened
from planner.derive.same_step import is_same_step
from planner.errors import StepError
from planner.recording.repeats.layer_runs import KEPT, KEPT_WHEN_GATHERED, LayerRun, layer_runs
from planner.recording.step_graph import StepGraph, first_step_before_update, last_step
from planner.virtual_gpu.forked_process import Running
from planner.workload.optimizer_choice import Optimizers, by_name
from planner.workload.workload import Workload


def runs_to_shorten(workload: Workload) -> tuple[LayerRun, ...]:
    """Returns the runs of identical layers of which a recording may have only a few."""
    if workload.gradient_names is not None:
        return ()
    if any(way.divides_parameters_by == 1 for way in workload.sharding):
        return ()  # DistributedDataParallel puts the gradients of several layers into one bucket
    is_gathered = any(way.gathers_parameters for way in workload.sharding)
    runs = layer_runs(workload.model, KEPT_WHEN_GATHERED if is_gathered else KEPT)
    options = _options(workload.optimizer)
    return tuple(run for run in runs if _are_updated_alike(run, workload.model, options))


def _options(optimizers: Optimizers) -> dict[int, object]:
    """Maps the `id` of each parameter to its optimizer's name and to the options that decide which ops update it."""
    found: dict[int, object] = {}
    for name, optimizer in by_name(optimizers).items():
        if isinstance(optimizer, torch.optim.Optimizer):
            # PyTorch's own optimizers ignore options that they do not know, such as the name of a group.
            is_own = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
            for group in optimizer.param_groups:
                known = optimizer.defaults if is_own else {*group} - {"params"}
                kinds = {option: _kind(value) for option, value in group.items() if option in known}
                found.update((id(parameter), (name, kinds)) for parameter in group["params"])
    return found


def _kind(value: object) -> object:
    """Returns the part of an option's value that may decide which ops an update runs.

    Two numbers are alike if both or neither are 0. All tensors are alike. Other objects, such as arrays, are alike only
    if they are the same object.
    """
    if isinstance(value, (list, tuple)):
        return [_kind(item) for item in value]
    if isinstance(value, dict):
        return {key: _kind(item) for key, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value != 0
    if isinstance(value, (bool, str, torch.dtype, type(None))):
        return value
    return torch.Tensor if isinstance(value, torch.Tensor) else id(value)


def _are_updated_alike(run: LayerRun, model: torch.nn.Module, options: Mapping[int, object]) -> bool:
    """True if the user's optimizers update the parameters of all layers of a run by the same ops."""
    layers = [model.get_submodule(run.path(run.first + number)) for number in range(run.layers)]
    first, *others = ([options.get(id(parameter)) for parameter in layer.parameters()] for layer in layers)
    return all(other == first for other in others)


def with_all_layers(graph: StepGraph, runs: Iterable[LayerRun]) -> StepGraph | None:
    """Returns a recording with all layers of the runs; None if they cannot be known from those that it has."""
    longer: StepGraph | None = graph
    for run in runs:
        longer = longer and lengthened(longer, run)
    return longer


class Shortening:
    """Decides whether recordings have only a few layers of each run. Copies of `Recordings` share it."""

    def __init__(
        self,
        runs: tuple[LayerRun, ...] = (),
        start_baseline: Callable[[tuple[LayerRun, ...]], Running] | None = None,
        baseline: Callable[[], StepGraph] | None = None,
    ) -> None:
        """
        Args:
            runs: runs of layers that look identical.
            start_baseline: starts the recording of two steps of the baseline with a few layers of each run; None if
                nothing is compared.
            baseline: returns the recording of two steps of the baseline with all layers; None if nothing is compared.
        """
        self.runs = runs
        """The runs; empty if all layers are recorded."""
        self.is_dropped = False
        """True if lengthened recordings were dropped, because they were wrong. It happens at most once."""
        self.is_assumed = False
        """True while recordings are lengthened without a comparison, because the baseline is still being rehearsed."""
        self._start_baseline, self._baseline = start_baseline, baseline
        self._child: Running | None = None
        self._is_compared = start_baseline is None or baseline is None

    @contextlib.contextmanager
    def assumed_right(self) -> Iterator[None]:
        """Within the context, recordings are lengthened although the baseline is not known yet."""
        self.is_assumed = True
        try:
            yield
        finally:
            self.is_assumed = False

    def begin(self) -> None:
        """Start the recording of the baseline with a few layers, unless it has been started."""
        if self.runs and not self._is_compared and self._child is None and self._start_baseline is not None:
            self._child = self._start_baseline(self.runs)

    def is_right(self) -> bool:
        """True if recordings may be lengthened; else call `end`. The first call compares recordings of the baseline."""
        if self.runs and not self._is_compared and not self.is_assumed:
            self.begin()
            self._is_compared = True
            return self._is_baseline_right()
        return bool(self.runs)

    def _is_baseline_right(self) -> bool:
        assert self._child is not None and self._baseline is not None
        full, child = self._baseline(), self._child
        self._child = None
        try:
            short = child.result()
        except StepError:  # the model may need all its layers
            return False
        # What-if recordings have the first step only. If its ops differ from those of later steps, as under FSDP2, the
        # first steps are compared, too.
        steps = [(last_step(short), full)]
        if full.ops_differ or short.ops_differ:
            steps.append((first_step_before_update(short), first_step_before_update(full)))
        return full.update_tick is not None and all(
            is_same_step(with_all_layers(few, self.runs), whole) for few, whole in steps
        )

    def end(self) -> None:
        """Record all layers from now on."""
        self.close()
        self.runs = ()

    def close(self) -> None:
        """End the recording of the baseline if it is still running."""
        if self._child is not None:
            self._child.end()
            self._child = None
