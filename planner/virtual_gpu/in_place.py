"""Ops that the autograd engine runs in place on real tensors, and out of place on tensor subclasses such as fakes.

- A second gradient for the same tensor is added into the first one if nobody else holds that
  (torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`).
- Backward formulas fill fresh zeros in place (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class InPlaceRule:
    """Tells which ops the real engine would write into their first argument."""

    def __init__(self, device: str) -> None:
        """To be made under the fake mode: one small backward shows how a tensor that nobody else holds is counted."""
        with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            y = torch.ones(2, device=device, requires_grad=True) * 1
            with _Probe() as probe:
                (y.sigmoid() * y.tanh()).sum().backward()
        self._held_by_one = probe.seen

    def __call__(self, op: torch._ops.OpOverload, args: tuple) -> bool:
        """To be asked in `__torch_dispatch__`, before the op runs."""
        if op is not torch.ops.aten.add.Tensor and op not in _INTO_FRESH_ZEROS:
            return False
        if torch.is_grad_enabled() or not _called_by_the_engine():
            return False
        if op is torch.ops.aten.add.Tensor and not _are_alike(*args[:2]):
            return False
        return args[0].layout is torch.strided and _is_dense(args[0]) and _holders(args) == self._held_by_one


class _Probe(TorchDispatchMode):
    """Notes how the engine's own sum of two gradients counts the first one."""

    seen: tuple[int, int, int]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.seen = _holders(args)
        return op(*args, **(kwargs or {}))


def _holders(args: tuple) -> tuple[int, int, int]:
    """Of the first argument: uses of the tensor, of its storage, and of its Python object."""
    target = args[0]
    storage_uses = torch._C._storage_Use_Count(target.untyped_storage()._cdata)
    return target._use_count(), storage_uses, sys.getrefcount(target)


def _called_by_the_engine() -> bool:
    """No Python but the dispatch itself runs between this call and the engine: no user's function, no hook."""
    frame = sys._getframe(3)  # beyond this function, its caller and `__torch_dispatch__`
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _are_alike(one: torch.Tensor, other: object) -> bool:
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
