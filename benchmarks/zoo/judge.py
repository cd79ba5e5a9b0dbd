"""Judges one model: compares its plain training step on the CPU with a rehearsal of that step.

A model is *exact* if the rehearsed bytes equal the real bytes in both steps: those of parameters and buffers, of
gradients, of optimizer state, and of all tensors at the peak. The real bytes of the peak come from PyTorch's CPU
allocator (`planner.rewrite.on_cpu.allocations`), the others from the tensors themselves.

The rehearsal that gives the peak is for a CPU, because the kernels of a GPU allocate other tensors. The step is also
rehearsed for a GPU; of that rehearsal, only parameters, gradients and state can be compared with the real step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import planner
from benchmarks.zoo.case import (
    ASSUMED,
    ERROR,
    EXACT,
    FITS,
    NO_PLAN,
    NOT_BUILT,
    REFUSED,
    SLOW,
    WRONG,
    Candidate,
    Case,
    Verdict,
)
from planner import profiles
from planner.errors import PlannerError, RehearsalProcessError
from planner.plan_types.sizes import format_size
from planner.recording.step_graph import Category, Phase, StepGraph
from planner.rewrite.application import apply_decisions
from planner.rewrite.on_cpu.allocations import BEFORE, AllocationRecord, MeasuredPeak
from planner.rewrite.on_cpu.prediction import Prediction, prediction_of
from planner.rewrite.on_cpu.run import compared
from planner.rewrite.optimizers import make_optimizer
from planner.rewrite.rehearse import start_rehearsal
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.call_convention import loss_of
from planner.workload.workload import Workload, tensors_of

STEPS = 2
BUDGET = 0.6
"""The budget of a plan allows this fraction of what the baseline's peak adds to parameters and optimizer state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of the tensors that outlive a step's forward."""

    parameters: int
    """Parameters and buffers."""
    gradients: int
    """Gradients at the beginning of the first update."""
    state: int
    """Optimizer state."""


def judged(case: Case, *, with_plan: bool, limit_s: float) -> Verdict:
    """Judges a case in a child process, which is ended after `limit_s` seconds."""
    began = time.perf_counter()
    verdict = _limited(lambda: _judged(case, with_plan), limit_s)
    if isinstance(verdict, str):
        result = SLOW if verdict == SLOW else ERROR
        verdict = Verdict(library=case.library, name=case.name, result=result, note=f"after {limit_s:.0f} s")
    return dataclasses.replace(verdict, seconds=round(time.perf_counter() - began, 1))


def _limited(function: Callable[[], Verdict], limit_s: float) -> Verdict | str:
    """Returns what `function` returns in a child process, or `SLOW`, or `ERROR` if the process dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        os.setsid()  # so that its own children can be ended with it
        sender.send(function())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            return SLOW
        return receiver.recv()
    except EOFError:
        return ERROR
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _judged(case: Case, with_plan: bool) -> Verdict:
    about: dict[str, Any] = {"library": case.library, "name": case.name}
    try:
        number, failures = run_in_child(lambda: first_that_trains(case.candidates()))
    except RehearsalProcessError as error:  # the process of the plain step died, or the case has no candidates
        return Verdict(**about, result=NOT_BUILT, note=str(error))
    if number is None:
        return Verdict(**about, result=NOT_BUILT, note=failures[0] if failures else "there is no way to build it")
    candidate = next(c for index, c in enumerate(case.candidates()) if index == number)
    about |= {"how": candidate.how}
    work = candidate.workload()
    with without_onednn_lstm(work.model):
        try:
            about["parameters"] = sum(parameter.numel() for parameter in work.model.parameters())
            on_cpu = rehearsed(work, None)
            on_gpu = rehearsed(work, profiles.bare())
        except Exception as error:  # the row says whether it is a refusal or a fault of the planner
            return Verdict(**about, result=_kind(error), note=_text(error))
        if with_plan:
            about |= planned(work, budget_of(on_gpu))
        real, peaks, differing = measured(candidate, prediction_of(on_cpu))
    assumptions = tuple(dict.fromkeys((*on_cpu.assumptions, *on_gpu.assumptions)))
    about["peak_bytes"] = max(peaks)
    differing = [
        *(f"CPU: {text}" for text in _other(on_cpu, real["cpu"])),
        *(f"GPU: {text}" for text in _other(on_gpu, real["gpu"])),
        *differing,
    ]
    if not differing:
        return Verdict(**about, result=EXACT)
    result = ASSUMED if any("assumed" in assumption for assumption in assumptions) else WRONG
    return Verdict(**about, result=result, note="; ".join([*differing[:3], *map(_without_folders, assumptions[:2])]))


# ---- the real step --------------------------------------------------------------------------------------------------


def first_that_trains(candidates: Iterable[Candidate]) -> tuple[int | None, list[str]]:
    """Returns the number of the first candidate with which two plain steps run, and why those before it failed."""
    failures = []
    for number, candidate in enumerate(candidates):
        try:
            plain_steps(candidate.workload())
        except Exception as error:  # whatever a library raises
            failures.append(f"{candidate.how}: {_text(error)}".removeprefix(": "))
        else:
            return number, failures
    return None, failures


def plain_steps(work: Workload) -> None:
    """Trains two steps without anything of the planner but the call of the model.

    Raises:
        ValueError: no parameter gets a gradient.
    """
    optimizer = make_optimizer(work.optimizer, work.model)
    for _ in range(STEPS):
        loss_of(work.calling.call(work.model, work.batch), work.batch, work.loss_fn).backward()
        if all(parameter.grad is None for parameter in work.model.parameters()):
            raise ValueError("no parameter gets a gradient")
        optimizer.step()
        optimizer.zero_grad()


def measured(candidate: Candidate, predicted: Prediction) -> tuple[dict[str, Sizes], list[int], list[str]]:
    """Trains two real steps. Returns the bytes of its tensors, of the peaks, and which peaks differ from a rehearsal.

    The bytes of its tensors are those on the CPU, and those that would be on a GPU: there, PyTorch's optimizers keep
    the numbers of steps on the CPU.
    """
    record, sizes = AllocationRecord(), []
    with record.recording():
        work = candidate.workload()
        rewritten = apply_decisions(
            (), work.model, optimizer=work.optimizer, calling=work.calling, batch_size=work.batch_size,
            loss_fn=work.loss_fn,
        )  # fmt: skip
        rewritten.step.observers = ()  # they allocate memory, which would be counted as memory of the step
        given = [tensor for _, tensor in tensors_of(work.batch)]  # a sparse gradient may refer to indices of the batch
        parameters = _bytes([*work.model.parameters(), *work.model.buffers()])
        rewritten.optimizer.register_step_pre_hook(lambda *_: sizes.append(_bytes(_gradients(work.model), given)))
        of_the_step = parameters + _bytes(given) + _bytes(tensor for _, tensor in _state(rewritten.optimizer))
        for _ in range(STEPS):
            with record.step():
                rewritten.step(work.batch)
    steps = []
    for rehearsal, peak in zip((predicted.first, predicted.later), record.peaks(predicted.ops), strict=True):
        equal = rehearsal.tensor_bytes == peak.tensor_bytes
        steps.append(compared(rehearsal, peak if equal else _without_attributes(peak, of_the_step)))
    state = _state(rewritten.optimizer)
    on_gpu = [tensor for name, tensor in state if name != "step"]
    real = {
        "cpu": Sizes(parameters=parameters, gradients=sizes[0], state=_bytes(tensor for _, tensor in state)),
        "gpu": Sizes(parameters=parameters, gradients=sizes[0], state=_bytes(on_gpu)),
    }
    differing = [
        f"peak of step {number}: rehearsed {format_size(step.predicted_bytes)}, really "
        f"{step.measured_bytes - step.predicted_bytes:+,} bytes ({step.why})"
        for number, step in enumerate(steps, 1)
        if step.predicted_bytes != step.measured_bytes
    ]
    return real, [step.measured_bytes for step in steps], differing


def _without_attributes(peak: MeasuredPeak, of_the_step: int) -> MeasuredPeak:
    """Leaves out tensors that are older than the step and neither of the model nor of the batch.

    They are attributes of modules. `module.to("cuda")` does not move them, and a rehearsal counts them only if an op
    takes them.

    Args:
        of_the_step: bytes of parameters, buffers, the batch, and optimizer state that exists before the step.
    """
    more = max(0, peak.alive_by_op.get(BEFORE, 0) - of_the_step)
    alive = {**peak.alive_by_op, BEFORE: peak.alive_by_op.get(BEFORE, 0) - more}
    return dataclasses.replace(peak, tensor_bytes=peak.tensor_bytes - more, alive_by_op=alive)


@contextlib.contextmanager
def without_onednn_lstm(model: torch.nn.Module) -> Iterator[None]:
    """Context without oneDNN for models with an LSTM: oneDNN's saves a buffer whose size is not public."""
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in model.modules())
    with torch.backends.mkldnn.flags(enabled=False) if has_lstm else contextlib.nullcontext():
        yield


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            yield from (parameter.grad._indices(), parameter.grad._values())
        elif parameter.grad is not None:
            yield parameter.grad


def _state(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [item for values in optimizer.state.values() for item in values.items() if torch.is_tensor(item[1])]


def _bytes(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
    """Returns the bytes of the storages of some tensors, without those of others."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    others = {tensor.untyped_storage()._cdata for tensor in without}
    return sum(size for key, size in storages.items() if key not in others)


# ---- the rehearsed step ---------------------------------------------------------------------------------------------


def rehearsed(work: Workload, card: Any) -> StepGraph:
    """Rehearses two steps for a card, or for the CPU if `card` is None."""
    sizes = (work.batch_size,)
    return start_rehearsal(work, (), card, sizes=sizes, steps=STEPS, primed=False, what_if=False).result()


def _other(graph: StepGraph, real: Sizes) -> Iterator[str]:
    """Yields text for each size that differs from the real one."""
    update = next((op.tick for op in graph.ops if op.phase is Phase.OPTIMIZER), graph.ticks)
    gradients = sum(
        storage.size_bytes
        for storage, spans in zip(graph.storages, graph.spans(), strict=True)
        if storage.category is Category.GRADIENT and any(start <= update < stop for start, stop in spans)
    )
    parameters, state = (graph.bytes_of(category) for category in (Category.PARAMETER, Category.OPTIMIZER_STATE))
    sizes = Sizes(parameters=parameters, gradients=gradients, state=state)
    for field in dataclasses.fields(sizes):
        mine, its = getattr(sizes, field.name), getattr(real, field.name)
        if mine != its:
            yield f"{field.name} rehearsed {mine:,} bytes, really {its:,}"


def budget_of(graph: StepGraph) -> int:
    """Returns the budget in bytes for a model with this baseline."""
    stays = graph.bytes_of(Category.PARAMETER) + graph.bytes_of(Category.OPTIMIZER_STATE)
    return stays + int(BUDGET * (graph.live_bytes().max() - stays))


def planned(work: Workload, budget_bytes: int) -> dict[str, str]:
    """Plans under a budget, and returns how that ended as fields of a verdict."""
    try:
        plan = planner.plan(
            work.model, work.batch, vram=budget_bytes, loss_fn=work.loss_fn, gpu="bare", optimizer=work.optimizer
        )
    except Exception as error:  # the row says whether it is a refusal or a fault of the planner
        return {"plan": _kind(error), "plan_note": _text(error)}
    return {
        "plan": FITS if plan.fits else NO_PLAN,
        "plan_note": ", ".join(dict.fromkeys(decision.kind for decision in plan.decisions)),
    }


def _kind(error: Exception) -> str:
    """Returns `REFUSED` if an error is a refusal with a message, and `ERROR` if it is a fault of the planner."""
    return REFUSED if isinstance(error, PlannerError) and not isinstance(error, RehearsalProcessError) else ERROR


def _text(error: Exception) -> str:
    """Returns the type and the first line of an error; for a fault of the planner also the line that raised it."""
    first = next(iter(str(error).strip().splitlines()), "no message")
    note = next(iter(getattr(error, "__notes__", ())), "")
    frames = [line.strip() for line in note.splitlines() if line.strip().startswith("File ")]
    if not frames and not isinstance(error, PlannerError):
        last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
        frames = [f'File "{last.filename}", line {last.lineno}'] if last else []
    where = f" [{_without_folders(frames[-1])}]" if frames else ""
    return f"{type(error).__name__}: {_without_folders(first)}{where}"


def _without_folders(text: str) -> str:
    """Returns a text in which paths of files are shortened to their names."""
    return re.sub(r"(?:/[^\s/:;]+)+/", "", text)
