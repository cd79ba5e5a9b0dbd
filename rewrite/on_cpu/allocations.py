"""Measure the peak of each training step with PyTorch's CPU allocator.

PyTorch's profiler records each allocation and each free with its address, its bytes, its time and the ops that were
running. Each allocation belongs to one of three groups:

- *tensors*: allocated by an op, and alive after it. A rehearsal predicts them.
- *temporaries inside kernels*: allocated and freed while one op ran, such as a column buffer of a convolution. A
  rehearsal records no op inside of another, so it does not know them.
- *outside of ops*: allocated while no op ran, or by `torch.get_rng_state`. These are states of random generators, which
  checkpoints keep (on the host if the model is on a card), and Python numbers that became tensors for one op.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "planner: one training step"
"""Name of the profiler's events that mark the steps."""
_STATE = "planner: state of the random generator"
"""Name of the profiler's events that mark calls of `torch.get_rng_state`. Autograd may run code that calls it inside
of an op, when the op saves tensors."""
_OP = re.compile(r"\w+::\w+")
"""Pattern of the names of ops, such as 'aten::mm'. Events of autograd and of Python functions have other names."""
_Event = Any
"""`torch._C._profiler._ProfilerEvent`: an event of the profiler, with the events that it contains. Its type annotations
lack the fields of allocations."""
BEFORE = ""
"""Key in `Peak.alive_by_op` for everything that was allocated before the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one step."""

    tensor_bytes: int
    """Largest sum of the bytes of all tensors that were alive at one time."""
    alive_by_op: dict[str, int]
    """Bytes alive at that time, by the op that allocated them, such as 'aten::mm', or `BEFORE`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPeak(Peak):
    """The peak of one step that ran on the CPU."""

    kernel_bytes: int
    """Maximum bytes of temporaries inside kernels that were alive at one time."""
    outside_bytes: int
    """Maximum bytes of allocations outside of ops that were alive at one time."""


@dataclasses.dataclass(slots=True)
class _Block:
    size_bytes: int
    born_ns: int
    dies_ns: float
    events: tuple[_Event, ...]
    """The events that were running at the allocation, outermost first."""


class AllocationRecord:
    """Records what PyTorch's CPU allocator does inside a context.

    The allocator reports no bytes for a block that was allocated before. So build the model inside the context.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which allocations are recorded. Python's garbage collector runs only between steps."""
        was_enabled, get_state = gc.isenabled(), torch.get_rng_state

        def marked() -> torch.Tensor:
            with record_function(_STATE):
                return get_state()

        gc.disable()
        torch.get_rng_state = marked
        try:
            with self._profile:
                yield
        finally:
            torch.get_rng_state = get_state
            if was_enabled:
                gc.enable()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context that marks one training step."""
        with record_function(_STEP):
            yield
            gc.collect()

    def peaks(self, recorded_ops: Collection[str]) -> list[MeasuredPeak]:
        """Return the peak of each marked step, in order.

        Args:
            recorded_ops: names of the ops that a rehearsal of the step recorded, such as 'aten.mm.default'.
        """
        names = {event_name(op) for op in recorded_ops}
        blocks, steps = self._blocks_and_steps()
        tensors, temporaries, outside = [], [], []
        for block in blocks:
            names_running = [event.name for event in block.events]
            if _STATE in names_running or not any(_OP.fullmatch(name) for name in names_running):
                outside.append(block)
            elif _is_temporary(block, names):
                temporaries.append(block)
            else:
                tensors.append(block)
        curve, kernel_curve, outside_curve = _Curve(tensors), _Curve(temporaries), _Curve(outside)
        peaks = []
        for began, ended in steps:
            tensor_bytes, time_ns = curve.largest(began, ended)
            alive: Counter[str] = Counter()
            for block in tensors:
                if block.born_ns <= time_ns < block.dies_ns:
                    alive[_origin(block, names, steps[0][0])] += block.size_bytes
            peaks.append(
                MeasuredPeak(
                    tensor_bytes=tensor_bytes,
                    alive_by_op=dict(alive),
                    kernel_bytes=kernel_curve.largest(began, ended)[0],
                    outside_bytes=outside_curve.largest(began, ended)[0],
                )
            )
        return peaks

    def _blocks_and_steps(self) -> tuple[list[_Block], list[tuple[int, int]]]:
        """Return all allocated blocks, and (start, end) of the steps in nanoseconds."""
        changes, steps = [], []
        finished: Any = self._profile.profiler
        for event, running in _walk(finished.kineto_results.experimental_event_tree(), ()):
            if event.name == _STEP:
                steps.append((event.start_time_ns, event.end_time_ns))
            elif event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
                changes.append((event.start_time_ns, event.extra_fields, running))
        blocks: list[_Block] = []
        at_address: dict[int, _Block] = {}
        for time_ns, fields, running in sorted(changes, key=lambda change: change[0]):
            if fields.alloc_size > 0:
                blocks.append(_Block(fields.alloc_size, time_ns, float("inf"), running))
                at_address[fields.ptr] = blocks[-1]
            elif fields.ptr in at_address:
                at_address.pop(fields.ptr).dies_ns = time_ns
        return blocks, sorted(steps)


def event_name(op: str) -> str:
    """Return the profiler's name for an op: 'aten.mm.default' gives 'aten::mm'."""
    return "::".join(op.split(".")[:2])


def _walk(events: list[_Event], running: tuple[_Event, ...]) -> Iterator[tuple[_Event, tuple[_Event, ...]]]:
    """Yield each event of the tree with the events that contain it, outermost first."""
    for event in events:
        yield event, running
        yield from _walk(event.children, (*running, event))


def _is_temporary(block: _Block, names: Collection[str]) -> bool:
    """True if the block was allocated and freed while one of the named ops ran.

    An op that calls another overload of itself, as `where` with a number does, is not recorded, but that overload is.
    """
    return any(
        event.name in names
        and block.dies_ns <= event.end_time_ns
        and not any(child.name == event.name for child in event.children)
        for event in block.events
    )


def _origin(block: _Block, names: Collection[str], first_step_ns: int) -> str:
    """Return the op that allocated the block: the outermost one that a rehearsal records, or else the innermost one."""
    if block.born_ns < first_step_ns:
        return BEFORE
    ops = [event.name for event in block.events if _OP.fullmatch(event.name)]
    return next((name for name in ops if name in names), ops[-1])


class _Curve:
    """The bytes of some blocks over time."""

    def __init__(self, blocks: list[_Block]) -> None:
        changes = [(block.born_ns, block.size_bytes) for block in blocks]
        changes += [(int(block.dies_ns), -block.size_bytes) for block in blocks if block.dies_ns < float("inf")]
        changes.sort()
        self._times = [time_ns for time_ns, _ in changes]
        self._bytes = list(itertools.accumulate(change for _, change in changes))

    def largest(self, began_ns: int, ended_ns: int) -> tuple[int, int]:
        """Return the largest value between two times, and the first time at which it is reached."""
        value, time_ns = 0, began_ns
        for change_ns, level in zip(self._times, self._bytes, strict=True):
            if change_ns > ended_ns:
                break
            if change_ns < began_ns:
                value = level
            elif level > value:
                value, time_ns = level, change_ns
        return value, time_ns
