"""Tells a rehearsal the values of the model's buffers and of the batch, or what is assumed about them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.virtual_gpu.shadow_ops import ASSUMED_LABELS, ASSUMED_MASK, ASSUMED_VALUES
from planner.virtual_gpu.shadow_values import ShadowValues, is_tracked


def learn_buffer(known: ShadowValues, fake: torch.Tensor, real: torch.Tensor) -> None:
    """Sets the values of a fake buffer to those of `real`, if `real` is small, on the CPU, and integer or boolean."""
    if real.device.type == "cpu" and not real.is_floating_point() and not real.is_complex() and is_tracked(real):
        known.learn(fake, real)


def assume_full(known: ShadowValues, name: str, tensor: torch.Tensor) -> None:
    """Assumes that a tensor of the batch is 1 everywhere if it is a mask or has labels, so that none is ignored.

    Args:
        name: path of the tensor in the batch. A mask has "mask" in it, labels have "label" in the last name.
    """
    last = name.rsplit(".", 1)[-1].lower()
    if "mask" in name.lower():
        known.assume(tensor, 1, ASSUMED_MASK)
    elif "label" in last and not tensor.is_floating_point():
        known.assume(tensor, 1, ASSUMED_LABELS)


def learn_batch(known: ShadowValues, name: str, fake: torch.Tensor, real: torch.Tensor) -> None:
    """Sets the values of a fake tensor of the batch to those that the user gave, if it is small and has no floats.

    If more samples are rehearsed than the batch has, its samples are repeated.

    Args:
        name: path of the tensor in the batch, for the assumption that is noted where the values are needed.
        real: the tensor that the user gave. Its values are known if it is on the CPU.
    """
    has_values = real.device.type == "cpu" and not isinstance(real, FakeTensor) and real.layout is torch.strided
    if not has_values or fake in known or real.is_floating_point() or real.is_complex() or not is_tracked(fake):
        return
    with unset_fake_temporarily():
        if fake.dim() and len(fake) != len(real):
            real = real[torch.arange(len(fake)) % max(len(real), 1)]
    known.learn(fake, real, frozenset((f"{ASSUMED_VALUES} '{name}'",)))
