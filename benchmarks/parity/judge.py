"""Compares trainings: the rewritten step, live and from an emitted file, against the plain loop."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
import logging
import math
import pathlib
import tempfile
import unittest.mock as mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.parity.case import Case, default_dtype
from benchmarks.parity.plain import Trained, Training, forward, trained_plainly
from benchmarks.parity.techniques import Offer, Technique, why_not_certified
from planner import rewrite
from planner.errors import PlannerError
from planner.plan_types.decisions import ChunkedLoss
from planner.plan_types.plan import Plan
from planner.rewrite.rules import offload

EQUAL, ROUNDED, REFUSED, WARNED = "equal bits", "equal but for rounding", "refused", "different, warned"
KNOWN, DIFFERENT, ERROR = "different, documented", "different", "error"
LATE = "refused after an update"
UNCHECKED, NOT_OFFERED, PLAIN_FAILS = "not run: live refuses", "not offered", "plain fails"
LEFT_OUT, BROKEN = "left out by the planner", "broken case"
OUTCOMES = (
    EQUAL,
    ROUNDED,
    REFUSED,
    WARNED,
    KNOWN,
    UNCHECKED,
    NOT_OFFERED,
    LEFT_OUT,
    PLAIN_FAILS,
    LATE,
    BROKEN,
    DIFFERENT,
    ERROR,
)
FAILURES = (LATE, BROKEN, DIFFERENT, ERROR)
"""Outcomes that make the judge fail."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one training."""

    case: str
    technique: str
    way: str
    """'live' or 'emitted'."""
    result: str
    size: float = 0.0
    """Largest relative difference."""
    note: str = ""
    """First line of an error or warning, or where the difference is."""

    @property
    def failed(self) -> bool:
        return self.result in FAILURES


def judged(case: Case, offer: Offer, technique: Technique, *, after: Callable[[Any], None] | None = None) -> Iterator:
    """Yields the outcomes of one technique, live and emitted.

    Args:
        after: called with the training step before the live training; tests plant mistakes with it.
    """
    with mock.patch.object(offload, "is_on_host", never):  # so that tensors are copied, although they are on the host
        live = _compared(case, technique, "live", lambda reached: _live(case, offer, technique, reached, after))
    if live.result in (DIFFERENT, ERROR) and (why := why_not_certified(case, technique)) is not None:
        for way in ("live", "emitted"):
            yield dataclasses.replace(live, way=way, result=LEFT_OUT, note=why)
        return
    yield live
    if live.result == REFUSED and technique.micro_batch_size is not None:
        yield dataclasses.replace(live, way="emitted", result=UNCHECKED)
        return
    emitted = _compared(case, technique, "emitted", lambda reached: _emitted(case, offer, technique, reached))
    if emitted.result == DIFFERENT and live.result in (WARNED, KNOWN):
        emitted = dataclasses.replace(emitted, result=live.result)
    yield emitted


def repeats(case: Case) -> Outcome | None:
    """Returns the outcome of a case whose plain loop fails, trains nothing or is not repeatable; None if it is fine."""
    try:
        first, second = (trained_plainly.__wrapped__(case, case.dtype) for _ in range(2))
    except Exception as why:  # of the case itself, which the table then lists as broken
        return Outcome(case.name, "plain", "live", BROKEN, note=first_line(why))
    if all(torch.equal(first.start[name], parameter) for name, parameter in first.parameters.items()):
        return Outcome(case.name, "plain", "live", BROKEN, note="no parameter changes")
    if not all(loss.isfinite() for loss in first.losses):
        return Outcome(case.name, "plain", "live", BROKEN, note="a loss is not finite")
    size, where = difference(first, second)
    return Outcome(case.name, "plain", "live", BROKEN, size, f"not repeatable: {where}") if size else None


# ---- the two ways to train -------------------------------------------------------------------------------------------


class _Reached:
    """The training that was reached when an exception was raised."""

    training: Training | None = None
    optimizer: torch.optim.Optimizer | None = None


def _live(case: Case, offer: Offer, technique: Technique, reached: _Reached, after: Any) -> Trained:
    """Train with `rewrite.apply`; the last batch is trained by plain code after `undo`."""
    training = reached.training = Training(case, technique.dtype_for(case))
    result = rewrite.apply(
        offer.plan_with(technique, training.model),
        training.model,
        case.optimizer(training.model),
        loss_fn=training.loss_fn,
        max_grad_norm=None if technique.steps_in_backward else case.clip,
        loss_weight=case.terms if technique.states_weight else None,
        scheduler=case.scheduler,
    )
    reached.optimizer = result.optimizer
    if after is not None:
        after(result)
    training.run(result.step, training.batches[:-1])
    result.undo()

    def step(batch: Any) -> torch.Tensor:
        result.optimizer.zero_grad(set_to_none=True)
        loss = forward(training.model, batch, training.loss_fn).reshape(())
        loss.backward()
        result.optimizer.step()
        return loss

    training.run(step, training.batches[-1:])
    return training.trained(result.optimizer)


def _emitted(case: Case, offer: Offer, technique: Technique, reached: _Reached) -> Trained:
    """Train all batches by the file that `rewrite.emit` writes."""
    training = reached.training = Training(case, technique.dtype_for(case))
    with tempfile.TemporaryDirectory() as folder:
        file, path = emitted_file(offer.plan_with(technique, training.model), folder)
        model = file.rewrite(training.model)
        optimizer = reached.optimizer = case.optimizer(model, **technique.kernel_options)
        if "_step_supports_amp_scaling = False" in path.read_text():  # as the file's `make_optimizer` sets it
            optimizer._step_supports_amp_scaling = False
        accepted = inspect.signature(file.training_step).parameters
        terms = case.terms
        options = {
            "loss_fn": training.loss_fn,
            "scaler": torch.amp.GradScaler("cpu") if technique.autocast == "fp16" else None,
            "max_grad_norm": case.clip,
            "scheduler": None if case.scheduler is None else case.scheduler(optimizer),
        }
        options = {name: value for name, value in options.items() if name in accepted}
        if "loss_terms" in accepted:
            if terms is not None and technique.states_weight:
                options["loss_terms"] = lambda batch, samples: terms(batch)
            elif accepted["loss_terms"].default is inspect.Parameter.empty:
                options["loss_terms"] = file.samples_only
        training.run(lambda batch: file.training_step(model, optimizer, batch, **options), training.batches)
    return training.trained(optimizer)


def emitted_file(plan: Plan, folder: str) -> tuple[Any, pathlib.Path]:
    """Emit a plan into a folder. Returns the file as a module, and its path. Tensors are copied for offloading."""
    path = pathlib.Path(folder) / "train_step.py"
    rewrite.emit(plan, path)
    spec = importlib.util.spec_from_file_location("emitted_train_step", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    if hasattr(file, "is_on_host"):
        file.is_on_host = never
    return file, path


def never(tensor: torch.Tensor) -> bool:
    return False


# ---- comparing -------------------------------------------------------------------------------------------------------


def _compared(case: Case, technique: Technique, way: str, train: Callable[[_Reached], Trained]) -> Outcome:
    """Train, and compare with the plain loop."""
    reached = _Reached()
    outcome = Outcome(case.name, technique.name, way, EQUAL)
    with default_dtype(technique.dtype_for(case)), listening() as heard:
        try:
            trained = train(reached)
        except Exception as why:  # a refusal or an error: `_of_exception` tells which, and the table lists it
            return _of_exception(case, technique, outcome, reached, why)
    truth = _truth(case, technique, plain_end=way == "live")
    if technique.micro_batch_size is not None:  # attributes are then those of the last micro-batch
        truth, trained = _without_attributes(truth), _without_attributes(trained)
    size, where = difference(truth, trained)
    if size == 0:
        return outcome
    if size <= allowed(case, technique):
        return dataclasses.replace(outcome, result=ROUNDED, size=size, note=where)
    result = DIFFERENT
    if (limit := _known(case, technique)) is not None:
        result, where = KNOWN, f"{where}; {limit}"
    elif heard:
        result, where = WARNED, f"{where}; {heard[0]}"
    return dataclasses.replace(outcome, result=result, size=size, note=where)


def _truth(case: Case, technique: Technique, *, plain_end: bool, steps: int | None = None) -> Trained:
    """Returns the plain training to compare with.

    A split batch trains like the whole batch if no random numbers are drawn, else like the same micro-batches.
    """
    size = technique.micro_batch_size if case.draws or technique.autocast is not None else None
    return trained_plainly(
        case, technique.dtype_for(case), autocast=technique.autocast, size=size,
        clips=not technique.steps_in_backward, last_plain=plain_end, steps=steps,
    )  # fmt: skip


def allowed(case: Case, technique: Technique) -> float:
    """Returns the largest relative difference that is rounding: 0 if the technique promises equal bits."""
    if not technique.reorders_sums:
        return 0.0
    if technique.autocast is None:
        return case.rounding
    return 5e-2 if any(isinstance(d, ChunkedLoss) for d in technique.decisions) else 1e-4


def _known(case: Case, technique: Technique) -> str | None:
    """Returns the limit in the documentation that explains a difference; None if there is none."""
    parts = technique.name.split(" + ")
    return next((limit for prefix, limit in case.known if any(part.startswith(prefix) for part in parts)), None)


def _without_attributes(trained: Trained) -> Trained:
    others = {name: value for name, value in trained.others.items() if not name.startswith("attribute")}
    return dataclasses.replace(trained, others=others)


def _of_exception(case: Case, technique: Technique, outcome: Outcome, reached: _Reached, why: Exception) -> Outcome:
    """Returns the outcome of a training that raised: refused only if all steps before were those of the plain loop."""
    note = f"{type(why).__name__}: {first_line(why)}"
    refuses = isinstance(why, PlannerError) or type(why).__name__ == "RecomputeDifference"
    training = reached.training
    if not refuses:
        try:
            trained_plainly(case, technique.dtype_for(case), autocast=technique.autocast)
        except Exception:  # the plain loop fails as well, so that the error is not the planner's
            return dataclasses.replace(outcome, result=PLAIN_FAILS, note=note)
        return dataclasses.replace(outcome, result=ERROR, note=note)
    if training is None or reached.optimizer is None:
        return dataclasses.replace(outcome, result=REFUSED, note=note)
    steps = len(training.losses)
    truth = _truth(case, technique, plain_end=False, steps=steps)
    present = training.trained(reached.optimizer)
    size, where = difference(truth, dataclasses.replace(present, others={}), others=False)
    if size <= allowed(case, technique):
        return dataclasses.replace(outcome, result=REFUSED, note=f"in step {steps + 1}: {note}")
    if (limit := _known(case, technique)) is not None:
        return dataclasses.replace(outcome, result=KNOWN, size=size, note=f"in step {steps + 1}, {limit}: {note}")
    return dataclasses.replace(outcome, result=LATE, size=size, note=f"in step {steps + 1}, {where}: {note}")


def difference(truth: Trained, other: Trained, *, others: bool = True) -> tuple[float, str]:
    """Returns the largest relative difference between two trainings, and where it is; 0.0 if all bits are equal.

    Losses are compared relative to the largest loss, parameters relative to how far training moved them, all other
    state relative to its largest element.
    """
    found = [(0.0, "")]
    if len(truth.losses) != len(other.losses):
        return math.inf, f"{len(other.losses)} losses instead of {len(truth.losses)}"
    scale = max((float(loss.abs()) for loss in truth.losses if loss.isfinite()), default=0.0)
    for step, (a, b) in enumerate(zip(truth.losses, other.losses, strict=True), 1):
        found.append((_relative(a, b, scale), f"loss of step {step}"))
    moved = {name: _largest(truth.start[name] - parameter) for name, parameter in truth.parameters.items()}
    farthest = max(moved.values(), default=0.0)
    if truth.parameters.keys() != other.parameters.keys():
        return math.inf, "names of parameters"
    for name, parameter in truth.parameters.items():
        found.append((_relative(parameter, other.parameters[name], max(moved[name], 1e-3 * farthest)), name))
    count = len(found)  # losses and parameters are named before other state
    if others:
        if missing := sorted(truth.others.keys() ^ other.others.keys()):
            found.append((math.inf, f"only one training has {missing[0]}"))
        shared = sorted(truth.others.keys() & other.others.keys())
        for kind, group in itertools.groupby(shared, key=lambda name: tuple(name.split()[:2])):
            names = list(group)
            whole = max(map(_largest, (truth.others[name] for name in names))) if kind[0] == "optimizer" else 0.0
            for name in names:
                scale = max(_largest(truth.others[name]), 1e-6 * whole)
                found.append((_relative(truth.others[name], other.others[name], scale), name))
    worst = max(found[:count])
    return worst if worst[0] > 0 else max(found)


def _relative(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape:
        return math.inf
    a, b = (x.to(torch.complex128) for x in (a, b))
    if torch.equal(a, b):
        return 0.0
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    largest = float((a - b)[differs].abs().max())
    if math.isnan(largest):
        return math.inf
    return largest / scale if scale else math.inf


def _largest(tensor: torch.Tensor) -> float:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    values = tensor.to(torch.complex128).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def first_line(why: BaseException) -> str:
    return (str(why).splitlines() or [type(why).__name__])[0][:230]


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collects the warnings that the product logs."""
    heard: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage().splitlines()[0][:230])

    logger, handler = logging.getLogger("planner.rewrite"), Collector(level=logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
