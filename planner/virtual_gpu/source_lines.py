"""Finds the line of the user's code that is running."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

import torch


def frames() -> Iterator[FrameType]:
    """Yields the frames of the caller and its callers, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# The separator at the end keeps packages whose names begin in the same way, such as torch_geometric, apart from torch.
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_NOT_MODEL_CODE = (
    os.path.join(pathlib.Path(torch.__file__).parent, ""),
    os.path.join(pathlib.Path(__file__).parents[1], ""),
    "<",
)

_RECORDING = ("record_steps", os.path.join(pathlib.Path(__file__).parents[1], "recording", "rehearsal.py"))
"""Name and file of the function that runs the training steps: the frames around it are not those of a model."""


@functools.cache
def is_model_code(filename: str) -> bool:
    """True if a file does not belong to PyTorch, the planner or Python's standard library."""
    standard = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    return not standard and not filename.startswith(_NOT_MODEL_CODE)


def optimizer_in(running: Iterable[FrameType]) -> torch.optim.Optimizer | None:
    """Returns the optimizer of which one of these frames runs a method; None if there is none."""
    owners = (frame.f_locals.get("self") for frame in running)
    return next((owner for owner in owners if isinstance(owner, torch.optim.Optimizer)), None)


def source_line(*, in_backward: bool = False) -> str:
    """Returns 'file.py:line' of the innermost frame of model code, or '' if there is none.

    The code that calls `record_steps` is not model code.

    Args:
        in_backward: True to look only at the code that autograd calls, and not at the code that called `backward()`.
    """
    for frame in frames():
        name = frame.f_code.co_name
        if (name, frame.f_code.co_filename) == _RECORDING or (in_backward and name == "_engine_run_backward"):
            return ""
        if is_model_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""
