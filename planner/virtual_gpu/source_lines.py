"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch


def frames() -> Iterator[Any]:
    """Of the caller and its callers, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_NOT_MODEL_CODE = (
    str(pathlib.Path(torch.__file__).parent),
    str(pathlib.Path(__file__).parents[1]),
    "<",
)


@functools.cache
def is_model_code(filename: str) -> bool:
    """Whether a file is neither PyTorch's nor ours, so that a line of it says something to the user."""
    standard = filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    return not standard and not filename.startswith(_NOT_MODEL_CODE)


def source_line() -> str:
    """'file.py:line' of the innermost frame of model code; empty if there is none."""
    for frame in frames():
        if is_model_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""
