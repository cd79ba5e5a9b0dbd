"""A published figure of a training on several cards, and the rehearsal of one rank that predicts it."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable

import torch

from planner import profiles
from planner.allocator.replay import AllocatorOutcome
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream, streams_of_blocks
from planner.estimate.footprint import replayed
from planner.recording.rehearsal import rehearse_program
from planner.virtual_gpu.backend import Target

MB, MIB = 10**6, 1 << 20


class Measure(enum.StrEnum):
    """The quantity that was measured on one card: the peak of allocated bytes, or of reserved bytes."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure."""

    setting: str
    """The model and how it is divided."""
    cards: int
    card: str
    """Name of the card's profile."""
    measure: Measure
    published: float
    """In units of `unit_bytes`."""
    unit_bytes: int
    program: Callable[[torch.device], None]
    """Trains as the first rank. Rows with the same program are rehearsed once."""
    has_workspaces: bool = True
    """Whether the version of PyTorch took the workspaces of cuBLAS from its allocator."""
    imported: tuple[str, ...] = ()
    """Modules that are imported before the rehearsal, because they cannot be imported where a card is simulated."""

    def predicted(self, outcome: AllocatorOutcome) -> float:
        """Returns the predicted figure in the unit of the published one."""
        is_reserved = self.measure is Measure.RESERVED
        return (outcome.peak_reserved_bytes if is_reserved else outcome.peak_allocated_bytes) / self.unit_bytes


def outcome(row: Row) -> AllocatorOutcome:
    """Returns the peaks of the first of several ranks. NCCL's memory is outside of the allocator and not counted."""
    for name in row.imported:
        importlib.import_module(name)
    profile = profiles.load(row.card)
    graph = rehearse_program(row.program, Target.of(profile, cards=row.cards))
    if row.has_workspaces:
        graph = with_workspaces(graph, profile, torch.__version__)
    ids, sizes, _ = allocation_stream(graph)
    return replayed((ids, sizes), profile, None, streams=streams_of_blocks(graph))
