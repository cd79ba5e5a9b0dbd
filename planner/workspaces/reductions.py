"""Formulas for the scratch memory of reductions.

If many elements are reduced to one output, several thread blocks share the work. They exchange partial results in a
buffer in global memory, and count with semaphores how many blocks have finished. The buffer has the size

    bytes per partial result x outputs x thread blocks per output

times the block's width and the outputs per vector load, if the fastest dimension (the one of the smallest stride) is
not reduced.

Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig::global_memory_size`) and
aten/src/ATen/TensorIterator.cpp (`reorder_dimensions`, `coalesce_dimensions`, `can_use_32bit_indexing`), torch 2.4 to
2.13.

The formulas assume that input addresses are aligned for vector loads. For other addresses they are not exact.
"""

from __future__ import annotations

import dataclasses
import functools

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_MAX_THREADS = 512
"""Maximum number of threads of a thread block."""
_WARP = 32
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_MAX_OFFSET = 2**31 - 1
"""Maximum offset in bytes of an element, for a kernel with 32-bit indexing."""
_WELFORD_BYTES = 16
"""Bytes of a partial result of a variance, `WelfordData<float, int32_t>`: mean, sum of squares, two counts."""
_VALUE_AND_INDEX_BYTES = 16
"""Bytes of a partial result that consists of a value and its int64 index, with padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Dimension:
    """One dimension of PyTorch's `TensorIterator`: a dimension of the tensor, or several that were merged."""

    size: int
    stride: int
    """Stride of the input in elements."""
    out_stride: int
    """Stride of the output in elements; 0 if the dimension is reduced."""


def reduction(
    layout: Layout, dims: tuple[int, ...] | None, *, accumulator_bytes: int, card: DeviceProfile
) -> list[int]:
    """Returns the sizes in bytes of the buffer and of the semaphores of one reduction.

    The result is [] if one thread block computes each output alone, because then neither is needed.

    Args:
        layout: Layout of the input.
        dims: Indices of the dimensions that are reduced. None or () means all.
        accumulator_bytes: Size of one partial result.
        card: The card, whose number of multiprocessors determines how many thread blocks share an output.
    """
    if layout.numel == 0:
        return []
    return _scratch_sizes(_dimensions(layout, dims), layout.itemsize, accumulator_bytes, card)


def _scratch_sizes(dims: list[_Dimension], itemsize: int, accumulator_bytes: int, card: DeviceProfile) -> list[int]:
    """Returns the result of `reduction`, computed as in PyTorch's `setReduceConfig`.

    Args:
        dims: Result of `_dimensions`.
        itemsize: Bytes of one element of the input.
        accumulator_bytes: Size of one partial result.
        card: The card.
    """
    # 1. TensorIterator halves the dimension of the largest extent until 32-bit offsets suffice, and runs the halves one
    #    after the other (`split`).
    while sum((dim.size - 1) * dim.stride for dim in dims) * itemsize + 1 > _MAX_OFFSET:
        widest = max(range(len(dims)), key=lambda index: (dims[index].size - 1) * dims[index].stride)
        dims = [
            dataclasses.replace(dim, size=dim.size // 2) if index == widest else dim for index, dim in enumerate(dims)
        ]
    # 2. The x-dimension of a thread block runs along the dimension of the smallest stride, be it reduced or kept.
    reduced = [dim for dim in dims if dim.out_stride == 0]
    kept = [dim for dim in dims if dim.out_stride != 0]
    inputs, outputs = _product(reduced), _product(kept)
    on_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    width, height = (inputs, outputs) if on_fastest else (outputs, inputs)
    fastest = (reduced if on_fastest else kept)[:1]
    # 3. Vector loads: 4 inputs per thread along a contiguous reduced dimension, or several outputs along a kept one.
    vector = 1
    if fastest and fastest[0].stride == 1:
        if on_fastest and width >= 128 and len(reduced) == 1:
            width //= 4
        elif not on_fastest:
            vector = _output_vector(kept[0].size, [dim.stride for dim in dims if dim is not kept[0]])
            width //= vector
    # 4. The threads of a block share the inputs of an output along x, and across warps (y) if there are many.
    block_width, block_height = _block(width, height, _MAX_THREADS // vector)
    step_input, step_output = (block_width, 1) if on_fastest else (1, block_width)
    across_warps = -(-inputs // step_input) >= min(block_height * 16, _MAX_VALUES_PER_THREAD)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    # 5. If each thread still has many values and the grid does not fill the card, several blocks share an output.
    values_per_thread = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = card.sm_count * (card.max_threads_per_sm // (block_width * block_height))
    if not across_warps or values_per_thread < _MAX_VALUES_PER_THREAD or grid > target:
        return []
    blocks = max(
        min(-(-target // grid), -(-values_per_thread // _MIN_VALUES_PER_THREAD)),
        -(-values_per_thread // _MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return []
    size = accumulator_bytes * outputs * blocks
    return [size if on_fastest else size * block_width * vector, 4 * grid]


def _dimensions(layout: Layout, dims: tuple[int, ...] | None) -> list[_Dimension]:
    """Returns the dimensions that PyTorch's `TensorIterator` makes from those of a tensor.

    Reduced dimensions come first, then kept ones, both in the order of their strides. Adjacent dimensions are merged if
    the result has a single stride, and dimensions of size 1 are dropped.
    """
    rank = len(layout.shape)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    out_stride, dimensions = 1, []
    for index in reversed(range(rank)):
        kept_stride = 0 if index in reduced else out_stride
        out_stride *= 1 if index in reduced else layout.shape[index]
        if layout.shape[index] > 1:
            dimensions.append(_Dimension(size=layout.shape[index], stride=layout.stride[index], out_stride=kept_stride))
    dimensions.sort(key=functools.cmp_to_key(_order))
    merged: list[_Dimension] = []
    for dim in dimensions:
        last = merged[-1] if merged else None
        if (
            last
            and (last.out_stride == 0) == (dim.out_stride == 0)
            and last.size * last.stride == dim.stride
            and last.size * last.out_stride == dim.out_stride
        ):
            merged[-1] = dataclasses.replace(last, size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged


def _order(first: _Dimension, second: _Dimension) -> int:
    """Compares two dimensions for sorting; negative if `first` comes first, 0 if it does not matter.

    Reduced dimensions come before kept ones, and small strides before large ones (`reorder_dimensions` in PyTorch).
    """
    if (first.out_stride == 0) != (second.out_stride == 0):
        return -1 if first.out_stride == 0 else 1
    for stride, other in ((first.out_stride, second.out_stride), (first.stride, second.stride)):
        if stride and other and stride != other:
            return -1 if stride < other else 1
    return 0


def _product(dims: list[_Dimension]) -> int:
    """Returns the product of the sizes of dimensions."""
    product = 1
    for dim in dims:
        product *= dim.size
    return product


def _output_vector(size: int, strides: list[int]) -> int:
    """Returns for how many outputs one vector load reads inputs: 4, 2 or 1 (`get_output_vec_size` in PyTorch).

    Args:
        size: Size of the kept dimension that is contiguous.
        strides: Strides of all other dimensions, in elements. The result divides `size` and all strides.
    """
    vector = 4
    for number in (size, *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Returns the width and the height of a block of at most `most` threads (`set_block_dimension` in PyTorch).

    `width` and `height` are the numbers of values to process along the x- and the y-dimension of the block.
    """
    width_power = _last_power(width) if width < most else most
    height_power = _last_power(height) if height < most else most
    block_width = min(width_power, _WARP)
    block_height = min(height_power, most // block_width)
    return min(width_power, most // block_height), block_height


def _last_power(number: int) -> int:
    """Returns the largest power of two that is at most `number`; 1 for 0 (`last_pow2` in PyTorch)."""
    return 1 << max(number.bit_length() - 1, 0)


def _dims(call: KernelCall) -> tuple[int, ...] | None:
    """Returns the indices of the dimensions that a call reduces; None means all dimensions."""
    dims = call.arguments.get("dim")
    return (dims,) if isinstance(dims, int) else dims


@takes_scratch(
    "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.nansum.default",
    "aten.prod.default", "aten.prod.dim_int", "aten.linalg_vector_norm.default", "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
)  # fmt: skip
def sums(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of sums, means, products and norms.

    A partial result is fp32, fp64 for a float64 input, or int64 for integers.
    """
    layout = call.tensor("self")
    return reduction(layout, _dims(call), accumulator_bytes=layout.accumulator_bytes, card=card)


@takes_scratch("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremes(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of maxima and minima without indices.

    A partial result has the dtype of the input.

    Source: ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu.
    """
    layout = call.tensor("self")
    return reduction(layout, _dims(call), accumulator_bytes=layout.itemsize, card=card)


@takes_scratch("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def places(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of maxima and minima with indices.

    A partial result is a value with its index.
    """
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=_VALUE_AND_INDEX_BYTES, card=card)


@takes_scratch("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def truths(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of `any` and `all`. A partial result is one byte."""
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=1, card=card)


@takes_scratch("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def moments(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of variances and standard deviations (Welford's algorithm)."""
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=_WELFORD_BYTES, card=card)


@takes_scratch("aten.logsumexp.default")
def log_sum_exp(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of `logsumexp`.

    The blocks are the maxima, the exponentials of all elements, and the scratch blocks of the sum over these.

    Source: ReduceOps.cpp, `logsumexp_out_impl`.
    """
    layout = call.tensor("self")
    sums_bytes = reduction(layout, _dims(call), accumulator_bytes=layout.accumulator_bytes, card=card)
    return [call.outputs[0].nbytes, layout.nbytes, *sums_bytes]


@takes_scratch("aten._safe_softmax.default")
def safe_softmax(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of the softmax that is zero in rows without a finite score.

    The blocks are a mask of the infinite elements, a mask of the rows that have no others, a zero of the output's
    dtype, and the scratch blocks of the reduction to rows. The zeros are written into the output.

    Source: transformers/attention.cpp, `_safe_softmax`.
    """
    scores, output = call.tensor("self"), call.outputs[0]
    masked = dataclasses.replace(scores, itemsize=1, dtype="bool")
    dim = call.arguments["dim"]
    rows_bytes = masked.numel // max(scores.shape[dim], 1) if scores.shape else 1
    return [masked.nbytes, rows_bytes, output.itemsize, *reduction(masked, (dim,), accumulator_bytes=1, card=card)]
