"""The formula for the copies that nearest-neighbour upsampling of images makes of tensors in another memory format."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.cudnn.layouts import is_contiguous, suggests_channels_last
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_CHANNELS = 4
"""Minimum number of channels for the kernel that computes in channels_last."""


@takes_scratch("aten.upsample_nearest2d.default", "aten._upsample_nearest_exact2d.default")
def upsample_nearest(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the bytes of the copies of the image and of the result.

    Source: cuda/UpSampleNearest2d.cu, `upsample_nearest2d_out_cuda_template`.
    """
    return _copies(call.tensor("self"), call.outputs[0])


@takes_scratch("aten.upsample_nearest2d_backward.default", "aten._upsample_nearest_exact2d_backward.default")
def upsample_nearest_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the bytes of the copies of the output's gradient and of the image's gradient.

    Source: cuda/UpSampleNearest2d.cu, `upsample_nearest2d_backward_out_cuda_template`.
    """
    return _copies(call.tensor("grad_output"), call.outputs[0])


def _copies(read: Layout, written: Layout) -> list[int]:
    if read.shape == written.shape or not written.numel:
        return []
    channels_last = suggests_channels_last(read) and read.shape[1] >= _CHANNELS
    if channels_last and is_contiguous(written, channels_last=True):
        return [] if is_contiguous(read, channels_last=True) else [read.nbytes]
    return [each.nbytes for each in (written, read) if not is_contiguous(each, channels_last=False)]
