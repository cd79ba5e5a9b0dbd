"""The memory formats of tensors, as PyTorch derives them from sizes and strides.

Source: c10/core/MemoryFormat.h (`is_channels_last_strides_2d_s4`, `is_channels_last_strides_3d_s5`),
c10/core/Contiguity.h, and aten/src/ATen/native/ConvUtils.h (`cudnn_conv_suggest_memory_format`), torch 2.13.
"""

from __future__ import annotations

import dataclasses

from planner.workspaces.registry import Layout


def suggests_channels_last(layout: Layout) -> bool:
    """True if the strides are those of the memory format channels_last (`Tensor.suggest_memory_format`).

    Strides of sizes of 1 may fit two formats. Then the result is False, as in PyTorch.
    """
    if len(layout.shape) not in (4, 5) or layout.stride[1] == 0:
        return False
    smallest = 0
    for dim in (1, *range(len(layout.shape) - 1, 1, -1), 0):
        size, stride = layout.shape[dim], layout.stride[dim]
        if size == 0 or stride < smallest or (dim == 0 and smallest == layout.stride[1]):
            return False
        smallest = stride * size if size > 1 else stride
    return True


def convolves_channels_last(first: Layout, second: Layout) -> bool:
    """True if cuDNN convolves two tensors in channels_last: one of them has this format. Never with fp64."""
    if "float64" in (first.dtype, second.dtype):
        return False
    return suggests_channels_last(first) or suggests_channels_last(second)


def is_contiguous(layout: Layout, *, channels_last: bool) -> bool:
    """True if `Tensor.contiguous` in this memory format returns the tensor itself, not a copy."""
    dims = range(len(layout.shape) - 1, -1, -1)
    order = (1, *(dim for dim in dims if dim > 1), 0) if channels_last else tuple(dims)
    expected = 1
    for dim in order:
        if layout.shape[dim] != 1:
            if layout.stride[dim] != expected:
                return False
            expected *= layout.shape[dim]
    return True


def contiguous(layout: Layout, *, channels_last: bool) -> Layout:
    """Returns the layout of the result of `Tensor.contiguous` in this memory format."""
    if is_contiguous(layout, channels_last=channels_last):
        return layout
    return dataclasses.replace(layout, stride=strides(layout.shape, channels_last=channels_last))


def strides(shape: tuple[int, ...], *, channels_last: bool) -> tuple[int, ...]:
    """Returns the strides of a tensor that is contiguous in this memory format, in elements."""
    dims = range(len(shape) - 1, -1, -1)
    order = (1, *(dim for dim in dims if dim > 1), 0) if channels_last else tuple(dims)
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def in_two_dimensions(layout: Layout) -> Layout:
    """Returns the layout of a one-dimensional image as PyTorch gives it to cuDNN: with a height of 1."""
    (samples, channels, width), stride = layout.shape, layout.stride
    return dataclasses.replace(
        layout, shape=(samples, channels, 1, width), stride=(stride[0], stride[1], width * stride[2], stride[2])
    )
