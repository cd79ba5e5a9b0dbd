"""Plans the training of LoRA adapters if no plan that trains the weights fits (`--fidelity adapted`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from planner import pipeline
from planner.errors import StepError, TimeLimitError
from planner.plan_types.adapter import ALL_LINEAR, Adapter
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Fidelity, Role
from planner.plan_types.plan import NextStep, Plan, Relaxation, Shortfall
from planner.plan_types.sizes import format_size
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.questions.known_plans import plan_that_fits
from planner.workload.adapters import adapted_workload, why_not_adapted
from planner.workload.workload import Workload

_RANK = 16
ADAPTERS = tuple(Adapter(rank=_RANK, targets=(ALL_LINEAR,), is_quantized=in_4_bits) for in_4_bits in (False, True))
"""The adapters that are tried, in this order: the first with which a plan fits is taken."""

_WEIGHTS_SHARE, _LORA_SHARE = 0.5, 0.7
"""The parts of the time that is left in which a plan that trains the weights, and then one with adapters on weights in
full precision, has to be found, so that the next attempt gets some time."""

_NOT_ENOUGH = "not enough on its own"
_Found = Plan | TimeLimitError | str
"""The plan of a model with adapters, or the reason why there is none."""


def plan_or_adapt(
    workload: Workload,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch | None = None,
    plan_step: Callable[..., Plan] | None = None,
    plan_fitting: Callable[..., Plan | None] | None = None,
    plan_smallest: Callable[..., Plan] | None = None,
    adapters: Sequence[Adapter] = ADAPTERS,
) -> Plan:
    """Return the plan of `plan_step`; if that does not fit, the plan that trains LoRA adapters instead.

    Adapters come before frozen layers. If the constraints do not allow adapters, the shortfall of the plan says whether
    they would make it fit. If they are allowed and no plan fits with them either, notes say why.

    Args:
        watch: limits the time of planning, and receives its progress; None for no limit.
        plan_step: plans a step, as `pipeline.plan_workload` does for one card; None for that function.
        plan_fitting: returns None instead of a plan that does not fit; None for `plan_that_fits`, for one card.
        plan_smallest: returns what `plan_step` does if no plan fits, without a search for one that fits; None for
            `plan_step`.
        adapters: the adapters to try, in this order.

    Raises:
        TimeLimitError: the time was up before any plan was certified.
    """
    watch, plan_step = watch or Watch(), plan_step or pipeline.plan_workload
    plan_fitting = plan_fitting or plan_that_fits
    if vram_bytes is None or workload.adapter is not None or constraints.force(Role.FREEZING):
        return plan_step(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    rounded = dataclasses.replace(constraints, fidelity=min(constraints.fidelity, Fidelity.ROUNDED))
    if constraints.fidelity < Fidelity.ADAPTED:
        plan = plan_step(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        if plan.shortfall is None or _opens_without_freezing(plan.shortfall):
            return plan
        rounded = dataclasses.replace(constraints, fidelity=Fidelity.ROUNDED)
        return _advised(
            plan,
            _tried(workload, card, adapters, plan_fitting, vram_bytes=vram_bytes, constraints=rounded, watch=watch),
        )
    why = f"no plan that trains the weights fits in {format_size(vram_bytes)}"
    fitting, tried = None, []
    try:
        with watch.until_found(_WEIGHTS_SHARE):
            fitting = plan_fitting(workload, card, vram_bytes=vram_bytes, constraints=rounded, watch=watch)
    except TimeLimitError:
        why = f"no plan that trains the weights was found in {watch.elapsed_seconds:.0f} s (a longer --time-limit may)"
        plan_smallest = None
    if fitting is None:
        tried = _tried(workload, card, adapters, plan_fitting, vram_bytes=vram_bytes, constraints=rounded, watch=watch)
    if fitting is None and isinstance(tried[-1][1], Plan):
        note = f"adapters are trained instead of the weights, because {why}; the baseline is the model with adapters"
        fitting = dataclasses.replace(tried[-1][1], notes=(note, *tried[-1][1].notes))
    if fitting is not None:
        return dataclasses.replace(fitting, fidelity=constraints.fidelity.name.lower())
    if plan_smallest is not None and constraints.fidelity == Fidelity.ADAPTED:
        plan_step = plan_smallest  # the searches above had all techniques that are allowed: no plan fits
    plan = plan_step(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    if plan.shortfall is None:
        return plan
    notes = (f"with {adapter or 'adapters'}, no plan was found that fits: {found}" for adapter, found in tried)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def _opens_without_freezing(shortfall: Shortfall) -> bool:
    """True if a relaxation makes a plan fit that has no frozen layers."""
    partial = Fidelity.PARTIAL.name.lower()
    return any(relaxation.opens and relaxation.fidelity != partial for relaxation in shortfall.relaxations)


def _tried(
    workload: Workload,
    card: DeviceProfile,
    adapters: Sequence[Adapter],
    plan_fitting: Callable[..., Plan | None],
    *,
    vram_bytes: int,
    constraints: Constraints,
    watch: Watch,
) -> list[tuple[Adapter | None, _Found]]:
    """Returns the adapters that were tried, each with the reason why no plan fits. The last one may have a plan.

    If none can be added to the model, the only entry is None with the reason.
    """
    tried: list[tuple[Adapter | None, _Found]] = []
    if why_not := why_not_adapted(workload):
        return [(None, why_not)]
    for adapter in adapters:
        found: _Found | None
        try:
            watch.check()
            adapted = adapted_workload(workload, adapter)
            with contextlib.nullcontext() if adapter is adapters[-1] else watch.until_found(_LORA_SHARE):
                found = plan_fitting(adapted, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
        except (TimeIsUp, TimeLimitError):
            found = TimeLimitError(f"planning ended {watch.cause}")
        except StepError as error:
            found = str(error)
        tried.append((adapter, found or _NOT_ENOUGH))
        if isinstance(found, Plan) or watch.left_seconds <= 0:
            break
    return tried


def _advised(plan: Plan, tried: list[tuple[Adapter | None, _Found]]) -> Plan:
    """Returns the plan with adapters among its relaxations. They are preferred to frozen layers."""
    if plan.shortfall is None:
        return plan
    rows = tuple(_relaxation(adapter, found, plan) for adapter, found in tried)
    steps = [row.next_step for row in rows if row.next_step is not None]
    shortfall = dataclasses.replace(
        plan.shortfall,
        next_step=steps[0] if steps else plan.shortfall.next_step,
        relaxations=(*rows, *plan.shortfall.relaxations),
    )
    return dataclasses.replace(plan, shortfall=shortfall)


def _relaxation(adapter: Adapter | None, found: _Found, plan: Plan) -> Relaxation:
    label = "--fidelity adapted" if adapter is None else f"--fidelity adapted, with {adapter}"
    if isinstance(found, TimeLimitError):
        return Relaxation(relax=label, opens=None, why=f"not tried: {found}", fidelity=None, next_step=None)
    if isinstance(found, str):
        return Relaxation(relax=label, opens=False, why=found, fidelity=None, next_step=None)
    step = NextStep(
        relax=label,
        decisions=found.decisions,
        total_bytes=found.peak.total_bytes,
        slowdown=found.peak.step_ns / max(plan.baseline.step_ns, 1),
    )
    return Relaxation(relax=label, opens=True, why="", fidelity=Fidelity.ADAPTED.name.lower(), next_step=step)
