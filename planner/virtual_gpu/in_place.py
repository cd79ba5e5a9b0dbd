"""Finds ops that the autograd engine runs in place on real tensors, but out of place on fake tensors.

There are two kinds of such ops:

- Accumulation: a second gradient of the same tensor is added into the first gradient if nothing else refers to the
  first gradient (torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`).
- Writing into zeros: some backward formulas create zeros and write a gradient into them (`areAnyTensorSubclassLike` in
  torch/csrc/autograd/FunctionsManual.cpp).

If such an op ran out of place, the recording would have a gradient that a real step does not allocate. Like the engine,
`InPlaceRule` decides by the number of references to a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_INTO_FRESH_ZEROS = (
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten.index_add.default,
)
_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_DISPATCH_FILES = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_python_dispatch.py")
"""Files of PyTorch's wrappers around `__torch_dispatch__`."""


class InPlaceRule:
    """Decides which ops the engine would write into their first argument if the tensors were real."""

    def __init__(self, device: str) -> None:
        """Creates the rule. Call it while the fake mode of the rehearsal is active.

        It runs a small backward on `device` to measure the reference counts of a gradient to which only the engine
        refers. They depend on the versions of Python and torch and on the active modes, so they cannot be constants.
        """
        with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            y = torch.ones(2, device=device, requires_grad=True) * 1
            with _Probe() as probe:
                (y.sigmoid() * y.tanh()).sum().backward()
        self._engine_only = probe.seen

    def __call__(self, op: torch._ops.OpOverload, args: tuple, maker: Callable[[torch.Tensor], str]) -> bool:
        """True if the engine would run the op in place. Call it in `__torch_dispatch__`, before the op runs.

        Args:
            maker: returns the name of the op that made the storage of a tensor.
        """
        if op is not torch.ops.aten.add.Tensor and (op not in _INTO_FRESH_ZEROS or maker(args[0]) not in _ZEROS):
            return False
        if torch.is_grad_enabled() or not _called_by_the_engine():
            return False
        if op is torch.ops.aten.add.Tensor and not _are_alike(*args[:2]):
            return False
        return args[0].layout is torch.strided and _is_dense(args[0]) and _reference_counts(args) == self._engine_only


class _Probe(TorchDispatchMode):
    """Stores the reference counts of the first operand (`seen`) when the engine adds two gradients."""

    seen: tuple[int, int, int]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.seen = _reference_counts(args)
        return op(*args, **(kwargs or {}))


def _reference_counts(args: tuple) -> tuple[int, int, int]:
    """Returns three reference counts of the first argument: of the C++ tensor, its storage, and its Python object."""
    target = args[0]
    storage_uses = torch._C._storage_Use_Count(target.untyped_storage()._cdata)
    return target._use_count(), storage_uses, sys.getrefcount(target)


def _called_by_the_engine() -> bool:
    """True if the engine itself calls the op, and not a Python function or hook that the engine has called."""
    frame: FrameType | None = sys._getframe(3)  # Skips this function, its caller and `__torch_dispatch__`.
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _are_alike(first: torch.Tensor, second: object) -> bool:
    """True if `second` is a tensor with the shape and dtype of `first`."""
    return isinstance(second, torch.Tensor) and second.shape == first.shape and second.dtype == first.dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements neither overlap nor leave gaps in memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
