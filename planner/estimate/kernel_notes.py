"""Notes for the user on kernels: algorithms of convolutions, where workspaces come from, and unknown workspaces."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection

import torch

from planner.estimate.add_workspaces import (
    convolution_notes,
    has_searches,
    unknown_ops,
    with_known_algorithms,
    without_searches,
)
from planner.estimate.footprint import Measured, measure
from planner.estimate.smallest_total import smallest_total_bytes
from planner.plan_types.decision_base import Decision
from planner.plan_types.sizes import MIB, format_size
from planner.profiles.device import DeviceProfile
from planner.progress import TimeIsUp, Watch
from planner.recording.step_graph import Op, Phase, StepGraph
from planner.workspaces import cudnn_attention

_MOST_KERNELS_NAMED = 4
"""Maximum number of kernels that a note names."""


def kernel_notes(
    graph: StepGraph, measured: Measured, decisions: tuple[Decision, ...], card: DeviceProfile, watch: Watch
) -> tuple[str, ...]:
    """Return notes on the workspaces of cuDNN, and one on kernels with unknown workspaces, if there are any.

    Args:
        graph: the recording of a step with these decisions.
        measured: its footprint on the card.
        watch: when its time is up, the search for the memory that the step needs with other algorithms ends, and the
            notes leave this memory out. `TimeIsUp` is not raised.
    """
    if not card.allocator:
        return ()
    version = str(torch.__version__)
    of_cudnn = (
        *convolution_notes(graph, card, version),
        *_slower_notes(graph, measured, decisions, card, watch),
        *cudnn_attention.notes(_calls(graph, cudnn_attention.OPS), card, version),
    )
    counts = unknown_ops(graph)
    if not counts:
        return of_cudnn
    most_frequent = sorted(counts.items(), key=lambda pair: -pair[1])[:_MOST_KERNELS_NAMED]
    names = ", ".join(f"{count} x {name}" for name, count in most_frequent)
    more = f" and {len(counts) - _MOST_KERNELS_NAMED} other kinds" if len(counts) > _MOST_KERNELS_NAMED else ""
    note = f"the workspaces of some kernels are unknown and not counted: {names}{more}, in two steps"
    return (*of_cudnn, note)


def _calls(graph: StepGraph, names: Collection[str]) -> int:
    """Return how often the ops of these names run in the first step of a recording."""
    return sum(op.step == 0 and op.name in names for op in graph.ops)


def _slower_notes(
    graph: StepGraph, measured: Measured, decisions: tuple[Decision, ...], card: DeviceProfile, watch: Watch
) -> tuple[str, ...]:
    """Return a note if convolutions run slower algorithms, or would run them under a smaller budget.

    PyTorch takes a slower algorithm if the workspace of the fastest one does not fit.
    """
    if not any(storage.trials for storage in graph.storages):
        return ()
    if has_searches(graph):
        return (_search_note(graph, measured, decisions, card, watch),)
    if measured.slower:
        enough_bytes = None
        with contextlib.suppress(TimeIsUp):
            enough_bytes = smallest_total_bytes(graph, card, decisions, fastest=True, watch=watch)
        return (_note_on_slower_ones([graph.ops[index] for index in dict.fromkeys(measured.slower)], enough_bytes),)
    total_bytes = measured.footprint.total_bytes  # often the smallest total already
    try:
        fastest_bytes = smallest_total_bytes(graph, card, decisions, fastest=True, below_bytes=total_bytes, watch=watch)
        least_bytes = smallest_total_bytes(graph, card, decisions, below_bytes=fastest_bytes, watch=watch)
    except TimeIsUp:
        return ()
    if fastest_bytes - least_bytes < MIB:
        return ()
    return (
        "the convolutions run their fastest algorithms, with which the step needs at least "
        f"{format_size(fastest_bytes)}. With less memory, PyTorch takes slower algorithms with smaller workspaces; the "
        f"step then needs at least {format_size(least_bytes)}",
    )


def _search_note(
    graph: StepGraph, measured: Measured, decisions: tuple[Decision, ...], card: DeviceProfile, watch: Watch
) -> str:
    """Return the note on the memory of a step whose convolutions search for their fastest algorithms.

    If the time of the watch is up, the note says that planning ended before this memory was computed.
    """
    left_out = (
        ". Under the budget, PyTorch leaves out algorithms whose workspaces do not fit" if measured.slower else ""
    )
    steps = without_searches(graph), with_known_algorithms(graph), graph
    try:
        usual, known, searching = (
            measure(each, card, vram_bytes=None, decisions=decisions).footprint for each in watch.checking(steps)
        )
    except TimeIsUp:
        return (
            "with cudnn.benchmark, PyTorch tries algorithms in free memory in the first step, and then releases its "
            f"cache{left_out}. Planning ended before the memory of a step without cudnn.benchmark was computed"
        )
    after_bytes = min(known.total_bytes, searching.total_bytes)  # `searching` has a step after the first one, too
    return (
        f"without cudnn.benchmark the step allocates {format_size(usual.allocated_bytes)} and takes "
        f"{format_size(usual.total_bytes)} in total. With it, a step after the first one allocates at most "
        f"{format_size(known.allocated_bytes)} and takes about {format_size(after_bytes)}. In the first step, "
        f"PyTorch tries algorithms in free memory, and takes up to {format_size(searching.total_bytes)} of a card that "
        f"runs nothing else; then it releases its cache{left_out}"
    )


def _note_on_slower_ones(ops: list[Op], enough_bytes: int | None) -> str:
    """Return the note on convolutions that run a slower algorithm.

    Args:
        ops: the convolutions.
        enough_bytes: a total in bytes that is enough for the fastest algorithms; None if it is not known.
    """
    last_step = max(op.step for op in ops)
    names = collections.Counter(_convolution_name(op) for op in ops if op.step == last_step)
    shown = [f"{count} x {name}" for name, count in names.most_common(_MOST_KERNELS_NAMED)]
    more = f" and {len(names) - len(shown)} other kinds" if len(names) > len(shown) else ""
    needs = "" if enough_bytes is None else f", with which the step needs {format_size(enough_bytes)}"
    return (
        f"{names.total()} convolutions of a step run a slower algorithm, because the workspace of the fastest one does "
        f"not fit: {', '.join(shown)}{more}. PyTorch takes the next algorithm on its own. How much slower it is cannot "
        f"be known without the card: the predicted time is that of the fastest ones{needs}"
    )


def _convolution_name(op: Op) -> str:
    """Return the direction of a convolution, and the shapes of its image and its weight."""
    assert op.kernel is not None  # The recorder keeps the call of every convolution.
    sizes = (" x ".join(map(str, op.kernel.tensor(name).shape)) for name in ("input", "weight"))
    return f"{'backward' if op.phase is Phase.BACKWARD else 'forward'} of {' with '.join(sizes)}"
