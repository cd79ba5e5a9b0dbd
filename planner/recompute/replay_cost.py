"""The cost of recomputing one call of a segment by a *replay*.

Only the ops that lead to a saved tensor (its ancestors in the graph of ops and storages) run again, and every tensor
that they make is freed after its last use by these ops. To make this possible, the host records the ops of the segment
during the forward (`rewrite/portable/replay_tape.py`). The host takes longer to record an op than to launch it. If a
segment has many small ops, its kernels wait for the host, and the step becomes slower.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence

from planner.estimate.tape_time import recorded_ns, replayed_ns
from planner.recompute.kept_products import Kept
from planner.recompute.recompute_cost import Rerun
from planner.recompute.replay_memory import ReplayMemory, SegmentReplay, Stage
from planner.recompute.segments import position_of
from planner.recording.module_calls import ops_in
from planner.recording.step_graph import Save, StepGraph

_COPIED_STATISTICS = 2
"""Number of running statistics of a norm that a replay copies: mean and variance."""
_EMPTY = ("aten.empty", "aten.new_empty")
"""Names of ops whose results have no values yet begin with one of these."""


class Replays:
    """Computes the cost of replaying segments op by op.

    Args:
        graph: a what-if recording with segments (`planner.recompute.segments.with_segments`).
        op_ns: time of each op in ns.
        sizes: bytes of each storage, rounded up as the allocator does.
        launch_ns: time in ns that the host takes to launch an op.
    """

    def __init__(self, graph: StepGraph, op_ns: list[int], sizes: list[int], launch_ns: int = 0) -> None:
        self._graph, self._op_ns, self._launch_ns = graph, op_ns, launch_ns
        self.memory = ReplayMemory(graph, sizes)
        self._segments = {index: call.segment for index, call in enumerate(graph.calls) if call.segment is not None}
        self._ops: dict[int, list[int]] = {}
        self._saves: dict[int, list[tuple[int, Save]]] = defaultdict(list)  # by call: storages and their saves
        self._writes: dict[int, list[int]] = defaultdict(list)
        if not self._segments:
            return
        unfilled = _saved_before_filled(graph)
        for save in graph.saves:
            if save.storage is not None and save.storage not in unfilled:
                for call in graph.enclosing(save.call):
                    self._saves[call].append((save.storage, save))
        for op in graph.ops:
            if op.writes and op.phase == "forward":
                for written in set(op.inputs) & set(op.outputs):
                    self._writes[written].append(op.tick)

    def ops_of(self, call: int) -> list[int]:
        """Returns the indices of a segment's ops, in the order of their numbers."""
        if call not in self._ops:
            owner = next(outer for outer in self._graph.enclosing(call) if outer not in self._segments)
            if owner not in self._ops:
                self._ops[owner] = ops_in(self._graph, owner)
            start, stop = self._segments[call]
            self._ops[call] = self._ops[owner][start:stop]
        return self._ops[call]

    def of_segment(self, index: int, kept: Kept, split_points: tuple[int, ...]) -> Rerun | None:
        """Returns the cost of replaying the ops of a segment that lead to the tensors it saved.

        Args:
            index: the segment, as an index into the recording's calls.
            kept: products that are kept instead of run again.
            split_points: numbers of the ops at which the segment is divided into parts that replay one at a time.

        Returns:
            The cost; None if the replay would free nothing, or if a tensor that the ops read is overwritten later.
        """
        graph, numbered, kept_ops = self._graph, self.ops_of(index), frozenset(kept.ops)
        # 1. The tensors that the segment makes and saves. None of them is held in the forward.
        ops = [op for op in numbered if op not in kept_ops]
        made = self._made(ops)
        made_saves = [(storage, save) for storage, save in self._saves[index] if storage in made]
        # 2. The parts, each with the tensors that are made again.
        parts = self._parts(index, kept_ops, split_points)
        saves = [entry for part in parts for entry in part.saves]
        if not saves or any(save.again is not None for _, save in saves):  # a tape replays for one backward only
            return None
        # 3. The ops that have to run again. A replay is wrong if a tensor that they read is overwritten after the first
        #    read, or if a part overwrites a tensor that an earlier part hands to it: the replay would write to a copy.
        program = [op for part in parts for op in sorted({*part.to_make, *part.to_pass})]
        starts = self._first_reads(program, made)
        if any(tick >= starts[storage] for storage in starts for tick in self._writes[storage]):
            return None
        if any(tick >= part.start for part in parts for storage in part.crossing for tick in self._writes[storage]):
            return None
        # 4. Tensors that are held: those that the replay reads and that were made before the segment, until the last
        #    release; other tensors that the segment reads, until its end; outputs of kept products, from their birth.
        release = max(graph.ticks if save.release is None else save.release for _, save in saves)
        births = {storage: graph.storages[storage].lives[0][0] for storage in kept.storages}
        held = [
            (storage, tick, release if storage in starts else graph.calls[index].end)
            for storage, tick in (self._first_reads(ops, made) | births).items()
            if graph.storages[storage].op is not None
        ]
        # 5. Time, peaks and further holds, found by simulating the replays.
        run = _Run(self, parts, release)
        backs = {save.pack: part.back for part in parts for _, save in part.saves}
        return Rerun(
            backs={save.pack: graph.ticks if (b := backs.get(save.pack)) is None else b for _, save in made_saves},
            frees=frozenset(storage for storage, _ in made_saves),
            kept=kept.storages,
            holds=(*held, *run.holds),
            cost_ns=run.cost_ns + self._recording_ns(numbered),
            peaks=tuple((replay.at, self.memory.peak_bytes(replay)) for replay in run.replays),
            replays=tuple(run.replays),
        )

    def _parts(self, index: int, kept_ops: frozenset[int], split_points: tuple[int, ...]) -> list[_Part]:
        """Returns the parts of a segment, each with its ops and the tensors that autograd saved for these ops.

        A save that autograd releases before the segment ends is not made again, although other saves of its storage
        may be.
        """
        graph, numbered, first = self._graph, self.ops_of(index), self._segments[index][0]
        ticks = [graph.ops[op].tick for op in numbered]
        bounds = [0, *(point - first for point in split_points), len(numbered)]
        parts = [
            _Part(start=ticks[start], ops=[op for op in numbered[start:stop] if op not in kept_ops])
            for start, stop in itertools.pairwise(bounds)
        ]
        made = self._made([op for part in parts for op in part.ops])
        for storage, save in self._saves[index]:
            if storage in made and (save.release is None or save.release > graph.calls[index].end):
                parts[bisect(split_points, first + position_of(save, ticks))].saves.append((storage, save))
        self._trace(parts)
        return parts

    def _trace(self, parts: list[_Part]) -> None:
        """Sets `to_make`, `to_pass` and `crossing` of every part, from the last part to the first."""
        made_before: list[set[int]] = [set()]
        for part in parts[:-1]:
            made_before.append(made_before[-1] | self._made(part.ops))
        after: set[int] = set()
        for part, made in zip(reversed(parts), reversed(made_before), strict=True):
            part.to_make, reads = self._leading_to(part.wanted, part.ops)
            part.to_pass, also_reads = self._leading_to(after, part.ops)
            after = part.crossing = (reads | also_reads) & made

    def _first_reads(self, ops: list[int], made: set[int]) -> dict[int, int]:
        """Returns, for each storage that the ops read and that is not in `made`, the tick of the first read."""
        read = ((s, self._graph.ops[op].tick) for op in reversed(ops) for s in self._graph.ops[op].inputs)
        return {storage: tick for storage, tick in read if storage not in made}

    def _made(self, ops: list[int]) -> set[int]:
        """Returns the storages that the ops make."""
        graph = self._graph
        return {storage for op in ops for storage in graph.ops[op].outputs if graph.storages[storage].op == op}

    def _leading_to(self, wanted: set[int], ops: list[int]) -> tuple[list[int], set[int]]:
        """Returns the ops that lead to the wanted storages, and all storages that are wanted or read by these ops.

        The ops are the ancestors of the storages, found in one backward sweep, since execution order is a topological
        order. `networkx.ancestors` finds the same (a test compares them) but takes 20 times as long, most of it for
        the subgraph of the segment: for all segments of examples/flat.py 104 ms against 5.2 ms, and of
        examples/llama_1b 131 ms against 6.3 ms, on top of 150 and 210 ms for the whole checkpoint problem, which is
        built once per recording (CPU time, networkx 3.6.1).
        """
        needed, leading = set(wanted), []
        for op in reversed(ops):
            if not needed.isdisjoint(self._graph.ops[op].outputs):
                needed.update(self._graph.ops[op].inputs)
                leading.append(op)
        return leading[::-1], needed

    def ns_of(self, ops: Sequence[int]) -> int:
        """Returns the time in ns of replaying these ops, and of copying the running statistics that they update."""
        copied = sum(op in self.memory.statistics for op in ops)
        copies_ns = _COPIED_STATISTICS * copied * replayed_ns(0, self._launch_ns)
        return sum(replayed_ns(self._op_ns[op], self._launch_ns) for op in ops) + copies_ns

    def _recording_ns(self, ops: Sequence[int]) -> int:
        """Returns the time in ns by which the forward becomes longer because these ops are recorded on a tape."""
        return sum(recorded_ns(self._op_ns[op], self._launch_ns) - self._op_ns[op] for op in ops)


@dataclasses.dataclass
class _Part:
    """One part of a divided segment; an undivided segment is a single part."""

    start: int
    """Tick at which the part begins in the forward."""
    ops: list[int]
    """The ops that it runs, without those whose outputs are kept."""
    saves: list[tuple[int, Save]] = dataclasses.field(default_factory=list)
    """(storage, save) of each tensor that autograd saved for an op of this part."""
    to_make: list[int] = dataclasses.field(default_factory=list)
    """Ops of this part that lead to the tensors saved in this part; they run when this part is replayed."""
    to_pass: list[int] = dataclasses.field(default_factory=list)
    """Ops of this part that lead to tensors that later parts read; they run when a later part is replayed."""
    crossing: set[int] = dataclasses.field(default_factory=set)
    """Storages that earlier parts make, and that this part or a later part reads."""

    @functools.cached_property
    def wanted(self) -> set[int]:
        """Storages of this part that hold tensors saved for backward."""
        return {storage for storage, _ in self.saves}

    @functools.cached_property
    def back(self) -> int | None:
        """Tick at which backward first reads a tensor that this part saved; None if it reads none."""
        return min((save.unpack for _, save in self.saves if save.unpack is not None), default=None)

    def can_be_read(self, tick: int) -> bool:
        """True if autograd still holds a tensor saved in this part at this tick."""
        return any(save.release is None or save.release > tick for _, save in self.saves)


class _Run:
    """Simulates all replays of one segment, in the order in which backward reads its parts.

    `rewrite/rules/segment_checkpoint.py` replays in the same way. A replay of a part runs all parts from the nearest
    *starting point* on. A starting point is a part whose inputs were kept by an earlier replay; the first part always
    is one. While the parts on the way run, new starting points are kept: the part in the middle of the way, the part in
    the middle of the second half, and so on. Backward reads the last part first. So each part runs about log2(parts)
    times, and about log2(parts) starting points are alive at once. This is the recursive bisection of Griewank 1992. It
    is not the optimal schedule (Revolve, Griewank and Walther 2000), which needs to know how many starting points fit
    in memory.
    """

    def __init__(self, replays: Replays, parts: list[_Part], release: int) -> None:
        self._replays, self._parts, self._release = replays, parts, release
        self._starting_points: dict[int, set[int]] = {}  # part -> its inputs, kept by a replay
        self._parts_run: set[int] = set()
        self.holds: list[tuple[int, int, int]] = []
        self.replays: list[SegmentReplay] = []
        self.cost_ns = 0
        for back, number in sorted((part.back, n) for n, part in enumerate(parts) if part.back is not None):
            self._replay(number, back)

    def _replay(self, wanted: int, back: int) -> None:
        """Simulates the replay of part number `wanted`, which backward reads at tick `back`."""
        replays, parts = self._replays, self._parts
        # Start from the nearest earlier part whose inputs are kept, else from the beginning of the segment.
        at = max((number for number in self._starting_points if number <= wanted), default=0)
        between = (number for number in range(at + 1, wanted) if number not in self._parts_run)
        to_hold = _midpoints([number for number in between if parts[number].can_be_read(back)])
        self._parts_run.add(wanted)
        # Run the parts on the way, and then the part itself. Only its own inputs are freed after their last use.
        stages, inputs = [], self._starting_points.pop(wanted, set())
        for number in range(at, wanted):
            crossing, is_held = parts[number + 1].crossing, number + 1 in to_hold
            stages.append(Stage(parts[number].to_pass, crossing, is_held))
            if is_held:
                back_then = parts[number + 1].back
                until = self._release if back_then is None else back_then - 1
                self._starting_points[number + 1] = crossing
                self.holds += [(storage, back, until) for storage in crossing]
        stages.append(Stage(parts[wanted].to_make, parts[wanted].wanted))
        self.replays.append(SegmentReplay(back - 1, stages, inputs))
        self.cost_ns += sum(replays.ns_of(stage.ops) for stage in stages)


def _saved_before_filled(graph: StepGraph) -> set[int]:
    """Returns the storages that `empty` makes and that autograd saves before an op writes to them.

    The noise of `torch.nn.functional.rrelu` is one. A tape keeps such a tensor: it cannot know what will fill it.
    """
    filled: dict[int, int] = {}
    for op in graph.ops:
        for storage in op.written:
            filled.setdefault(storage, op.tick)
    made_by = {save.storage: graph.storages[save.storage].op for save in graph.saves if save.storage is not None}
    empty = {s for s, op in made_by.items() if op is not None and graph.ops[op].name.startswith(_EMPTY)}
    return {
        save.storage
        for save in graph.saves
        if save.storage in empty and save.pack < filled.get(save.storage, graph.ticks)
    }


def _midpoints(parts: list[int]) -> set[int]:
    """Returns the middle one of the parts, the middle one of the parts after it, and so on."""
    middle = len(parts) // 2
    return {parts[middle], *_midpoints(parts[middle + 1 :])} if parts else set()
