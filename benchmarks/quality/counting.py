"""Counts the live bytes and the FLOPs of a training step op by op on the CPU. Exact and repeatable."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _grouped_product(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    if len(a) == len(b) == 2:  # groups of the summed dimension, as in the gradient of the weights
        return 2 * a[0] * a[1] * b[1]
    tokens = a if len(a) == 2 else b
    return 2 * tokens.numel() * (b[-1] if len(a) == 2 else a[1])


def _convolution_backward(gradient: torch.Size, x: torch.Size, weight: torch.Size, *options: Any, **__: object) -> int:
    transposed, output_mask = options[4], options[7]
    return sum(output_mask[:2]) * conv_flop_count(x, weight, gradient, transposed=transposed)


FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
"""FLOP formulas that torch's counter lacks, so that a recompute of these ops would cost nothing (attention on a CPU,
the experts of a mixture), and one that ignores the groups of a convolution."""


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of all storages that are created inside it, and their peak."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts of one step."""

    peak_bytes: int
    """Peak in bytes above the memory alive before the step, when there are no gradients."""
    allocator_bytes: int
    """The same from the CPU's allocator, scratch memory of kernels included. Measured without a dispatch mode, in which
    autograd would add up the gradients of a tied weight out of place."""
    flops: int
    loss: float


def counted(step: Callable[[], torch.Tensor], known: Iterable[torch.Tensor]) -> Counted:
    """Run the step once for each count, since torch's FLOP counter keeps tensors of recomputed modules alive.

    Args:
        known: tensors that are alive before the step.
    """
    with LiveBytes(known) as memory:
        loss = step()
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as flops:
        step()
    return Counted(
        peak_bytes=memory.peak_bytes,
        allocator_bytes=allocator_peak_bytes(step),
        flops=flops.get_total_flops(),
        loss=float(loss),
    )


def allocator_peak_bytes(step: Callable[[], torch.Tensor]) -> int:
    """Returns the peak of the bytes that the CPU's allocator gave out during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)
