"""Rehearse the decisions of a saved plan again for the same model, optionally on a different card or budget."""

from __future__ import annotations

import dataclasses
import time

from planner import pipeline
from planner.assemble import assemble_plan
from planner.choose.choice import given_choice
from planner.choose.relaxations import shortfall_of
from planner.errors import PlanFileError
from planner.plan_types.answers import Answers
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import (
    Fidelity,
    Role,
    cards_of,
    communicators_of,
    micro_batch_size_of,
    micro_batches_of,
    with_roles,
)
from planner.plan_types.plan import Plan
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.profiles.links import CARDS_PER_NODE, with_links
from planner.progress import Watch
from planner.run_memory.batches import BatchShape
from planner.whole_run.request import verify_planned_run
from planner.workload.budget import Budget, card_and_budget
from planner.workload.cards import resolve_card, with_allocator_options
from planner.workload.loading import load_callable, load_workload
from planner.workload.synthetic_batch import planned_masking
from planner.workload.workload import Workload


def replan(
    saved: Plan,
    *,
    vram: str | None,
    gpu: str | None,
    margin: str | None = None,
    alloc_conf: str | None = None,
    cudnn_benchmark: bool = False,
    watch: Watch | None = None,
) -> Plan:
    """Rehearse the decisions of a saved plan again, and return the plan with the new memory, time and verdict.

    Args:
        vram: a size such as "6GiB"; None keeps the budget of the saved plan.
        gpu: the name of a profile; None keeps the card of the saved plan.
        margin: the part of the card that stays free. None keeps the margin of the saved plan, except on another card.
        alloc_conf: options of the caching allocator; None keeps those with which the saved plan was simulated.
        cudnn_benchmark: True for training with `torch.backends.cudnn.benchmark = True`; False keeps the setting of the
            saved plan.
        watch: limits the time, and receives progress; None for no limit.

    Raises:
        PlanFileError: the plan was made for a live model, which cannot be loaded, or its model has changed since.
        TimeLimitError: the time was up before the plan was certified.
    """
    workload = load_planned(saved)
    began = time.perf_counter()
    if vram is None:
        card, vram_bytes = resolve_card(gpu or saved.card, saved.vram_bytes), saved.vram_bytes
    else:
        card, vram_bytes = card_and_budget(gpu or saved.card, vram)
    card = with_planned_links(card, saved, is_same_card=gpu is None)
    card, given = with_allocator_options(card, saved.alloc_conf if alloc_conf is None else alloc_conf)
    card = dataclasses.replace(card, cudnn_benchmark=saved.cudnn_benchmark or cudnn_benchmark)
    constraints = Constraints(
        fidelity=Fidelity.parse(saved.fidelity),
        forced=saved.forced,
        forbidden=saved.forbidden,
        max_slowdown=saved.max_slowdown,
        margin=saved.margin_bytes if margin is None and gpu is None else margin,
    )
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=constraints.margin)
    notes = given if budget is None else (*given, *budget.notes(card))
    with pipeline.open_session(workload, card, budget, watch) as session:
        certified = session.certify(given_choice(saved.decisions))
        if budget is not None:
            if not certified.measured.fits:
                session = session.with_slower_algorithms()
            certified = session.measure_at_smallest_budget(certified)
        fits = budget is None or (certified.measured.fits and session.quick_enough(certified, constraints))
        certified = certified.with_measured_promise()
        shortfall = None if fits else shortfall_of(session, certified, ())
        plan = assemble_plan(session, certified, constraints, budget, shortfall=shortfall, notes=notes, began=began)
    if saved.run is None:
        return plan
    return verify_planned_run(
        plan,
        workload,
        card,
        constraints=constraints,
        source=saved.run.source,
        at=lambda shape: load_planned(saved, shape),
        watch=watch,
    )


def with_planned_links(card: DeviceProfile, saved: Plan, *, is_same_card: bool) -> DeviceProfile:
    """Return the card with the links between the cards of a plan, and NCCL's memory; unchanged for one card.

    Args:
        is_same_card: True if the links are those of the plan; False for the links of another card.
    """
    sharding = with_roles(saved.decisions, Role.SHARDING)
    if not sharding:
        return card
    return with_links(
        card,
        cards=cards_of(sharding),
        communicators=communicators_of(sharding),
        within=saved.link if is_same_card else None,
        cards_per_node=saved.cards_per_node or CARDS_PER_NODE,
    )


def load_planned(saved: Plan, shape: BatchShape | None = None) -> Workload:
    """Load the workload that the plan was made for, and check that model and batch size still match the plan.

    For a plan for several cards, it is the workload of one of them.

    Args:
        shape: the shape of the batch; None for that of the plan.

    Raises:
        PlanFileError: the plan was made for a live model, which cannot be loaded, or its model has changed since.
    """
    if saved.model.reference is None:
        raise PlanFileError(
            "the plan was made in Python for a live model, which cannot be loaded by name: use "
            "rewrite.certify(plan, model, batch)"
        )
    workload = load_workload(
        saved.model.reference,
        batch_size=saved.workload.batch_size if shape is None else shape.samples,
        seq_len=saved.workload.seq_len if shape is None else shape.length,
        optimizer=saved.workload.optimizer,
        gradients_alive=saved.workload.gradients_alive,
        dtype=None if ":" in saved.model.reference else saved.model.dtype,
        adapter=saved.model.adapter,
        program=saved.model.program,
        input_shapes=saved.workload.input_shapes,
        masking=planned_masking(saved),
        arguments=saved.model.arguments,
        answers=Answers(values=saved.workload.values, worst_case=saved.workload.worst_case),
        choose=lambda workloads: next((w for w in workloads if w.facts().batch == saved.workload.batch), workloads[0]),
    )
    if workload.model_facts().fingerprint != saved.model.fingerprint:
        raise PlanFileError(
            f"'{saved.model.reference}' is not the {saved.model.name} that the plan was made for: names, shapes or "
            "dtypes of its parameters or buffers differ; make the plan again"
        )
    size, count = micro_batch_size_of(saved.decisions), micro_batches_of(saved.decisions)
    if size is not None and shape is None and count != -(-workload.batch_size // size):
        raise PlanFileError(
            f"the plan is inconsistent: {count} micro-batches of {counted(size, 'sample')} do not make up its batch of "
            f"{counted(workload.batch_size, 'sample')}; make the plan again"
        )
    sharding = with_roles(saved.decisions, Role.SHARDING)
    function = next((name for decision in sharding if (name := decision.dividing_function)), None)
    parallelize = None if function is None else load_callable(function, again=False)
    return dataclasses.replace(
        workload, not_by_sample=saved.workload.not_by_sample, sharding=sharding, parallelize=parallelize
    )
