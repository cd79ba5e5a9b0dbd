"""Parts of an emitted file: the code that a rule contributes, and Python literals formatted as by ruff or black."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence

from planner.plan_types.decision_base import cards_of
from planner.plan_types.plan import Plan
from planner.profiles.links import CARDS_PER_NODE

WIDTH = 120
"""Maximum length of an emitted line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmittedCode:
    """The source text that one decision adds to the emitted file."""

    environment: tuple[tuple[str, str | None], ...] = ()
    """Names and values of environment variables, which the file sets before it imports torch; None unsets one."""
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    """Sources of functions and classes that the other functions use. They come at the end of the file."""
    defaults: tuple[str, ...] = ()
    """Sources of functions that are default values of parameters of the step, and so are defined before it."""
    rewriting: tuple[str, ...] = ()
    """Statements on `model`, in the body of `rewrite(model)`."""
    wrapped: str = ""
    """Expression for a wrapper of `model`, whose modules have other paths; empty without one. `rewrite` returns it."""
    is_watched: bool = False
    """True if the file has a `RECOMPUTE_CHECK`. The training step then calls it at its start and before the update."""
    autocast: str = ""
    """Context expression for forward and loss; empty without autocast."""
    scaled: bool = False
    """True if the step uses a gradient scaler."""
    backward: str = ""
    """Context expression for a backward that also applies the updates; empty if the optimizer steps after it."""
    split: str = ""
    """Expression over `batch` that yields (micro-batch, weight of its loss); empty if the batch is not split."""
    before_micro_batch: str = ""
    """Statement before the forward of each micro-batch, in which `is_last` is True for the last one; '' for none."""
    around_micro_batch: str = ""
    """Context expression for forward and backward of each micro-batch, in which `is_last` is known; '' for none."""
    share: str = ""
    """Expression over `batch`: the factor for the loss of this rank; empty for one process."""
    cards: int = 1
    """Number of processes that run the file."""
    shards: bool = False
    """True if `rewrite` divides the model among the processes, and moves its part to the device."""
    receives: bool = False
    """True if only rank 0 has to build the model with its weights, and `receive_from_rank_0` sends them."""
    part: str = "rank"
    """Expression over `rank`: the number of the part of the batch that a process gets."""
    loads: tuple[tuple[str, str], ...] = ()
    """Functions of the user's own that the file calls: the name there, and file and name of the function."""
    clipping: str = ""
    """Function that clips the gradients; empty for PyTorch's own."""
    communicates_on_host: bool = False
    """True if collectives also run on tensors in host memory, such as the norms of offloaded gradients."""
    options: tuple[str, ...] = ()
    """Keyword parameters that the emitted step has because `split` needs them."""
    main_arguments: tuple[str, ...] = ()
    """Arguments that the emitted `main` passes for these `options`."""
    optimizer: str = ""
    """Source text of `make_optimizer(model)`; empty if the plan's own optimizer is used."""
    optimizer_class: str = ""
    """Class that divides the optimizer among the processes, and gets the optimizer's class as `optimizer_class`."""
    optimizer_options: tuple[str, ...] = ()
    """Further keyword arguments for a torch optimizer, in addition to its hyperparameters."""


def environment_source(environment: Iterable[tuple[str, str | None]]) -> str:
    """Python statements that set environment variables, and unset those whose value is None."""
    return "\n".join(
        f"os.environ.pop({literal(name)}, None)" if value is None else f"os.environ[{literal(name)}] = {literal(value)}"
        for name, value in environment
    )


def assignment(name: str, value: object) -> str:
    """Python source of `name = value`."""
    return f"{name} = {literal(value, used=len(name) + 3)}"


def literal(value: object, *, indent: int = 0, used: int = 0) -> str:
    """Python source of plain data. Containers that do not fit on the line get one line per item.

    The source is a literal whatever the texts in it are: they cannot end it.

    Args:
        indent: columns that the statement is indented by.
        used: columns of the line that stand before the literal.

    Raises:
        TypeError: a value is not plain data, so that it has no literal.
    """
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
            # Half of a surrogate pair, as in file names that are not UTF-8, cannot be encoded.
            return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
        case dict():
            return "{" + ", ".join(f"{_one_line(key)}: {_one_line(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(_one_line(item) for item in value) + "]"
        case tuple():
            return "(" + ", ".join(_one_line(item) for item in value) + ("," if len(value) == 1 else "") + ")"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case bool() | int() | float() | None:
            return repr(value)
        case _:
            raise TypeError(f"there is no literal for a value of type {type(value).__name__}")


def call(function: str, arguments: Sequence[str]) -> str:
    """Return a call in one line that may be indented once, or with one argument in each line if that is too long."""
    line = f"{function}({', '.join(arguments)})"
    if len(line) + len("    ") <= WIDTH:
        return line
    return "\n".join((f"{function}(", *(f"    {argument}," for argument in arguments), ")"))


def torchrun(plan: Plan) -> str:
    """Return the command that starts a file on the cards of a plan for several, without the name of the file.

    If the cards are in several machines, the command is for each of them, and HOST is the name of one of them.
    """
    cards = cards_of(plan.decisions)
    each = next(n for n in range(min(cards, plan.cards_per_node or CARDS_PER_NODE), 0, -1) if cards % n == 0)
    if each == cards:
        return f"torchrun --nproc-per-node {cards}"
    where = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {cards // each} --nproc-per-node {each} {where}"
