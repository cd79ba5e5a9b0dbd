"""What autograd keeps for backward, in a what-if recording: ghosts instead of tensors, and when each is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from planner.recording.module_calls import TAKES_GRADIENTS
from planner.recording.step_graph import Save

if TYPE_CHECKING:
    from planner.recording.recorder import Recorder


class _SavedPlaceholder:
    """Stands for a saved tensor: what is needed to make one like it."""

    __slots__ = ("dtype", "offset", "recorder", "save", "shadow", "shape", "stride")

    def __init__(self, recorder: Recorder, tensor: torch.Tensor, save: Save) -> None:
        self.recorder, self.save = recorder, save
        self.shadow = recorder.data_dependence.known.shadow(tensor)
        self.shape, self.stride, self.offset, self.dtype = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
        )

    def __del__(self) -> None:
        self.save.release = self.recorder.next_tick()


class _Kept:
    """A saved tensor that is held as it is (parameters, inputs, host tensors); its times are still noted."""

    __slots__ = ("recorder", "save", "tensor")

    def __init__(self, recorder: Recorder, tensor: torch.Tensor, save: Save) -> None:
        self.recorder, self.tensor, self.save = recorder, tensor, save

    def __del__(self) -> None:
        self.save.release = self.recorder.next_tick()


class SavedTensors:
    """Pack and unpack hooks for `torch.autograd.graph.saved_tensors_hooks`; they write `Save`s into the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pack(self, tensor: torch.Tensor) -> _SavedPlaceholder | _Kept:
        storage = self._recorder.storage_of(tensor) if not tensor.is_sparse else None
        permanent = storage is None or self._recorder.storages[storage].op is None
        save = Save(
            storage=None if permanent else storage,
            pack=self._recorder.next_tick(),
            unpack=None,
            release=None,
            call=self._recorder.calls.innermost[1],
            is_of_next_op=torch.autograd._get_sequence_nr() != self._recorder.sequence,
        )
        self._recorder.saves.append(save)
        if permanent:
            with self._recorder.pause():
                return _Kept(self._recorder, tensor.detach(), save)
        return _SavedPlaceholder(self._recorder, tensor, save)

    def unpack(self, packed: _SavedPlaceholder | _Kept) -> torch.Tensor:
        save = packed.save
        if self._recorder.calls.innermost[1] is not None:
            self._recorder.calls.note_obstacle(save.call, TAKES_GRADIENTS)
        if save.unpack is None:
            save.unpack = self._recorder.next_tick()
        if isinstance(packed, _Kept):
            return packed.tensor
        with self._recorder.pause():
            elements = math.ceil(self._recorder.storages[save.storage].size_bytes / packed.dtype.itemsize)
            base = torch.empty(elements, dtype=packed.dtype, device=self._recorder.device)
            self._recorder.storage_of(base, adopt=save.storage)
            self._recorder.data_dependence.known.take_over(base, packed.shadow)
            return base.as_strided(packed.shape, packed.stride, packed.offset)
