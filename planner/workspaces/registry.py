"""The registry of formulas by the name of the op, and `KernelCall`, the description of a call that a formula takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


BENCHMARK_LIMIT = 10
"""The default of `torch.backends.cudnn.benchmark_limit` (aten/src/ATen/Context.h)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CudnnSettings:
    """The settings of `torch.backends.cudnn` with which an op ran. The defaults are PyTorch's."""

    enabled: bool = True
    allow_tf32: bool = True
    """True if convolutions in fp32 may be rounded to TF32."""
    deterministic: bool = False
    benchmark: bool = False
    """True if each convolution runs the algorithm that is the fastest on the card."""
    benchmark_limit: int = BENCHMARK_LIMIT
    """Number of algorithms whose times are compared then; 0 for all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an op: everything that the size of its scratch memory depends on."""

    arguments: Mapping[str, Any]
    """All arguments by their names in the op's schema, with the schema's defaults for those that were not passed.

    Tensors are given as `Layout`s, and lists as tuples.
    """
    outputs: tuple[Layout, ...]
    settings: CudnnSettings = CudnnSettings()

    def tensor(self, name: str) -> Layout:
        """Returns the argument `name`, which must be a tensor, as its layout."""
        layout: Layout = self.arguments[name]
        return layout


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """The sizes of a workspace that PyTorch tries one after another, until one fits."""

    sizes_bytes: tuple[int, ...]
    """Sizes in the order of the trials, each smaller than the one before it. The algorithms with small workspaces are
    usually slower."""
    remembered_as: str
    """Key under which PyTorch remembers the last size that fitted: calls with the same key begin with it."""
    search: Search | None = None
    """How PyTorch finds the algorithm if it measures their times; None if it takes the first one that fits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """How PyTorch finds the fastest algorithm of a convolution, with `torch.backends.cudnn.benchmark = True`."""

    plans_bytes: tuple[int, ...]
    """Sizes of the workspaces of all algorithms, in cuDNN's order."""
    most: int
    """Number of algorithms whose times are compared; 0 for all of them."""
    card_bytes: int
    """Memory of the card that the caching allocator may take."""
    heuristic_bytes: tuple[int, ...]
    """Sizes that PyTorch tries without a search."""

    def compared(self, available_bytes: int) -> tuple[int, ...]:
        """Returns the sizes of the algorithms whose times are compared: the first ones of those that fit.

        Args:
            available_bytes: the largest workspace that fits.
        """
        fitting = [size for size in self.plans_bytes if size <= available_bytes]
        return tuple(fitting[: self.most or None])


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One block of scratch memory, with its place between the outputs of the call."""

    size_bytes: int
    first: int
    """Number of outputs that have been allocated when the block is allocated; 0 for a block before the first output."""
    last: int
    """Number of outputs that have been allocated when the block is freed, at least `first`. The block is freed before
    the next output is allocated, or, after the last output, at the end of the call."""
    trials: Trials | None = None
    """The sizes that PyTorch tries if the block does not fit, `size_bytes` first; None if it tries no other."""


Formula = Callable[[KernelCall, DeviceProfile], Sequence[int | Block]]
"""A function that takes a call and a card, and returns the blocks of scratch memory.

The blocks are those that the call allocates in addition to its outputs, in the order of their allocation. A number
stands for a block of that many bytes after all outputs, which is freed at the end of the call.
"""
FormulaByVersion = Callable[[KernelCall, DeviceProfile, str], Sequence[int | Block]]
"""A formula for a kernel that depends on the version of PyTorch, which is its third argument ('2.13.0')."""

_FORMULAS: dict[str, Formula | FormulaByVersion] = {}
_INCOMPLETE: set[str] = set()
"""Names of the ops whose formula does not count all scratch memory."""
_BY_VERSION: set[str] = set()
"""Names of the ops whose formula is a `FormulaByVersion`."""


def takes_scratch(*names: str, complete: bool = True) -> Callable[[Formula], Formula]:
    """Returns a decorator that registers a formula for ops.

    Args:
        names: Full names of the ops, such as 'aten.sum.dim_IntList'.
        complete: False if the kernel may allocate more scratch memory than the formula returns.

    Raises:
        ValueError: (from the decorator) an op has a formula already, or is listed in `nothing`.
    """

    def register(formula: Formula) -> Formula:
        _register(names, formula)
        _INCOMPLETE.update(() if complete else names)
        return formula

    return register


def takes_scratch_by_version(*names: str) -> Callable[[FormulaByVersion], FormulaByVersion]:
    """Returns a decorator that registers a formula which also depends on the version of PyTorch (see `takes_scratch`).

    Raises:
        ValueError: (from the decorator) an op has a formula already, or is listed in `nothing`.
    """

    def register(formula: FormulaByVersion) -> FormulaByVersion:
        _register(names, formula)
        _BY_VERSION.update(names)
        return formula

    return register


def _register(names: tuple[str, ...], formula: Formula | FormulaByVersion) -> None:
    for name in names:
        if name in _FORMULAS or name in NEED_NOTHING:
            raise ValueError(
                f"{name} cannot get this formula, because it has another one or is listed in `nothing`: list each "
                "op once"
            )
        _FORMULAS[name] = formula


def blocks_of(name: str, call: KernelCall, card: DeviceProfile, torch_version: str) -> list[Block]:
    """Returns the blocks of scratch memory that a call takes; empty if no formula is registered for its op.

    Args:
        name: Full name of the op.
        torch_version: a version as in `torch.__version__`.
    """
    formula: Any = _FORMULAS.get(name)
    if formula is None:
        return []
    blocks = formula(call, card, torch_version) if name in _BY_VERSION else formula(call, card)
    outputs = len(call.outputs)
    placed = (block if isinstance(block, Block) else Block(block, outputs, outputs) for block in blocks)
    return [block for block in placed if block.size_bytes > 0]


def has_formula(name: str) -> bool:
    """True if a formula is registered for the op `name`. The formula may be incomplete."""
    return name in _FORMULAS


def is_known(name: str) -> bool:
    """True if the scratch memory of the op is completely known: it has a complete formula, or needs no memory."""
    return (name in _FORMULAS and name not in _INCOMPLETE) or name in NEED_NOTHING
