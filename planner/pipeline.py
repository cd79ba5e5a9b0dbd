"""The pipeline, and the one place that knows planner and rewriter both.

    workload -> record -> step graph -> cost -> search -> decisions -> rewrite -> rehearse again -> Plan

Read `plan_workload`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch

from planner.choose import fitting
from planner.choose.certificates import Certificates
from planner.choose.chooser import Choice
from planner.choose.pareto_front import front, total_bytes
from planner.choose.planning_session import Certified, PlanningSession
from planner.choose.relaxations import relaxations
from planner.errors import PlanFileError, SizeError
from planner.estimate.add_workspaces import unknown_ops
from planner.estimate.footprint import smallest_capacity_bytes
from planner.plan_types.constraints import Constraints
from planner.plan_types.decisions import Accumulation, Decision, Fidelity, Offload
from planner.plan_types.plan import Plan, Shortfall, SolverFacts, WorkloadFacts
from planner.plan_types.sizes import format_size, parse_size
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.recording.fx_graph import to_fx
from planner.recording.step_graph import Phase
from planner.rewrite.certificate import (
    certifying_graph,
    finish_certificate,
    start_certificate,
    start_rehearsal,
    start_update,
    with_gradient_names,
)
from planner.workload.call_convention import LossFn
from planner.workload.cards import GENERIC, resolve_card
from planner.workload.loading import load_workload
from planner.workload.model_loss import own_loss
from planner.workload.workload import OptimizerSpec, Workload, workload


def plan_live_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    vram: str | int | None,
    loss_fn: LossFn | None,
    gpu: str | None,
    optimizer: OptimizerSpec,
    gradients_alive: bool,
    constraints: Constraints,
) -> Plan:
    """`planner.plan`."""
    work = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer, gradients_alive=gradients_alive)
    card, vram_bytes = card_and_budget(gpu, vram)
    return plan_workload(work, card, vram_bytes=vram_bytes, constraints=constraints)


def tradeoff_of_live_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    vram: str | int | None,
    loss_fn: LossFn | None,
    gpu: str | None,
    optimizer: OptimizerSpec,
    gradients_alive: bool,
    constraints: Constraints,
    seconds: float,
) -> Tradeoff:
    """`planner.tradeoff`."""
    work = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer, gradients_alive=gradients_alive)
    card, vram_bytes = card_and_budget(gpu, vram)
    return tradeoff_workload(work, card, vram_bytes=vram_bytes, constraints=constraints, seconds=seconds)


def record_live_model(
    model: torch.nn.Module, batch: Any, *, loss_fn: LossFn | None, gpu: str | None, optimizer: OptimizerSpec
) -> torch.fx.Graph:
    """`planner.record`."""
    work = workload(model, batch, loss_fn=loss_fn, optimizer=optimizer)
    return to_fx(certifying_graph(work, (), resolve_card(gpu, None)))


def card_and_budget(gpu: str | None, vram: str | int | None) -> tuple[DeviceProfile, int | None]:
    """The card, and the budget in bytes; '80%' is of the card named or at hand."""
    if type(vram) is int:
        if vram <= 0:
            raise SizeError(
                f"budget of {vram} bytes is nothing: give a number of bytes above zero, or a text such as 6GiB"
            )
        return resolve_card(gpu, vram), vram
    relative = isinstance(vram, str) and vram.strip().endswith("%")
    size = None if vram is None or relative else parse_size(vram, device_bytes=None)
    card = resolve_card(gpu, size)
    if not relative:
        return card, size
    has_a_size = card.allocator and card.name != GENERIC
    return card, parse_size(vram, device_bytes=card.vram_bytes if has_a_size else None)


def plan_workload(work: Workload, card: DeviceProfile, *, vram_bytes: int | None, constraints: Constraints) -> Plan:
    """Plan one optimizer step of `work` on `card` so that its total stays inside `vram_bytes`.

    Rehearse it as it is; list what may be decided; take the fastest certified plan that fits. Where none does, the plan
    is the smallest one, with what is missing and the cheapest relaxation that would help.
    """
    began = time.perf_counter()
    usable_bytes, about_card = within_card(card, vram_bytes)
    with _open_session(work, card, usable_bytes) as session:
        if vram_bytes is None:
            return _plan(session, session.baseline, constraints, vram_bytes, shortfall=None, notes=(), began=began)
        session.expect(constraints)
        offered = session.offer(constraints)
        notes = (*about_card, *offered.notes)
        found, short = fitting.best(session, offered, constraints), None
        if found is None or not session.quick_enough(found, constraints):
            found = fitting.nearest(session, offered, constraints)
            if not found.measured.fits or not session.quick_enough(found, constraints):
                short = fitting.shortfall(session, found, relaxations(session, constraints))
        return _plan(session, found, constraints, vram_bytes, shortfall=short, notes=notes, began=began)


def plan_that_fits(work: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints) -> Plan | None:
    """The plan of `plan_workload` where there is one that fits; None, quickly, where there is none."""
    began = time.perf_counter()
    usable_bytes, about_card = within_card(card, vram_bytes)
    with _open_session(work, card, usable_bytes) as session:
        offered = session.offer(constraints)
        found = fitting.best(session, offered, constraints)
        if found is None or not session.quick_enough(found, constraints):
            return None
        notes = (*about_card, *offered.notes)
        return _plan(session, found, constraints, vram_bytes, shortfall=None, notes=notes, began=began)


def smallest_configuration(
    work: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> tuple[int, tuple[Decision, ...]]:
    """The smallest promise: the smallest total in which it gets through, frozen prefixes apart, and its decisions.

    Quicker than the smallest plan, for which the allocator's slack is looked at, too.
    """
    usable_bytes, _ = within_card(card, vram_bytes)
    with _open_session(work, card, usable_bytes) as session:
        found = session.certify(session.chooser(session.offer(constraints), constraints).smallest())
        return session.smallest_budget_bytes(found), found.choice.decisions


def configuration_within(
    work: Workload, card: DeviceProfile, *, vram_bytes: int, constraints: Constraints
) -> tuple[int, tuple[Decision, ...]]:
    """Total and decisions of the plan of `plan_workload`, which looks for more than the smallest way."""
    usable_bytes, _ = within_card(card, vram_bytes)
    with _open_session(work, card, usable_bytes) as session:
        offered = session.offer(constraints)
        found = fitting.best(session, offered, constraints) or fitting.nearest(session, offered, constraints)
        return found.measured.footprint.total_bytes, found.choice.decisions


def total_bytes_with(work: Workload, card: DeviceProfile, decisions: tuple[Decision, ...]) -> int:
    """The smallest total in which the step gets through under these decisions, by rehearsal."""
    return smallest_capacity_bytes(certifying_graph(with_gradient_names(work, card), decisions, card), card)


def tradeoff_workload(
    work: Workload, card: DeviceProfile, *, vram_bytes: int | None, constraints: Constraints, seconds: float
) -> Tradeoff:
    """Certified plans from the fastest to the smallest that the rules allow.

    Args:
        vram_bytes: a budget to mark among them; None marks nothing.
        seconds: after so many the front is left as fine as it is by then.
    """
    began = time.perf_counter()
    usable_bytes, about_card = within_card(card, vram_bytes)
    with _open_session(work, card, None) as session:
        session.expect(constraints)
        found = front(session, constraints, vram_bytes=usable_bytes, seconds=seconds)
        budgets = [total_bytes(point) for point in found.points]
        plans = tuple(
            _plan(session, point, constraints, budget, shortfall=None, notes=about_card, began=began)
            for budget, point in zip(budgets, found.points, strict=True)
        )
        return Tradeoff(
            as_it_is=_plan(session, session.baseline, constraints, None, shortfall=None, notes=(), began=began),
            points=plans,
            vram_bytes=vram_bytes,
            usable_bytes=usable_bytes,
            complete=found.complete,
            seconds=time.perf_counter() - began,
        )


def replan(saved: Plan, *, vram: str | None, gpu: str | None) -> Plan:
    """Rehearse a saved plan again, perhaps on another card or under another budget.

    Raises:
        PlanFileError: the plan was made for a live object, or its model is another one by now.
    """
    if saved.model.reference is None:
        raise PlanFileError("the plan was made for a live model: use rewrite.certify(plan, model, batch)")
    work = load_workload(
        saved.model.reference,
        batch_size=saved.workload.batch_size,
        seq_len=saved.workload.seq_len,
        optimizer=saved.workload.optimizer,
        gradients_alive=saved.workload.gradients_alive,
    )
    if work.model_facts().fingerprint != saved.model.fingerprint:
        raise PlanFileError(
            f"'{saved.model.reference}' is not the {saved.model.name} that the plan was made for: names, shapes or "
            "dtypes of its parameters differ; make the plan again"
        )
    if vram is None:
        card, vram_bytes = resolve_card(gpu or saved.card, saved.vram_bytes), saved.vram_bytes
    else:
        card, vram_bytes = card_and_budget(gpu or saved.card, vram)
    for split in (decision for decision in saved.decisions if isinstance(decision, Accumulation)):
        if split.micro_batches != -(-work.batch_size // split.micro_batch_size):
            raise PlanFileError(
                f"the plan splits a batch of {work.batch_size} into {split.micro_batches} micro-batches of "
                f"{split.micro_batch_size}: make it again"
            )
    began = time.perf_counter()
    constraints = Constraints(
        fidelity=Fidelity.parse(saved.fidelity),
        forced=saved.forced,
        forbidden=saved.forbidden,
        max_slowdown=saved.max_slowdown,
    )
    usable_bytes, notes = within_card(card, vram_bytes)
    with _open_session(work, card, usable_bytes) as session:
        found = session.certify(
            Choice(decisions=saved.decisions, peak_bytes=0, step_ns=0, status="not needed", gap=0.0)
        )
        found = found if vram_bytes is None else session.measure_at_smallest_budget(found)
        fits = vram_bytes is None or (found.measured.fits and session.quick_enough(found, constraints))
        promised = dataclasses.replace(found.choice, peak_bytes=found.measured.curve_bytes)
        found = dataclasses.replace(found, choice=promised)
        short = None if fits else fitting.shortfall(session, found, ())
        return _plan(session, found, constraints, vram_bytes, shortfall=short, notes=notes, began=began)


@contextlib.contextmanager
def _open_session(work: Workload, card: DeviceProfile, vram_bytes: int | None) -> Iterator[PlanningSession]:
    """Where planner and rewriter meet: what is rehearsed is the step that the rewriter makes of the decisions."""
    with _without_collector():
        work = with_gradient_names(work, card)
        session = PlanningSession(
            work,
            card,
            vram_bytes=vram_bytes,
            start_what_if=lambda decisions, sizes: start_rehearsal(
                work, decisions, card, sizes=sizes, steps=1, primed=True, what_if=True
            ),
            start_update=lambda decisions, trained: start_update(work, decisions, card, trained),
            certificates=Certificates(
                lambda decisions: start_certificate(work, decisions, card),
                lambda graph: finish_certificate(graph, work, card),
            ),
        )
        with contextlib.closing(session):
            yield session


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Recordings are many objects without cycles; to look for some again and again takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def within_card(card: DeviceProfile, vram_bytes: int | None) -> tuple[int | None, tuple[str, ...]]:
    """The budget, at most what a named card has, and a note where that is less."""
    if vram_bytes is None or vram_bytes <= card.vram_bytes or card.name == GENERIC or not card.allocator:
        return vram_bytes, ()
    note = f"{card.title} offers {format_size(card.vram_bytes)} to torch: planned for that, not for the larger budget"
    return card.vram_bytes, (note,)


def _plan(
    session: PlanningSession,
    found: Certified,
    constraints: Constraints,
    vram_bytes: int | None,
    *,
    shortfall: Shortfall | None,
    notes: tuple[str, ...],
    began: float,
) -> Plan:
    if session.undecided:
        notes += (f"{session.undecided} programs hit their time limit without an answer: a faster plan may exist",)
    notes += (
        *session.dropped(constraints),
        *found.graph.assumptions,
        *_about_host(found),
        *_about_scratch(found, session.card),
    )
    return Plan(
        model=session.work.model_facts(),
        workload=_workload_facts(session.work),
        card=session.card.name,
        card_source=session.card.source,
        vram_bytes=vram_bytes,
        fidelity=constraints.fidelity.name.lower(),
        forced=constraints.forced,
        forbidden=constraints.forbidden,
        max_slowdown=constraints.max_slowdown,
        baseline=session.baseline.measured.footprint,
        peak=found.measured.footprint,
        decisions=found.choice.decisions,
        fits=shortfall is None,
        certified=True,
        solver=SolverFacts(
            status=found.choice.status,
            gap=found.choice.gap,
            seconds=session.solve_seconds,
            promised_bytes=found.choice.peak_bytes,
            certified_bytes=found.measured.curve_bytes,
        ),
        shortfall=shortfall,
        notes=notes,
        versions=versions(),
        seconds=time.perf_counter() - began,
    )


def _workload_facts(work: Workload) -> WorkloadFacts:
    """With what a loss that the model takes by itself is a mean over."""
    return dataclasses.replace(work.facts(), own_loss=own_loss(work.model, work.calling, work.loss_fn))


def _about_host(found: Certified) -> tuple[str, ...]:
    """What an offload takes of the host's memory."""
    graph = found.graph
    if not any(isinstance(decision, Offload) for decision in found.choice.decisions):
        return ()
    copied: dict[int, int] = {}
    for op in graph.ops:
        if op.host_bytes and op.phase is Phase.FORWARD and op.step == graph.steps - 1:
            copied[op.micro_batch] = copied.get(op.micro_batch, 0) + op.host_bytes
    return (f"{format_size(max(copied.values(), default=0))} of the host's memory are pinned for what is offloaded",)


def _about_scratch(found: Certified, card: DeviceProfile) -> tuple[str, ...]:
    """Ops of which nobody has said what their kernels take beside their outputs."""
    counts = unknown_ops(found.graph) if card.allocator else {}
    if not counts:
        return ()
    names = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1])[:4])
    more = f" and {len(counts) - 4} kinds more" if len(counts) > 4 else ""
    note = f"scratch memory of some kernels is unknown and not counted: {names}{more}, in two steps"
    if any("convolution" in name for name in counts):
        note += "; in recordings of real cards a convolution takes 0.2 to 128 MiB, one at a time"
    return (note,)


def versions() -> dict[str, str]:
    """Of everything whose version can change a plan."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "bitsandbytes"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
