"""Which kernels PyTorch runs for a convolution, what it asks of cuDNN, and which copies of tensors it makes.

Sources, in aten/src/ATen/native: Convolution.cpp (`_select_conv_backend`, `use_cudnn`, `use_cudnn_depthwise`,
`check_cudnn_depthwise_workload_with_filter`, `convolution_backward`), cudnn/ConvShared.cpp, and in cuda/:
DepthwiseConv2d.cu, DepthwiseConv3d.cu, ConvolutionMM2d.cu and NaiveDilatedConvolution.cu.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any

from planner.workspaces.cudnn.convolution import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    ITEM_BYTES,
    Convolution,
    Kind,
    Shape,
)
from planner.workspaces.cudnn.layouts import (
    contiguous,
    convolves_channels_last,
    in_two_dimensions,
    is_contiguous,
    suggests_channels_last,
)
from planner.workspaces.cudnn.versions import release
from planner.workspaces.registry import CudnnSettings, KernelCall, Layout

_MOST_ELEMENTS = 2**31 - 1
"""Maximum number of elements for PyTorch's own kernels (`canUse32BitIndexMath`)."""
_CONVOLVES_BF16 = (8, 0)
"""Minimum compute capability at which cuDNN convolves bf16."""
_AVOIDS_VOLUMES = (2, 9)
"""The release of PyTorch that does not run cuDNN for volumes in half precision."""
FORWARD_OP, BACKWARD_OP = "aten.convolution.default", "aten.convolution_backward.default"


class Kernels(enum.Enum):
    """The kernels that PyTorch chooses between."""

    CUDNN = "cuDNN"
    DEPTHWISE = "PyTorch's kernels for depthwise convolutions, which take no scratch memory but copies of tensors"
    COLUMNS = "PyTorch's kernels that multiply the weight with a matrix of columns, for one sample after another"
    OTHER = "PyTorch's kernels for what else cuDNN does not run, with scratch memory that is not known"


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Memory that a convolution takes while it runs, with its place between the outputs (see `registry.Block`)."""

    taken: Convolution | int
    """The convolution that cuDNN computes in this place, with a workspace; or the bytes of a copy of a tensor."""
    first: int
    last: int


def is_convolution(op: str) -> bool:
    """True if the op is a convolution, or the backward of one."""
    return op in (FORWARD_OP, BACKWARD_OP)


def kernels_of(
    call: KernelCall, capability: tuple[int, int] | None = None, torch_version: str | None = None
) -> Kernels:
    """Returns the kernels that PyTorch runs for a convolution, or for its backward.

    Args:
        capability: compute capability of the card; None for one that runs all dtypes in cuDNN.
        torch_version: a version as in `torch.__version__`; None for one that runs all volumes in cuDNN.
    """
    if call.tensor("input").dtype not in ITEM_BYTES:
        return Kernels.OTHER
    x, w, options = _inputs(call)
    in_cudnn = _runs_in_cudnn(x, w, options) and not _is_refused(x, w, capability, torch_version)
    if not options.transposed and 1 < options.groups == x.shape[1] and w.shape[0] % x.shape[1] == 0:
        return Kernels.CUDNN if in_cudnn and _prefers_cudnn_for_depthwise(x, w, options) else Kernels.DEPTHWISE
    if in_cudnn:
        return Kernels.CUDNN
    return Kernels.OTHER if options.transposed or options.groups > 1 else Kernels.COLUMNS


def results_in_channels_last(call: KernelCall, capability: tuple[int, int] | None = None) -> bool:
    """True if the output of a convolution has the memory format channels_last, or the gradients of a backward do.

    Only cuDNN computes in this format (`cudnn_conv_suggest_memory_format`, ConvUtils.h). The format of a
    one-dimensional convolution is that of the two-dimensional one as which PyTorch computes it.
    """
    x, w, _ = _inputs(call)
    return kernels_of(call, capability) is Kernels.CUDNN and convolves_channels_last(x, w)


def shape_of(call: KernelCall) -> Shape:
    """Returns the sizes of a convolution, or of the one that a transposed convolution is the gradient of."""
    x, w, options = _inputs(call)
    return options.shape(_image_of_transposed(call) if options.transposed else x, w)


def placed_of(
    call: KernelCall, capability: tuple[int, int] | None = None, torch_version: str | None = None
) -> list[Placed]:
    """Returns what a convolution takes, or its backward, in the order in which it is allocated.

    The scratch memory of the sum that gives the gradient of a bias is not in the list.

    Args:
        capability: as for `kernels_of`.
        torch_version: as for `kernels_of`.
    """
    kernels = kernels_of(call, capability, torch_version)
    if call.tensor("input").numel == 0 or kernels is Kernels.OTHER:
        return []
    forward, backward = {
        Kernels.CUDNN: (_forward, _backward),
        Kernels.DEPTHWISE: (_depthwise_forward, _depthwise_backward),
        Kernels.COLUMNS: (_columns_forward, _columns_backward),
    }[kernels]
    return list(backward(call) if "grad_output" in call.arguments else forward(call))


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """Options of a convolution, one item for each spatial dimension where there are several."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    settings: CudnnSettings

    @property
    def is_dilated(self) -> bool:
        return set(self.dilation) != {1}

    def shape(self, x: Layout, w: Layout) -> Shape:
        return Shape(x.shape, w.shape, self.stride, self.padding, self.dilation)

    def asked(self, operation: str, *, x: Layout, w: Layout, channels_last: bool) -> Convolution:
        """Returns what is asked of cuDNN. The image `x` is the larger side: the result of a transposed convolution."""
        kind = Kind(
            operation=operation,
            dtype=x.dtype,
            channels_last=channels_last,
            tf32=x.dtype == "float32" and self.settings.allow_tf32,
            deterministic=self.settings.deterministic,
        )
        return Convolution(kind, self.shape(x, w))


def _inputs(call: KernelCall) -> tuple[Layout, Layout, _Options]:
    """Returns image, weight and options. One-dimensional convolutions are given as two-dimensional ones."""
    x, w = call.tensor("input"), call.tensor("weight")
    dims = len(w.shape) - 2
    names = ("stride", "padding", "dilation", "output_padding")
    lists = {name: _one_for_each(call.arguments[name], dims) for name in names}
    if dims == 1:
        x, w = in_two_dimensions(contiguous(x, channels_last=False)), in_two_dimensions(w)
        fillers = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        lists = {name: (filler, *lists[name]) for name, filler in fillers.items()}
    groups, transposed = call.arguments["groups"], call.arguments["transposed"]
    return x, w, _Options(**lists, groups=groups, transposed=transposed, settings=call.settings)


def _one_for_each(numbers: Any, dims: int) -> tuple[int, ...]:
    """Returns one number for each spatial dimension. PyTorch accepts a single number for all of them."""
    return tuple(numbers) * dims if len(numbers) == 1 else tuple(numbers)


def _runs_in_cudnn(x: Layout, w: Layout, options: _Options) -> bool:
    """True if cuDNN may run a convolution (`use_cudnn`): a deterministic one with dilation only in channels_last."""
    if not options.settings.enabled:
        return False
    if any(more >= step for more, step in zip(options.output_padding, options.stride, strict=True)):
        return False
    return not (options.is_dilated and options.settings.deterministic) or convolves_channels_last(x, w)


def _is_refused(x: Layout, w: Layout, capability: tuple[int, int] | None, torch_version: str | None) -> bool:
    """True if PyTorch keeps a convolution away from cuDNN because of the card or of its release.

    cuDNN convolves bf16 from compute capability 8.0 on (CUDAHooks.cpp, `supportsBFloat16ConvolutionWithCuDNNv8`).
    PyTorch 2.9 avoids errors of cuDNN 9.8 to 9.14 in volumes of half precision, unless the kernel has one element
    (pull requests 163581 and 166480 of PyTorch). It is not known which later releases do, with these versions of cuDNN.
    """
    if x.dtype == "bfloat16" and capability is not None and capability < _CONVOLVES_BF16:
        return True
    is_volume = x.dtype in ("bfloat16", "float16") and len(w.shape) == 5 and set(w.shape[2:]) != {1}
    if not is_volume or torch_version is None or convolves_channels_last(x, w):
        return False
    return release(torch_version) == _AVOIDS_VOLUMES


def _prefers_cudnn_for_depthwise(x: Layout, w: Layout, options: _Options) -> bool:
    """True if PyTorch gives a depthwise convolution to cuDNN: huge ones, in channels_last, and some sizes in fp16."""
    if convolves_channels_last(x, w) or max(x.numel, w.numel) > _MOST_ELEMENTS:
        return True
    if not (x.dtype == w.dtype == "float16" and len(x.shape) == 4 and not options.is_dilated):
        return False
    samples, channels, height, width = x.shape
    (kernel_height, kernel), (stride_height, stride) = w.shape[2:], options.stride
    if channels < 32 or (stride_height != stride and height != 1):
        return False
    if height == 1 and stride == 1:
        return True
    if kernel_height != kernel or kernel not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if samples == 1:
        return kernel != 1 or width <= 28
    if kernel == 1:
        return samples <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def _copy(layout: Layout, first: int, last: int, *, channels_last: bool) -> Iterator[Placed]:
    """Yields the copy that `Tensor.contiguous` makes of a tensor; nothing if it makes none."""
    if not is_contiguous(layout, channels_last=channels_last):
        yield Placed(layout.nbytes, first, last)


def _image_of_transposed(call: KernelCall) -> Layout:
    """Returns the result of a transposed convolution, which is the image of the convolution that it transposes."""
    output = call.outputs[0]
    return in_two_dimensions(output) if len(output.shape) == 3 else output


def _copy_in_one_dimension(call: KernelCall, last: int) -> Iterator[Placed]:
    """Yields the contiguous copy that PyTorch makes of a one-dimensional image before it chooses the kernels."""
    if len((given := call.tensor("input")).shape) == 3:
        yield from _copy(given, 0, last, channels_last=False)


def _forward(call: KernelCall) -> Iterator[Placed]:
    x, w, options = _inputs(call)
    channels_last = convolves_channels_last(x, w)
    yield from _copy_in_one_dimension(call, 1)
    yield from _copy(x, 0, 1, channels_last=channels_last)
    yield from _copy(w, 1, 1, channels_last=channels_last)
    if options.transposed:
        image = _image_of_transposed(call)
        yield Placed(options.asked(GRAD_INPUT, x=image, w=w, channels_last=channels_last), 1, 1)
    else:
        yield Placed(options.asked(FORWARD, x=x, w=w, channels_last=channels_last), 1, 1)


def _gradients(call: KernelCall) -> tuple[Layout, bool, bool]:
    """Returns the gradient of the output, and whether the gradients of the input and of the weight are computed."""
    gradient = call.tensor("grad_output")
    of_input, of_weight = call.arguments["output_mask"][:2]
    return in_two_dimensions(gradient) if len(gradient.shape) == 3 else gradient, of_input, of_weight


def _backward(call: KernelCall) -> Iterator[Placed]:
    """Yields the copies for both gradients, then the input's gradient with what it takes, then the weight's."""
    x, w, options = _inputs(call)
    gradient, of_input, of_weight = _gradients(call)
    last = int(of_input) + int(of_weight)
    if not last:
        return
    # 1. Copies that both gradients use, made before either of them.
    yield from _copy_in_one_dimension(call, last)
    if of_weight:
        channels_last = convolves_channels_last(x, w)
        yield from _copy(x, 0, last, channels_last=channels_last)
        x = contiguous(x, channels_last=channels_last)
    channels_last = suggests_channels_last(x)
    yield from _copy(gradient, 0, last, channels_last=channels_last)
    gradient = contiguous(gradient, channels_last=channels_last)
    # 2. The gradient of the input. That of a transposed convolution is a convolution of the output's gradient.
    if of_input:
        channels_last = convolves_channels_last(gradient, w)
        yield from _copy(w, 1, 1, channels_last=channels_last)
        yield from _copy(gradient, 1, 1, channels_last=channels_last)
        operation, image = (FORWARD, gradient) if options.transposed else (GRAD_INPUT, x)
        yield Placed(options.asked(operation, x=image, w=w, channels_last=channels_last), 1, 1)
    # 3. The gradient of the weight.
    if of_weight:
        channels_last = convolves_channels_last(x, gradient)
        image = gradient if options.transposed else x
        yield Placed(options.asked(GRAD_WEIGHT, x=image, w=w, channels_last=channels_last), last, last)


def _depthwise_forward(call: KernelCall) -> Iterator[Placed]:
    x, w, _ = _inputs(call)
    yield from _copy_in_one_dimension(call, 1)
    yield from _copy(x, 0, 1, channels_last=False)
    yield from _copy(w, 0, 1, channels_last=False)


def _depthwise_backward(call: KernelCall) -> Iterator[Placed]:
    """Yields the contiguous copies that PyTorch's depthwise kernels read.

    In two dimensions, the weight's gradient is computed first, and the copy of the image is freed before the input's
    gradient is allocated. Recordings name the input's gradient first, so the copy ends before the first output. In
    three dimensions, both gradients are allocated before the copies.
    """
    x, w, _ = _inputs(call)
    gradient, of_input, of_weight = _gradients(call)
    last = int(of_input) + int(of_weight)
    if not last:
        return
    is_volume = len(x.shape) == 5
    yield from _copy_in_one_dimension(call, last)
    yield from _copy(gradient, last if is_volume else 0, last, channels_last=False)
    if of_weight:
        end = last if is_volume or not of_input else 0
        yield from _copy(x, last if is_volume else 0, end, channels_last=False)
    if of_input:
        yield from _copy(w, last, last, channels_last=False)


def _columns_forward(call: KernelCall) -> Iterator[Placed]:
    """Yields contiguous copies, and the matrix of columns of one sample: for each output, the elements that it reads.

    A two-dimensional convolution whose kernel has one element reads the image itself.
    """
    x, w, options = _inputs(call)
    yield from _copy_in_one_dimension(call, 1)
    yield from _copy(x, 0, 1, channels_last=False)
    yield from _copy(w, 0, 1, channels_last=False)
    reads_image = set(w.shape[2:]) == set(options.stride) == {1} and set(options.padding) == {0}
    if len(w.shape) == 5 or options.is_dilated or not reads_image:
        yield Placed(_columns_bytes(call.outputs[0], x, w), 1, 1)


def _columns_backward(call: KernelCall) -> Iterator[Placed]:
    """Yields contiguous copies, and one matrix of columns, which both gradients use.

    The kernels without dilation in two dimensions allocate it after the input's gradient, the others after all outputs.
    """
    x, w, options = _inputs(call)
    gradient, of_input, of_weight = _gradients(call)
    outputs = sum(call.arguments["output_mask"])
    yield from _copy_in_one_dimension(call, outputs)
    for each in (x, w, gradient):
        yield from _copy(each, 0, outputs, channels_last=False)
    if of_input or of_weight:
        is_early = of_input and len(w.shape) == 4 and not options.is_dilated
        yield Placed(_columns_bytes(gradient, x, w), 1 if is_early else outputs, outputs)


def _columns_bytes(output: Layout, x: Layout, w: Layout) -> int:
    return math.prod((*w.shape[1:], *output.shape[2:])) * x.itemsize
