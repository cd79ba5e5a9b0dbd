"""Outputs and gradients on the virtual GPU have the memory formats that CUDA's kernels give them.

Many kernels of the CPU keep channels_last where those of CUDA do not. The source files are in aten/src/ATen/native of
PyTorch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.recording.rehearsal import rehearse_program
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.backend import Target
from tests.support.truth import Case, rehearsal, truth

IMAGE, VOLUME = (2, 4, 6, 6), (2, 4, 6, 6, 6)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def bytes_allocated(function, shape, *, is_contiguous, grad_is_contiguous) -> list[int]:
    """Returns what a function of an image in channels_last and its backward allocate; checks the formats in between."""

    def program(device: torch.device) -> None:
        image = torch.rand(shape, device=device).contiguous(memory_format=CHANNELS_LAST[len(shape)])
        gradients = []
        read = image.requires_grad_().view_as(image)  # autograd may copy the gradient of a leaf into its format
        read.register_hook(lambda gradient: gradients.append(gradient.is_contiguous()))
        output = function(read)
        assert output.is_contiguous() == is_contiguous
        output.backward(torch.rand(output.shape, device=device).contiguous(memory_format=CHANNELS_LAST[len(shape)]))
        assert gradients == [grad_is_contiguous]

    graph = rehearse_program(program, Target(compute_capability=(8, 0)))
    return [graph.storages[each].size_bytes for op in graph.ops if "pad" in op.name for each in scratch_of(graph, op)]


def scratch_of(graph: StepGraph, op) -> list[int]:
    """Returns the storages that an op makes but neither returns nor reads."""
    ends = [other.tick for other in graph.ops if other.tick > op.tick]
    born = (s for s in graph.storages if s.lives and op.tick <= s.lives[0][0] < min(ends, default=graph.ticks))
    return [graph.storages.index(each) for each in born if graph.storages.index(each) not in (*op.outputs, *op.inputs)]


def test_a_one_dimensional_convolution_has_the_format_of_its_weight_as_an_image():
    """Source: Convolution.cpp (`view4d(weight)`): a transposed weight is in channels_last if its height is 1.

    The sequence is made contiguous before (`input.contiguous()`), so that its format does not count.
    """

    def program(device: torch.device) -> None:
        weight, sequence = torch.rand(8, 5, 6, device=device), torch.rand(2, 20, 6, device=device).transpose(1, 2)
        assert F.conv1d(sequence, weight.transpose(1, 2).contiguous()).stride() == (128, 16, 1)
        transposed = weight.transpose(1, 2).requires_grad_()
        output = F.conv1d(sequence, transposed)
        assert output.stride() == (128, 1, 8)
        (of_weight,) = torch.autograd.grad(output.sum(), transposed)
        assert of_weight.stride() == (30, 1, 6)

    rehearse_program(program, Target(compute_capability=(8, 0)))


@pytest.mark.parametrize(
    ("options", "is_contiguous"),
    [({}, False), ({"dilation": 2, "output_padding": 1}, True)],
    ids=["cudnn", "slow_conv_transpose2d"],
)
def test_only_convolutions_of_cudnn_keep_channels_last(options, is_contiguous):
    """Source: Convolution.cpp (`use_cudnn`, `is_output_padding_big`), NaiveConvolutionTranspose2d.cu (`contiguous`)."""

    def convolved(image: torch.Tensor) -> torch.Tensor:
        weight = torch.rand(4, 4, 3, 3, device=image.device).contiguous(memory_format=torch.channels_last)
        return F.conv_transpose2d(image, weight, **options)

    bytes_allocated(convolved, IMAGE, is_contiguous=is_contiguous, grad_is_contiguous=is_contiguous)


@pytest.mark.parametrize("shape", [IMAGE, VOLUME], ids=["2d", "3d"])
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_makes_contiguous_images_and_gradients(shape, mode):
    """Source: cuda/ReflectionPad.cu, cuda/ReplicationPadding.cu (`LEGACY_CONTIGUOUS_MEMORY_FORMAT`, no other format).

    The kernels for reflection read contiguous images: `input_.contiguous()`, and in two dimensions also
    `grad_output_.contiguous()`. The kernels for replication read any strides.
    """
    dims = len(shape) - 2
    scratch = bytes_allocated(
        lambda image: F.pad(image, (1, 1) * dims, mode=mode), shape, is_contiguous=True, grad_is_contiguous=True
    )
    of_image, of_padded = 4 * 2 * 4 * 6**dims, 4 * 2 * 4 * 8**dims
    assert scratch == {("reflect", 2): [of_image, of_padded], ("reflect", 3): [of_image]}.get((mode, dims), [])


def test_shuffled_channels_that_stay_in_their_order_are_a_view():
    """Source: torch/_refs/nn/functional (`channel_shuffle`): on CUDA, no copy with one group or one channel each."""
    bytes_allocated(lambda image: F.channel_shuffle(image, 4), IMAGE, is_contiguous=False, grad_is_contiguous=False)
    bytes_allocated(lambda image: F.channel_shuffle(image, 2), IMAGE, is_contiguous=True, grad_is_contiguous=True)


def test_upsampling_keeps_channels_last():
    """Source: UpSampleNearest2d.cpp, UpSampleBilinear2d.cpp: `memory_format(input.suggest_memory_format())`.

    PyTorch's decompositions are contiguous for fewer than 4 or 16 channels, which CUDA's kernels write differently.
    """
    for mode in ("nearest", "bilinear"):
        bytes_allocated(
            lambda image, mode=mode: F.interpolate(image, scale_factor=2, mode=mode),
            (2, 3, 6, 6),
            is_contiguous=False,
            grad_is_contiguous=False,
        )


def test_fake_kernels_that_ask_for_the_device_choose_as_for_cuda():
    """Source: torch/_meta_registrations.py, `device_hint`: cuFFT transforms at most three dimensions in one stage,
    and the vectors of cuSOLVER are in row-major order.
    """

    def program(device: torch.device) -> None:
        image = torch.rand(IMAGE, device=device)
        assert torch.fft.fftn(image.to(torch.complex64)).stride() == (1, 72, 12, 2)
        assert torch.fft.rfftn(image).stride() == (24, 6, 1, 48)
        assert torch.linalg.eig(image)[1].is_contiguous()
        assert torch.linalg.eig(torch.rand(6, 6))[1].stride() == (1, 6)

    rehearse_program(program, Target(compute_capability=(8, 0)))


def test_group_norm_keeps_a_contiguous_copy_of_its_input_for_the_backward():
    """Source: group_norm.cpp (`group_norm`): `input.contiguous()`, except for the CPU and for other devices."""

    def program(device: torch.device) -> None:
        image = torch.rand(IMAGE, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
        output = F.group_norm(image * 2, 2, torch.rand(4, device=device), torch.rand(4, device=device))
        assert output.is_contiguous()
        output.sum().backward()

    graph = rehearse_program(program, Target(compute_capability=(8, 0)))
    names = [op.name for op in graph.ops]
    forward, backward = (
        next(op for op in graph.ops if op.name == f"aten.native_group_norm{part}.default") for part in ("", "_backward")
    )
    copy = graph.ops[names.index("aten.native_group_norm.default") - 1]
    assert copy.name == "aten.clone.default"
    assert set(copy.outputs) <= set(forward.inputs) & set(backward.inputs)
    assert not set(copy.inputs) & set(backward.inputs)


def net(layer):
    def build():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), layer(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
        images = torch.rand(2, 3, 16, 16).to(memory_format=torch.channels_last)
        return model, images, lambda output, batch: output.square().mean()

    return build


@pytest.mark.parametrize(
    "layer", [lambda: nn.GroupNorm(2, 8), lambda: nn.ReflectionPad2d(1), lambda: nn.ReplicationPad2d(1)]
)
def test_a_rehearsal_for_the_cpu_keeps_the_formats_of_the_cpu(layer):
    case = Case(build=net(layer), optimizer="sgd")
    real, rehearsed = truth(case), rehearsal(case)
    assert [op.name for op in real.ops] == [op.name for op in rehearsed.ops]
    assert real.storages == rehearsed.storages
