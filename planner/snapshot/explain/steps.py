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
_RECOMPUTATION = {"backward", "unpack_hook", "recompute_fn"}
"""Names of functions of torch.utils.checkpoint that run in the backward."""
_LEAST_FALL = 0.2
"""Least fall of allocated memory at the end of a step, as a fraction of the highest level of the record."""


def is_optimizer(frames: Sequence[Frame]) -> bool:
    """True if an optimizer's step made the allocation."""
    return any(
        any(part in frame.filename for part in _OPTIMIZERS) or frame.name.endswith(", optimizer") for frame in frames
    )


def is_backward(frames: Sequence[Frame]) -> bool:
    """True if autograd's backward made the allocation, also to recompute activations."""
    return any(
        frame.name == "backward"
        or "torch::autograd::Engine" in frame.name
        or "AccumulateGrad" in frame.name
        or frame.name.endswith((", backward", ", recompute"))
        or (frame.name in _RECOMPUTATION and "torch/utils/checkpoint" in frame.filename)
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

    If stack traces show backwards and updates, a step begins where allocated memory is lowest after them, and before
    the next backward. So with gradient accumulation, each micro-batch counts as a step. If they show that parameters
    are made, the first step begins after that.

    Otherwise a step begins where memory is lowest between two rises, if it falls and rises by at least half of its
    largest fall, and if that is a fifth of the highest level. Blocks from before that which are freed while memory
    rises again, such as gradients after the update, belong to the step before. The result is empty if neither is found.
    """
    levels = [level for level in program.levels() if 0 <= level[0] <= until]
    traces = {block.born: block.frames for block in program.blocks if block.born >= 0}
    loaded = max((event for event, frames in traces.items() if event <= until and is_loading(frames)), default=-1)
    first = [loaded] if loaded >= 0 else []
    levels = [level for level in levels if level[0] > loaded]
    has_traces = any(frame.filename for frames in traces.values() for frame in frames)
    ends_step = [_ends_step(traces.get(event)) for event, _ in levels]
    if has_traces and any(ends_step):
        return [*first, *_after(levels, ends_step)]
    ends = sorted((block.freed, block.born) for block in program.blocks if block.freed is not None)
    return [*first, *_lows(levels, ends)]


def _ends_step(frames: Sequence[Frame] | None) -> bool | None:
    """True for an allocation of a backward or an update, and False for one of a forward.

    None for a free (without `frames`) and for allocations outside steps. Backwards run in a thread without Python
    frames.
    """
    if frames is None or is_outside(frames):
        return None
    return not frames or is_optimizer(frames) or is_backward(frames)


def _after(levels: Sequence[tuple[int, int]], ends_step: Sequence[bool | None]) -> list[int]:
    """Returns the event with the lowest level between the end of each step and the backward of the next step.

    Args:
        levels: Requested bytes that are alive after each event, as (event, bytes).
        ends_step: For each of them, the result of `_ends_step`.
    """
    starts: list[int] = []
    since: list[tuple[int, int]] = []
    is_ending = seen = False
    for level, ends in zip(levels, ends_step, strict=True):
        if ends is True:
            if not is_ending and seen:
                starts.append(min(since, key=lambda found: found[1])[0])
            is_ending = seen = True
            since = []
        elif seen:
            since.append(level)
            is_ending = is_ending and ends is None
    if since and not is_ending:
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
