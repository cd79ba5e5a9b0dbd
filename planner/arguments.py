"""Checks the types of the arguments of the public functions, so that a wrong one is refused in one line.

Values are checked where they are used. Here are the types, by the name of an argument.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from planner.errors import ArgumentError, plain_line
from planner.files.fields import GREATEST
from planner.workload.unsupported import is_coroutine_function

T = TypeVar("T")
Test = Callable[[Any], bool]

_HUGE = 1 << 63
"""Minimum of the whole numbers that do not fit into a signed 64-bit integer."""
_DATA = ("model", "batch")
"""Arguments that may contain any numbers."""
_LONGEST_SHOWN = 80
"""Maximum number of characters of a value that a message repeats."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the types of arguments, by their names. Names without an entry in `_EXPECTED` are not checked.

    Raises:
        ArgumentError: an argument has another type; the message names it, its value, and what is expected.
    """
    for name, value in arguments.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if name in _FUNCTIONS and is_coroutine_function(value):
            raise ArgumentError(
                f"{name} is a coroutine function (`async def`), and a call of it runs nothing: write it with `def`"
            )
        if name in _EXPECTED:
            is_right, expected = _EXPECTED[name]
            if not is_right(value):
                raise ArgumentError(f"{name} is {_shown(value)}: give {expected}")
        if name not in _DATA and any(map(_is_huge, _parts(value))):
            raise ArgumentError(f"{name} is {_shown(value)}: give a number below 2**63")
        most = GREATEST.get(name)
        if most is not None and any(_is_whole(part) and part > most for part in _parts(value)):
            raise ArgumentError(f"{name} is {_shown(value)}: give at most {most:,}")


def plain(value: T) -> T:
    """Return a number of any library, such as numpy, as one of Python's, which a plan file can hold.

    So are the numbers in a list, tuple or dict. Everything else is returned unchanged.
    """
    found: Any = value
    if _is_whole(found):
        found = int(found)
    elif _is_number(found):
        try:
            found = float(found)
        except OverflowError:  # a fraction; no argument may be infinite
            found = math.inf
    elif type(found) in (list, tuple):
        found = type(found)(map(plain, found))
    elif type(found) is dict:
        found = {name: plain(part) for name, part in found.items()}
    return found


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the items of a list or tuple, the values of a dict, or a tuple with any other value."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _is_huge(value: Any) -> bool:
    """True for a whole number that is too large for a count of bytes or nanoseconds."""
    return _is_whole(value) and not -_HUGE < value < _HUGE


def _shown(value: Any) -> str:
    try:
        text = hex(value) if _is_huge(value) else repr(value)  # Python shows at most 4,300 decimal digits
    except Exception as error:  # a class of the user's, whose __repr__ has a fault
        text = f"an object that cannot be shown ({type(error).__name__})"
    return f"{plain_line(text, _LONGEST_SHOWN)} ({type(value).__name__})"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in value)


def _are_techniques(value: Any) -> bool:
    return isinstance(value, str) or _are_names(value)


def _are_values(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(line, str) and _is_number(number) for line, number in value.items()
    )


def _is_mesh(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_whole(size) for name, size in value.items())
    return isinstance(value, (list, tuple)) and all(_is_whole(size) for size in value)


def _are_activities(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (None,)
    return all(isinstance(part, str) or callable(part) for part in parts)


def _makes_optimizers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True  # the optimizers of a step of the user's own: `optimizer_choice` names the one that is wrong
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(part, str) or callable(part) or hasattr(part, "param_groups") for part in parts)


_TECHNIQUES = (_are_techniques, "names of techniques, such as 'checkpoint' or ('checkpoint', 'offload')")
_SWITCH = (_is_bool, "True or False")
_FUNCTIONS = ("loss_fn", "step", "parallelize", "optimizer", "progress")
_MAY_BE_NONE = (
    *("gpu", "only", "max_slowdown", "margin", "by_sample", "values", "alloc_conf", "eval_batch_size", "cards", "mesh"),
    *("parallelize", "sharding", "cards_per_node", "link", "progress", "loss_fn", "step", "cudnn_benchmark"),
)
_EXPECTED: dict[str, tuple[Test, str]] = {
    "gpu": (_is_text, "the name of a card, such as 'rtx-2060', or the path of a profile as text"),
    "loss_fn": (callable, "a function of the output and the batch, or None if the model returns a loss"),
    "step": (callable, "a function of the model, the optimizer and the batch, or None"),
    "optimizer": (_makes_optimizers, "a name such as 'adamw', a torch optimizer, or a function of the parameters"),
    "fidelity": (_is_text, "'exact', 'rounded', 'adapted' or 'partial'"),
    "force": _TECHNIQUES,
    "forbid": _TECHNIQUES,
    "only": (_are_techniques, f"{_TECHNIQUES[1]}, or None for all"),
    "max_slowdown": (_is_number, "a number such as 1.2, or None for no limit"),
    "margin": (lambda value: _is_text(value) or _is_whole(value), "a size such as '500MiB' or '5%', or None"),
    "gradients_alive": _SWITCH,
    "worst_case": _SWITCH,
    "offload_shards": _SWITCH,
    "by_sample": (_are_names, "names of tensors of the batch, such as ('x', 'labels'), or None"),
    "values": (_are_values, "numbers by line, such as {'model.py:42': 100}"),
    "alloc_conf": (_is_text, "options as text, such as 'expandable_segments:True', or None"),
    "cudnn_benchmark": (_is_bool, "True, False, or None for the setting of this process"),
    "eval_batch_size": (_is_count, "a number of samples, at least 1, or None"),
    "between": (_are_activities, "functions, 'average', 'save' or 'resume' in a list, or in a dict with names"),
    "cards": (lambda value: _is_text(value) or _is_whole(value), "the number of cards, 'fewest', or None for one"),
    "mesh": (_is_mesh, "numbers of cards, such as (2, 4) or {'dp': 2, 'tp': 4}, or None"),
    "parallelize": (callable, "a function of the model and the mesh, or None"),
    "sharding": (_is_text, "'ddp', 'zero1', 'zero2' or 'fsdp', or None"),
    "cards_per_node": (_is_count, "a number of cards, at least 1, or None"),
    "link": (_is_text, "the name of a link, such as 'nvlink-4' or 'pcie', or None"),
    "progress": (lambda value: _is_bool(value) or callable(value), "True, False, a function, or None"),
}
"""By name of an argument: a function that is true for values of the expected type, and text for a message."""
