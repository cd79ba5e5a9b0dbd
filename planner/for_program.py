"""Plans for the config of a program that trains by its own loop (axolotl, LLaMA-Factory).

Such a program runs the model as transformers loads it. So a plan may only use what the config can express:
micro-batches, autocast, the optimizer's name, adapters, and transformers' own gradient checkpointing of all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from planner import pipeline
from planner.errors import TimeLimitError
from planner.plan_types.adapter import Adapter
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import micro_batches_of
from planner.plan_types.plan import Plan, TrainingProgram
from planner.plan_types.words import ProgramName
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.questions.known_plans import plan_that_fits
from planner.workload.loading import FORMS
from planner.workload.programs import PROGRAMS
from planner.workload.programs.program import Terms, Wish
from planner.workload.transformers_models import stored_dtype, transformers_config
from planner.workload.workload import Workload

UNSUPPORTED = ("step-in-backward", "chunked-loss", "checkpoint", "segment-checkpoint", "offload", "freeze")
"""Techniques that need a rewritten step, or that the config of neither program can express."""
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}

Load = Callable[[TrainingProgram], Workload]
"""Loads the workload, prepared as a program with these settings prepares it."""


def terms_for(
    name: ProgramName,
    reference: str,
    card: DeviceProfile,
    *,
    adapter: Adapter | None,
    optimizer: str,
    dtype: str | None,
) -> Terms:
    """Returns the conditions under which a plan can be followed by a program's config.

    Args:
        name: the program.
        reference: MODEL: the path or the hub id of a transformers model.
        adapter: the adapters to train; None to train the weights.
        optimizer: the planner's name of the optimizer.
        dtype: the dtype of the weights that the user asks for; None to let the program choose.

    Raises:
        WorkloadError: there is no such model, or the program cannot train it in this way.
    """
    stored = stored_dtype(transformers_config(reference, FORMS), reference) or "float32"
    autocast = _AUTOCAST[card.native_dtypes[0]] if card.native_dtypes else None
    wish = Wish(adapter=adapter, optimizer=optimizer, dtype=dtype, stored=stored, autocast=autocast)
    return PROGRAMS[name].terms(wish)


def plan_for_program(
    name: ProgramName,
    load: Load,
    card: DeviceProfile,
    *,
    vram_bytes: int | None,
    constraints: Constraints,
    watch: Watch,
) -> tuple[Plan, Workload]:
    """Returns the faster certified plan of those without and with gradient checkpointing, and its workload.

    If none of them fits, it is the smallest plan with gradient checkpointing. That is not tried if the plan without it
    takes the whole batch at once, because it could only be slower.

    Raises:
        TimeLimitError: the time was up before any plan was certified.
    """
    without, with_it = (TrainingProgram(name=name, gradient_checkpointing=enabled) for enabled in (False, True))
    begin = f"the plan for {PROGRAMS[name].title} is "
    workload = load(without)
    if vram_bytes is None:
        plan = pipeline.plan_workload(workload, card, vram_bytes=None, constraints=constraints, watch=watch)
        return _noted(plan, f"{begin}without gradient checkpointing"), workload
    plain = plan_that_fits(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    if plain is not None and micro_batches_of(plain.decisions) == 1:
        return _noted(plain, f"{begin}without gradient checkpointing, since the whole batch fits without it"), workload
    if not workload.model.supports_gradient_checkpointing:
        plan = plain or _plan_or_shortfall(workload, card, vram_bytes, constraints, watch)
        return _noted(plan, f"{begin}without gradient checkpointing, which this model does not support"), workload
    checkpointed = load(with_it)
    if plain is None:
        plan = _plan_or_shortfall(checkpointed, card, vram_bytes, constraints, watch)
        note = "with gradient checkpointing of all layers, because no plan without it fits; the baseline uses it, too"
        return _noted(plan, begin + note), checkpointed
    try:
        other = plan_that_fits(checkpointed, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    except TimeLimitError:
        return _noted(plain, f"{begin}without gradient checkpointing; no plan with it was certified in time"), workload
    if other is None:
        return _noted(plain, f"{begin}without gradient checkpointing, because no plan with it fits"), workload
    times = f"{plain.peak.step_ns / 1e6:,.1f} ms without it, {other.peak.step_ns / 1e6:,.1f} ms with it"
    if plain.peak.step_ns <= other.peak.step_ns:
        return _noted(plain, f"{begin}without gradient checkpointing, which is faster: {times}"), workload
    note = f"with gradient checkpointing of all layers, which is faster: {times}; the baseline uses it, too"
    return _noted(other, begin + note), checkpointed


def _plan_or_shortfall(
    workload: Workload, card: DeviceProfile, vram_bytes: int, constraints: Constraints, watch: Watch
) -> Plan:
    """Returns the plan. Its shortfall does not offer techniques that the program cannot use."""
    plan = pipeline.plan_workload(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    if plan.shortfall is None:
        return plan
    refused = {f"allow {technique}" for technique in constraints.forbidden}
    step = plan.shortfall.next_step
    shortfall = dataclasses.replace(
        plan.shortfall,
        next_step=None if step is not None and step.relax in refused else step,
        relaxations=tuple(row for row in plan.shortfall.relaxations if row.relax not in refused),
    )
    return dataclasses.replace(plan, shortfall=shortfall)


def _noted(plan: Plan, note: str) -> Plan:
    return dataclasses.replace(plan, notes=(note, *plan.notes))
