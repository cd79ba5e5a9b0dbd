"""The comparisons that `rewrite.verify` makes, each of a planned run with a plain one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from planner.plan_types.decision_base import (
    Role,
    autocast_dtype_of,
    frozen_modules_of,
    has_role,
    micro_batches_of,
)
from planner.plan_types.plan import Plan
from planner.rewrite.parity.model_structure import difference, identity_facts, mutable_settings
from planner.rewrite.parity.reference_step import Comparable, Narrowing, StepTrace
from planner.rewrite.parity.result import TERMS, Row, compare, dense, failed, held, largest, module_scales, norm
from planner.rewrite.parity.runs import VerifyInputs, lower_dtype

ROUNDINGS = 16
"""Of a lower precision, in the norm of a gradient: each op rounds once, and independent errors add as the square root
of their number, so that this is enough for some 256 ops between a weight and the loss and back."""

LOOSEST = 0.01
"""A larger bound of how far parameters move would hold nothing, and is not claimed."""

LARGEST_SCALE = 2.0**120
"""Of a loss, such that gradients overflow in fp16 and the loss in fp32 does not."""

Comparison = Callable[[str, VerifyInputs, list[str]], list[Row]]
"""Of its name and what was given: rows, after notes were added to."""


def comparisons(plan: Plan) -> dict[str, Comparison]:
    """Those that this plan asks for, by name."""
    found: dict[str, Comparison] = {"as planned": as_planned, "kept": kept}
    if any(decision.needs_gradient_scaler for decision in plan.decisions):
        found["overflow"] = overflow
    if has_role(plan.decisions, Role.FREEZING):
        found["freeze"] = freeze
    if any(decision.reorders_sums for decision in plan.decisions):
        found["in double"] = in_double
    if has_role(plan.decisions, Role.PRECISION):
        found["rounding"] = rounding
    if any(decision.eight_bit_state for decision in plan.decisions):
        found["8-bit state"] = eight_bit_state
    return found


def as_planned(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Everything, for every step, to the bit."""
    decisions = given.plan.decisions
    order = tuple(d for d in decisions if d.reorders_sums or d.eight_bit_state)
    plain = given.plain(order, precision=autocast_dtype_of(given.plan.decisions), updates=given.steps)
    planned = given.planned(decisions, updates=given.steps)
    rows = _updates(name, plain, planned, given.steps)
    for kind in ("loss", "gradient", "parameter", "buffer", "state", "random"):
        rows += compare(name, kind, _of(kind, plain), _of(kind, planned), bound=0.0)
    for parameter in (each for each in planned.before if _is_frozen(each, given.plan)):
        moved = not torch.equal(planned.before[parameter], planned.after[parameter])
        got = parameter in planned.times or (parameter in planned.left and parameter not in plain.left)
        why = "it changed" if moved else "it got a gradient" if got else ""
        rows.append(held(name, "frozen", parameter, why))
    return rows


def kept(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """The objects, keys, modes and hooks of the model while it is rewritten, and with its forwards after `undo`."""
    model = given.copied()
    first = given.rewritten(model, ())  # in its first step a model may set itself up
    first.step(given.fresh())
    first.undo()
    before, settings = identity_facts(model), mutable_settings(model)
    rewritten = given.rewritten(model, given.plan.decisions)
    found = {"applied": difference(before, identity_facts(model))}
    rewritten.step(given.fresh())
    rewritten.undo()
    found["undone"] = difference(before | settings, identity_facts(model) | mutable_settings(model))
    return [held(name, when, aspect, why) for when, aspects in found.items() for aspect, why in aspects.items()]


def overflow(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """A step whose gradients are not finite trains nothing, and lowers the scale."""
    decisions = given.plan.decisions
    order = tuple(d for d in decisions if d.reorders_sums or d.eight_bit_state)
    precision = autocast_dtype_of(given.plan.decisions)
    plain = given.plain(order, precision=precision, scale=LARGEST_SCALE, updates=1)
    planned = given.planned(decisions, scale=LARGEST_SCALE, updates=1)
    if plain.updates:
        notes.append(f"{name}: no gradient is so large that it overflows at a scale of {LARGEST_SCALE:.2g}")
    rows = compare(name, "parameter", plain.after, planned.after, bound=0.0)
    rows += compare(name, "buffer", plain.buffers, planned.buffers, bound=0.0)
    return rows + compare(name, "state", plain.state, planned.state, bound=0.0)


def freeze(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """What stays trained gets the gradient that it had; later steps differ, since the prefix stays where it was.

    In double, since some kernels look at whether a gradient is wanted, and add up in another order without (recurrent).
    """
    given = dataclasses.replace(given, max_grad_norm=None)  # the norm of all gradients is another one
    decisions = tuple(d for d in given.plan.decisions if d.role is not Role.PRECISION and not d.eight_bit_state)
    order = tuple(decision for decision in decisions if decision.reorders_sums)
    plain, double, eps = _in_double(
        name, given, notes, dropout=True, run=lambda double: given.plain(order, trained=True, double=double, updates=1)
    )
    with Comparable(dropout=True, double=double):
        planned = given.planned(decisions, double=double, updates=1)
    kept = {name: gradient for name, gradient in plain.gradients.items() if not _is_frozen(name, given.plan)}
    rows = compare(name, "loss", plain.losses, planned.losses, bound=TERMS * eps)
    return rows + compare(name, "gradient", kept, planned.gradients, bound=TERMS * eps)


def _in_double(
    name: str, given: VerifyInputs, notes: list[str], *, dropout: bool, run: Callable[[bool], StepTrace]
) -> tuple[StepTrace, bool, float]:
    """A run of the plain step in double, or where it has none as it is; which of them; eps of its lowest precision."""
    narrowing = Narrowing()
    try:
        with narrowing, Comparable(dropout=dropout, double=True):
            found = run(True)
    except Exception as error:  # the untouched step: no fault of the plan's
        notes.append(f"{name}: the step as it is cannot run in double ({first_line(error)}): it is compared as it is")
        with Comparable(dropout=dropout, double=False):
            found = run(False)
        return found, False, max(torch.finfo(p.dtype).eps for p in given.model.parameters() if p.requires_grad)
    if narrowing.eps > torch.finfo(torch.float64).eps:
        notes.append(f"{name}: not all of it is double, rounding is {narrowing.eps:.2g}")
    return found, True, narrowing.eps


def in_double(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Only the order of sums differs from the untouched step on the full batch."""
    decisions = tuple(d for d in given.plan.decisions if d.role is not Role.PRECISION and not d.eight_bit_state)
    split = micro_batches_of(given.plan.decisions) > 1
    if split:
        notes.append(f"{name}: dropout is off, and batch normalisation takes its running statistics")
    plain, double, eps = _in_double(
        name, given, notes, dropout=not split,
        run=lambda double: given.plain(double=double, split=split, updates=given.steps),
    )  # fmt: skip
    with Comparable(dropout=not split, double=double):
        planned = given.planned(decisions, double=double, split=split, updates=given.steps)
    if split and plain.drew:
        notes.append(f"{name}: the model draws random numbers that are not dropout's: they are all the same here")
    bound = TERMS * eps
    rows = _updates(name, plain, planned, given.steps)
    for kind in ("loss", "gradient", "buffer"):
        rows += compare(name, kind, _of(kind, plain), _of(kind, planned), bound=bound)
    growth = plain.growth()
    if growth * bound > LOOSEST:
        notes.append(f"{name}: parameters and state are left out, rounding errors grow too large in this optimizer")
        return rows
    bound *= growth
    moved = module_scales({key: largest(plain.after[key] - before) for key, before in plain.before.items()})
    for key, value in plain.after.items():
        moved[key] += largest(value) * eps * given.steps / bound
    rows += compare(name, "parameter", plain.after, planned.after, bound=bound, scales=moved)
    return rows + compare(name, "state", plain.state, planned.state, bound=bound, scales=_state_scales(plain.state))


def rounding(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Off from the untouched step by no more than twice what autocast alone is off by, and some roundings.

    What a lower precision does to a model is the model's: where a gradient jumps (ReLU) and where batches are
    normalised it may be much. Whatever else the plan does must not add to it.
    """
    notes.append(f"{name}: dropout is off, which draws other masks in another precision")
    precision, split = autocast_dtype_of(given.plan.decisions), micro_batches_of(given.plan.decisions) > 1
    with Comparable(dropout=False, double=False):
        plain = given.plain(split=split, updates=1)
        alone = given.plain(precision=precision, split=split, updates=1)
        planned = given.planned(given.plan.decisions, split=split, updates=1)
    rows, eps = [], torch.finfo(lower_dtype(precision)).eps
    for kind, size in (("loss", largest), ("gradient", norm)):
        exact, rounded, ours = (_of(kind, run) for run in (plain, alone, planned))
        if kind == "loss":  # of later steps, a scaler may have skipped some
            exact, rounded, ours = ({"1": losses["1"]} for losses in (exact, rounded, ours))
        off = {row.name: row.measured for row in compare(name, kind, exact, rounded, bound=math.inf, size=size)}
        bounds = {key: ROUNDINGS * eps + 2 * measured for key, measured in off.items()}
        rows += compare(name, kind, exact, ours, bound=bounds, size=size)
        worst = max(off, key=off.get, default=None)
        if worst is not None and off[worst] > ROUNDINGS * eps:
            notes.append(f"{name}: autocast alone moves the {kind} of {worst} by {off[worst]:.2g} of its size")
    return rows


def eight_bit_state(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """The first update is made from state that is not quantized yet; after it, the state is what was quantized."""
    plain = given.plain(updates=1)
    decisions = tuple(d for d in given.plan.decisions if d.role is Role.FREEZING or d.eight_bit_state)
    planned = given.planned(decisions, updates=1)
    bound = TERMS * torch.finfo(torch.float32).eps
    moved = module_scales({key: largest(plain.after[key] - before) for key, before in plain.before.items()})
    rows = compare(name, "parameter", plain.after, planned.after, bound=bound, scales=moved)
    averages = {key: value for key, value in plain.state.items() if key.endswith((".exp_avg", ".exp_avg_sq"))}
    found, bounds = dequantized(planned.state)
    for key in dict.fromkeys([*averages, *found]):
        one, other = ({key: each[key]} if key in each else {} for each in (averages, found))
        rows += compare(name, "state", one, other, bound=bounds.get(key, bound))
    for owner, module in given.model.named_modules():
        for part, weight in module.named_parameters(owner, recurse=False) if type(module) is torch.nn.Embedding else ():
            eight = [key for key in bounds if key.rpartition(".")[0] == part and weight.requires_grad]
            rows.append(held(name, "embedding", part, f"{eight[0]} is in 8 bits" if eight else ""))
    return rows


def dequantized(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Averages of an 8-bit Adam by torch's names, and the largest relative difference that quantizing them makes.

    Each number becomes the nearest of a block's 256: half the largest gap between two of them, of the block's largest,
    and as much as the averages differ before that.
    """
    from bitsandbytes.functional import dequantize_blockwise

    averages, bounds = {}, {}
    for key, value in state.items():
        owner, _, part = key.rpartition(".")
        if part not in ("state1", "state2"):
            continue
        name = f"{owner}.{'exp_avg' if part == 'state1' else 'exp_avg_sq'}"
        averages[name] = value
        if value.dtype is torch.uint8:
            code, absmax = state[f"{owner}.qmap{part[-1]}"], state[f"{owner}.absmax{part[-1]}"]
            averages[name] = dequantize_blockwise(value, absmax=absmax, code=code, blocksize=256)
            bounds[name] = (code.diff().max() / 2).item() + TERMS * torch.finfo(torch.float32).eps
    return averages, bounds


def _updates(comparison: str, plain: StepTrace, planned: StepTrace, steps: int) -> list[Row]:
    """Whether there were as many updates as steps, of each parameter as many as without the plan, from gradients."""
    rows = []
    for side, run in (("plain", plain), ("planned", planned)):
        why = f"{run.updates} updates instead of {steps}" if run.updates != steps else ""
        rows.append(held(comparison, "updates", f"of the {side} step", why or ("" if run.gradients else "no gradient")))
    for name in dict.fromkeys([*plain.times, *planned.times]):
        ours, theirs = planned.times.get(name, 0), plain.times.get(name, 0)
        rows.append(held(comparison, "updates", name, "" if ours == theirs else f"{ours} updates instead of {theirs}"))
    for name in sorted({*plain.left} ^ {*planned.left}):
        rows.append(failed(comparison, "updates", name, "a gradient is left after the step, on one side only"))
    return rows


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _of(kind: str, run: StepTrace) -> dict[str, Any]:
    found = {
        "loss": run.losses,
        "gradient": run.gradients,
        "parameter": run.after,
        "buffer": run.buffers,
        "state": run.state,
        "random": {"numbers": run.numbers},
    }
    return found[kind]


def _state_scales(state: dict[str, Any]) -> dict[str, float]:
    """As for gradients, for each kind of state."""
    by_part: dict[str, dict[str, float]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        by_part.setdefault(part, {})[name] = largest(dense(torch.as_tensor(value)))
    return {f"{name}.{part}": scale for part, sizes in by_part.items() for name, scale in module_scales(sizes).items()}


def _is_frozen(parameter: str, plan: Plan) -> bool:
    frozen = frozen_modules_of(plan.decisions)
    return any(not name or parameter.startswith(f"{name}.") for name in frozen)
