"""Finds module calls that must not be run twice because of tensors in host memory, such as a buffer that is used again.

The recording contains the tensors of the device only. A module may also read a tensor on the host, for example to copy
it to the device. If the program overwrites that tensor before backward, a second run of the module would read other
values, and `torch.utils.checkpoint` refuses to run it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from planner.recording.step_graph import Call
from planner.virtual_gpu.values.shadow_ops import nested_tensors


class HostTensors:
    """Notes which calls read which tensors in host memory.

    Args:
        device: type of the device whose memory is recorded. If it is the CPU, there are no other tensors.
        calls: all module calls so far. Their `obstacle` is set.
    """

    def __init__(self, device: str, calls: list[Call]) -> None:
        self._is_idle, self._calls = device == "cpu", calls
        self._known: dict[int, tuple[weakref.ref, int, list[int]]] = {}
        """By storage number: finalizer, tick at which the forward made the storage (0 for older ones), its readers."""

    def note(self, call: int | None, tick: int, written: object, read: object, made: object) -> None:
        """Notes an op that runs in `call`, with its arguments and results, unless it is an op of the backward."""
        if self._is_idle or torch._C._current_autograd_node() is not None:
            return
        for tensor in _on_host(written):
            born, readers = self._of(tensor, 0)
            for reader in readers:
                self._forbid(reader, born, "a tensor in host memory that it reads is overwritten later")
            self._forbid(call, born, "it overwrites a tensor in host memory that it did not make")
        for tensor in _on_host(read):
            _, readers = self._of(tensor, 0)
            if call is not None and call not in readers[-1:]:
                readers.append(call)
        for tensor in _on_host(made):
            self._of(tensor, tick)

    def forget(self) -> None:
        """Forgets all tensors, because backward begins: what is overwritten from now on changes no second run."""
        self._known.clear()

    def _of(self, tensor: torch.Tensor, tick: int) -> tuple[int, list[int]]:
        """Returns the tick at which the tensor's storage was made, and the calls that read it."""
        storage, known = tensor.untyped_storage(), self._known
        key = storage._cdata
        if key not in known:
            known[key] = weakref.ref(storage, lambda _: known.pop(key, None)), tick, []
        _, born, readers = known[key]
        return born, readers

    def _forbid(self, index: int | None, born: int, obstacle: str) -> None:
        """Sets the obstacle of the call and of those around it that began after the tensor was made."""
        while index is not None:
            call = self._calls[index]
            if born < call.start:
                call.obstacle = call.obstacle or obstacle
            index = call.parent


def _on_host(value: object) -> Iterator[torch.Tensor]:
    return (
        tensor for tensor in nested_tensors(value) if tensor.device.type == "cpu" and tensor.layout is torch.strided
    )
