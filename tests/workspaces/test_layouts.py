"""Memory formats from sizes and strides, compared with PyTorch's own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._prims_common import suggest_memory_format

from planner.workspaces.cudnn.layouts import contiguous, is_contiguous, strides, suggests_channels_last
from planner.workspaces.registry import Layout

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout(tensor: torch.Tensor) -> Layout:
    return Layout(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), itemsize=4, dtype="float32")


@settings(deadline=None, max_examples=300)
@given(sizes=st.lists(st.sampled_from([1, 1, 2, 3]), min_size=4, max_size=5), data=st.data())
def test_formats_are_those_of_pytorch(sizes, data):
    """Tensors whose dimensions were permuted and sliced, many of them with sizes of 1."""
    tensor = torch.empty(sizes).permute(data.draw(st.permutations(range(len(sizes)))))
    if data.draw(st.booleans()):
        tensor = tensor[:, :1]
    last = FORMATS[len(sizes)]
    assert suggests_channels_last(layout(tensor)) == (suggest_memory_format(tensor) is last)
    for channels_last, memory_format in ((True, last), (False, torch.contiguous_format)):
        same = is_contiguous(layout(tensor), channels_last=channels_last)
        assert same == tensor.is_contiguous(memory_format=memory_format)
        made = contiguous(layout(tensor), channels_last=channels_last)
        assert made.stride == tensor.contiguous(memory_format=memory_format).stride()


def test_strides_of_a_contiguous_tensor():
    assert strides((2, 3, 4, 5), channels_last=False) == (60, 20, 5, 1)
    assert strides((2, 3, 4, 5), channels_last=True) == torch.empty(2, 3, 4, 5).to(memory_format=FORMATS[4]).stride()
