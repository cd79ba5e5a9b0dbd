"""What it frees, holds and takes to leave to the host's memory what is saved in a call (`rewrite/rules/offload.py`).

What a call made and saved is copied when it is saved, and copied back when backward first asks for a part of it. There
it is until backward has asked for all of it. Of a call that runs again it is the inputs, which come back before that.
Where others hold on to the same storage for longer a copy frees nothing, and such calls are left as they are.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable

from planner.estimate.roofline import HostCopies
from planner.recompute.recompute_cost import Rerun
from planner.recording.step_graph import Save, StepGraph

FROM_BYTES = 1 << 20
"""Smaller storages are not worth the launch of two copies."""


class Offloads:
    """Of the calls of one recording.

    Args:
        sizes: of storages, rounded as the allocator does.
    """

    def __init__(self, graph: StepGraph, copies: HostCopies, sizes: list[int]) -> None:
        self._graph, self._copies, self._sizes = graph, copies, sizes
        self._ticks = [op.tick for op in graph.ops]
        self._saves: dict[int, dict[int, list[Save]]] = defaultdict(lambda: defaultdict(list))
        self._all_saves: dict[int, list[Save]] = defaultdict(list)
        for save in graph.saves:
            if save.storage is None or graph.storages[save.storage].size_bytes < FROM_BYTES:
                continue
            self._all_saves[save.storage].append(save)
            call = save.call
            while call is not None:
                self._saves[call][save.storage].append(save)
                call = graph.calls[call].parent

    def of_saved(self, call: int) -> Rerun | None:
        """What the call made and saves; None if that is nothing of some size."""
        given = set(self._graph.calls[call].inputs)
        saves = {storage: saves for storage, saves in self._saves[call].items() if storage not in given}
        asked = {storage: self._asked(saves[storage]) for storage in saves}
        if not saves or any(self._is_held(storage, saves[storage], asked[storage][0]) for storage in saves):
            return None
        return Rerun(
            backs={save.pack: asked[storage][0] for storage in saves for save in saves[storage]},
            frees=frozenset(saves),
            kept=frozenset(),
            holds=tuple((storage, first, last) for storage, (first, last) in asked.items() if first < last),
            cost_ns=self._cost_ns(call, saves),
            peaks=(),
        )

    def of_inputs(self, call: int, rerun: Rerun) -> Rerun | None:
        """The inputs of a call that runs again; None if they are small, or made by nothing."""
        graph = self._graph
        copied = {s for s in graph.calls[call].made_inputs if graph.storages[s].size_bytes >= FROM_BYTES}
        back = rerun.peaks[0][0]
        if not copied or any(self._is_held(storage, self._saves[call].get(storage, []), back) for storage in copied):
            return None
        size_bytes = sum(self._sizes[storage] for storage in copied)
        return dataclasses.replace(
            rerun,
            holds=tuple(hold for hold in rerun.holds if hold[0] not in copied),
            cost_ns=rerun.cost_ns + self._cost_ns(call, copied),
            peaks=tuple((at, most_bytes + size_bytes) for at, most_bytes in rerun.peaks),
        )

    def _asked(self, saves: list[Save]) -> tuple[int, int]:
        """When backward asks for the first of these, and when it has asked for all; one is released without."""
        ticks = self._graph.ticks
        asked = [save.unpack for save in saves if save.unpack is not None]
        if not asked:
            return ticks, ticks
        released = [ticks if save.release is None else save.release for save in saves if save.unpack is None]
        return min(asked), max(asked + released)

    def _is_held(self, storage: int, saves: list[Save], back: int) -> bool:
        """Whether others than these still hold a storage when it comes back: then it is there twice."""
        inside = {save.pack for save in saves}
        others = (save for save in self._all_saves[storage] if save.pack not in inside)
        return any(save.release is None or save.release > back for save in others)

    def _cost_ns(self, call: int, storages: Iterable[int]) -> int:
        op = self._graph.ops[max(bisect(self._ticks, self._graph.calls[call].end) - 1, 0)]
        sizes = (self._graph.storages[storage].size_bytes for storage in storages)
        return sum(self._copies.ns(size, op.micro_batch) for size in sizes)
