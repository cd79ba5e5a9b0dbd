"""Scratch memory of kernels: the formulas against what public histories of the allocator show."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import profiles
from planner.workspaces import FORMULAS, blocks_of, has_formula, is_known
from planner.workspaces.cudnn.layouts import strides
from planner.workspaces.reductions import reduction
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

pytestmark = pytest.mark.no_torch

H100 = profiles.load("h100")


def scratch(name: str, call: KernelCall) -> list[int]:
    return [block.size_bytes for block in blocks_of(name, call, H100, "2.13.0")]


def fp32(*shape: int) -> Layout:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return Layout(shape=shape, stride=tuple(reversed(strides)), itemsize=4, dtype="float32")


@pytest.mark.parametrize(
    ("inputs", "outputs", "accumulator_bytes", "recorded_bytes"),
    [
        (2560, 512, 4, 10_485_760),
        (2560, 2048, 4, 41_943_040),
        (10_000, 512, 16, 164_626_432),
        (10_000, 2048, 16, 553_648_128),
    ],
)
def test_column_reductions_take_what_an_h100_recorded(inputs, outputs, accumulator_bytes, recorded_bytes):
    """kkaitlyn111/cs336-a2-systems, torch 2.6.0, H100: sums, and maxima with their places."""
    found = reduction(fp32(inputs, outputs), (0,), accumulator_bytes=accumulator_bytes, card=H100)
    assert found[0] == recorded_bytes


def test_few_rows_take_no_buffer():
    assert reduction(fp32(128, 4096), (0,), accumulator_bytes=4, card=H100) == []


def test_a_reduction_of_everything_takes_a_small_buffer():
    buffer, semaphores = reduction(fp32(1 << 24), None, accumulator_bytes=4, card=H100)
    assert 0 < buffer < 1 << 20 and semaphores == 4


def test_a_tensor_beyond_32_bit_offsets_is_reduced_in_parts():
    parts = reduction(fp32(1 << 15, 1 << 15), (0,), accumulator_bytes=4, card=H100)
    whole = reduction(fp32(1 << 13, 1 << 15), (0,), accumulator_bytes=4, card=H100)
    assert parts and parts[0] <= 2 * sum(whole or [0]) + (1 << 30)


@settings(deadline=None, max_examples=200)
@given(
    shape=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    reduced=st.sets(st.integers(0, 3), min_size=1),
    sms=st.integers(10, 200),
)
def test_a_merged_view_of_a_tensor_reduces_alike(shape, reduced, sms):
    """Size-1 dimensions change nothing."""
    card = dataclasses.replace(H100, sm_count=sms)
    dims = tuple(sorted(dim for dim in reduced if dim < len(shape))) or (0,)
    plain = reduction(fp32(*shape), dims, accumulator_bytes=4, card=card)
    wider = reduction(fp32(*shape, 1), dims, accumulator_bytes=4, card=card)
    assert plain == wider


def test_an_op_gets_one_formula():
    with pytest.raises(ValueError, match="list each op once"):
        takes_scratch("aten.sum.dim_IntList")(lambda call, card: [])
    with pytest.raises(ValueError, match="list each op once"):
        takes_scratch("aten.cat.default")(lambda call, card: [])


def test_every_file_of_formulas_names_its_source():
    for module in FORMULAS:
        documented = module.__doc__ + "".join(str(value.__doc__) for value in vars(module).values() if callable(value))
        assert ".cu" in documented or ".cpp" in documented, module.__name__


def test_convolutions_are_known_since_cudnn_names_what_it_takes():
    for name in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert is_known(name) and has_formula(name)


def test_large_embeddings_sort_their_indices():
    arguments = {
        "grad_output": fp32(8192, 768),
        "indices": Layout(shape=(8192,), stride=(1,), itemsize=8, dtype="int64"),
        "num_weights": 50_000,
        "padding_idx": -1,
        "scale_grad_by_freq": False,
    }
    blocks = scratch("aten.embedding_dense_backward.default", KernelCall(arguments=arguments, outputs=()))
    partial = 8192 // 10 + 8192
    assert sum(blocks) == 8 * 8192 * 5 + 8 * partial + 4 * partial * 768
    small = arguments | {"indices": Layout(shape=(3072,), stride=(1,), itemsize=8, dtype="int64")}
    assert scratch("aten.embedding_dense_backward.default", KernelCall(arguments=small, outputs=())) == []


def test_a_softmax_that_allows_rows_without_scores_takes_two_masks():
    """The profiler of torch 2.13 shows these allocations on a CPU: 4,194,304, 16,384 and 4 bytes."""
    scores = fp32(64, 256, 256)
    call = KernelCall(arguments={"self": scores, "dim": -1, "dtype": None}, outputs=(scores,))
    assert is_known("aten._safe_softmax.default")
    assert scratch("aten._safe_softmax.default", call) == [4_194_304, 16_384, 4]


def test_nearest_upsampling_copies_what_its_kernels_do_not_read_in_channels_last():
    """UpSampleNearest2d.cu: the kernel for channels_last takes 4 channels or more, the other one contiguous tensors."""

    def sizes(channels: int, *, read_last: bool, backward: bool = False) -> list[int]:
        shapes = ((2, channels, size, size) for size in (5, 10))
        small, large = (
            dataclasses.replace(fp32(*shape), stride=strides(shape, channels_last=read_last)) for shape in shapes
        )
        if backward:
            call = KernelCall(arguments={"grad_output": large}, outputs=(small,))
            return scratch("aten.upsample_nearest2d_backward.default", call)
        return scratch("aten.upsample_nearest2d.default", KernelCall(arguments={"self": small}, outputs=(large,)))

    for backward in (False, True):
        assert sizes(4, read_last=True, backward=backward) == sizes(3, read_last=False, backward=backward) == []
        assert sorted(sizes(3, read_last=True, backward=backward)) == [4 * 2 * 3 * 25, 4 * 2 * 3 * 100]
    slice_of_image = dataclasses.replace(fp32(2, 8, 5, 5), stride=(400, 25, 5, 1))
    call = KernelCall(arguments={"self": slice_of_image}, outputs=(fp32(2, 8, 10, 10),))
    assert scratch("aten._upsample_nearest_exact2d.default", call) == [slice_of_image.nbytes]
