"""The registry of formulas by the name of the op, and the description of a call that a formula takes."""

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
    """Strides in elements."""
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
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the accumulator of a sum (`at::opmath_type`, and int64 for integers and booleans)."""
        return {"float32": 4, "bfloat16": 4, "float16": 4}.get(self.dtype, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an op: everything that the size of its scratch memory depends on."""

    arguments: Mapping[str, Any]
    """Arguments by the names of the op's schema, with defaults. Tensors are `Layout`s, and lists are tuples."""
    outputs: tuple[Layout, ...]

    def tensor(self, name: str) -> Layout:
        """Returns the layout of an argument that is a tensor."""
        layout: Layout = self.arguments[name]
        return layout


Formula = Callable[[KernelCall, DeviceProfile], list[int]]
"""Returns the sizes in bytes of the blocks that a call allocates in addition to its outputs.

All blocks are alive at the same time, and are freed at the end of the call.
"""

_FORMULAS: dict[str, Formula] = {}
_PARTLY: set[str] = set()
"""Ops whose formula is incomplete."""


def takes_scratch(*names: str, complete: bool = True) -> Callable[[Formula], Formula]:
    """Registers a formula for ops by their full names, such as 'aten.sum.dim_IntList'.

    A second formula for an op is refused.

    Args:
        complete: False if the kernel allocates more than the formula says, and the rest cannot be computed.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if name in _FORMULAS or name in NEED_NOTHING:
                raise ValueError(f"{name} is already listed: list an op once, with a formula or in `nothing`")
            _FORMULAS[name] = formula
        _PARTLY.update(() if complete else names)
        return formula

    return register


def formula_of(name: str) -> Formula | None:
    """Returns the formula of an op; None if it has none."""
    return _FORMULAS.get(name)


def has_formula(name: str) -> bool:
    """True if the op has a formula, which may be incomplete."""
    return name in _FORMULAS


def is_known(name: str) -> bool:
    """True if the scratch memory of the op is completely known: it has a complete formula, or needs none."""
    return (name in _FORMULAS and name not in _PARTLY) or name in NEED_NOTHING
