"""From a what-if recording to the checkpoint problem: what would be alive if these module calls were recomputed.

A unit is a module with the products that it keeps, none or some; checkpointing it affects all its calls.
`torch.utils.checkpoint` (non-reentrant) then behaves so:

- nothing saved inside the call is kept from its forward until `back`, the first time that backward asks for any of it;
- at `back` the forward of the call runs again, up to the last tensor it saves (early stop); what it saves lives from
  there until it is unpacked, and then only as long as the backward function uses it, while a tensor that autograd
  saved itself lives until its node is released;
- the call's tensor arguments are kept until the last tensor saved in it is released;
- results of products that are kept stay until that second run, which takes them instead of running the product.

Source: torch/utils/checkpoint.py, `_CheckpointFrame`, `_recomputation_hook`, `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from planner.decisions import Checkpoint
from planner.products import NOTHING, Keepable, Kept
from planner.search.problem import CheckpointProblem, Hold, Recompute
from planner.step_graph import StepGraph, round_up


@dataclasses.dataclass(slots=True)
class _Window:
    """Of one call: when backward first asks for what it saved, last save, last release."""

    back: float = math.inf
    last_pack: int = 0
    release: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Option:
    """What a unit is for one of its module's calls."""

    unit: int
    kept: Kept


_Options = dict[int, tuple[_Option, ...]]
"""By call: the units that run it again, the one that keeps nothing first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """A module that may be recomputed, and the products whose results it keeps."""

    module: str
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """The problem, and what each of its units is."""

    units: tuple[Unit, ...]
    problem: CheckpointProblem

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that may be recomputed, each once."""
        return tuple(unit.module for unit in self.units if not unit.kept)

    def decisions(self, numbers: Iterable[int]) -> tuple[Checkpoint, ...]:
        """What a plan says when the units with these numbers are recomputed; nothing if there are none."""
        chosen = [self.units[number] for number in sorted(numbers)]
        if not chosen:
            return ()
        kept = tuple(unit.kept for unit in chosen)
        return (Checkpoint(modules=tuple(unit.module for unit in chosen), kept=kept if any(kept) else ()),)


def units_of(graph: StepGraph, op_ns: list[int], *, granularity_bytes: int) -> Units:
    """The checkpoint problem of a what-if recording.

    Args:
        graph: recorded with `what_if=True`.
        op_ns: time that each op stands for, as `cost.op_times_ns` gives it.
        granularity_bytes: sizes are rounded up to this (512 for CUDA's allocator, 1 for counted bytes).
    """
    windows = _windows(graph)
    sizes = [round_up(storage.size_bytes, granularity_bytes) for storage in graph.storages]
    units, options = _choices(graph, windows, Keepable(graph, op_ns, sizes))
    fixed, holds = _holds(graph, windows, options, sizes)
    recomputes, costs = _recomputes(graph, windows, options, sizes, op_ns, len(units))
    problem = CheckpointProblem(
        fixed_bytes=fixed, holds=holds, recomputes=recomputes, cost_ns=costs, paths=_paths(graph, options)
    )
    return Units(units=units, problem=problem)


def _ancestry(graph: StepGraph, call: int | None) -> list[int]:
    """A call and the calls it is nested in, innermost first."""
    chain = []
    while call is not None:
        chain.append(call)
        call = graph.calls[call].parent
    return chain


def _windows(graph: StepGraph) -> dict[int, _Window]:
    windows: dict[int, _Window] = defaultdict(_Window)
    for save in graph.saves:
        for call in _ancestry(graph, save.call):
            window = windows[call]
            window.back = min(window.back, math.inf if save.unpack is None else save.unpack)
            window.last_pack = max(window.last_pack, save.pack)
            window.release = max(window.release, graph.ticks if save.release is None else save.release)
    return windows


def _candidates(graph: StepGraph, windows: dict[int, _Window]) -> tuple[str, ...]:
    """Modules all of whose calls may be run twice and keep something for backward."""
    seen: dict[str, bool] = {}
    for index, call in enumerate(graph.calls):
        usable = call.obstacle is None and index in windows and math.isfinite(windows[index].back)
        seen[call.module] = seen.get(call.module, True) and usable
    return tuple(sorted(name for name, usable in seen.items() if usable and name))


def _choices(graph: StepGraph, windows: dict[int, _Window], keepable: Keepable) -> tuple[tuple[Unit, ...], _Options]:
    """Every unit, and by call the units that run it again."""
    calls_of: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        calls_of[call.module].append(index)
    units: list[Unit] = []
    options: dict[int, tuple[_Option, ...]] = {}
    for module in _candidates(graph, windows):
        calls = calls_of[module]
        nothing = dict.fromkeys(calls, NOTHING)
        for kept in (nothing, *keepable.choices({call: windows[call].last_pack for call in calls})):
            option_of = {call: _Option(unit=len(units), kept=kept[call]) for call in calls}
            units.append(Unit(module=module, kept=kept[calls[0]].numbers))
            options |= {call: (*options.get(call, ()), option) for call, option in option_of.items()}
    return tuple(units), options


def _holds(
    graph: StepGraph, windows: dict[int, _Window], options: _Options, sizes: list[int]
) -> tuple[np.ndarray, tuple[Hold, ...]]:
    pieces: dict[int, list[tuple[int, int, str, tuple[int, ...]]]] = defaultdict(list)
    for save in graph.saves:
        if save.storage is None:
            continue
        release = graph.ticks if save.release is None else save.release
        chain = [call for call in _ancestry(graph, save.call) if call in options]
        start = save.pack
        for depth in range(len(chain), 0, -1):  # outermost first: it brings its tensors back earliest
            back = int(min(windows[chain[depth - 1]].back, release))
            if back > start:
                chosen = [option for call in chain[:depth] for option in options[call]]
                units = _units(option for option in chosen if save.storage not in option.kept.storages)
                pieces[save.storage].append((start, back, "unless" if units else "fixed", units))
                start = back
        unpack = release if save.unpack is None or not chain else min(save.unpack, release)
        if unpack > start:
            pieces[save.storage].append((start, unpack, "fixed", ()))
        if release > unpack:
            units = _units(option for call in chain for option in options[call])
            pieces[save.storage].append((unpack, release, "unless", units))
    for index, choices in options.items():
        call, window = graph.calls[index], windows[index]
        for option in choices:
            for storage in call.inputs:
                if graph.storages[storage].op is not None:
                    pieces[storage].append((call.start, window.release, "when", (option.unit,)))
            for storage in option.kept.storages:
                birth = graph.storages[storage].lives[0][0]
                pieces[storage].append((birth, int(window.back) - 1, "when", (option.unit,)))
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


def _recomputes(
    graph: StepGraph,
    windows: dict[int, _Window],
    options: _Options,
    sizes: list[int],
    op_ns: list[int],
    n_units: int,
) -> tuple[tuple[Recompute, ...], tuple[int, ...]]:
    op_ticks = np.fromiter((op.tick for op in graph.ops), np.int64, len(graph.ops))
    elapsed = np.concatenate([[0], np.cumsum(np.array(op_ns, dtype=np.int64))])
    saved = {save.storage for save in graph.saves}
    spans = graph.spans()
    births = np.array([span[0][0] if span else graph.ticks for span in spans])
    deaths = np.array([span[0][1] if span else graph.ticks for span in spans])
    order = np.argsort(births, kind="stable")
    births, deaths, ordered_sizes = births[order], deaths[order], np.array(sizes, dtype=np.int64)[order]
    recomputes, costs = [], [0] * n_units
    for index, choices in options.items():
        start, stop = graph.calls[index].start, windows[index].last_pack
        first_op, last_op = np.searchsorted(op_ticks, [start, stop])
        inside = slice(*np.searchsorted(births, [start, stop]))
        for option in choices:
            spared_ns = sum(op_ns[op] for op in option.kept.ops)
            costs[option.unit] += int(elapsed[last_op] - elapsed[first_op]) - spared_ns
            born, held = births[inside], ordered_sizes[inside]
            if option.kept.storages:
                kept = np.array([storage in option.kept.storages for storage in order[inside].tolist()])
                there = np.array([storage in saved for storage in order[inside].tolist()])
                born, held = np.where(kept, start, born), np.where(kept & there, 0, held)
            extra = _highest(born, np.minimum(deaths[inside], stop), held)
            recomputes.append(Recompute(unit=option.unit, at=int(windows[index].back) - 1, extra_bytes=extra))
    return tuple(recomputes), tuple(costs)


def _highest(births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray) -> int:
    """Largest number of bytes alive at once among storages that live [birth, death)."""
    if not len(births):
        return 0
    ticks = np.concatenate([births, deaths])
    deltas = np.concatenate([sizes, -sizes])
    return int(np.cumsum(deltas[np.lexsort((deltas, ticks))]).max())


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
