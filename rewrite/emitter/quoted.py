"""Quote or check what comes from a plan, a path or a name, and goes into emitted code.

A plan file is data: whoever wrote it must not be able to add code to the file that is emitted from it. Texts and
numbers become literals (`planner.rewrite.emitted_code.literal`), names are checked to be names, and remarks stay inside
of a docstring or a comment.
"""

from __future__ import annotations

import keyword

import torch

from planner.errors import PlanFileError


def name(text: object, what: str) -> str:
    """Return a Python name, such as that of a class, or names with dots between them.

    Args:
        text: the text from the plan.
        what: description of the text for the error message.

    Raises:
        PlanFileError: the text is not a name.
    """
    parts = text.split(".") if isinstance(text, str) else [""]
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise PlanFileError(
            f"{what} is {str(text)[:60]!r}, which is not a name in Python, so no file is written: make the plan again"
        )
    return ".".join(parts)


def class_name(text: object, what: str) -> str:
    """Return a name without dots. Raises `PlanFileError` for other texts."""
    if "." in (found := name(text, what)):
        raise PlanFileError(f"{what} is {found[:60]!r}, which is not the name of a class: make the plan again")
    return found


def dtype(text: str) -> str:
    """Return the expression for a dtype of torch, given its name with or without 'torch.'.

    Raises:
        PlanFileError: torch has no such dtype.
    """
    found = text.removeprefix("torch.")
    if not isinstance(getattr(torch, found, None), torch.dtype):
        raise PlanFileError(f"the plan has the dtype {text[:60]!r}, which torch does not have: make the plan again")
    return f"torch.{found}"


def torch_optimizer(path: str) -> str:
    """Return the path of an optimizer of torch. Raises `PlanFileError` if torch has no such class."""
    found = path.removeprefix("torch.optim.").rpartition(".")[2]
    kind = getattr(torch.optim, found, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise PlanFileError(
            f"the optimizer {path[:60]!r} of the plan is not a class of torch.optim, so no code that creates it can be "
            "written: plan with the name of an optimizer, such as adamw"
        )
    return f"torch.optim.{found}"


def number(value: object, what: str) -> int:
    """Return a whole number. Raises `PlanFileError` for other values."""
    if type(value) is not int:
        raise PlanFileError(f"{what} is {str(value)[:60]!r}, not a whole number: correct it, or make the plan again")
    return value


def remark(text: str) -> str:
    """Return a text for a comment or a docstring on one line: other characters than printable ones become spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def docstring(text: str) -> str:
    """Return a docstring with its quotes. It is a raw string if there are backslashes, as at the ends of lines."""
    lines = "\n".join(remark(line) for line in text.split("\n")).replace('"""', "'''")
    if lines.endswith(('"', "\\")):
        lines += " "
    return f'{"r" if chr(92) in lines else ""}"""{lines}"""'
