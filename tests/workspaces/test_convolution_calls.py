"""Which kernels PyTorch runs for a convolution, and what it asks of cuDNN for it, from Convolution.cpp by hand."""

from __future__ import annotations

import dataclasses

import pytest

from planner import profiles
from planner.workspaces import blocks_of, convolutions
from planner.workspaces.cudnn.convolution import Convolution, Kind, Shape
from planner.workspaces.cudnn.dispatch import (
    BACKWARD_OP,
    FORWARD_OP,
    Kernels,
    kernels_of,
    placed_of,
    results_in_channels_last,
    shape_of,
)
from planner.workspaces.cudnn.layouts import strides
from planner.workspaces.cudnn.sources import Answer, Source
from planner.workspaces.registry import Block, CudnnSettings, KernelCall, Layout

pytestmark = pytest.mark.no_torch

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8}


def layout(*shape: int, dtype: str = "float32", last: bool = False) -> Layout:
    return Layout(shape=shape, stride=strides(shape, channels_last=last), itemsize=ITEM_BYTES[dtype], dtype=dtype)


def forward(x: Layout, w: Layout, *, output: Layout | None = None, settings: CudnnSettings | None = None, **options):
    dims = len(w.shape) - 2
    arguments = {"input": x, "weight": w, "bias": None, "stride": (1,) * dims, "padding": (0,) * dims}
    arguments |= {"dilation": (1,) * dims, "transposed": False, "output_padding": (0,) * dims, "groups": 1, **options}
    return KernelCall(arguments=arguments, outputs=(output or x,), settings=settings or CudnnSettings())


def backward(x: Layout, w: Layout, gradient: Layout, mask: tuple[bool, bool, bool] = (True, True, False), **options):
    call = forward(x, w, **options)
    arguments = {**call.arguments, "grad_output": gradient, "output_mask": mask}
    outputs = tuple(part for part, wanted in zip((x, w, x), mask, strict=True) if wanted)
    return dataclasses.replace(call, arguments=arguments, outputs=outputs)


def asked(call: KernelCall) -> list[tuple[str, int, int]]:
    """Kind and place of what is asked of cuDNN, and 'copy' for each copy."""
    return [
        (each.taken.kind.text if isinstance(each.taken, Convolution) else f"copy {each.taken}", each.first, each.last)
        for each in placed_of(call)
    ]


IMAGE, WEIGHT, RESULT = layout(8, 3, 32, 32), layout(16, 3, 3, 3), layout(8, 16, 30, 30)


def test_a_forward_takes_its_workspace_after_the_output():
    assert asked(forward(IMAGE, WEIGHT)) == [("forward:float32:tf32", 1, 1)]
    assert shape_of(forward(IMAGE, WEIGHT)).text == "8,3,32,32/16,3,3,3/1,1/0,0/1,1"


def test_each_gradient_takes_its_workspace_after_it_and_before_the_next():
    both = [("grad_input:float32:tf32", 1, 1), ("grad_weight:float32:tf32", 2, 2)]
    assert asked(backward(IMAGE, WEIGHT, RESULT, (True, True, True))) == both
    assert asked(backward(IMAGE, WEIGHT, RESULT, (False, True, True))) == [("grad_weight:float32:tf32", 1, 1)]
    assert asked(backward(IMAGE, WEIGHT, RESULT, (True, False, False))) == both[:1]
    assert asked(backward(IMAGE, WEIGHT, RESULT, (False, False, True))) == []


def test_settings_are_part_of_what_is_asked():
    exact = CudnnSettings(allow_tf32=False, deterministic=True)
    assert asked(forward(IMAGE, WEIGHT, settings=exact)) == [("forward:float32:deterministic", 1, 1)]
    halves = forward(layout(8, 3, 32, 32, dtype="bfloat16"), layout(16, 3, 3, 3, dtype="bfloat16"))
    assert asked(halves) == [("forward:bfloat16", 1, 1)]
    without = CudnnSettings(enabled=False)
    assert kernels_of(forward(IMAGE, WEIGHT, settings=without)) is Kernels.COLUMNS
    depthwise = forward(layout(8, 3, 32, 32), layout(3, 1, 3, 3), groups=3, settings=without)
    assert kernels_of(depthwise) is Kernels.DEPTHWISE
    for others in ({"groups": 2}, {"transposed": True}):
        call = forward(layout(8, 4, 32, 32), layout(4, 4, 3, 3), settings=without, **others)
        assert kernels_of(call) is Kernels.OTHER and asked(call) == []


def test_deterministic_convolutions_with_dilation_run_in_cudnn_in_channels_last_only():
    """`ConvParams::use_cudnn` of Convolution.cpp."""
    deterministic = CudnnSettings(deterministic=True)
    last = layout(8, 3, 32, 32, last=True)
    for image, dilation, kernels in (
        (IMAGE, (1, 1), Kernels.CUDNN),
        (IMAGE, (2, 2), Kernels.COLUMNS),
        (last, (2, 2), Kernels.CUDNN),
    ):
        assert kernels_of(forward(image, WEIGHT, settings=deterministic, dilation=dilation)) is kernels
        assert kernels_of(forward(image, WEIGHT, dilation=dilation)) is Kernels.CUDNN


def test_a_convolution_that_searches_counts_the_largest_workspace_of_the_algorithms_that_are_compared(monkeypatch):
    plans = (500, 0, 900, 700, 2000)

    def answers(wanted, *_):
        sizes = {each: plans if each.kind.benchmark else (500, 0) for each in wanted}
        return {each: Answer(size, Source.TABLE, None, True) for each, size in sizes.items()}

    monkeypatch.setattr(convolutions, "workspaces", answers)
    card = profiles.load("a100-40gb")
    searching = CudnnSettings(benchmark=True, benchmark_limit=4)
    for setting, settings, size in (
        (None, searching, 900),
        (True, CudnnSettings(), 2000),
        (False, searching, 500),
        (None, CudnnSettings(), 500),
    ):
        chosen = dataclasses.replace(card, cudnn_benchmark=setting)
        (block,) = blocks_of(FORWARD_OP, forward(IMAGE, WEIGHT, settings=settings), chosen, "2.13.0")
        assert block.size_bytes == block.trials.sizes_bytes[0] == size
        assert (block.trials.search is None) is (size == 500)
    assert block.trials.sizes_bytes == (500, 0)
    (block,) = blocks_of(FORWARD_OP, forward(IMAGE, WEIGHT, settings=searching), card, "2.13.0")
    assert block.trials.sizes_bytes == (900, 700, 500, 0) and block.trials.search.heuristic_bytes == (500, 0)


def test_an_image_in_channels_last_needs_a_weight_and_a_gradient_in_it():
    image = layout(8, 3, 32, 32, last=True)
    weight, gradient = WEIGHT.nbytes, RESULT.nbytes
    assert asked(forward(image, WEIGHT)) == [(f"copy {weight}", 1, 1), ("forward:float32:channels_last:tf32", 1, 1)]
    assert asked(backward(image, WEIGHT, RESULT)) == [
        (f"copy {gradient}", 0, 2),
        (f"copy {weight}", 1, 1),
        ("grad_input:float32:channels_last:tf32", 1, 1),
        ("grad_weight:float32:channels_last:tf32", 2, 2),
    ]
    last = layout(8, 16, 30, 30, last=True), layout(16, 3, 3, 3, last=True)
    assert [each for each in asked(backward(image, last[1], last[0])) if "copy" in each[0]] == []


def test_fp64_is_never_convolved_in_channels_last():
    image, weight = layout(8, 3, 32, 32, dtype="float64", last=True), layout(16, 3, 3, 3, dtype="float64")
    assert asked(forward(image, weight)) == [(f"copy {image.nbytes}", 0, 1), ("forward:float64", 1, 1)]


def test_a_transposed_convolution_is_the_gradient_of_the_one_with_its_result_as_image():
    small, large = layout(4, 64, 16, 16), layout(4, 32, 32, 32)
    options = {"stride": (2, 2), "transposed": True}
    call = forward(small, layout(64, 32, 2, 2), output=large, **options)
    (placed,) = placed_of(call)
    assert placed.taken.kind.operation == "grad_input" and placed.taken.shape.y == small.shape
    assert placed.taken.shape.text == "4,32,32,32/64,32,2,2/2,2/0,0/1,1" == shape_of(call).text
    gradients = placed_of(backward(small, layout(64, 32, 2, 2), large, **options))
    assert [each.taken.kind.operation for each in gradients] == ["forward", "grad_weight"]
    assert {each.taken.shape.text for each in gradients} == {placed.taken.shape.text}
    padded = dataclasses.replace(call, arguments={**call.arguments, "output_padding": (2, 0)})
    assert kernels_of(padded) is Kernels.OTHER


def test_one_dimension_becomes_two_and_one_number_stands_for_all_dimensions():
    sound = forward(layout(4, 80, 3000), layout(384, 80, 3), padding=(1,))
    assert shape_of(sound).text == "4,80,1,3000/384,80,1,3/1,1/0,1/1,1"
    cube = forward(layout(2, 16, 8, 8, 8), layout(32, 16, 3, 3, 3), stride=(2,), padding=(1,), dilation=(1,))
    assert shape_of(cube).text == "2,16,8,8,8/32,16,3,3,3/2,2,2/1,1,1/1,1,1"


def depthwise(dtype: str, pixels: int = 56, last: bool = False, stride: int = 1, kernel: int = 3) -> Kernels:
    image = layout(32, 64, pixels, pixels, dtype=dtype, last=last)
    call = forward(image, layout(64, 1, kernel, kernel, dtype=dtype), groups=64, stride=(stride, stride))
    return kernels_of(call)


def test_depthwise_convolutions_run_on_kernels_of_pytorch_except_in_channels_last_and_some_in_fp16():
    assert depthwise("float32") is depthwise("bfloat16") is Kernels.DEPTHWISE
    assert depthwise("float32", last=True) is depthwise("bfloat16", last=True) is Kernels.CUDNN
    assert depthwise("float16") is Kernels.CUDNN
    assert depthwise("float16", kernel=7) is Kernels.DEPTHWISE  # as those of ConvNeXt
    assert depthwise("float16", pixels=6) is depthwise("float16", stride=2) is Kernels.DEPTHWISE
    grouped = forward(layout(32, 64, 56, 56), layout(64, 2, 3, 3), groups=32)
    assert kernels_of(grouped) is Kernels.CUDNN and placed_of(grouped)[0].taken.shape.groups == 32


def strided(given: Layout) -> Layout:
    """Returns the layout of a tensor whose last two dimensions are transposed."""
    *shape, height, width = given.shape
    swapped = strides((*shape, width, height), channels_last=False)
    return dataclasses.replace(given, stride=(*swapped[:-2], swapped[-1], swapped[-2]))


def test_depthwise_kernels_of_pytorch_read_contiguous_copies():
    """DepthwiseConv2d.cu: `expect_contiguous` of the image, of the weight and of the output's gradient."""
    image, weight, gradient = layout(8, 64, 20, 30), layout(64, 1, 3, 5), layout(8, 64, 18, 26)
    assert asked(forward(image, weight, groups=64)) == asked(backward(image, weight, gradient, groups=64)) == []
    image, weight, gradient = strided(image), strided(weight), strided(gradient)
    x, w, g = (f"copy {each.nbytes}" for each in (image, weight, gradient))
    assert asked(forward(image, weight, groups=64)) == [(x, 0, 1), (w, 0, 1)]
    assert asked(backward(image, weight, gradient, groups=64)) == [(g, 0, 2), (x, 0, 0), (w, 2, 2)]
    assert asked(backward(image, weight, gradient, (False, True, True), groups=64)) == [(g, 0, 1), (x, 0, 1)]
    assert asked(backward(image, weight, gradient, (True, False, True), groups=64)) == [(g, 0, 1), (w, 1, 1)]
    assert asked(backward(image, weight, gradient, (False, False, True), groups=64)) == []


def test_depthwise_kernels_for_volumes_copy_after_both_gradients():
    """DepthwiseConv3d.cu: `conv_depthwise3d_backward_cuda` begins with `at::empty` of both gradients."""
    image, weight, gradient = (strided(layout(*shape)) for shape in ((2, 8, 9, 9, 7), (8, 1, 3, 3, 2), (2, 8, 7, 7, 6)))
    x, w, g = (f"copy {each.nbytes}" for each in (image, weight, gradient))
    assert asked(forward(image, weight, groups=8)) == [(x, 0, 1), (w, 0, 1)]
    assert asked(backward(image, weight, gradient, groups=8)) == [(g, 2, 2), (x, 2, 2), (w, 2, 2)]


@pytest.mark.parametrize(("groups", "kernels"), [(64, Kernels.DEPTHWISE), (1, Kernels.CUDNN)])
def test_a_sequence_with_the_channels_last_is_copied_also_if_the_weight_is_frozen(groups, kernels):
    """Convolution.cpp: `input = input.contiguous()` for each one-dimensional image, in forward and backward."""
    sequence = strided(layout(8, 64, 100))
    weight, gradient = layout(64, 64 // groups, 5), layout(8, 64, 96)
    for call, outputs in (
        (forward(sequence, weight, output=gradient, groups=groups), 1),
        (backward(sequence, weight, gradient, groups=groups), 2),
        (backward(sequence, weight, gradient, (True, False, False), groups=groups), 1),
    ):
        assert kernels_of(call) is kernels
        assert [each for each in asked(call) if "copy" in each[0]] == [(f"copy {sequence.nbytes}", 0, outputs)]


def test_kernels_without_cudnn_take_a_matrix_of_columns_for_one_sample():
    """ConvolutionMM2d.cu: `requires_columns` of `slow_conv2d_forward`, `slow_conv2d_backward_out_cuda`."""
    without = CudnnSettings(enabled=False)
    columns = f"copy {4 * 3 * 3 * 3 * 30 * 30}"
    assert asked(forward(IMAGE, WEIGHT, output=RESULT, settings=without)) == [(columns, 1, 1)]
    both, none = (True, True, True), (False, False, True)
    assert asked(backward(IMAGE, WEIGHT, RESULT, both, settings=without)) == [(columns, 1, 3)]
    assert asked(backward(IMAGE, WEIGHT, RESULT, (False, True, True), settings=without)) == [(columns, 2, 2)]
    assert asked(backward(IMAGE, WEIGHT, RESULT, none, settings=without)) == []
    point, flat = layout(16, 3, 1, 1), layout(8, 16, 32, 32)
    assert asked(forward(IMAGE, point, output=flat, settings=without)) == []
    assert asked(backward(IMAGE, point, flat, both, settings=without)) == [(f"copy {4 * 3 * 32 * 32}", 1, 3)]
    last = layout(8, 3, 32, 32, last=True)
    assert asked(forward(last, WEIGHT, output=RESULT, settings=without)) == [
        (f"copy {last.nbytes}", 0, 1),
        (columns, 1, 1),
    ]


def test_dilated_kernels_without_cudnn_take_the_columns_after_all_outputs():
    """NaiveDilatedConvolution.cu: `at::empty` of all gradients, then `slow_conv_dilated_all_cuda_template`."""
    options = {"settings": CudnnSettings(deterministic=True), "dilation": (2, 2)}
    result = layout(8, 16, 28, 28)
    columns = f"copy {4 * 3 * 3 * 3 * 28 * 28}"
    assert asked(forward(IMAGE, WEIGHT, output=result, **options)) == [(columns, 1, 1)]
    assert asked(backward(IMAGE, WEIGHT, result, (True, True, True), **options)) == [(columns, 3, 3)]


def test_bf16_is_convolved_by_cudnn_from_compute_capability_8_on():
    """CUDAHooks.cpp, `supportsBFloat16ConvolutionWithCuDNNv8`: `prop->major >= 8`."""
    image, weight = layout(8, 3, 32, 32, dtype="bfloat16", last=True), layout(16, 3, 3, 3, dtype="bfloat16")
    for capability, kernels in (((7, 5), Kernels.COLUMNS), ((8, 0), Kernels.CUDNN), ((12, 0), Kernels.CUDNN)):
        assert kernels_of(forward(image, weight), capability) is kernels
        assert results_in_channels_last(forward(image, weight), capability) is (kernels is Kernels.CUDNN)
    assert kernels_of(forward(IMAGE, WEIGHT), (7, 5)) is Kernels.CUDNN


def test_torch_2_9_convolves_volumes_in_half_precision_without_cudnn():
    """Convolution.cpp of torch 2.9 (pull request 163581), unless the kernel has one element.

    A log of torch 2.9.1 says "Tried to allocate 5.06 GiB" in the decoder of Qwen-Image (issue 177406 of PyTorch). That
    size fits its last layers, with 96 channels, for one image of 1024 x 1024.
    """
    volume, weight = layout(1, 96, 3, 1026, 1026, dtype="bfloat16"), layout(96, 96, 3, 3, 3, dtype="bfloat16")
    call = forward(volume, weight, output=layout(1, 96, 1, 1024, 1024, dtype="bfloat16"))
    for version, kernels in (("2.8.0", Kernels.CUDNN), ("2.9.1+cu128", Kernels.COLUMNS), ("2.13.0", Kernels.CUDNN)):
        assert kernels_of(call, (9, 0), version) is kernels
    (columns,) = placed_of(call, (9, 0), "2.9.1")
    assert f"{columns.taken / 2**30:.2f}" == "5.06"
    for sound in (
        forward(layout(1, 96, 3, 64, 64, dtype="bfloat16", last=True), weight),
        forward(volume, layout(96, 96, 1, 1, 1, dtype="bfloat16")),
        forward(layout(1, 96, 3, 64, 64), layout(96, 96, 3, 3, 3)),
    ):
        assert kernels_of(sound, (9, 0), "2.9.1") is Kernels.CUDNN


def test_other_numbers_and_empty_batches_ask_nothing():
    assert kernels_of(forward(layout(1, 2, 8, 8, dtype="complex64"), layout(2, 2, 3, 3, dtype="complex64"))) is (
        Kernels.OTHER
    )
    assert placed_of(forward(layout(0, 3, 32, 32), WEIGHT)) == []


def test_the_text_of_a_convolution_says_all_of_it():
    shape = Shape.of("8,3,32,32/16,3,3,3/2,1/0,1/1,2")
    assert shape.y == (8, 16, 15, 30)
    for kind in ("forward:float16", "grad_weight:float32:channels_last:tf32:deterministic"):
        assert Convolution.of(Convolution(Kind.of(kind), shape).text) == Convolution(Kind.of(kind), shape)


def test_the_blocks_of_a_backward_are_placed_and_the_sum_for_the_bias_comes_last(monkeypatch):
    sizes = {"grad_input": 700, "grad_weight": 900}
    monkeypatch.setattr(
        convolutions,
        "workspaces",
        lambda wanted, *_: {each: Answer((sizes[each.kind.operation],), Source.TABLE, None, True) for each in wanted},
    )
    card = profiles.load("a100-40gb")
    gradient = layout(64, 16, 256, 256)
    call = backward(layout(64, 3, 256, 256), WEIGHT, gradient, (True, True, True), padding=(1, 1))
    first, second, *of_bias = blocks_of(BACKWARD_OP, call, card, "2.13.0")
    assert (first, second) == (Block(700, 1, 1), Block(900, 2, 2))
    assert of_bias and {(block.first, block.last) for block in of_bias} == {(3, 3)}
    assert blocks_of(FORWARD_OP, forward(layout(0, 3, 8, 8), WEIGHT), card, "2.13.0") == []
