"""Pieces of an emitted file: what one rule contributes, and Python literals as a formatter would lay them out."""

from __future__ import annotations

import dataclasses
import json
import math

WIDTH = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmittedCode:
    """What one decision adds to the emitted file. Everything is source text."""

    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    rewriting: tuple[str, ...] = ()
    """Statements on `model`, in the body of `rewrite(model)`."""
    autocast: str = ""
    """Context of forward and loss."""
    scaled: bool = False
    """Whether the step takes a gradient scaler."""
    backward: str = ""
    """Context of a backward that takes the optimizer's steps itself."""
    split: str = ""
    """Expression over `batch` that yields (part, weight)."""
    options: tuple[str, ...] = ()
    """Keyword arguments of the step that `split` needs."""
    main_arguments: tuple[str, ...] = ()
    """What `main` gives the step for them."""
    optimizer: str = ""
    """The function `make_optimizer(model)`."""
    optimizer_options: tuple[str, ...] = ()
    """Keyword arguments beside the hyperparameters, where torch's own optimizer is made."""


def assignment(name: str, value: object) -> str:
    return f"{name} = {literal(value, used=len(name) + 3)}"


def literal(value: object, *, indent: int = 0, used: int = 0) -> str:
    """Python source of plain data; containers that do not fit on the line have one item a line."""
    line = _one_line(value)
    if not isinstance(value, (dict, list, tuple)) or not value or indent + used + len(line) <= WIDTH:
        return line
    inner = indent + 4
    pad = " " * inner
    if isinstance(value, dict):
        opening, closing = "{", "}"
        keyed = [(f"{_one_line(key)}: ", item) for key, item in value.items()]
    else:
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")")
        keyed = [("", item) for item in value]
    lines = [f"{pad}{key}{literal(item, indent=inner, used=len(key) + 1)}" for key, item in keyed]
    return opening + "\n" + "".join(f"{line},\n" for line in lines) + " " * indent + closing


def _one_line(value: object) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ", ".join(f"{_one_line(key)}: {_one_line(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(_one_line(item) for item in value) + "]"
        case tuple():
            return "(" + ", ".join(_one_line(item) for item in value) + ("," if len(value) == 1 else "") + ")"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case _:
            return repr(value)
