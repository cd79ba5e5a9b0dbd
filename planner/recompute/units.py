"""From a what-if recording to the checkpoint problem: what would be alive if these module calls were recomputed.

A unit is a module, or a stretch of one's forward, with the results that it keeps, none or some; recomputing it affects
all its calls. `torch.utils.checkpoint` (non-reentrant) then behaves so:

- nothing saved inside the call is kept from its forward until `back`, the first time that backward asks for any of it;
- at `back` the forward of the call runs again, up to the last tensor it saves (early stop); what it saves lives from
  there until it is unpacked, and then only as long as the backward function uses it, while a tensor that autograd
  saved itself lives until its node is released;
- the call's tensor arguments are kept until the last tensor saved in it is released;
- results of products that are kept stay until that second run, which takes them instead of running the product.

A replay does the same for a stretch, but for what it runs and holds (`recompute_cost`): a tensor that the stretch saves
and did not make stays saved. An offload runs nothing again: what is saved in the call, or the inputs of one that is
recomputed, lies in the host's memory meanwhile (`offload_cost`).

Source: torch/utils/checkpoint.py, `_CheckpointFrame`, `_recomputation_hook`, `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable

import numpy as np

from planner.estimate.roofline import HostCopies
from planner.plan_types.decisions import Checkpoint, Decision, Offload, Replay
from planner.recompute.kept_products import NOTHING, Keepable
from planner.recompute.offload_cost import FROM_BYTES, Offloads
from planner.recompute.recompute_cost import Replays, Rerun, Reruns, Window
from planner.recompute.segments import with_stretches
from planner.recording.module_calls import NO_REPLAY
from planner.recording.step_graph import StepGraph, round_up
from planner.search.problem import CheckpointProblem, Hold, Recompute


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Option:
    """What a unit is for one of its calls."""

    unit: int
    rerun: Rerun


_Options = dict[int, tuple[_Option, ...]]
"""By call: the units that run it again, the one that keeps nothing first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """A module that may be recomputed, or a stretch of its forward, and the results that are kept."""

    module: str
    stretch: tuple[int, int] | None
    """Numbers of its first op and of the one after the last; None: the whole module."""
    kept: tuple[int, ...]
    """Numbers of products; in a stretch, of ops."""
    stops: tuple[int, ...] = ()
    """Numbers of ops that divide a stretch into parts."""
    runs_again: bool = True
    on_host: bool = False
    """Whether the host holds its inputs, if it runs again, or else what it saves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """The problem, and what each of its units is."""

    units: tuple[Unit, ...]
    problem: CheckpointProblem

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that may be recomputed, each once."""
        plain = (unit for unit in self.units if unit.stretch is None and unit.runs_again and not unit.on_host)
        return tuple(unit.module for unit in plain if not unit.kept)

    def decisions(self, numbers: Iterable[int]) -> tuple[Checkpoint | Replay | Offload, ...]:
        """What a plan says when the units with these numbers are chosen; nothing if there are none."""
        chosen = [self.units[number] for number in sorted(numbers)]
        modules = [unit for unit in chosen if unit.stretch is None and unit.runs_again]
        stretches = sorted((u for u in chosen if u.stretch is not None), key=lambda unit: (unit.module, unit.stretch))
        on_host = [unit for unit in chosen if unit.on_host]
        decisions: list[Checkpoint | Replay | Offload] = []
        if modules:
            kept = tuple(unit.kept for unit in modules)
            names = tuple(unit.module for unit in modules)
            decisions.append(Checkpoint(modules=names, kept=kept if any(kept) else ()))
        if stretches:
            names, ranges = tuple(unit.module for unit in stretches), tuple(unit.stretch for unit in stretches)
            kept, stops = tuple(unit.kept for unit in stretches), tuple(unit.stops for unit in stretches)
            decisions.append(Replay(modules=names, stretches=ranges, kept=kept, stops=stops if any(stops) else ()))
        if on_host:
            inputs_of = tuple(unit.module for unit in on_host if unit.runs_again)
            names = tuple(unit.module for unit in on_host)
            decisions.append(Offload(modules=names, inputs_of=inputs_of, from_bytes=FROM_BYTES))
        return tuple(decisions)


def units_of(
    graph: StepGraph,
    op_ns: list[int],
    *,
    granularity_bytes: int,
    kinds: Container[type[Decision]] = (Checkpoint, Replay),
    host_copies: HostCopies | None = None,
) -> Units:
    """The checkpoint problem of a what-if recording.

    Args:
        graph: recorded with `what_if=True`.
        op_ns: time that each op stands for, as `cost.op_times_ns` gives it.
        granularity_bytes: sizes are rounded up to this (512 for CUDA's allocator, 1 for counted bytes).
        kinds: decisions that may be made of units, `Checkpoint` and `Offload` of modules and `Replay` of stretches.
        host_copies: what those of an offload take; without it there are none.
    """
    if Replay in kinds:
        graph = with_stretches(graph)
    windows = _windows(graph)
    sizes = [round_up(storage.size_bytes, granularity_bytes) for storage in graph.storages]
    offloads = None if host_copies is None or Offload not in kinds else Offloads(graph, host_copies, sizes)
    units, options = _choices(graph, windows, op_ns, sizes, kinds, offloads)
    fixed, holds = _holds(graph, options, sizes)
    problem = CheckpointProblem(
        fixed_bytes=fixed,
        holds=holds,
        recomputes=tuple(
            Recompute(unit=option.unit, at=tick, extra_bytes=extra_bytes)
            for option in itertools.chain.from_iterable(options.values())
            for tick, extra_bytes in option.rerun.peaks
        ),
        cost_ns=_costs(options, len(units)),
        paths=_paths(graph, options),
    )
    return Units(units=units, problem=problem)


def _ancestry(graph: StepGraph, call: int | None) -> list[int]:
    """A call and the calls it is nested in, innermost first."""
    chain = []
    while call is not None:
        chain.append(call)
        call = graph.calls[call].parent
    return chain


def _windows(graph: StepGraph) -> dict[int, Window]:
    windows: dict[int, Window] = defaultdict(lambda: Window(back=math.inf, last_pack=0, release=0))
    for save in graph.saves:
        for call in _ancestry(graph, save.call):
            window = windows[call]
            window.back = min(window.back, math.inf if save.unpack is None else save.unpack)
            window.last_pack = max(window.last_pack, save.pack)
            window.release = max(window.release, graph.ticks if save.release is None else save.release)
    return windows


def _candidates(
    graph: StepGraph, windows: dict[int, Window], kinds: Container[type[Decision]]
) -> dict[tuple[str, tuple[int, int] | None], list[int]]:
    """Calls by module and stretch, where all of them may be run twice."""
    found: dict[tuple[str, tuple[int, int] | None], list[int]] = defaultdict(list)
    unusable = set()
    for index, call in enumerate(graph.calls):
        key = call.module, call.stretch
        found[key].append(index)
        keeps_something = index in windows and math.isfinite(windows[index].back)
        if call.stretch is None and not (call.module and call.obstacle is None and keeps_something):
            unusable.add(key)
        if (Checkpoint if call.stretch is None else Replay) not in kinds:
            unusable.add(key)
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or ())) if key not in unusable}


def _callable(graph: StepGraph) -> dict[str, list[int]]:
    """Calls by module, where hooks for what is saved may be set in all of them."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        if call.stretch is None:
            found[call.module].append(index)
    return {
        module: calls
        for module, calls in sorted(found.items())
        if module and not any(graph.calls[call].obstacle in NO_REPLAY for call in calls)
    }


def _choices(
    graph: StepGraph,
    windows: dict[int, Window],
    op_ns: list[int],
    sizes: list[int],
    kinds: Container[type[Decision]],
    offloads: Offloads | None,
) -> tuple[tuple[Unit, ...], _Options]:
    """Every unit, and by call the units that run it again."""
    keepable, reruns, replays = Keepable(graph, op_ns, sizes), Reruns(graph, op_ns, sizes), Replays(graph, op_ns, sizes)
    units: list[Unit] = []
    options: dict[int, tuple[_Option, ...]] = {}
    to_run_again: dict[str, int] = {}

    def add(unit: Unit, found: dict[int, Rerun | None]) -> None:
        if None not in found.values():
            for call, rerun in found.items():
                options[call] = (*options.get(call, ()), _Option(unit=len(units), rerun=rerun))
            units.append(unit)

    for (module, stretch), calls in _candidates(graph, windows, kinds).items():
        if stretch is None:
            results = keepable.choices({call: windows[call].last_pack for call in calls})
        else:
            results = keepable.choices_among({call: replays.ops_of(call) for call in calls}, first=stretch[0])
        nothing, first = dict.fromkeys(calls, NOTHING), graph.calls[calls[0]]
        choices = [] if first.only_divided else [(kept, ()) for kept in (nothing, *results)]
        if first.stops:
            choices.append((nothing, first.stops))
        for kept, stops in choices:
            if stretch is None:
                found = {call: reruns.of_module(call, windows[call], kept[call]) for call in calls}
            else:
                found = {call: replays.of_stretch(call, kept[call], stops) for call in calls}
            add(Unit(module=module, stretch=stretch, kept=kept[calls[0]].numbers, stops=stops), found)
            if offloads is not None and stretch is None and kept is nothing:
                to_run_again[module] = sum(rerun.cost_ns for rerun in found.values())
                on_host = {call: offloads.of_inputs(call, rerun) for call, rerun in found.items()}
                add(Unit(module=module, stretch=None, kept=(), on_host=True), on_host)
    for module, calls in {} if offloads is None else _callable(graph).items():
        on_host = {call: offloads.of_saved(call) for call in calls}
        if _cost_ns(on_host) <= to_run_again.get(module, math.inf):  # else it is better made again
            add(Unit(module=module, stretch=None, kept=(), runs_again=False, on_host=True), on_host)
    return tuple(units), options


def _cost_ns(reruns: dict[int, Rerun | None]) -> float:
    """Of all calls of a unit; infinite where it is none."""
    return math.inf if None in reruns.values() else sum(rerun.cost_ns for rerun in reruns.values())


def _costs(options: _Options, n_units: int) -> tuple[int, ...]:
    costs = [0] * n_units
    for option in itertools.chain.from_iterable(options.values()):
        costs[option.unit] += option.rerun.cost_ns
    return tuple(costs)


def _holds(graph: StepGraph, options: _Options, sizes: list[int]) -> tuple[np.ndarray, tuple[Hold, ...]]:
    pieces: dict[int, list[tuple[int, int, str, tuple[int, ...]]]] = defaultdict(list)
    for save in graph.saves:
        if save.storage is None:
            continue
        start, release = save.pack, graph.ticks if save.release is None else save.release
        chosen = [option for call in _ancestry(graph, save.call) for option in options.get(call, ())]
        backs = [
            (min(option.rerun.back(save), release), option) for option in chosen if not option.rerun.keeps(save.storage)
        ]
        for back in sorted({back for back, _ in backs if back > start}):  # what brings it back later frees it longer
            units = _units(option for later, option in backs if later >= back)
            pieces[save.storage].append((start, back, "unless", units))
            start = back
        unpack = release if save.unpack is None or not chosen else min(save.unpack, release)
        if unpack > start:
            pieces[save.storage].append((start, unpack, "fixed", ()))
        if release > unpack:
            units = _units(option for option in chosen if option.rerun.gives_away(save.storage))
            pieces[save.storage].append((unpack, release, "unless" if units else "fixed", units))
    for option in itertools.chain.from_iterable(options.values()):
        for storage, start, stop in option.rerun.holds:
            pieces[storage].append((start, stop, "when", (option.unit,)))
    delta = np.zeros(graph.ticks + 1, dtype=np.int64)
    holds: list[Hold] = []
    for storage, record in enumerate(graph.storages):
        lives = [(start, stop, "fixed", ()) for start, stop in record.lives]
        for start, stop, hold in _disjoint(lives + pieces.get(storage, []), sizes[storage]):
            if hold is None:
                delta[start] += sizes[storage]
                delta[stop] -= sizes[storage]
            else:
                holds.append(hold)
    return np.cumsum(delta)[:-1], tuple(holds)


def _units(options: Iterable[_Option]) -> tuple[int, ...]:
    return tuple(sorted({option.unit for option in options}))


def _disjoint(pieces: list[tuple[int, int, str, tuple[int, ...]]], size: int) -> list[tuple[int, int, Hold | None]]:
    """Cut overlapping pieces at their ends: each result is held for certain (None) or on one condition."""
    if len(pieces) == 1 and pieces[0][2] == "fixed":
        return [(pieces[0][0], pieces[0][1], None)]
    cuts = sorted({tick for start, stop, _, _ in pieces for tick in (start, stop)})
    result: list[tuple[int, int, Hold | None]] = []
    for start, stop in itertools.pairwise(cuts):
        active = [(kind, units) for first, last, kind, units in pieces if first <= start and stop <= last]
        if not active:
            continue
        if any(kind == "fixed" for kind, _ in active):
            result.append((start, stop, None))
            continue
        unless = tuple(sorted({units for kind, units in active if kind == "unless"}))
        when = tuple(sorted({units[0] for kind, units in active if kind == "when"}))
        if result and result[-1][1] == start and (last := result[-1][2]) and (last.unless, last.when) == (unless, when):
            start = result.pop()[0]
        result.append((start, stop, Hold(size_bytes=size, start=start, stop=stop, unless=unless, when=when)))
    return result


def _paths(graph: StepGraph, options: _Options) -> tuple[tuple[int, ...], ...]:
    """Units of a module and of all that it runs inside of; tuples contained in a longer one are left out."""
    paths = {
        _units(option for outer in _ancestry(graph, index) for option in options.get(outer, ())) for index in options
    }
    longest: list[tuple[int, ...]] = []
    for path in sorted(paths, key=lambda path: (-len(path), path)):
        if not any(set(path) <= set(kept) for kept in longest):
            longest.append(path)
    return tuple(path for path in longest if len(path) > 1)
