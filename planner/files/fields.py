"""Checks the fields of dataclasses that were read from a file: types by their annotations, and ranges of numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

MOST = 2**63 - 1
"""Largest whole number in a file. Sizes in bytes and numbers of elements above it cannot exist."""
LEAST = {
    **dict.fromkeys(("batch_size", "seq_len", "cards_per_node", "multiple", "eval_batch_size"), 1),
    "ignored": -MOST,
}
"""By name of a field, its smallest whole number; 0 for other fields."""
GREATEST = {
    **dict.fromkeys(("batch_size", "micro_batch_size", "micro_batches", "seq_len", "lengths", "multiple"), 2**31 - 1),
    **dict.fromkeys(("eval_batch_size", "eval_samples", "samples", "steps"), 2**31 - 1),
    **dict.fromkeys(("cards_per_node", "mesh", "rank"), 2**20),
    "chunks": 1024,
}
"""By name of a field, its largest whole number; `MOST` for other fields. These numbers are sizes of tensors, or say how
often something runs."""
ANY_NUMBER = ("values",)
"""Fields with numbers of the user's own, which may be of any size and sign."""


def check_field_types(record: Any, path: str = "") -> None:
    """Checks every field of a dataclass, also those of dataclasses in it.

    Args:
        path: names of the fields that lead to this dataclass, such as 'baseline.'.

    Raises:
        TypeError: a value does not have the type of its annotation, or is a number out of range; the message names the
            field.
    """
    for name, hint in _hints(record.__class__).items():
        value = getattr(record, name)
        _check(value, hint, f"{path}{name}")
        if name not in ANY_NUMBER:
            _check_range(value, (LEAST.get(name, 0), GREATEST.get(name, MOST)), f"{path}{name}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _check(value: Any, hint: Any, path: str) -> None:
    if dataclasses.is_dataclass(value) and isinstance(hint, type) and isinstance(value, hint):
        check_field_types(value, f"{path}.")
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        possible = [argument for argument in arguments if _is_of(value, argument)]
        if possible:
            _check(value, possible[0], path)
            return
    elif _is_of(value, hint):
        for key, part in _parts(value, origin, arguments):
            _check(part, key[1], f"{path}{key[0]}")
        return
    raise TypeError(f"{path} is {repr(value)[:80]}")


def _check_range(value: Any, limits: tuple[int, int], path: str) -> None:
    """Checks a number, or the numbers in a tuple or a dict. `limits` are the smallest and the largest whole number."""
    if isinstance(value, (tuple, list)):
        for part in value:
            _check_range(part, limits, path)
    elif isinstance(value, Mapping):
        for part in value.values():
            _check_range(part, limits, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{path} is {value!r}, not a finite number")
    elif type(value) is int and not limits[0] <= value <= limits[1]:
        raise TypeError(f"{path} is {value if abs(value) <= MOST else 'a number of too many digits'}, out of range")


def _is_of(value: Any, hint: Any) -> bool:
    """True if the value is of the type, apart from its parts."""
    kind = typing.get_origin(hint) or hint
    if kind is Any:
        return True
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, type(None) if kind is None else kind)


def _parts(value: Any, origin: Any, arguments: tuple[Any, ...]) -> list[tuple[tuple[str, Any], Any]]:
    """Returns the parts of a tuple or a dict, each as (its place, its annotation) and its value."""
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return [((f"[{number}]", arguments[0]), part) for number, part in enumerate(value)]
    if origin is tuple:
        if len(value) != len(arguments):
            return [((" (its number of values)", None), len(value))]
        return [((f"[{number}]", hint), part) for number, (hint, part) in enumerate(zip(arguments, value, strict=True))]
    if origin in (dict, Mapping):
        return [((f"[{key!r}]", arguments[1]), part) for key, part in value.items()]
    return []
