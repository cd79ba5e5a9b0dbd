"""The windows of ticks in which the layers of a model take turns, and where they are in a recording of more layers."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from planner.recording.repeats.layer_runs import LayerRun
from planner.recording.step_graph import Call, Phase, StepGraph

FARTHEST = 2
"""Maximum distance, in layers, of an op from what it reads, and of an event from its owner."""


class NotAlikeError(Exception):
    """The layers differ, or something belongs to all layers together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A part of the step in which the layers take turns: a forward, a backward, or the release of what they held."""

    kind: str
    number: int
    """Number of the micro-batch; for a release, its number among the releases."""
    upwards: bool
    """True if the first layer comes first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The ticks of one layer in one pass."""

    start: int
    stop: int
    layer: int
    """Position of the layer in its container."""
    passed: Pass


class Ticks:
    """Converts ticks of the shorter recording to ticks of the longer one."""

    def __init__(self, graph: StepGraph, run: LayerRun, windows: Sequence[Window]) -> None:
        self.run, self.end = run, graph.before_update_end
        self.begin = graph.step_starts[0]
        self._windows = sorted(windows, key=lambda window: window.start)
        self._starts = [window.start for window in self._windows]
        if any(one.stop > other.start for one, other in zip(self._windows, self._windows[1:], strict=False)):
            raise NotAlikeError
        self._by_place = {(window.passed, window.layer): window for window in windows}
        self._starts_found: dict[tuple[Pass, int, int], list[int]] = {}
        """Caches the results of `_moved_starts`."""
        self._insertions: list[tuple[int, int]] = []
        self._lengths: dict[Pass, int] = {}
        template = run.copied
        for passed in {window.passed for window in windows}:
            one, other = self._by_place[passed, template], self._by_place[passed, template + 1]
            length = one.stop - one.start
            if other.stop - other.start != length:
                raise NotAlikeError
            self._lengths[passed] = length
            # The copies come after the template in a forward, and before it in a backward.
            self._insertions.append((one.stop if passed.upwards else one.start, length * run.left_out))

    def window(self, tick: int) -> Window | None:
        """Returns the window that a tick is in."""
        number = self.windows_until(tick) - 1
        if number < 0 or tick >= self._windows[number].stop:
            return None
        return self._windows[number]

    def layer_at(self, tick: int) -> int | None:
        """Returns the layer in whose window a tick is; None if it is in no window, or before the step."""
        window = self.window(tick) if tick > self.begin else None
        return None if window is None else window.layer

    def windows_until(self, tick: int) -> int:
        """Returns the number of windows that begin at a tick or before it."""
        return bisect.bisect_right(self._starts, tick)

    def relative(self, tick: int, owner: int) -> tuple[object, ...]:
        """Returns a description of a tick that is the same for all layers that are alike."""
        if tick >= self.end:
            return ("update",)
        if tick <= self.begin:
            return ("setup",)
        window = self.window(tick)
        return (tick,) if window is None else (window.passed, window.layer - owner, tick - window.start)

    def moved(self, tick: int) -> int:
        """Returns a tick, moved by the windows that are inserted before it.

        This is the tick in the longer recording of an event that has one copy.
        """
        return tick + sum(length for point, length in self._insertions if point <= tick)

    def moved_all(self, tick: int, owner: int | None) -> list[int]:
        """Returns the ticks in the longer recording of the copies of an event, in the order of `layers`.

        Args:
            owner: position in the shorter recording of the layer that the event belongs to; None if it has none.
        """
        window = self.window(tick) if owner is not None and self.begin < tick < self.end else None
        if window is None or owner is None:
            return [self.moved(tick)] * len(self.layers(owner))
        distance = window.layer - owner
        if abs(distance) > FARTHEST:
            if owner == self.run.copied:
                raise NotAlikeError
            return [self.moved(tick)]
        into = tick - window.start
        return [start + into for start in self._moved_starts(window.passed, owner, distance)]

    def layers(self, owner: int | None) -> range:
        """Returns the positions in the longer recording of the copies of a layer of the shorter one.

        If `owner` is None, the range has length one, because an item that belongs to no layer has one copy. Its value
        has no meaning.
        """
        layer = 0 if owner is None else self.new_layer(owner)
        return range(layer, layer + 1 + (self.run.left_out if owner == self.run.copied else 0))

    def new_layer(self, layer: int) -> int:
        """Returns the position of a layer of the shorter recording in the longer one."""
        return layer if layer <= self.run.copied else layer + self.run.left_out

    def _moved_starts(self, passed: Pass, owner: int, distance: int) -> list[int]:
        """Returns the ticks in the longer recording at which windows begin, one for each copy of a layer.

        Args:
            owner: the layer, by its position in the shorter recording.
            distance: position of the layer that has the window, relative to the copy; 1 for the next layer.
        """
        found = self._starts_found.get((passed, owner, distance))
        if found is None:
            starts = [self._moved_start(passed, layer + distance) for layer in self.layers(owner)]
            found = self._starts_found[passed, owner, distance] = starts
        return found

    def _moved_start(self, passed: Pass, layer: int) -> int:
        """Returns the tick in the longer recording at which the window of a layer of the longer model begins."""
        template, left_out = self.run.copied, self.run.left_out
        copy = layer - template
        if 0 < copy <= left_out:
            moved = self.moved(self._by_place[passed, template].start)
            return moved + copy * self._lengths[passed] * (1 if passed.upwards else -1)
        window = self._by_place.get((passed, layer if copy <= 0 else layer - left_out))
        if window is None:
            raise NotAlikeError
        return self.moved(window.start)


def windows_of(graph: StepGraph, run: LayerRun) -> list[Window]:
    """Returns the windows of the layers of a run that were rehearsed, for each forward and each backward."""
    kept = range(run.first, run.first + run.kept)
    forwards: dict[int, list[Call]] = {layer: [] for layer in kept}
    paths = {run.path(layer): layer for layer in kept}
    for call in graph.calls:
        if call.module in paths:
            forwards[paths[call.module]].append(call)
    backwards: dict[tuple[int, int], list[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.BACKWARD and op.forward_op is not None and (found := run.position(op.module)):
            first, _ = backwards.setdefault((op.micro_batch, found[0]), [op.tick, op.tick])
            backwards[op.micro_batch, found[0]] = [first, op.tick]
    micro_batches = len(graph.micro_batch_sizes)
    if any(len(calls) != micro_batches for calls in forwards.values()):
        raise NotAlikeError
    windows: list[Window] = []
    for number in range(micro_batches):
        starts = [forwards[layer][number].start for layer in kept]
        ends = [*starts[1:], forwards[kept[-1]][number].end + 1]
        windows += in_turn(kept, starts, ends, Pass("forward", number, True))
        spans = [backwards.get((number, layer)) for layer in reversed(kept)]
        if None not in spans:
            starts = [span[0] for span in spans if span is not None]
            last = spans[-1]
            assert last is not None
            windows += in_turn(kept[::-1], starts, [*starts[1:], last[1] + 1], Pass("backward", number, False))
        elif any(spans):
            raise NotAlikeError
    return windows


def in_turn(layers: Sequence[int], starts: list[int], stops: list[int], passed: Pass) -> Iterator[Window]:
    """Yields the windows of the layers in a pass, in which they take turns.

    Args:
        layers: positions of the layers, in the order of their turns.
        starts, stops: first tick of each layer's turn, and the tick after its last one.

    Raises:
        NotAlikeError: a turn is empty or ends before it begins, so the layers do not take turns.
    """
    for layer, start, stop in zip(layers, starts, stops, strict=True):
        if stop <= start:
            raise NotAlikeError
        yield Window(start, stop, layer, passed)
