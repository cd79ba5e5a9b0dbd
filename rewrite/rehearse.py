"""Rehearse the step that decisions rewrite a workload to: the bridge between the rewriter and the virtual GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from planner.errors import WorkloadError
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import with_whole_batch
from planner.plan_types.decision_base import (
    Decision,
    Role,
    micro_batch_size_of,
    micro_batches_of,
    with_sharding,
    without_roles,
)
from planner.plan_types.decisions import Shard
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recording.rehearsal import Between, MakeBatch, Rehearsal
from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import TWO_STEPS, Schedule, StepGraph
from planner.rewrite.application import Rewritten, apply_decisions
from planner.rewrite.optimizers import make_optimizers
from planner.rewrite.step import TrainingStep
from planner.virtual_gpu.backend import Target
from planner.virtual_gpu.forked_process import Child
from planner.workload.call_convention import loss_of
from planner.workload.optimizer_choice import for_copies
from planner.workload.own_step import runs_own_code
from planner.workload.unsupported import library
from planner.workload.workload import Workload, resized

RunActivity = Callable[[torch.nn.Module, Any, Callable[[], contextlib.AbstractContextManager], MakeBatch], object]
"""Runs an activity between the steps of a run, such as an evaluation.

Arguments: the rewritten model, its optimizer or optimizers, a function that returns the context of its forwards, and
one that makes a batch of a number of samples.
"""


class Activity(Protocol):
    """An activity between the steps of a run."""

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> RunActivity: ...


def with_gradient_names(workload: Workload, card: DeviceProfile | None, watch: Watch | None = None) -> Workload:
    """Return the workload with the names of the parameters that get a gradient, found by rehearsing one step.

    Only a step that starts with gradients of earlier batches (`gradients_alive`) needs these names. Otherwise the
    workload is returned unchanged.

    Args:
        card: as for `start_rehearsal`.
        watch: limits the time of the rehearsal; None for no limit.
    """
    if not workload.gradients_alive or workload.gradient_names is not None:
        return workload
    child = start_rehearsal(
        dataclasses.replace(workload, gradients_alive=False),
        (),
        card,
        sizes=(workload.batch_size,),
        steps=1,
        primed=False,
        what_if=False,
    ).timed_by(watch)
    return dataclasses.replace(workload, gradient_names=child.result().trained)


def certifying_graph(
    workload: Workload, decisions: Sequence[Decision], card: DeviceProfile, watch: Watch | None = None
) -> StepGraph:
    """Rehearse two steps: the first creates the optimizer state, the second has it from the start.

    The calls of a step of the user's own are rehearsed until they repeat.

    Args:
        watch: limits the time of the rehearsal; None for no limit.
    """
    child = start_certificate(workload, decisions, card).timed_by(watch)
    return finish_certificate(child.result(), workload, card)


def start_certificate(
    workload: Workload,
    decisions: Sequence[Decision],
    card: DeviceProfile,
    schedule: Schedule | None = None,
    between: Sequence[Activity] = (),
    runs: tuple[LayerRun, ...] = (),
) -> Child:
    """Start the rehearsal of two steps in a child process; `.result()` is a `StepGraph` without workspaces.

    Args:
        schedule: the calls of a step of the user's own that have to be recorded, as another recording of it found them.
            None to watch the calls until they repeat.
        between: functions that run between the steps of a run; each of them is recorded twice after the steps.
        runs: runs of identical layers, of which only the first `kept` are recorded. A recording with such runs cannot
            be used as a certificate.
    """
    if schedule is None and workload.step is None:
        schedule = TWO_STEPS
    return start_rehearsal(
        workload,
        decisions,
        card,
        sizes=rehearsed_sizes(workload, decisions),
        steps=None if schedule is None else schedule.calls,
        schedule=schedule or TWO_STEPS,
        primed=False,
        what_if=False,
        between=between,
        runs=runs,
    )


class Certifier:
    """Rehearses the rewritten steps of one workload. All recordings have the calls that the first one needed."""

    def __init__(self, workload: Workload, card: DeviceProfile, watch: Watch | None = None) -> None:
        self._workload, self._card, self._watch = workload, card, watch
        self._schedule: Schedule | None = None

    def start(self, decisions: Sequence[Decision]) -> Child:
        """Start the rehearsal of the step that these decisions rewrite."""
        return start_certificate(self._workload, decisions, self._card, self._schedule).timed_by(self._watch)

    def finish(self, graph: StepGraph) -> StepGraph:
        """Add memory that is not in the recording (`finish_certificate`)."""
        self._schedule = self._schedule or graph.schedule
        return finish_certificate(graph, self._workload, self._card)


def finish_certificate(graph: StepGraph, workload: Workload, card: DeviceProfile) -> StepGraph:
    """Add memory that is not in the recording: samples that were not rehearsed, and the workspaces of kernels."""
    return with_workspaces(with_whole_batch(graph, workload.batch_bytes), card, torch.__version__)


def rehearsed_sizes(workload: Workload, decisions: Sequence[Decision]) -> tuple[int, ...]:
    """Return the sizes of the micro-batches to rehearse: the first, the second, and the last if it differs.

    The last one differs if it is smaller, or if only its backward reduces gradients over several cards. Micro-batches
    between the second and the last allocate the same memory as the second, and are not rehearsed.
    """
    size, count = micro_batch_size_of(decisions), micro_batches_of(decisions)
    reduces_once = any(way.keeps_whole_gradients for way in with_sharding(workload.sharding, decisions))
    if size is None:
        return (workload.batch_size,)
    last = workload.batch_size - size * (count - 1)
    if count == 2 or (last == size and not reduces_once):
        return (size, last if count == 2 else size)
    return (size, size, last)


def start_rehearsal(
    workload: Workload,
    decisions: Sequence[Decision],
    card: DeviceProfile | None,
    *,
    sizes: tuple[int, ...],
    steps: int | None,
    primed: bool,
    what_if: bool,
    schedule: Schedule = TWO_STEPS,
    between: Sequence[Activity] = (),
    runs: tuple[LayerRun, ...] = (),
) -> Child:
    """Start the rehearsal of the step rewritten by `decisions`; `.result()` is a `StepGraph` without workspaces.

    Args:
        card: the card that the step is rehearsed for; None for a step on the CPU.
        sizes: number of samples of each micro-batch to rehearse.
        steps: number of optimizer steps; None to watch the calls of a step of the user's own until they repeat.
        schedule: how the steps continue after the recorded ones.
        primed: True if the optimizer state exists before the first step.
        what_if: True for a recording that shows the tensors that every module saves. Candidates for recomputing are
            derived from it.
        between: functions that run between steps; each of them is recorded twice after the steps.
        runs: runs of identical layers, of which only the first `kept` are recorded.
    """
    decisions = with_sharding(
        workload.sharding, without_roles(decisions, Role.ALLOCATOR)
    )  # the recording has no allocator
    decisions = tuple(
        decision.without_modules(lambda path: any(run.leads_elsewhere(path) for run in runs)) for decision in decisions
    )
    _import_once(decisions)
    shortened = tuple(decision.with_micro_batches(len(sizes)) for decision in decisions)
    rewrite = _rewriter(workload, shortened, runs)
    made: list[Rewritten] = []

    def prepare(model: torch.nn.Module):
        if what_if:  # candidates checkpoint modules, and a checkpointed module keeps no cache of keys and values
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):
                    config.use_cache = False
        rewritten = rewrite(model, sum(sizes))
        made.append(rewritten)
        if workload.gradient_names is None:
            return rewritten.step, rewritten.optimizers
        return _adding_to_gradients(rewritten.step, model, workload.gradient_names), rewritten.optimizers

    return Rehearsal(
        model=workload.model,
        batch=workload.batch,
        batch_size=workload.batch_size,
        not_by_sample=workload.not_by_sample,
        prepare=prepare,
        target=_target(workload, decisions, card),
        answers=workload.answers,
        micro_batch_sizes=sizes,
        steps=steps,
        schedule=schedule,
        primed=primed,
        what_if=what_if,
        loss_fn=workload.loss_fn,
        own_step=workload.step,
        runs_own_code=runs_own_code(workload),
        between=tuple(_bound(activity, made) for activity in between),
        shortened=runs,
    ).start()


def _bound(activity: Activity, made: Sequence[Rewritten]) -> Between:
    """Return the activity with the model, optimizers and context of the rewritten step, which is made later."""
    return Between(name=activity.name, run=functools.partial(_happens, activity.run, made))


def _happens(activity: RunActivity, made: Sequence[Rewritten], make_batch: MakeBatch) -> None:
    step = made[0].step
    autocast = step.autocast if isinstance(step, TrainingStep) else contextlib.nullcontext
    activity(made[0].module, made[0].optimizer, autocast, make_batch)


def start_forward(workload: Workload, card: DeviceProfile, samples: int) -> Child:
    """Start the rehearsal of forward and loss on a number of samples; `.result()` raises if the model refuses them."""
    batch = resized(workload.batch, samples, present=workload.batch_size, not_by_sample=workload.not_by_sample)

    def prepare(model: torch.nn.Module):
        def forward(batch: Any) -> None:
            loss_of(workload.calling.call(model, batch), batch, workload.loss_fn)

        return forward, (torch.optim.SGD(model.parameters()),)

    return Rehearsal(
        model=workload.model,
        batch=batch,
        values_from=workload.batch,
        batch_size=samples,
        prepare=prepare,
        target=Target.of(card),
        answers=workload.answers,
        micro_batch_sizes=(samples,),
        steps=1,
        primed=False,
        what_if=False,
    ).start()


def start_update(
    workload: Workload, decisions: Sequence[Decision], card: DeviceProfile, trained: Sequence[str]
) -> Child:
    """Start the rehearsal of the optimizer's update alone, with optimizer state and gradients present.

    Args:
        decisions: the decisions, without micro-batching and recomputing, on which the update does not depend.
        trained: names of the parameters that have a gradient.
    """
    decisions = with_sharding(workload.sharding, decisions)
    _import_once(decisions)
    rewrite = _rewriter(workload, decisions)

    def prepare(model: torch.nn.Module):
        rewritten = rewrite(model, workload.batch_size)
        step, parameters = rewritten.step, dict(model.named_parameters())
        assert isinstance(step, TrainingStep)  # the update is never recorded alone for a step of the user's own

        def update(_: Any) -> None:
            for name in trained:
                if parameters[name].requires_grad:
                    parameters[name].grad = torch.empty_like(parameters[name])
            if step.scaler is not None:
                step.scaler.scale(torch.zeros((), device=next(iter(parameters.values())).device))
            step.update()

        return update, rewritten.optimizers

    return Rehearsal(
        model=workload.model,
        batch=workload.batch,
        batch_size=workload.batch_size,
        not_by_sample=workload.not_by_sample,
        prepare=prepare,
        target=_target(workload, decisions, card),
        answers=workload.answers,
        micro_batch_sizes=(1,),
        steps=1,
        primed=True,
        what_if=False,
        trained=tuple(trained),
    ).start()


def _target(workload: Workload, decisions: Sequence[Decision], card: DeviceProfile | None) -> Target:
    """Return the card; of several cards, the one that holds the most memory."""
    sharding = next((decision for decision in decisions if isinstance(decision, Shard)), None)
    if sharding is None:
        return Target.of(card)
    made = make_optimizers(for_copies(workload.optimizer, workload.model)(workload.model), workload.model)
    rank = max(_fullest_rank(sharding, optimizer) for optimizer in made.values())
    return Target.of(card, cards=sharding.cards, rank=rank)


def _fullest_rank(decision: Shard, optimizer: torch.optim.Optimizer) -> int:
    """Return the rank that holds the most memory: the first one, or with ZeRO-1 the one with the most optimizer state.

    `ZeroRedundancyOptimizer` gives each parameter, the largest first, to the rank that has the fewest so far.
    """
    if decision.way != "zero1":
        return 0
    sizes = [0] * decision.cards
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=torch.numel, reverse=True):
            sizes[sizes.index(min(sizes))] += parameter.numel()
    return sizes.index(max(sizes))


def _adding_to_gradients(
    step: Callable[[Any], Any], model: torch.nn.Module, gradient_names: Sequence[str]
) -> Callable[[Any], Any]:
    """Return a step that starts with gradients of these parameters, as if earlier batches had left them.

    The memory of these gradients is not freed when the update sets gradients to None.
    """
    parameters = dict(model.named_parameters())
    buffers = {name: torch.empty_like(parameters[name]) for name in gradient_names if parameters[name].requires_grad}

    def adding(batch: Any) -> Any:
        for name, buffer in buffers.items():
            parameters[name].grad = buffer.detach()
        return step(batch)

    return adding


def _rewriter(
    workload: Workload, decisions: Sequence[Decision], runs: tuple[LayerRun, ...] = ()
) -> Callable[[torch.nn.Module, int], Rewritten]:
    """Return a function that takes a virtual model and its batch size, and returns the rewritten model.

    Args:
        runs: runs of identical layers, of which the virtual model has only the first `kept`.
    """
    optimizers = for_copies(workload.optimizer, workload.model, lambda path: any(run.lacks(path) for run in runs))

    def rewrite(model: torch.nn.Module, batch_size: int) -> Rewritten:
        rewritten = apply_decisions(
            decisions,
            model,
            optimizer=optimizers(model),
            calling=workload.calling,
            batch_size=batch_size,
            loss_fn=workload.loss_fn,
            step=workload.step,
            not_by_sample=workload.not_by_sample,
            parallelize=workload.parallelize,
        )
        rewritten.step.observers = ()  # they compare values, and virtual tensors have none
        return rewritten

    return rewrite


def _import_once(decisions: Sequence[Decision]) -> None:
    """Import modules in this process that each child process would otherwise import again.

    If a library cannot be used, the child process that needs it says so.
    """
    for decision in decisions:
        for package in decision.required_packages:
            with contextlib.suppress(WorkloadError):
                library(package, decision.kind)
