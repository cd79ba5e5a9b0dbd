"""Plans for the config of a program that trains by its own loop (axolotl, LLaMA-Factory): without our rewriting.

Such a program runs the model as transformers loads it. So a plan may only use what the config can express: micro-batches,
autocast, the optimizer's name, adapters, and transformers' own gradient checkpointing, which is for all layers or none.
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
from planner.workload.loading import FORMS
from planner.workload.programs import PROGRAMS
from planner.workload.programs.program import Terms, Wish
from planner.workload.transformers_models import stored_dtype, transformers_config
from planner.workload.workload import Workload

UNSUPPORTED = ("step-in-backward", "chunked-loss", "checkpoint", "segment-checkpoint", "offload", "freeze")
"""Techniques that need our rewriting, or that no config of these programs expresses."""
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

    If none of them fits, it is the plan that needs less memory. Gradient checkpointing is not tried if the plan without
    it takes the whole batch at once, because it could only be slower.

    Raises:
        TimeLimitError: the time was up before any plan was certified.
    """
    title = PROGRAMS[name].title

    def planned(*, gradient_checkpointing: bool) -> tuple[Plan, Workload]:
        workload = load(TrainingProgram(name=name, gradient_checkpointing=gradient_checkpointing))
        return _plan(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch), workload

    plain, workload = planned(gradient_checkpointing=False)
    if vram_bytes is None or (plain.fits and micro_batches_of(plain.decisions) == 1):
        return _noted(plain, f"for {title}: without gradient checkpointing"), workload
    if not getattr(workload.model, "supports_gradient_checkpointing", False):
        why = "which this model does not support"
        return _noted(plain, f"for {title}: without gradient checkpointing, {why}"), workload
    try:
        other, checkpointed = planned(gradient_checkpointing=True)
    except TimeLimitError:
        why = f"which was not looked at: planning ended {watch.cause}"
        return _noted(plain, f"for {title}: without gradient checkpointing, {why}"), workload
    times = f"{plain.peak.step_ns / 1e6:,.1f} ms without it, {other.peak.step_ns / 1e6:,.1f} ms with it"
    if plain.fits and (not other.fits or plain.peak.step_ns <= other.peak.step_ns):
        why = f"the step takes {times}" if other.fits else "with which no plan fits"
        return _noted(plain, f"for {title}: without gradient checkpointing ({why})"), workload
    why = f"the step takes {times}" if plain.fits else "without it no plan fits"
    note = f"for {title}: with gradient checkpointing of all layers ({why}); the baseline has it, too"
    return _noted(other, note), checkpointed


def _plan(
    workload: Workload, card: DeviceProfile, *, vram_bytes: int | None, constraints: Constraints, watch: Watch
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
