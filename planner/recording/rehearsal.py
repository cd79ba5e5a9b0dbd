"""Rehearses training steps of a model on the virtual GPU, in a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from planner.errors import PlannerError, WorkloadError
from planner.plan_types.answers import NOTHING_STATED, Answers
from planner.plan_types.quantized import is_quantized
from planner.recording.hook_errors import HookErrors, failure, failure_in_backward
from planner.recording.module_state import host_random_state
from planner.recording.recorder import Recorder
from planner.recording.repeats.layer_runs import LayerRun, shorten
from planner.recording.repeats.own_calls import MOST_CALLS, Repetition
from planner.recording.repeats.second_step import StepInParts, StepWithRepeatedGradients
from planner.recording.step_graph import TWO_STEPS, Category, Schedule, StepGraph, first_steps
from planner.recording.virtual_batch import learn_values, virtual_batch
from planner.spawned.surroundings import set_aside
from planner.virtual_gpu import backend, fake_tensor_cache, kernels, library_patches, quantized_weights, ranks, rnn
from planner.virtual_gpu.cuda_functions import empty_cache
from planner.virtual_gpu.forked_process import Child, Refuse
from planner.virtual_gpu.in_place import InPlaceRule
from planner.virtual_gpu.sparse_tensors import no_rows_of, virtual_sparse
from planner.virtual_gpu.values.shadow_values import ShadowValues, is_tracked
from planner.workload.module_hooks import carry_gradient_hooks
from planner.workload.torch_optimizers import skip_first_steps, sparse_lookups
from planner.workload.workload import tensors_of

Prepare = Callable[[torch.nn.Module], tuple[Callable[[Any], Any], Sequence[torch.optim.Optimizer]]]
"""A function that returns the training step, called as `step(batch)`, and the optimizers of the model that it gets.

It is called in the child process, with the virtual model.
"""


Program = Callable[[torch.device], object]
"""A function that runs a program on the device that it gets. Memory on other devices is not counted."""

MakeBatch = Callable[[int], Any]
"""Returns a virtual batch of a number of samples, with the values that a rehearsal knows or assumes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between:
    """A function that runs between the steps of a run, and its name for messages."""

    name: str
    run: Callable[[MakeBatch], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The arguments of one rehearsal."""

    model: torch.nn.Module
    """The user's model; the child process replaces its parameters and buffers by fake ones."""
    batch: Any
    batch_size: int
    """Number of samples in `batch`. A tensor whose dimension 0 has another size is not resized for the rehearsal."""
    not_by_sample: tuple[str, ...] = ()
    """Paths of the tensors of `batch` that are the same for all samples; they are not resized either."""
    values_from: Any = None
    """The batch that the user gave, if `batch` is a copy without values; None if it is `batch` itself."""
    prepare: Prepare
    target: backend.Target
    micro_batch_sizes: tuple[int, ...]
    """Number of samples in each rehearsed micro-batch. The rehearsed batch has as many samples as all of them together;
    the training step splits it."""
    steps: int | None
    """Number of training steps to record. None to watch the calls of a step of the user's own until they repeat."""
    schedule: Schedule = TWO_STEPS
    """How the steps continue after the recorded ones, if `steps` is a number."""
    primed: bool
    """True if the optimizer's state exists before the first recorded step."""
    what_if: bool
    """True for a what-if recording, see `planner.recording.recorder`."""
    trained: tuple[str, ...] | None = None
    """Names of the parameters that have a gradient, for a step without a backward. None for a step with
    a backward, in which they are recorded."""
    answers: Answers = NOTHING_STATED
    """The values of tensors that the user states."""
    loss_fn: Callable | None = None
    """The loss function, whose state is compared before and after the last step; None if it is part of the model."""
    own_step: Callable | None = None
    """The user's own training step; None for the planner's step."""
    runs_own_code: bool = True
    """True if the model, the loss function or the optimizer contains the user's own code, which may behave differently
    in the second step. False if all their code comes from libraries."""
    between: tuple[Between, ...] = ()
    """Functions that run between the steps of a run, such as an evaluation. Each is recorded twice after the steps."""
    shortened: tuple[LayerRun, ...] = ()
    """Runs of identical layers, most of which are left out of the rehearsal."""

    def start(self) -> Child:
        """Starts the rehearsal in a child process. `Child.result` waits for it and returns its `StepGraph`."""
        importlib.import_module("torch._dynamo")  # fake modes import it: once here instead of once in each child
        return Child(lambda refuse: _rehearse(self, refuse), receive=_received)


@contextlib.contextmanager
def on_virtual_gpu(target: backend.Target, refuse: Refuse, *, what_if: bool) -> Iterator[Recorder]:
    """Installs the virtual GPU in this process, permanently, and yields a recorder that is not active yet.

    Python's garbage collector is switched off, so that the ticks at which storages die do not depend on it.

    Args:
        target: the properties of the simulated card. For the CPU, nothing is installed: fake tensors are on the CPU,
            and PyTorch chooses kernels as for real tensors there.
        refuse: called with an error that must not be raised (`forked_process.Refuse`).
        what_if: True for a what-if recording, False for a plain one.
    """
    gc.freeze()
    gc.disable()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # errors are reported in one line
    autocast = None if target.device == "cpu" else backend.install(target)
    library_patches.let_libraries_take_fakes_for_real(target.device)
    with (
        set_aside(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        backend.VirtualGpuMode(),
    ):
        if target.cards > 1:
            ranks.join(target.device, cards=target.cards, rank=target.rank)
        recorder = Recorder(target.device, what_if=what_if, in_place=InPlaceRule(target.device))
        empty_cache.on_call = recorder.table.note_cache_release
        recorder.data_dependence.on_refusal_in_backward = refuse
        recorder.data_dependence.install(target.autograd_key)
        kernels.register_routes(recorder.data_dependence, target.autograd_key)
        if autocast is not None:
            autocast.on_cast = lambda tensor: recorder.mark(tensor, Category.AUTOCAST)
            rnn.register(recorder.data_dependence)
        yield recorder


def _received(answer: tuple[StepGraph, bytes]) -> StepGraph:
    """Returns the recording from the child's answer, and adds the answer's cache entries to the fake tensor cache."""
    graph, calls = answer
    fake_tensor_cache.remember(calls)
    return graph


def _rehearse(rehearsal: Rehearsal, refuse: Refuse) -> tuple[StepGraph, bytes]:
    """Runs the rehearsal in the child process. Returns the recording, and the new entries of the fake tensor cache."""
    known_calls = fake_tensor_cache.known()
    with on_virtual_gpu(rehearsal.target, refuse, what_if=rehearsal.what_if) as recorder:
        device = rehearsal.target.device
        shorten(rehearsal.model, rehearsal.shortened)
        make_virtual(rehearsal.model, device, recorder.data_dependence.known)
        if isinstance(rehearsal.loss_fn, torch.nn.Module):  # such as CrossEntropyLoss(weight=...), moved to the card
            make_virtual(rehearsal.loss_fn, device, recorder.data_dependence.known)
        wanted_size = sum(rehearsal.micro_batch_sizes)
        given = rehearsal.batch if rehearsal.values_from is None else rehearsal.values_from
        recorder.data_dependence.answers = rehearsal.answers

        def make_batch(samples: int) -> Any:
            batch = virtual_batch(
                rehearsal.batch, rehearsal.batch_size, samples, device, not_by_sample=rehearsal.not_by_sample
            )
            learn_values(recorder.data_dependence.known, batch, given, worst_case=rehearsal.answers.worst_case)
            return batch

        batch = make_batch(wanted_size)
        graph = record_steps(
            recorder,
            rehearsal.model,
            batch,
            rehearsal.prepare,
            steps=rehearsal.steps,
            schedule=rehearsal.schedule,
            primed=rehearsal.primed,
            micro_batch_sizes=rehearsal.micro_batch_sizes,
            trained=rehearsal.trained,
            loss_fn=rehearsal.loss_fn,
            own_step=rehearsal.own_step,
            runs_own_code=rehearsal.runs_own_code,
            between=rehearsal.between,
            make_batch=make_batch,
        )
        return graph, fake_tensor_cache.fresh(since=known_calls)


def record_steps(
    recorder: Recorder,
    model: torch.nn.Module,
    batch: Any,
    prepare: Prepare,
    *,
    steps: int | None,
    primed: bool,
    micro_batch_sizes: tuple[int, ...],
    schedule: Schedule = TWO_STEPS,
    trained: tuple[str, ...] | None = None,
    loss_fn: Callable | None = None,
    own_step: Callable | None = None,
    runs_own_code: bool = True,
    between: Sequence[Between] = (),
    make_batch: MakeBatch | None = None,
) -> StepGraph:
    """Runs training steps under the recorder, and returns the recording.

    The caller has to switch Python's garbage collector off; it runs here after each step.

    Args:
        recorder: a recorder for the virtual GPU or for a real device.
        model, batch: the model and its batch, on the recorder's device.
        prepare, steps, primed, micro_batch_sizes, schedule, trained, loss_fn, own_step, runs_own_code, between: as in
            `Rehearsal`.
        make_batch: makes the batches of `between`; needed if there are any.

    Raises:
        WorkloadError: the training step raised an error, or exits; the message names the module and the line.
        RehearsalError: the virtual GPU cannot run an op of the step.
    """
    steps_given = steps is not None
    hook_errors = HookErrors(
        lambda error: recorder.data_dependence.on_refusal_in_backward(failure_in_backward(error, model))
    )
    if recorder.virtual:
        hook_errors.install(model)
    with recorder:
        _mark_parameters(recorder, model)
        for path, tensor in tensors_of(batch):
            recorder.mark(tensor, Category.INPUT, name=path)
        step, optimizers = prepare(model)
        _mark_parameters(recorder, model)  # sharding replaces them
        is_plain = recorder.virtual and not (primed or recorder.what_if or recorder.is_rank)
        if steps == 2 and is_plain and not runs_own_code and isinstance(step, StepInParts):
            step = StepWithRepeatedGradients(step, recorder, model)
        with recorder.watching(model, optimizers, own_step=own_step is not None):
            if trained is not None:
                recorder.updates.note_trained(trained)
            if primed:
                priming = (lambda _: _prime(model, optimizers)) if own_step is None else step
                _run_step(priming, batch, model, hook_errors)
                skip_first_steps(optimizers, recorder.data_dependence.known.learn)
            recorder.setup_ends()
            function = (loss_fn, "loss function") if own_step is None else (own_step, "step function")
            repetition = Repetition(recorder.table)
            random_before = host_random_state()
            for number in range(MOST_CALLS if steps is None else steps):
                recorder.starts_step(number)
                repetition.starts()
                _run_step(step, batch, model, hook_errors)
                skip_first_steps(optimizers, recorder.data_dependence.known.learn)
                gc.collect()
                if steps is None or 1 < steps <= number + 2:
                    repetition.ends(model, function, optimizers)
                if steps is None and repetition.is_certain:
                    break
            if not recorder.ops:
                raise WorkloadError(
                    "the step runs no op on the model's parameters or the batch: nothing can be planned"
                )
            steps = number + 1
            schedule = schedule if steps_given else repetition.schedule()
            for number, activity in enumerate((activity for activity in between for _ in range(2)), start=steps):
                recorder.starts_step(number)
                recorder.data_dependence.numbers_are_for_logging = True
                _run_step(activity.run, make_batch, model, hook_errors, what=activity.name)
                gc.collect()
        graph = recorder.finish(steps=steps, primed=primed, micro_batch_sizes=micro_batch_sizes)
        if not steps_given and not between:
            graph = first_steps(graph, schedule.calls)
        return dataclasses.replace(
            graph,
            changed_state=repetition.changed_state,
            changed_optimizer=repetition.changed_optimizer,
            schedule=schedule,
            forwards_differ=graph.forwards_differ and host_random_state() == random_before,  # else: draws on the host
        )


def _run_step(
    step: Callable[[Any], Any], batch: Any, model: torch.nn.Module, hook_errors: HookErrors, *, what: str | None = None
) -> None:
    """Runs one step. If it fails, raises `WorkloadError`, which names the module and the line.

    Args:
        what: name of what runs, if it is not the training step.
    """
    try:
        step(batch)
        hook_errors.raise_first()
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        message = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise WorkloadError(failure(error, message, model, what)) from error


def _prime(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Makes the optimizers create their state, by an update with empty gradients."""
    with_rows = {id(weight) for weight in sparse_lookups(model).values()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = no_rows_of(parameter) if id(parameter) in with_rows else torch.empty_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def make_virtual(model: torch.nn.Module, device: str, known: ShadowValues | None = None) -> None:
    """Replaces the parameters and buffers of a model by fake tensors, in place. Shared ones stay shared.

    Call it while a `FakeTensorMode` is active.

    Args:
        model: the model that is changed.
        device: device of the fake tensors.
        known: receives the values of small integer and boolean buffers on the CPU, so that the rehearsal knows them.
    """
    memo: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo and is_quantized(tensor):
            memo[id(tensor)] = quantized_weights.fake_parameter(tensor, device)
        elif id(tensor) not in memo and tensor.is_sparse:
            memo[id(tensor)] = virtual_sparse(tensor, device)
        elif id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                vars(empty).update(vars(tensor))
                carry_gradient_hooks(tensor, empty)
            elif known is not None:
                learn_buffer(known, empty, tensor)
            memo[id(tensor)] = empty
        return memo[id(tensor)]

    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = fake(tensor)
        quantized_weights.move_module_state(module, device)
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
            if device == backend.NAME:
                rnn.flatten_weights(module)


def _mark_parameters(recorder: Recorder, model: torch.nn.Module) -> None:
    for name, tensor in _in_order_of_arrival(model):
        recorder.mark(tensor, Category.PARAMETER, name=name)


def _in_order_of_arrival(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers with their names in the order in which `torch.nn.Module.to` moves them.

    The tensors of a module's children come before those of the module, and a quantized weight before its state.
    """
    paths = {module: f"{path}." if path else "" for path, module in model.named_modules()}
    for module in dict.fromkeys(_children_first(model)):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = paths[module] + name
                yield name, tensor
                yield from ((name, part) for part in quantized_weights.state_tensors(tensor))


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def learn_buffer(known: ShadowValues, fake: torch.Tensor, real: torch.Tensor) -> None:
    """Sets the values of a fake buffer to those of `real`, if `real` is small, on the CPU, and integer or boolean."""
    if real.device.type == "cpu" and not real.is_floating_point() and not real.is_complex() and is_tracked(real):
        known.learn(fake, real)


def rehearse_program(program: Program, target: backend.Target) -> StepGraph:
    """Rehearses any program, such as the creation of a model and a loop, and returns a plain recording as one step.

    It starts with an empty card. Only the ops and the storages that the program allocates are recorded.

    Raises:
        RehearsalError: the virtual GPU cannot run an op of the program; the message names the op and the source line.
        RehearsalProcessError: the program raised another error, or the child process ended without a result.
    """

    def run(refuse: Refuse) -> StepGraph:
        with on_virtual_gpu(target, refuse, what_if=False) as recorder, recorder, recorder.watching_ranks():
            recorder.setup_ends()
            program(torch.device(backend.NAME))
            return recorder.finish(steps=1, primed=False, micro_batch_sizes=())

    return Child(run).result()
