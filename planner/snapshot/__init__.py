"""Checks the simulated allocator against a memory snapshot of a real card: `python -m planner.snapshot FILE`."""

from __future__ import annotations

from planner.snapshot.command import main
from planner.snapshot.file import load
from planner.snapshot.history import Action, Event, Frame, History
from planner.snapshot.replay import recorded_stream, replay_history
from planner.snapshot.result import ReplayResult
from planner.snapshot.simulate import SimulatedHistory, simulate
from planner.snapshot.write import Origin, snapshot_data, write_snapshot

__all__ = [
    "Action",
    "Event",
    "Frame",
    "History",
    "Origin",
    "ReplayResult",
    "SimulatedHistory",
    "load",
    "main",
    "recorded_stream",
    "replay_history",
    "simulate",
    "snapshot_data",
    "write_snapshot",
]
