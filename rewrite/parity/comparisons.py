"""The comparisons of `rewrite.verify`. Each compares a run with the plan to a reference run."""

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
"""Allowed relative error of the norm of a gradient in a lower precision, in multiples of the precision's eps.

Each op rounds once, and independent errors add up as the square root of their number: 16 covers about 256 ops on the
way from a weight to the loss and back."""

LOOSEST = 0.01
"""Loosest bound at which parameters are compared, relative to how far they moved. A looser bound would show nothing."""

LARGEST_SCALE = 2.0**120
"""A loss scale at which gradients overflow in fp16 while the loss in fp32 does not."""

Comparison = Callable[[str, VerifyInputs, list[str]], list[Row]]
"""`comparison(name, inputs, notes)` returns rows, and may append remarks for the user to `notes`."""


def comparisons(plan: Plan) -> dict[str, Comparison]:
    """Return the comparisons that apply to this plan, by name."""
    chosen: dict[str, Comparison] = {"as planned": as_planned, "kept": kept}
    if any(decision.needs_gradient_scaler for decision in plan.decisions):
        chosen["overflow"] = overflow
    if has_role(plan.decisions, Role.FREEZING):
        chosen["freeze"] = freeze
    if any(decision.reorders_sums for decision in plan.decisions):
        chosen["in double"] = in_double
    if has_role(plan.decisions, Role.PRECISION):
        chosen["rounding"] = rounding
    if any(decision.eight_bit_state for decision in plan.decisions):
        chosen["8-bit state"] = eight_bit_state
    return chosen


def as_planned(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare all results of all steps, bit by bit, with a plain step of the same precision and order of sums."""
    decisions = given.plan.decisions
    order = tuple(d for d in decisions if d.reorders_sums or d.eight_bit_state)
    plain = given.plain(order, precision=autocast_dtype_of(given.plan.decisions), updates=given.steps)
    planned = given.planned(decisions, updates=given.steps)
    rows = _updates(name, plain, planned, given.steps)
    for kind in ("loss", "gradient", "parameter", "buffer", "state", "random"):
        rows += compare(name, kind, _of(kind, plain), _of(kind, planned), bound=0.0)
    for parameter in (name for name in planned.before if _is_frozen(name, given.plan)):
        moved = not torch.equal(planned.before[parameter], planned.after[parameter])
        is_leftover = parameter in planned.leftover_gradients and parameter not in plain.leftover_gradients
        has_gradient = parameter in planned.gradient_counts or is_leftover
        why = "it changed" if moved else "it got a gradient" if has_gradient else ""
        rows.append(held(name, "frozen", parameter, why))
    return rows


def kept(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Check that a rewritten model keeps its objects, keys, modes and hooks, and that `undo` restores its forwards."""
    model = given.copied()
    first = given.rewritten(model, ())  # a model may set itself up in its first step
    first.step(given.fresh())
    first.undo()
    before, settings = identity_facts(model), mutable_settings(model)
    rewritten = given.rewritten(model, given.plan.decisions)
    differences = {"applied": difference(before, identity_facts(model))}
    rewritten.step(given.fresh())
    rewritten.undo()
    differences["undone"] = difference(before | settings, identity_facts(model) | mutable_settings(model))
    return [held(name, when, aspect, why) for when, aspects in differences.items() for aspect, why in aspects.items()]


def overflow(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare a step whose gradients overflow in fp16: it must update nothing, and lower the loss scale."""
    decisions = given.plan.decisions
    order = tuple(d for d in decisions if d.reorders_sums or d.eight_bit_state)
    precision = autocast_dtype_of(given.plan.decisions)
    plain = given.plain(order, precision=precision, scale=LARGEST_SCALE, updates=1)
    planned = given.planned(decisions, scale=LARGEST_SCALE, updates=1)
    if plain.updates:
        notes.append(f"{name}: no gradient overflows at a loss scale of {LARGEST_SCALE:.2g}")
    rows = compare(name, "parameter", plain.after, planned.after, bound=0.0)
    rows += compare(name, "buffer", plain.buffers, planned.buffers, bound=0.0)
    return rows + compare(name, "state", plain.state, planned.state, bound=0.0)


def freeze(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare the gradients of the first step with those of a step in which no module is frozen.

    Only parameters that the plan does not freeze are compared. Later steps differ, because the frozen parameters no
    longer move. The comparison is in double, because some kernels (recurrent ones) add up in another order if no
    gradient is needed.
    """
    given = dataclasses.replace(given, max_grad_norm=None)  # with frozen modules, fewer gradients make up the norm
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
    """Run the reference step in double, or in the model's own precision if the step fails in double.

    Args:
        dropout: False to switch dropout off.
        run: runs the step, in double if its argument is True.

    Returns:
        The trace of the step, True if it ran in double, and the eps of the lowest precision to which an op rounds.
    """
    narrowing = Narrowing()
    try:
        with narrowing, Comparable(dropout=dropout, double=True):
            trace = run(True)
    except Exception as error:  # the step without the plan: not a failure of the plan
        notes.append(
            f"{name}: the baseline cannot run in double ({first_line(error)}): it is compared in the model's precision"
        )
        with Comparable(dropout=dropout, double=False):
            trace = run(False)
        return trace, False, max(torch.finfo(p.dtype).eps for p in given.model.parameters() if p.requires_grad)
    if narrowing.eps > torch.finfo(torch.float64).eps:
        notes.append(f"{name}: some ops round to a lower precision than double, with eps {narrowing.eps:.2g}")
    return trace, True, narrowing.eps


def in_double(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare the plan, without lower precision and 8-bit state, with the baseline on the full batch, in double.

    Only the order of sums may differ. If the batch is split, both runs have dropout off and batch normalization in
    evaluation mode, because these depend on the split.
    """
    decisions = tuple(d for d in given.plan.decisions if d.role is not Role.PRECISION and not d.eight_bit_state)
    split = micro_batches_of(given.plan.decisions) > 1
    if split:
        notes.append(f"{name}: dropout is off, and batch normalization uses its running statistics")
    plain, double, eps = _in_double(
        name, given, notes, dropout=not split,
        run=lambda double: given.plain(double=double, split=split, updates=given.steps),
    )  # fmt: skip
    with Comparable(dropout=not split, double=double):
        planned = given.planned(decisions, double=double, split=split, updates=given.steps)
    if split and plain.drew_random_numbers:
        notes.append(f"{name}: random numbers that the model draws, other than for dropout, are replaced by a constant")
    bound = TERMS * eps
    rows = _updates(name, plain, planned, given.steps)
    for kind in ("loss", "gradient", "buffer"):
        rows += compare(name, kind, _of(kind, plain), _of(kind, planned), bound=bound)
    # The bound for parameters and state is that for gradients, times the factor by which the optimizer amplifies them.
    growth = plain.growth()
    if growth * bound > LOOSEST:
        notes.append(f"{name}: parameters and state are not compared, since this optimizer amplifies rounding errors")
        return rows
    bound *= growth
    # Differences are relative to how far the parameters of a module moved, plus the rounding of their own size.
    moved = module_scales({key: largest(plain.after[key] - before) for key, before in plain.before.items()})
    for key, value in plain.after.items():
        moved[key] += largest(value) * eps * given.steps / bound
    rows += compare(name, "parameter", plain.after, planned.after, bound=bound, scales=moved)
    return rows + compare(name, "state", plain.state, planned.state, bound=bound, scales=_state_scales(plain.state))


def rounding(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare loss and gradients of the first update with those of the baseline, which uses no lower precision.

    The error may be twice that of the baseline with autocast, plus `ROUNDINGS`. How much a lower precision changes a
    gradient depends on the model: it can be much if the gradient jumps (ReLU) or if batches are normalized. The other
    decisions of the plan must not add to this error.
    """
    notes.append(f"{name}: dropout is off, since its masks differ between precisions")
    precision, split = autocast_dtype_of(given.plan.decisions), micro_batches_of(given.plan.decisions) > 1
    assert precision is not None, "only plans with mixed precision are compared so"
    with Comparable(dropout=False, double=False):
        plain = given.plain(split=split, updates=1)
        alone = given.plain(precision=precision, split=split, updates=1)
        planned = given.planned(given.plan.decisions, split=split, updates=1)
    rows, eps = [], torch.finfo(lower_dtype(precision)).eps
    for kind, size in (("loss", largest), ("gradient", norm)):
        exact, rounded, ours = (_of(kind, run) for run in (plain, alone, planned))
        if kind == "loss":  # only that of the first step, since a scaler may have skipped it and run others
            # A loss that is not computed by an op that autocast runs in fp32 has the lower precision as its dtype.
            exact, rounded, ours = ({"1": losses["1"].double()} for losses in (exact, rounded, ours))
        off = {row.name: row.measured for row in compare(name, kind, exact, rounded, bound=math.inf, size=size)}
        bounds = {key: ROUNDINGS * eps + 2 * measured for key, measured in off.items()}
        rows += compare(name, kind, exact, ours, bound=bounds, size=size)
        worst = max(off, key=off.__getitem__, default=None)
        if worst is not None and off[worst] > ROUNDINGS * eps:
            notes.append(f"{name}: autocast alone moves the {kind} of {worst} by {off[worst]:.2g} of its size")
    return rows


def eight_bit_state(name: str, given: VerifyInputs, notes: list[str]) -> list[Row]:
    """Compare the first update of the 8-bit optimizer with that of the original optimizer.

    The first update uses state that is not quantized yet, so parameters must be the same after it. The state must be
    the same up to the error of one quantization. The state of embeddings must not be quantized.
    """
    plain = given.plain(updates=1)
    decisions = tuple(d for d in given.plan.decisions if d.role is Role.FREEZING or d.eight_bit_state)
    planned = given.planned(decisions, updates=1)
    bound = TERMS * torch.finfo(torch.float32).eps
    moved = module_scales({key: largest(plain.after[key] - before) for key, before in plain.before.items()})
    rows = compare(name, "parameter", plain.after, planned.after, bound=bound, scales=moved)
    averages = {key: value for key, value in plain.state.items() if key.endswith((".exp_avg", ".exp_avg_sq"))}
    planned_averages, bounds = dequantized(planned.state)
    for key in dict.fromkeys([*averages, *planned_averages]):
        pair = ({key: side[key]} if key in side else {} for side in (averages, planned_averages))
        rows += compare(name, "state", *pair, bound=bounds.get(key, bound))
    for owner, module in given.model.named_modules():
        for part, weight in module.named_parameters(owner, recurse=False) if type(module) is torch.nn.Embedding else ():
            in_8_bits = [key for key in bounds if key.rpartition(".")[0] == part and weight.requires_grad]
            rows.append(held(name, "embedding", part, f"{in_8_bits[0]} is in 8 bits" if in_8_bits else ""))
    return rows


def dequantized(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the moving averages of an 8-bit Adam, dequantized, and bounds on the relative error of each.

    Both are by torch's names, such as 'weight.exp_avg'. Block-wise quantization replaces each number by the nearest of
    256 codes, times the largest number of its block. So the error is at most half the largest distance between two
    codes, plus the rounding error of the average before it is quantized.
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
    """Return rows on the number of updates, of each run and of each parameter, and on gradients that are left over."""
    rows = []
    for side, run in (("reference", plain), ("planned", planned)):
        why = f"{run.updates} updates instead of {steps}" if run.updates != steps else ""
        rows.append(held(comparison, "updates", f"of the {side} step", why or ("" if run.gradients else "no gradient")))
    for name in dict.fromkeys([*plain.gradient_counts, *planned.gradient_counts]):
        count, expected = planned.gradient_counts.get(name, 0), plain.gradient_counts.get(name, 0)
        why = "" if count == expected else f"{count} updates instead of {expected}"
        rows.append(held(comparison, "updates", name, why))
    for name in sorted({*plain.leftover_gradients} ^ {*planned.leftover_gradients}):
        rows.append(failed(comparison, "updates", name, "a gradient is left after the step, on one side only"))
    return rows


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _of(kind: str, run: StepTrace) -> dict[str, Any]:
    """Return the quantities of one kind (`Row.kind`) in a run, by name."""
    by_kind: dict[str, dict[str, Any]] = {
        "loss": run.losses,
        "gradient": run.gradients,
        "parameter": run.after,
        "buffer": run.buffers,
        "state": run.state,
        "random": {"numbers": run.rng_state},
    }
    return by_kind[kind]


def _state_scales(state: dict[str, Any]) -> dict[str, float]:
    """Return the sizes that differences in state tensors are relative to, by name.

    These are the `module_scales`, computed separately for each kind of state such as 'exp_avg'.
    """
    by_part: dict[str, dict[str, float]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        by_part.setdefault(part, {})[name] = largest(dense(torch.as_tensor(value)))
    return {f"{name}.{part}": scale for part, sizes in by_part.items() for name, scale in module_scales(sizes).items()}


def _is_frozen(parameter: str, plan: Plan) -> bool:
    frozen = frozen_modules_of(plan.decisions)
    return any(not name or parameter.startswith(f"{name}.") for name in frozen)
