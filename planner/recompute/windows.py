"""How long the tensors saved in each module call are needed."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

from planner.recording.step_graph import StepGraph


@dataclasses.dataclass(slots=True)
class Window:
    """Ticks that describe how long the tensors saved in one call are needed."""

    back: float = math.inf
    """Tick at which backward first reads a saved tensor; infinite if it reads none."""
    again: float = math.inf
    """Tick at which a second backward first reads a saved tensor; infinite if there is none."""
    last_pack: int = 0
    """Tick of the last save in the call."""
    release: int = 0
    """Tick at which autograd releases the last tensor saved in the call."""

    @property
    def is_read(self) -> bool:
        """True if backward reads a tensor that the call saved."""
        return math.isfinite(self.back)

    @property
    def is_read_twice(self) -> bool:
        """True if two backwards read a tensor that the call saved."""
        return math.isfinite(self.again)


def windows_of(graph: StepGraph) -> dict[int, Window]:
    """Returns, for each call, how long its saved tensors are needed."""
    windows: dict[int, Window] = defaultdict(Window)
    for save in graph.saves:
        for call in graph.enclosing(save.call):
            window = windows[call]
            window.back = min(window.back, math.inf if save.unpack is None else save.unpack)
            window.again = min(window.again, math.inf if save.again is None else save.again)
            window.last_pack = max(window.last_pack, save.pack)
            window.release = max(window.release, graph.ticks if save.release is None else save.release)
    return windows
