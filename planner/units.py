"""From a what-if recording to the checkpoint problem: what would be alive if these module calls were recomputed.

A unit is a module; checkpointing it affects all its calls. `torch.utils.checkpoint` (non-reentrant) then behaves so:

- nothing saved inside the call is kept from its forward until `back`, the first time that backward asks for any of it;
- at `back` the forward of the call runs again, up to the last tensor it saves (early stop); what it saves lives from
  there until it is unpacked, and then only as long as the backward function uses it, while a tensor that autograd
  saved itself lives until its node is released;
- the call's tensor arguments are kept until the last tensor saved in it is released.

Source: torch/utils/checkpoint.py, `_CheckpointFrame`, `_recomputation_hook`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np

from planner.search.problem import CheckpointProblem, Hold, Recompute
from planner.step_graph import StepGraph, round_up


@dataclasses.dataclass(slots=True)
class _Window:
    """Of one call: when backward first asks for what it saved, last save, last release."""

    back: float = math.inf
    last_pack: int = 0
    release: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """The problem, and the module that each unit is."""

    modules: tuple[str, ...]
    problem: CheckpointProblem


def units_of(graph: StepGraph, op_ns: list[int], *, granularity_bytes: int) -> Units:
    """The checkpoint problem of a what-if recording.

    Args:
        graph: recorded with `what_if=True`.
        op_ns: time that each op stands for, as `cost.op_times_ns` gives it.
        granularity_bytes: sizes are rounded up to this (512 for CUDA's allocator, 1 for counted bytes).
    """
    windows = _windows(graph)
    modules = _candidates(graph, windows)
    unit_of_module = {module: unit for unit, module in enumerate(modules)}
    unit_of_call = {
        index: unit_of_module[call.module] for index, call in enumerate(graph.calls) if call.module in unit_of_module
    }
    sizes = [round_up(storage.size_bytes, granularity_bytes) for storage in graph.storages]
    fixed, holds = _holds(graph, windows, unit_of_call, sizes)
    recomputes, costs = _recomputes(graph, windows, unit_of_call, sizes, op_ns, len(modules))
    problem = CheckpointProblem(
        fixed_bytes=fixed, holds=holds, recomputes=recomputes, cost_ns=costs, paths=_paths(graph, unit_of_call)
    )
    return Units(modules=modules, problem=problem)


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


def _holds(
    graph: StepGraph, windows: dict[int, _Window], unit_of_call: dict[int, int], sizes: list[int]
) -> tuple[np.ndarray, tuple[Hold, ...]]:
    pieces: dict[int, list[tuple[int, int, str, tuple[int, ...]]]] = defaultdict(list)
    for save in graph.saves:
        if save.storage is None:
            continue
        release = graph.ticks if save.release is None else save.release
        chain = [call for call in _ancestry(graph, save.call) if call in unit_of_call]
        start = save.pack
        for depth in range(len(chain), 0, -1):  # outermost first: it brings its tensors back earliest
            back = int(min(windows[chain[depth - 1]].back, release))
            if back > start:
                units = tuple(sorted({unit_of_call[call] for call in chain[:depth]}))
                pieces[save.storage].append((start, back, "unless", units))
                start = back
        unpack = release if save.unpack is None or not chain else min(save.unpack, release)
        if unpack > start:
            pieces[save.storage].append((start, unpack, "fixed", ()))
        if release > unpack:
            units = tuple(sorted({unit_of_call[call] for call in chain}))
            pieces[save.storage].append((unpack, release, "unless", units))
    for index, unit in unit_of_call.items():
        call = graph.calls[index]
        for storage in call.inputs:
            if graph.storages[storage].op is not None:
                pieces[storage].append((call.start, windows[index].release, "when", (unit,)))
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
    unit_of_call: dict[int, int],
    sizes: list[int],
    op_ns: list[int],
    n_units: int,
) -> tuple[tuple[Recompute, ...], tuple[int, ...]]:
    op_ticks = np.fromiter((op.tick for op in graph.ops), np.int64, len(graph.ops))
    elapsed = np.concatenate([[0], np.cumsum(np.array(op_ns, dtype=np.int64))])
    spans = graph.spans()
    births = np.array([span[0][0] if span else graph.ticks for span in spans])
    deaths = np.array([span[0][1] if span else graph.ticks for span in spans])
    order = np.argsort(births, kind="stable")
    births, deaths, ordered_sizes = births[order], deaths[order], np.array(sizes, dtype=np.int64)[order]
    recomputes, costs = [], [0] * n_units
    for index, unit in unit_of_call.items():
        start, stop = graph.calls[index].start, windows[index].last_pack
        first, last = np.searchsorted(op_ticks, [start, stop])
        costs[unit] += int(elapsed[last] - elapsed[first])
        first, last = np.searchsorted(births, [start, stop])
        inside = slice(first, last)
        extra = _highest(births[inside], np.minimum(deaths[inside], stop), ordered_sizes[inside])
        recomputes.append(Recompute(unit=unit, at=int(windows[index].back) - 1, extra_bytes=extra))
    return tuple(recomputes), tuple(costs)


def _highest(births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray) -> int:
    """Largest number of bytes alive at once among storages that live [birth, death)."""
    if not len(births):
        return 0
    ticks = np.concatenate([births, deaths])
    deltas = np.concatenate([sizes, -sizes])
    return int(np.cumsum(deltas[np.lexsort((deltas, ticks))]).max())


def _paths(graph: StepGraph, unit_of_call: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Each unit with the units that it runs inside of; tuples contained in a longer one are left out."""
    paths = {
        tuple(sorted({unit_of_call[outer] for outer in _ancestry(graph, index) if outer in unit_of_call}))
        for index in unit_of_call
    }
    longest: list[tuple[int, ...]] = []
    for path in sorted(paths, key=lambda path: (-len(path), path)):
        if not any(set(path) <= set(kept) for kept in longest):
            longest.append(path)
    return tuple(path for path in longest if len(path) > 1)
