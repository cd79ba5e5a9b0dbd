"""Rehearse the step that decisions rewrite a workload to: the bridge between the rewriter and the virtual GPU."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.footprint import with_whole_batch
from planner.plan_types.decisions import Accumulation, Decision, Optimizer
from planner.profiles.device import DeviceProfile
from planner.recording.rehearsal import Rehearsal
from planner.recording.step_graph import StepGraph
from planner.rewrite.application import Rewritten, apply_decisions
from planner.virtual_gpu.backend import Target
from planner.virtual_gpu.forked_process import Child
from planner.workload.workload import OptimizerBlueprint, Workload


def with_gradient_names(work: Workload, card: DeviceProfile) -> Workload:
    """Where gradients are alive before the step: the workload with the names of the parameters that have one."""
    if not work.gradients_alive or work.gradient_names is not None:
        return work
    graph = start_rehearsal(
        dataclasses.replace(work, gradients_alive=False),
        (),
        card,
        sizes=(work.batch_size,),
        steps=1,
        primed=False,
        what_if=False,
    ).result()
    return dataclasses.replace(work, gradient_names=graph.trained)


def certifying_graph(work: Workload, decisions: Sequence[Decision], card: DeviceProfile) -> StepGraph:
    """Two plain steps: the first one makes the optimizer's state, the second one has it from the start."""
    return finish_certificate(start_certificate(work, decisions, card).result(), work, card)


def start_certificate(work: Workload, decisions: Sequence[Decision], card: DeviceProfile) -> Child:
    """Begin to rehearse the two steps; `.result()` is still without workspaces."""
    sizes = rehearsed_sizes(work, decisions)
    return start_rehearsal(work, decisions, card, sizes=sizes, steps=2, primed=False, what_if=False)


def finish_certificate(graph: StepGraph, work: Workload, card: DeviceProfile) -> StepGraph:
    """Add what the rehearsal cannot show: the rest of the batch, and workspaces."""
    return with_workspaces(with_whole_batch(graph, work.batch_bytes), card, torch.__version__)


def rehearsed_sizes(work: Workload, decisions: Sequence[Decision]) -> tuple[int, ...]:
    """Micro-batches to rehearse: the first, the second, and a smaller last one. Those between repeat the second."""
    accumulation = next((d for d in decisions if isinstance(d, Accumulation)), None)
    if accumulation is None:
        return (work.batch_size,)
    size, count = accumulation.micro_batch_size, accumulation.micro_batches
    last = work.batch_size - size * (count - 1)
    if count == 2 or last == size:
        return (size, last if count == 2 else size)
    return (size, size, last)


def start_rehearsal(
    work: Workload,
    decisions: Sequence[Decision],
    card: DeviceProfile,
    *,
    sizes: tuple[int, ...],
    steps: int,
    primed: bool,
    what_if: bool,
) -> Child:
    """Begin to rehearse the step rewritten by `decisions`; `.result()` is a `StepGraph` without workspaces."""
    _import_once(decisions)
    shortened = tuple(
        dataclasses.replace(decision, micro_batches=len(sizes)) if isinstance(decision, Accumulation) else decision
        for decision in decisions
    )
    rewrite = _rewriter(work, shortened)

    def prepare(model: torch.nn.Module):
        if what_if:  # no rewritten step keeps a cache of keys and values
            for module in model.modules():
                if getattr(getattr(module, "config", None), "use_cache", False):
                    module.config.use_cache = False
        rewritten = rewrite(model, sum(sizes))
        step = (
            _adding_to_gradients(rewritten.step, model, work.gradient_names) if work.gradients_alive else rewritten.step
        )
        return step, rewritten.optimizer

    return Rehearsal(
        model=work.model,
        batch=work.batch,
        batch_size=work.batch_size,
        prepare=prepare,
        target=Target(compute_capability=card.compute_capability),
        micro_batch_sizes=sizes,
        steps=steps,
        primed=primed,
        what_if=what_if,
    ).start()


def start_update(work: Workload, decisions: Sequence[Decision], card: DeviceProfile, trained: Sequence[str]) -> Child:
    """Begin to rehearse the update alone, with state and gradients there already.

    Args:
        decisions: without accumulation or checkpoints, which it does not depend on.
        trained: parameters that have a gradient.
    """
    _import_once(decisions)
    rewrite = _rewriter(work, decisions)

    def prepare(model: torch.nn.Module):
        rewritten = rewrite(model, work.batch_size)
        step, parameters = rewritten.step, dict(model.named_parameters())

        def update(_: Any) -> None:
            for name in trained:
                if parameters[name].requires_grad:
                    parameters[name].grad = torch.empty_like(parameters[name])
            if step.scaler is not None:
                step.scaler.scale(torch.zeros((), device=next(iter(parameters.values())).device))
            step.update()

        return update, rewritten.optimizer

    return Rehearsal(
        model=work.model,
        batch=work.batch,
        batch_size=work.batch_size,
        prepare=prepare,
        target=Target(compute_capability=card.compute_capability),
        micro_batch_sizes=(1,),
        steps=1,
        primed=True,
        what_if=False,
        trained=tuple(trained),
    ).start()


def _adding_to_gradients(
    step: Callable[[Any], Any], model: torch.nn.Module, gradient_names: Sequence[str]
) -> Callable[[Any], Any]:
    """The step with gradients of these parameters there before it, in buffers that outlive its update."""
    parameters = dict(model.named_parameters())
    buffers = {name: torch.empty_like(parameters[name]) for name in gradient_names if parameters[name].requires_grad}

    def adding(batch: Any) -> Any:
        for name, buffer in buffers.items():
            parameters[name].grad = buffer.detach()
        return step(batch)

    return adding


def _rewriter(work: Workload, decisions: Sequence[Decision]) -> Callable[[torch.nn.Module, int], Rewritten]:
    """From a virtual model and its batch size to the model rewritten, with an optimizer as the user's."""
    spec = work.optimizer
    blueprint = OptimizerBlueprint.of(spec, work.model) if isinstance(spec, torch.optim.Optimizer) else None

    def rewrite(model: torch.nn.Module, batch_size: int) -> Rewritten:
        return apply_decisions(
            decisions,
            model,
            optimizer=blueprint.over(model) if blueprint else spec,
            calling=work.calling,
            batch_size=batch_size,
            loss_fn=work.loss_fn,
        )

    return rewrite


def _import_once(decisions: Sequence[Decision]) -> None:
    """What children would each import anew."""
    if any(isinstance(decision, Optimizer) for decision in decisions):
        importlib.import_module("bitsandbytes")
