"""Formulas by the name of the op, and the calls they are asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from planner.profiles.device import DeviceProfile
from planner.workspaces.nothing import NEED_NOTHING


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    itemsize: int
    dtype: str
    """As torch prints it, without 'torch.'."""

    @property
    def numel(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def accumulator_bytes(self) -> int:
        """Of a sum over elements (`at::opmath_type`, and int64 for integers and bools)."""
        return {"float32": 4, "bfloat16": 4, "float16": 4}.get(self.dtype, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an op, as far as sizes depend on it."""

    arguments: Mapping[str, Any]
    """By the schema's names, defaults filled in; tensors are `Layout`s, lists are tuples."""
    outputs: tuple[Layout, ...]

    def tensor(self, name: str) -> Layout:
        """An argument that is a tensor."""
        return self.arguments[name]


Formula = Callable[[KernelCall, DeviceProfile], list[int]]
"""Sizes in bytes of the blocks that the call takes beside its outputs, all at once, and gives back at its end."""

_FORMULAS: dict[str, Formula] = {}
_PARTLY: set[str] = set()


def takes_scratch(*names: str, complete: bool = True) -> Callable[[Formula], Formula]:
    """Register a formula for these ops ('aten.sum.dim_IntList'). A second one for an op is refused.

    Args:
        complete: False where the kernel takes more than the formula says, and nobody can compute how much.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            if name in _FORMULAS or name in NEED_NOTHING:
                raise ValueError(f"{name} is listed already")
            _FORMULAS[name] = formula
        _PARTLY.update(() if complete else names)
        return formula

    return register


def formula_of(name: str) -> Formula | None:
    return _FORMULAS.get(name)


def has_formula(name: str) -> bool:
    return name in _FORMULAS


def is_known(name: str) -> bool:
    """Whether it is known what the op takes: by a formula, or nothing."""
    return (name in _FORMULAS and name not in _PARTLY) or name in NEED_NOTHING
