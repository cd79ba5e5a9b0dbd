"""Makes the `Plan` or `Tradeoff` that the user gets from certified configurations: adds facts, notes and versions."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time

import torch

from planner.choose.choice import TIE, Certified, Choice
from planner.choose.pareto_front import Front, total_bytes
from planner.choose.planning_session import PlanningSession
from planner.estimate.add_workspaces import has_searches
from planner.estimate.allocation_stream import with_largest
from planner.estimate.footprint import granularity_bytes, measure
from planner.estimate.kernel_notes import kernel_notes
from planner.estimate.largest_tensors import largest_tensors
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import (
    Decision,
    allocator_options_of,
    changed_options,
    frozen_modules_of,
    options_in,
    with_sharding,
)
from planner.plan_types.plan import Plan, Shortfall, SolverFacts
from planner.plan_types.sizes import format_size
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.profiles.links import foreign_link_note
from planner.recording.module_state import is_compiled
from planner.recording.step_graph import Phase
from planner.virtual_gpu.values.data_dependence import STATED
from planner.workload.budget import Budget
from planner.workload.optimizer_choice import by_name
from planner.workload.workload import Workload

_WORTH_NAMING = 1.01
"""Factor between predicted step times from which on a note names the faster plan that was passed over."""
_MOST_UNTRIED_NAMED = 3
"""Maximum number of configurations that the note on a plan that ended early names."""


def assemble_plan(
    session: PlanningSession,
    certified: Certified,
    constraints: Constraints,
    budget: Budget | None,
    *,
    began: float,
    shortfall: Shortfall | None = None,
    notes: tuple[str, ...] = (),
    is_early: bool = False,
) -> Plan:
    """Return the `Plan` for a certified configuration.

    Args:
        budget: the budget; None if there is none.
        began: `time.perf_counter()` when planning began.
        shortfall: the explanation why no plan fits; None if the plan fits.
        notes: remarks for the user; they come before the notes that are added here.
        is_early: True if the search was not finished when its time was up.
    """
    links = session.card.links
    is_open = is_early or session.searches.undecided(constraints) > 0
    return Plan(
        model=session.workload.model_facts(),
        workload=session.workload.facts(),
        card=session.card.name,
        card_source=session.card.source,
        vram_bytes=None if budget is None else budget.asked_bytes,
        card_bytes=None if budget is None else budget.card_bytes,
        margin_bytes=0 if budget is None else budget.margin_bytes,
        fidelity=constraints.fidelity.name.lower(),
        forced=constraints.forced,
        forbidden=constraints.forbidden,
        max_slowdown=constraints.max_slowdown,
        baseline=session.baseline.measured.footprint,
        peak=certified.measured.footprint,
        decisions=with_sharding(session.workload.sharding, certified.choice.decisions),
        fits=shortfall is None,
        certified=True,
        solver=SolverFacts(
            status="time limit" if is_open else certified.choice.status,
            gap=1.0 if is_open else certified.choice.gap,
            seconds=session.searches.solve_seconds,
            promised_bytes=certified.choice.peak_bytes + certified.more_bytes,
            certified_bytes=certified.measured.curve_bytes,
        ),
        shortfall=shortfall,
        notes=(
            *session.workload.notes,
            *notes,
            *_search_notes(session, constraints),
            *certified.graph.assumptions,
            *_unused_values_notes(session),
            *_later_calls_notes(session, certified),
            *_later_updates_notes(certified),
            *_tie_notes(certified.choice),
            *tied_to_frozen(session.workload.model, certified.choice.decisions),
            *_compile_notes(session.workload.model),
            *_host_memory_notes(certified),
            *_paged_state_notes(session.workload),
            *_allocator_notes(certified.choice.decisions),
            *changed_notes(certified.choice.decisions, session.card.alloc_conf),
            *_default_options_notes(session, certified, budget, is_fitting=shortfall is None),
            *kernel_notes(certified.graph, certified.measured, certified.choice.decisions, session.card, session.watch),
            *foreign_link_note(session.card),
            *_nccl_notes(session.card),
        ),
        alloc_conf=session.card.alloc_conf,
        cudnn_benchmark=has_searches(certified.graph),
        link=None if links is None else links.within.name,
        cards_per_node=None if links is None else links.cards_per_node,
        versions=versions(),
        tensors=largest_tensors(
            with_largest(certified.graph, certified.measured.searched),
            certified.measured.peak_tick,
            granularity_bytes=granularity_bytes(session.card),
        ),
        seconds=time.perf_counter() - began,
        recalled=session.watch.recalled,
    )


def assemble_tradeoff(
    session: PlanningSession,
    baseline_plan: Plan,
    front: Front,
    constraints: Constraints,
    budget: Budget | None,
    *,
    began: float,
) -> Tradeoff:
    """Return the `Tradeoff` with one plan for each point of the Pareto front.

    The budget of each plan (`Plan.vram_bytes`) is the total memory that the plan itself needs.

    Args:
        baseline_plan: the plan of the baseline, assembled before the search, so that it is known how long that takes.
        budget: the user's budget, which only marks the fastest plan inside it; None if there is none.
        began: `time.perf_counter()` when planning began.
    """
    notes = () if budget is None else budget.notes(session.card)
    return Tradeoff(
        as_it_is=dataclasses.replace(
            baseline_plan,
            notes=(*baseline_plan.notes, *_search_notes(session, constraints)),
            solver=dataclasses.replace(baseline_plan.solver, seconds=session.searches.solve_seconds),
            seconds=time.perf_counter() - began,
            recalled=session.watch.recalled,
        ),
        points=tuple(
            assemble_plan(
                session, point, constraints, Budget.of_total(session.card, total_bytes(point)), notes=notes, began=began
            )
            for point in front.points
        ),
        vram_bytes=None if budget is None else budget.asked_bytes,
        usable_bytes=None if budget is None else budget.usable_bytes,
        complete=front.complete,
        seconds=time.perf_counter() - began,
    )


def _search_notes(session: PlanningSession, constraints: Constraints) -> tuple[str, ...]:
    """Return notes on integer programs of the searches that had no answer, and on techniques that failed."""
    undecided, dropped = session.searches.undecided(constraints), session.searches.dropped(constraints)
    if not undecided:
        return dropped
    return (
        f"{undecided} of the search's integer programs reached their time limit without an answer: a faster plan may "
        "exist",
        *dropped,
    )


def early_note(session: PlanningSession, constraints: Constraints) -> str:
    """Return a note on a plan with which planning ended early: the cause, and what was not tried."""
    names = [
        ", ".join(decision.describe() for decision in config)
        or "activation checkpointing or offloading without other techniques"
        for config in session.searches.untried(constraints)
    ]
    if not names:
        left = "the search for a faster plan was not finished"
    else:
        more = "" if len(names) <= _MOST_UNTRIED_NAMED else f"; and {len(names) - _MOST_UNTRIED_NAMED} more"
        left = f"not tried: {'; '.join(names[:_MOST_UNTRIED_NAMED])}{more}"
    return (
        f"planning ended {session.watch.cause} with the best plan that was certified by then, and a faster plan may "
        f"exist; {left}"
    )


def _tie_notes(choice: Choice) -> tuple[str, ...]:
    """Return a note if a faster plan was passed over for a simpler one, and is faster by more than `_WORTH_NAMING`."""
    faster = choice.passed_over
    if faster is None or choice.step_ns <= _WORTH_NAMING * faster.step_ns:
        return ()
    kinds = {decision.kind for decision in choice.decisions}
    more = [decision for decision in faster.decisions if decision not in choice.decisions]
    named = sorted({decision.kind for decision in more} - kinds)
    ask = f", and --force {','.join(named)} asks for the other plan" if named else ""
    with_them = "; ".join(decision.describe() for decision in more) or "fewer changes"
    return (
        f"the planner found a faster plan and did not certify it: its predicted step is "
        f"{1 - faster.step_ns / choice.step_ns:.1%} shorter, with {with_them}. Steps within {TIE - 1:.0%} count as "
        f"equally fast; the plan that is more exact or simpler is chosen{ask}",
    )


def _nccl_notes(card: DeviceProfile) -> tuple[str, ...]:
    """Return a note on the memory that NCCL takes outside of the allocator, which is not rehearsed."""
    if not card.nccl_bytes or card.links is None:
        return ()
    count, more_bytes = card.links.communicators, card.links.nccl_most_bytes - card.nccl_bytes
    return (
        f"NCCL's {'communicator is' if count == 1 else f'{count} communicators are'} counted with "
        f"{format_size(card.nccl_bytes)} on each card. This figure comes from reports of others or from an assumption "
        f"(profiles/links.toml), not from a rehearsal; NCCL may take up to {format_size(more_bytes)} more: leave that "
        "free with --margin, or set a smaller NCCL_BUFFSIZE, and on cards with NVLink SHARP NCCL_NVLS_ENABLE=0",
    )


def _allocator_notes(decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    """Return a note if the plan sets options of the allocator whose simulation was never compared with a recording."""
    if "max_split_size_mb" not in allocator_options_of(decisions):
        return ()
    return (
        "max_split_size_mb is simulated from PyTorch's source: no recording of a card with this option was available "
        "to compare the simulation with",
    )


def changed_notes(decisions: tuple[Decision, ...], given: str) -> tuple[str, ...]:
    """Return a note if the plan changes options of the allocator that the user has set."""
    present = options_in(given)
    changed = [f"{name} from {present[name]} to {value}" for name, value in changed_options(decisions, given).items()]
    if not changed:
        return ()
    return (
        f"the plan changes options of the allocator that you have set: {', '.join(changed)}, because it does not fit "
        "with yours, or because the technique is forced",
    )


def _default_options_notes(
    session: PlanningSession, certified: Certified, budget: Budget | None, *, is_fitting: bool
) -> tuple[str, ...]:
    """Return a note if a plan that does not fit would fit with PyTorch's default options of the allocator."""
    if is_fitting or budget is None or not session.card.alloc_conf:
        return ()
    plain = dataclasses.replace(session.card, alloc_conf="")
    if not measure(certified.graph, plain, vram_bytes=budget.usable_bytes).fits:
        return ()
    return (
        f"the plan would fit with PyTorch's default options of the allocator: leave '{session.card.alloc_conf}' out "
        '(--alloc-conf "" plans without it)',
    )


def versions() -> dict[str, str]:
    """Versions of everything that can change a plan, by name."""
    return {
        "python": platform.python_version(),
        "torch-planner": _version("torch-planner"),
        "torch": str(torch.__version__),  # with the build, which the package's own metadata leaves out for PyPI's
        "transformers": _version("transformers"),
        "bitsandbytes": _version("bitsandbytes"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def tied_to_frozen(model: torch.nn.Module, decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    """Return notes on modules that are not frozen themselves but share parameters with frozen modules.

    An output layer that is tied to the embedding is an example.
    """
    modules = frozen_modules_of(decisions)
    frozen: dict[int, str] = {}
    others: list[tuple[str, torch.nn.Parameter]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(not module or name.startswith(f"{module}.") for module in modules):
            frozen.setdefault(id(parameter), name)
        elif parameter.requires_grad:
            others.append((name, parameter))
    tied = ((name, frozen[id(parameter)]) for name, parameter in others if id(parameter) in frozen)
    return tuple(f"'{name}' is frozen too: it is the same parameter as '{other}'" for name, other in tied)


def _unused_values_notes(session: PlanningSession) -> tuple[str, ...]:
    """Return a note for each line of code for which the user stated a value that no op asked for."""
    stated = [note.rpartition(" at ")[2] for note in session.baseline.graph.assumptions if STATED in note]
    return tuple(
        f"the value stated for {line} was not used: no op on such a line reads a tensor's value or selects elements, "
        "or the rehearsal knows the result"
        for line in session.workload.answers.unused(stated)
    )


def _compile_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note on the compiled step; empty if `torch.compile` has compiled no module."""
    if not any(map(is_compiled, model.modules())):
        return ()
    return (
        "the plan is for the step without torch.compile; a compiled step usually saves less for backward (0.6 to "
        "1.0 times as many bytes in six models), but it is not known without a card what its kernels allocate",
    )


def _later_calls_notes(session: PlanningSession, certified: Certified) -> tuple[str, ...]:
    """Return a note if the user's own step may do other work in later calls than in the rehearsed ones."""
    graph = certified.graph
    schedule = graph.schedule
    if session.workload.step is None or schedule.is_certain:
        return ()
    if schedule.growth_bytes:
        return (
            f"the calls of your step hold more and more memory, {format_size(schedule.growth_bytes)} more in each "
            f"call, and the plan covers {schedule.watched} calls: keep fewer tensors from one call to the next (as in "
            "collections.deque(maxlen=8)), or move them to the host",
        )
    if not schedule.repeats:
        last = f" (the last call changed {graph.changed_state})" if graph.changed_state else ""
        return (
            f"the allocations of the first {schedule.watched} calls of your step show no repeating pattern{last}, and "
            "the plan covers only these calls: if a later call needs more memory, plan a step function that always "
            "does this work",
        )
    why = (
        f"each step changes {graph.changed_state}"
        if graph.changed_state
        else "the planner cannot prove that later calls of your step repeat the first ones"
    )
    return (
        f"{why}, and the plan covers {schedule.watched} calls: if a later call does more, such as a penalty in every "
        f"{2 * schedule.watched}nd step, plan a step function that always does it",
    )


def _later_updates_notes(certified: Certified) -> tuple[str, ...]:
    """Return a note if later updates of the user's own optimizer may do other work than the rehearsed ones."""
    graph = certified.graph
    if graph.changed_optimizer is None:
        return ()
    return (
        f"the last rehearsed step changed {graph.changed_optimizer}, and the plan covers {graph.schedule.watched} "
        "steps: if the optimizer does more in a later update, as a lookahead optimizer does in every k-th one, that "
        "update may need more memory; leave memory for it with a smaller budget (--vram)",
    )


def _host_memory_notes(certified: Certified) -> tuple[str, ...]:
    """Return a note on how much pinned host memory the plan takes; empty if the plan offloads nothing."""
    graph = certified.graph
    if not any(decision.needs_host_memory for decision in certified.choice.decisions):
        return ()
    copied_bytes: dict[tuple[int, int], int] = {}
    for op in graph.ops:
        if op.host_bytes and op.phase is Phase.FORWARD and op.step >= graph.steps - graph.schedule.period:
            part = op.step, op.micro_batch
            copied_bytes[part] = copied_bytes.get(part, 0) + op.host_bytes
    most_bytes = max(copied_bytes.values(), default=0)
    return (f"offloading keeps up to {format_size(most_bytes)} in pinned host memory",)


def _paged_state_notes(workload: Workload) -> tuple[str, ...]:
    """Return a note that the state of a paged optimizer is not counted; empty if no optimizer is known to be paged."""
    specs = by_name(workload.optimizer).values()
    if not any(
        spec.startswith("paged_") if isinstance(spec, str) else getattr(spec, "is_paged", False) for spec in specs
    ):
        return ()
    return (
        "the paged optimizer state is in CUDA's unified memory and not counted: the driver moves it to host memory "
        "when the card is full, which makes the step slower than predicted",
    )
