"""Memory freed, memory held and time taken when the saved tensors of a call are offloaded to host memory.

`rewrite/rules/offload.py` does the offloading. A storage that a call made and saved is copied to the host when autograd
saves it, and copied back when backward first reads a tensor on it. The copy on the device is held until backward has
read all tensors that the call saved on this storage. For a call that is also recomputed, the inputs of the call are
offloaded instead, and are copied back before the recompute.

If the same storage is also saved outside of the call, and still held there when it would be copied back, offloading
frees nothing. Such a call is not offloaded.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable

from planner.estimate.roofline import HostCopies
from planner.recompute.recompute_cost import Rerun
from planner.recording.step_graph import Save, StepGraph

FROM_BYTES = 1 << 20
"""Minimum size of an offloaded storage in bytes; a smaller storage is not worth launching two copies."""


class Offloads:
    """Computes what offloading costs for the calls of one recording.

    Args:
        graph: a what-if recording.
        copies: gives the time of a copy to the host and back.
        sizes: bytes of each storage, rounded up as the allocator does.
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
            for call in graph.enclosing(save.call):
                self._saves[call][save.storage].append(save)

    def of_saved(self, call: int) -> Rerun | None:
        """Returns the cost of offloading the tensors that the call makes and saves.

        Returns None if none of their storages is as large as `FROM_BYTES`, if another call holds one of them longer, or
        if two backwards read one of them.
        """
        inputs = set(self._graph.calls[call].inputs)
        saves = {storage: saves for storage, saves in self._saves[call].items() if storage not in inputs}
        reads = {storage: self._reads(saves[storage]) for storage in saves}
        if any(save.again is not None for of_storage in saves.values() for save in of_storage):
            return None
        if not saves or any(self._is_held_elsewhere(storage, saves[storage], reads[storage][0]) for storage in saves):
            return None
        return Rerun(
            backs={save.pack: reads[storage][0] for storage in saves for save in saves[storage]},
            frees=frozenset(saves),
            kept=frozenset(),
            holds=tuple((storage, first, last) for storage, (first, last) in reads.items() if first < last),
            cost_ns=self._cost_ns(call, saves),
            peaks=(),
        )

    def of_inputs(self, call: int, rerun: Rerun) -> Rerun | None:
        """Returns the cost of a recompute (`rerun`), changed for inputs of the call that are offloaded until then.

        Only inputs that the model made are offloaded. Returns None if none of them is as large as `FROM_BYTES`, or if
        one of them is also held outside of the call.
        """
        graph = self._graph
        copied = {s for s in graph.calls[call].made_inputs if graph.storages[s].size_bytes >= FROM_BYTES}
        back = rerun.peaks[0][0] if rerun.peaks else graph.ticks
        saves = self._saves[call]
        if (
            not copied
            or not rerun.releases
            or any(self._is_held_elsewhere(storage, saves.get(storage, []), back) for storage in copied)
        ):
            return None
        size_bytes = sum(self._sizes[storage] for storage in copied)
        return dataclasses.replace(
            rerun,
            holds=tuple(hold for hold in rerun.holds if hold[0] not in copied),
            cost_ns=rerun.cost_ns + self._cost_ns(call, copied),
            peaks=tuple((at, most_bytes + size_bytes) for at, most_bytes in rerun.peaks),
            copied=frozenset(copied),
        )

    def _reads(self, saves: Collection[Save]) -> tuple[int, int]:
        """Returns the tick at which backward first reads one of the saves, and the tick from which it needs none.

        Both are the end of the recording if backward reads none of them.
        """
        ticks = self._graph.ticks
        reads = [save.unpack for save in saves if save.unpack is not None]
        if not reads:
            return ticks, ticks
        # Backward may skip a save; then autograd holds it until it releases the node.
        released = [ticks if save.release is None else save.release for save in saves if save.unpack is None]
        return min(reads), max(reads + released)

    def _is_held_elsewhere(self, storage: int, saves: Iterable[Save], back: int) -> bool:
        """True if saves of the storage other than `saves` still hold it at tick `back`, when the copy comes back."""
        inside = {save.pack for save in saves}
        others = (save for save in self._all_saves[storage] if save.pack not in inside)
        return any(save.release is None or save.release > back for save in others)

    def _cost_ns(self, call: int, storages: Iterable[int]) -> int:
        op = self._graph.ops[max(bisect(self._ticks, self._graph.calls[call].end) - 1, 0)]
        sizes = (self._graph.storages[storage].size_bytes for storage in storages)
        return sum(self._copies.ns(size, op.micro_batch) for size in sizes)
