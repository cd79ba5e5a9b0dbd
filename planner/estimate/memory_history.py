"""Simulates what the allocator does during a recorded step, event by event, for the report and for memory snapshots."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from planner.estimate import roofline
from planner.estimate.allocation_stream import allocation_stream, streams_of_blocks, trials_of_blocks
from planner.estimate.footprint import settings_on
from planner.plan_types.decision_base import Decision
from planner.profiles.device import SEGMENT_ADDRESSES, DeviceProfile
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.snapshot.history import Action, Frame
from planner.snapshot.simulate import SimulatedHistory, simulate
from planner.snapshot.write import Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryHistory:
    """The simulated history of a recording. A request is an allocation or a free of a storage."""

    simulated: SimulatedHistory
    storages: tuple[int, ...]
    """For each request: index of its storage in the recording."""
    ticks: tuple[int, ...]
    """For each request: its tick in the recording."""

    def reserved_bytes(self, graph_ticks: int) -> np.ndarray:
        """Returns int64[graph_ticks]: the largest number of bytes that the allocator held in each tick."""
        most = np.zeros(graph_ticks, dtype=np.int64)
        reserved = now = 0
        for event, request in zip(self.simulated.history.events, self.simulated.requests, strict=True):
            tick = self.ticks[request]
            most[now + 1 : tick + 1] = reserved
            now = tick
            if event.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
                reserved += event.size_bytes
            elif event.action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
                reserved -= event.size_bytes
            most[tick] = max(most[tick], reserved)
        most[now + 1 :] = reserved
        return most


def memory_history(
    graph: StepGraph, card: DeviceProfile, decisions: Iterable[Decision] = (), *, capacity_bytes: int | None
) -> MemoryHistory:
    """Simulates the allocator on a recording to which workspaces have been added.

    Args:
        card: a card with a caching allocator.
        decisions: the decisions of the step, which may set options of the allocator.
        capacity_bytes: maximum number of bytes that the allocator may reserve; None for no limit. With the peak of the
            reserved bytes of a measured step (`Footprint.reserved_bytes`) as the limit, the allocator behaves
            as it did under the budget with which the step was measured.

    Raises:
        OutOfMemory: the recording does not run in `capacity_bytes`.
    """
    settings = settings_on(card, decisions)
    ids, sizes, ticks = (column.tolist() for column in allocation_stream(graph))
    histories = [
        simulate(
            zip(ids, sizes, strict=True),
            capacity_bytes,
            settings=settings,
            card_bytes=card.vram_bytes,
            descending=descending,
            streams=streams_of_blocks(graph),
            trials=trials_of_blocks(graph),
        )
        for descending in SEGMENT_ADDRESSES[card.segment_addresses]
    ]
    storage_of_block = [index for index, spans in enumerate(graph.spans()) for _ in spans]
    return MemoryHistory(
        simulated=max(histories, key=lambda history: history.peak_reserved_bytes),
        storages=tuple(storage_of_block[block] for block in ids),
        ticks=tuple(ticks),
    )


def tick_times_ns(graph: StepGraph, card: DeviceProfile, *, micro_batches: int) -> np.ndarray:
    """Returns int64[ticks + 1]: the predicted time at which each tick begins, from the first recorded step on.

    If a recorded micro-batch stands for several real ones, each of its ops takes the time of all of them. The time of a
    kernel is divided evenly between the ticks from its start to the start of the next kernel.

    Args:
        micro_batches: number of micro-batches of the real step; the recording may hold fewer.
    """
    repeats = roofline.repetitions(graph, micro_batches)
    ops = [op for op in graph.ops if op.phase is not Phase.SETUP]
    kernels = [
        op for op, before in zip(ops, [None, *ops], strict=False)
        if not op.is_view or before is None or op.step != before.step
    ]  # fmt: skip
    durations = [
        roofline.op_ns(op, card)
        * (1 if op.phase is Phase.OPTIMIZER else repeats[min(op.micro_batch, len(repeats) - 1)])
        for op in kernels
    ]
    ticks = [op.tick for op in kernels]
    return np.interp(np.arange(graph.ticks + 1), [*ticks, graph.ticks], [0, *itertools.accumulate(durations)]).astype(
        np.int64
    )


def snapshot_origins(graph: StepGraph, history: MemoryHistory, times_ns: np.ndarray) -> list[Origin]:
    """Returns the origin of each request: the stack trace that a snapshot shows, its time, and its category.

    The frames are the op, the line of the model's code, the modules from the inside out, and the step and its phase.

    Args:
        times_ns: time of each tick, from `tick_times_ns`.
    """
    origins = []
    for number, tick in zip(history.storages, history.ticks, strict=True):
        storage = graph.storages[number]
        op = None if storage.op is None else graph.ops[storage.op]
        shape = f" {storage.dtype}{list(storage.shape)}" if storage.dtype else ""
        frames = _frames(graph, op) if op is not None else (Frame("before the training step"),)
        origins.append(
            Origin(
                frames=(Frame(storage.name), *frames) if storage.name else frames,
                time_us=int(times_ns[tick]) // 1000,
                remark=f"{storage.category}{shape}",
            )
        )
    return origins


def _frames(graph: StepGraph, op: Op) -> tuple[Frame, ...]:
    """Returns the stack trace of an op, innermost frame first."""
    file, line = source_of(graph, op)
    parts = op.module.split(".") if op.module else []
    paths = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    modules = [Frame(f"{path} ({graph.module_types.get(path, 'module')})") for path in paths]
    return (Frame(op.name, file, line), *modules, Frame(f"step {op.step + 1}, {op.phase}"))


def source_of(graph: StepGraph, op: Op) -> tuple[str, int]:
    """Returns file and line of the model's code that ran an op, or whose backward it is; ('', 0) if not known."""
    source = op.source or (graph.ops[op.forward_op].source if op.forward_op is not None else "")
    file, _, line = source.rpartition(":")
    return (file, int(line)) if file else ("", 0)
