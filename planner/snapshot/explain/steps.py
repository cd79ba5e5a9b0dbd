"""Where the training steps of a record begin, and what the frames of a stack trace say about an allocation."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from planner.snapshot.explain.program import Program
from planner.snapshot.history import Frame

_OPTIMIZERS = ("torch/optim/", "bitsandbytes/optim/", "apex/optimizers/", "deepspeed/ops/adam")
_LIBRARY = ("torch/", "torch\\")
_INSTALLED = ("site-packages/", "dist-packages/", "<frozen")
_LOADING = {
    *("_apply", "to_empty", "from_pretrained", "_load_pretrained_model", "load_state_dict", "reset_parameters"),
    *("set_module_tensor_to_device", "load_checkpoint_in_model", "_load_state_dict_into_meta_model"),
}
"""Names of functions that make parameters, or move them to the card."""
_OUTSIDE = {
    *("evaluate", "evaluation_loop", "prediction_loop", "prediction_step", "predict", "eval_step", "run_evaluation"),
    *("validate", "validation", "validation_step", "test_step", "generate", "save_pretrained", "save_model"),
    *("save_checkpoint", "_save_checkpoint"),
}
"""Names of functions outside training steps, in transformers, Lightning, accelerate's examples and many scripts."""
_LEAST_FALL = 0.2
"""Least fall of allocated memory at the end of a step, as a fraction of the highest level of the record."""


def is_optimizer(frames: Sequence[Frame]) -> bool:
    """True if an optimizer's step made the allocation."""
    return any(
        any(part in frame.filename for part in _OPTIMIZERS) or frame.name.endswith(", optimizer") for frame in frames
    )


def is_backward(frames: Sequence[Frame]) -> bool:
    """True if autograd's backward made the allocation."""
    return any(
        "torch::autograd::Engine" in frame.name
        or "AccumulateGrad" in frame.name
        or frame.name.endswith((", backward", ", recompute"))
        for frame in frames
    )


def is_loading(frames: Sequence[Frame]) -> bool:
    """True if the allocation made a parameter or buffer: while the model was built, loaded or moved to the card."""
    if is_optimizer(frames):
        return False
    return any(
        frame.name in _LOADING or (frame.name == "__init__" and "torch/nn/" in frame.filename) for frame in frames
    )


def is_outside(frames: Sequence[Frame]) -> bool:
    """True if the allocation was made outside training steps: by an evaluation, a generation, or to save the model."""
    return any(frame.name in _OUTSIDE for frame in frames)


def step_starts(program: Program, until: int) -> list[int]:
    """Returns the events after which a training step begins, up to the event `until`.

    If stack traces show updates by an optimizer, a step begins where allocated memory is lowest after an update. If
    they show that parameters are made, the first step begins after that. Otherwise, and for later steps without an
    update, a step begins where memory is lowest between two rises, if it falls and rises by at least half of its
    largest fall, and if that is a fifth of the highest level. Blocks from before that which are freed while memory
    rises again, such as gradients after the update, belong to the step before. The result is empty if neither is found.
    """
    levels = [level for level in program.levels() if 0 <= level[0] <= until]
    traces = {block.born: block.frames for block in program.blocks if block.born >= 0}
    is_update = [is_optimizer(traces[event]) if traces.get(event) else None for event, _ in levels]
    if any(is_update):
        return _after_updates(levels, is_update)
    loaded = max((event for event, frames in traces.items() if event <= until and is_loading(frames)), default=-1)
    ends = sorted((block.freed, block.born) for block in program.blocks if block.freed is not None)
    return [*([loaded] if loaded >= 0 else []), *_lows([level for level in levels if level[0] > loaded], ends)]


def _after_updates(levels: Sequence[tuple[int, int]], is_update: Sequence[bool | None]) -> list[int]:
    """Returns the event with the lowest level between each update and the next one.

    Args:
        levels: Requested bytes that are alive after each event, as (event, bytes).
        is_update: For each of them, True if an optimizer asked; None for a free, and if there is no stack trace.
    """
    starts: list[int] = []
    since: list[tuple[int, int]] = []
    in_update = seen = False
    for level, update in zip(levels, is_update, strict=True):
        if update is not None and update != in_update:
            if update and seen and since:
                starts.append(min(since, key=lambda found: found[1])[0])
            in_update, seen = update, True
        if update is True:
            since = []
        elif seen:
            since.append(level)
    if not in_update and since:
        starts.append(min(since, key=lambda found: found[1])[0])
    return starts


def _lows(levels: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the events at which steps begin, by the level alone. See `step_starts`.

    Args:
        levels: Requested bytes that are alive after each event, as (event, bytes).
        ends: Events that free and allocate each freed block, as (freed, born), in ascending order.
    """
    highest = list(itertools.accumulate((level for _, level in levels), max))
    fall = max((high - level for high, (_, level) in zip(highest, levels, strict=True)), default=0)
    if not levels or fall < _LEAST_FALL * highest[-1]:
        return []
    starts: list[int] = []
    low = high = levels[0]
    falling = False
    for at in levels:
        if falling:
            low = min(low, at, key=lambda found: found[1])
            if at[1] - low[1] >= fall / 2:
                meanwhile = ends[bisect.bisect(ends, (low[0], low[0])) : bisect.bisect(ends, (at[0], at[0]))]
                starts.append(max((freed for freed, born in meanwhile if born <= low[0]), default=low[0]))
                high, falling = at, False
        else:
            high = max(high, at, key=lambda found: found[1])
            if high[1] - at[1] >= fall / 2:
                low, falling = at, True
    return starts


def place_of(frames: Sequence[Frame]) -> tuple[str, str]:
    """Returns the place in the program that made an allocation, and the place of the user's own code that called it.

    Both are texts such as 'forward (model.py:12)', and empty if not known. Frames of PyTorch and of C++ are passed
    over, unless there are no others.
    """
    python = [frame for frame in frames if frame.filename.endswith(".py") or not frame.filename]
    shown = [frame for frame in python if not any(part in frame.filename for part in (*_LIBRARY, "<frozen"))] or python
    shown = shown or [frame for frame in frames if frame.name]
    if not shown:
        return "", ""
    own = [frame for frame in shown[1:] if frame.filename and not any(part in frame.filename for part in _INSTALLED)]
    return _text(shown[0]), _text(own[0]) if own else ""


def _text(frame: Frame) -> str:
    return f"{frame.name} ({_line(frame)})" if frame.filename else frame.name


def _line(frame: Frame) -> str:
    return f"{frame.filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.line}"


def source_of(frames: Sequence[Frame]) -> set[str]:
    """Returns the lines of a stack trace as 'file.py:12', without folders."""
    return {_line(frame) for frame in frames if frame.filename}
