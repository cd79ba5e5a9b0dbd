"""Which line of the model's own code is running: what a refusal, an assumption and a recorded op point to."""

from __future__ import annotations

import functools
import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_NOT_MODEL_CODE = (
    str(pathlib.Path(torch.__file__).parent),
    str(pathlib.Path(__file__).parent),
    str(pathlib.Path(__file__).parent.parent / "rewrite"),
    "<",
)


@functools.cache
def is_model_code(filename: str) -> bool:
    """Whether a file is neither PyTorch's nor ours, so that a line of it says something to the user."""
    standard = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    return not standard and not filename.startswith(_NOT_MODEL_CODE)


def frames() -> Iterator[Any]:
    """The running Python frames, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def source_line() -> str:
    """'file.py:line' of the innermost frame of model code; empty if there is none."""
    for frame in frames():
        if is_model_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""
