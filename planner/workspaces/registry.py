"""The registry of formulas by the name of the op, and `KernelCall`, the description of a call that a formula takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from planner.profiles.device import DeviceProfile
from planner.workspaces.nothing import NEED_NOTHING


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Stride of each dimension, in elements."""
    itemsize: int
    """Bytes of one element."""
    dtype: str
    """Name of the dtype without 'torch.', such as 'float32'."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of all elements together."""
        return self.numel * self.itemsize

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of a partial result of a sum: 4 for fp32, fp16 and bf16 (`at::opmath_type`), 8 for other dtypes."""
        return {"float32": 4, "bfloat16": 4, "float16": 4}.get(self.dtype, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an op: everything that the size of its scratch memory depends on."""

    arguments: Mapping[str, Any]
    """All arguments by their names in the op's schema, with the schema's defaults for those that were not passed.

    Tensors are given as `Layout`s, and lists as tuples.
    """
    outputs: tuple[Layout, ...]

    def tensor(self, name: str) -> Layout:
        """Returns the argument `name`, which must be a tensor, as its layout."""
        layout: Layout = self.arguments[name]
        return layout


Formula = Callable[[KernelCall, DeviceProfile], list[int]]
"""A function that takes a call and a card, and returns the sizes in bytes of the blocks of scratch memory.

The blocks are those that the call allocates in addition to its outputs. All of them are alive at the same time, and are
freed at the end of the call.
"""

_FORMULAS: dict[str, Formula] = {}
_INCOMPLETE: set[str] = set()
"""Names of the ops whose formula does not count all scratch memory."""


def takes_scratch(*names: str, complete: bool = True) -> Callable[[Formula], Formula]:
    """Returns a decorator that registers a formula for ops.

    Args:
        names: Full names of the ops, such as 'aten.sum.dim_IntList'.
        complete: False if the kernel may allocate more scratch memory than the formula returns.

    Raises:
        ValueError: (from the decorator) an op has a formula already, or is listed in `nothing`.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if name in _FORMULAS or name in NEED_NOTHING:
                raise ValueError(
                    f"{name} cannot get this formula, because it has another one or is listed in `nothing`: list each "
                    "op once"
                )
            _FORMULAS[name] = formula
        _INCOMPLETE.update(() if complete else names)
        return formula

    return register


def formula_of(name: str) -> Formula | None:
    """Returns the formula of the op `name`; None if no formula is registered for it."""
    return _FORMULAS.get(name)


def has_formula(name: str) -> bool:
    """True if a formula is registered for the op `name`. The formula may be incomplete."""
    return name in _FORMULAS


def is_known(name: str) -> bool:
    """True if the scratch memory of the op is completely known: it has a complete formula, or needs no memory."""
    return (name in _FORMULAS and name not in _INCOMPLETE) or name in NEED_NOTHING
