"""What stands for a saved tensor in a what-if recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from planner.step_graph import Save

if TYPE_CHECKING:
    from planner.recorder import Recorder


class Ghost:
    """Stands for a saved tensor: what is needed to make one like it."""

    __slots__ = ("dtype", "offset", "recorder", "save", "shape", "stride", "twin")

    def __init__(self, recorder: Recorder, tensor: torch.Tensor, save: Save) -> None:
        self.recorder, self.save = recorder, save
        self.twin = recorder.answers.known.twin(tensor)
        self.shape, self.stride, self.offset, self.dtype = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
        )

    def __del__(self) -> None:
        self.save.release = self.recorder.next_tick()


class Kept:
    """A saved tensor that is held as it is (parameters, inputs, host tensors); its times are still noted."""

    __slots__ = ("recorder", "save", "tensor")

    def __init__(self, recorder: Recorder, tensor: torch.Tensor, save: Save) -> None:
        self.recorder, self.tensor, self.save = recorder, tensor, save

    def __del__(self) -> None:
        self.save.release = self.recorder.next_tick()
