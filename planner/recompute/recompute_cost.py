"""The cost of recomputing one call of a unit: the memory held for the recompute, its time, and its own peak memory.

A module is recomputed by running its forward again as Python code, up to the last tensor that it saves. A segment is
recomputed by a replay of its ops instead (`planner.recompute.replay_cost`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.recompute.kept_products import Kept
from planner.recompute.replay_memory import SegmentReplay
from planner.recompute.windows import Window
from planner.recording.step_graph import Save, StepGraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rerun:
    """The cost of one call if it is recomputed (or offloaded) by one unit."""

    backs: dict[int, int] | int
    """Tick at which saved tensors are made again (or copied back): one tick for all saves of the call, or a dict with
    one tick for each save of a storage in `frees`; its keys are the `Save.pack` of the saves. If a tensor is not made
    again, the tick is the end of the recording."""
    frees: frozenset[int] | None
    """Storages saved in the call that are freed until they are made again; None for all storages except `kept`."""
    kept: frozenset[int]
    """Storages of the outputs that selective checkpointing keeps."""
    releases: bool = True
    """True if a saved tensor is freed as soon as backward has read it; autograd would hold it longer, until the node is
    released. False if a second backward reads it."""
    holds: tuple[tuple[int, int, int], ...]
    """(storage, first tick, tick after the last) of storages that are kept alive because the unit is selected: inputs
    that the recompute needs, tensors from which later replays start, or offloaded tensors that were copied back."""
    cost_ns: int
    """Time of the recompute and of copies between device and host, in ns."""
    peaks: tuple[tuple[int, int], ...]
    """(tick, bytes) for each time the call is recomputed: the most bytes that the recompute has alive at once, without
    `holds`. A divided segment is recomputed once per part."""
    copied: frozenset[int] = frozenset()
    """Inputs that were offloaded and that are copied back before the recompute. `peaks` includes them."""
    replays: tuple[SegmentReplay, ...] = ()
    """The replays of a segment, one for each entry of `peaks`; none for a module."""

    def back(self, save: Save) -> int:
        """Returns the tick at which a saved tensor is made again or copied back."""
        return self.backs if isinstance(self.backs, int) else self.backs[save.pack]

    def keeps(self, save: Save) -> bool:
        """True if the unit leaves a saved tensor alive until backward reads it."""
        return save.storage in self.kept if self.frees is None else save.storage not in self.frees

    def makes(self, save: Save, *, since: int, born: int) -> bool:
        """True if the unit makes a saved tensor again or copies it back. A recompute does not make its inputs.

        Args:
            since: tick at which the call began.
            born: tick at which the storage was born.
        """
        return not self.keeps(save) and (self.frees is not None or born > since)

    def gives_away(self, storage: int) -> bool:
        """True if a saved storage is freed as soon as backward has read it."""
        return self.releases and (self.frees is None or storage in self.frees)


class Reruns:
    """Computes the cost of recomputing whole modules.

    Args:
        graph: a what-if recording.
        op_ns: time of each op in ns.
        sizes: bytes of each storage, rounded up as the allocator does.
    """

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int]) -> None:
        self._graph, self._op_ns, self._sizes = graph, op_ns, sizes
        self._op_ticks = np.fromiter((op.tick for op in graph.ops), np.int64, len(graph.ops))
        self._elapsed = np.concatenate([[0], np.cumsum(np.array(op_ns, dtype=np.int64))])
        self._is_saved = np.zeros(len(graph.storages), dtype=bool)
        self._is_saved[[save.storage for save in graph.saves if save.storage is not None]] = True
        # Storages in order of birth, so that those born inside of a call are one slice.
        spans = graph.spans()
        births = np.array([span[0][0] if span else graph.ticks for span in spans])
        deaths = np.array([span[0][1] if span else graph.ticks for span in spans])
        self._order = np.argsort(births, kind="stable")
        self._births, self._deaths = births[self._order], deaths[self._order]
        self._ordered_sizes = np.array(sizes, dtype=np.int64)[self._order]
        self._made_by = np.array([-1 if storage.op is None else storage.op for storage in graph.storages])

    def of_module(self, index: int, window: Window, kept: Kept) -> Rerun:
        """Returns the cost of running the whole forward of call `index` again, except for the products in `kept`.

        If no backward reads what the call saved, it does not run again. If a second backward reads it, the forward runs
        again for it, too, and the saved tensors are counted as held between the two.
        """
        graph, call = self._graph, self._graph.calls[index]
        # Held: the inputs until the last saved tensor is released, the kept outputs until the recompute takes them.
        taken = int(window.back) - 1 if window.is_read else window.release
        holds = [(s, call.start, window.release) for s in call.inputs if graph.storages[s].op is not None]
        holds += [(s, graph.storages[s].lives[0][0], taken) for s in kept.storages]
        if not window.is_read:
            return Rerun(backs=graph.ticks, frees=None, kept=kept.storages, holds=tuple(holds), cost_ns=0, peaks=())
        # The recompute ends at the last save (early stop). Its memory repeats the recorded lives inside of the call.
        first_op, last_op = np.searchsorted(self._op_ticks, [call.start, window.last_pack])
        inside = slice(*np.searchsorted(self._births, [call.start, window.last_pack]))
        born, held = self._births[inside], self._ordered_sizes[inside]
        if kept.storages:
            # Kept outputs are alive from the start. If autograd saved them too, the memory curve counts them already.
            numbers = self._order[inside]
            is_kept = np.isin(numbers, list(kept.storages))
            # Workspaces of kept products are not allocated, because these products do not run again.
            is_scratch = ~is_kept & np.isin(self._made_by[numbers], list(kept.ops))
            is_counted = (is_kept & self._is_saved[numbers]) | is_scratch
            born, held = np.where(is_kept, call.start, born), np.where(is_counted, 0, held)
        forward_ns = int(self._elapsed[last_op] - self._elapsed[first_op])
        highest_bytes = _highest(born, np.minimum(self._deaths[inside], window.last_pack), held)
        backs = (window.back, *([window.again] if window.is_read_twice else []))
        return Rerun(
            backs=int(window.back),
            frees=None,
            kept=kept.storages,
            releases=not window.is_read_twice,
            holds=tuple(holds),
            cost_ns=len(backs) * forward_ns - sum(self._op_ns[op] for op in kept.ops),
            peaks=tuple((int(back) - 1, highest_bytes) for back in backs),
        )


def _highest(births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray) -> int:
    """Returns the largest number of bytes alive at once, for storages that are alive at ticks [birth, death)."""
    if not len(births):
        return 0
    ticks = np.concatenate([births, deaths])
    deltas = np.concatenate([sizes, -sizes])
    return int(np.cumsum(deltas[np.lexsort((deltas, ticks))]).max())
