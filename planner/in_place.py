"""Ops that the autograd engine runs in place on real tensors, and out of place on tensor subclasses such as fakes.

- A second gradient for the same tensor is added into the first one if nobody else holds that
  (torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`).
- Backward formulas fill fresh zeros in place (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import sys

import torch

_INTO_FRESH_ZEROS = (
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten.index_add.default,
)
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_DISPATCH_FILES = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_python_dispatch.py")
"""Wrappers that PyTorch puts around `__torch_dispatch__`."""
_HELD_BY_ONE = 2
"""Uses of a storage that one tensor holds, counting the Python object that asks."""


def is_in_place_on_cuda(op: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the real engine would write the result into the first argument. To be asked inside a dispatch mode."""
    if op is not torch.ops.aten.add.Tensor and op not in _INTO_FRESH_ZEROS:
        return False
    if torch.is_grad_enabled() or not _called_by_the_engine():
        return False
    target = args[0]
    if op is torch.ops.aten.add.Tensor and not _like(target, args[1]):
        return False
    return target.layout is torch.strided and _is_dense(target) and _uses(target) == _HELD_BY_ONE


def _called_by_the_engine() -> bool:
    """No Python but the dispatch itself runs between this call and the engine: no user's function, no hook."""
    frame = sys._getframe(3)  # beyond this function, its caller and `__torch_dispatch__`
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _like(one: torch.Tensor, other: object) -> bool:
    return isinstance(other, torch.Tensor) and other.shape == one.shape and other.dtype == one.dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and without gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _uses(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
