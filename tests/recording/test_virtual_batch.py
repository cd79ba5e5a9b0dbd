"""The tensors of a batch on the virtual GPU have the strides of the copies that `Tensor.to` makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.recording.virtual_batch import virtual_batch
from tests.support.truth import Case, rehearsal, truth

SAMPLES, CHANNELS, SIZE = 4, 3, 5

BATCHES = {
    "contiguous": lambda: torch.randn(SAMPLES, CHANNELS, SIZE, SIZE),
    "channels_last": lambda: torch.randn(SAMPLES, CHANNELS, SIZE, SIZE).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(SAMPLES, 1, SIZE, SIZE).to(memory_format=torch.channels_last),
    "one pixel": lambda: torch.randn(SAMPLES, CHANNELS, 1, 1).to(memory_format=torch.channels_last),
    "one pixel, contiguous": lambda: torch.randn(SAMPLES, CHANNELS, 1, 1),
    "one row": lambda: torch.randn(SAMPLES, CHANNELS, 1, SIZE).to(memory_format=torch.channels_last),
    "one sample": lambda: torch.randn(1, CHANNELS, SIZE, SIZE).to(memory_format=torch.channels_last),
    "one sample, expanded": lambda: torch.randn(CHANNELS, SIZE).expand(1, CHANNELS, SIZE),
    "channels_last_3d": lambda: torch.randn(SAMPLES, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    "time first": lambda: torch.randn(SIZE, SAMPLES, CHANNELS).transpose(0, 1),
    "reversed": lambda: torch.randn(SIZE, CHANNELS, SAMPLES).permute(2, 1, 0),
    "expanded": lambda: torch.randn(SAMPLES, 1, SIZE).expand(SAMPLES, CHANNELS, SIZE),
    "cut": lambda: torch.randn(SAMPLES, CHANNELS, 2 * SIZE)[..., :SIZE],
    "cut, channels_last": lambda: torch.randn(SAMPLES, 7, 7, CHANNELS).permute(0, 3, 1, 2)[..., :SIZE, :SIZE],
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_strides_are_those_of_a_copy_on_another_device(name):
    given = BATCHES[name]()
    # A copy with another dtype takes the same strides as one on another device, but needs no other device.
    assert fake_batch(given, len(given)).stride() == given.to(torch.float64).stride()


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("channels_last", torch.empty(6, CHANNELS, SIZE, SIZE, memory_format=torch.channels_last)),
        ("one sample", torch.empty(6, CHANNELS, SIZE, SIZE, memory_format=torch.channels_last)),
        ("one sample, expanded", torch.empty(6, CHANNELS, SIZE)),
        ("time first", torch.empty(SIZE, 6, CHANNELS).transpose(0, 1)),
    ],
)
def test_the_memory_format_is_kept_with_another_number_of_samples(name, larger):
    fake = fake_batch(BATCHES[name](), 6)
    assert fake.shape == larger.shape
    assert fake.stride() == larger.stride()


def fake_batch(given: torch.Tensor, samples: int) -> torch.Tensor:
    with FakeTensorMode():
        return virtual_batch(given, len(given), samples, "cpu")


@pytest.mark.slow
def test_a_step_with_a_batch_in_channels_last_is_rehearsed_as_it_runs():
    def build(given=BATCHES["channels_last"]):
        # `Flatten` copies images in channels_last, and takes a view of contiguous ones.
        net = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(CHANNELS * SIZE * SIZE, 7))
        return net, given(), lambda output, batch: output.square().mean()

    real, rehearsed = truth(Case(build=build)), rehearsal(Case(build=build))
    assert [_kernel(op) for op in real.ops] == [_kernel(op) for op in rehearsed.ops]
    assert real.storages == rehearsed.storages
    contiguous = rehearsal(Case(build=lambda: build(BATCHES["contiguous"])))
    assert len(contiguous.storages) < len(rehearsed.storages)


def _kernel(op):
    return dataclasses.replace(op, host_bytes=0, inputs=())
