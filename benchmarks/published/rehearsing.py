"""Rehearses a program that starts on an empty card, and replays its allocations in the simulated allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from planner import profiles
from planner.allocator.replay import AllocatorOutcome
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream
from planner.estimate.footprint import replayed
from planner.recording.rehearsal import Program, rehearse_program
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.backend import Target


def outcome(program: Program, card_name: str, torch_version: str) -> AllocatorOutcome:
    """Returns the peaks of the program's memory."""
    return outcome_of(graph_of(program, card_name), card_name, torch_version)


def graph_of(program: Program, card_name: str) -> StepGraph:
    """Returns the recording of the program on a card."""
    return rehearse_program(program, Target(compute_capability=profiles.load(card_name).compute_capability))


def outcome_of(graph: StepGraph, card_name: str, torch_version: str) -> AllocatorOutcome:
    """Returns the peaks of memory of a recording, with the workspaces of the card's kernels."""
    card = profiles.load(card_name)
    ids, sizes, _ = allocation_stream(with_workspaces(graph, card, torch_version))
    return replayed((ids, sizes), card, None)


@contextlib.contextmanager
def making(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating-point tensors have this dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
