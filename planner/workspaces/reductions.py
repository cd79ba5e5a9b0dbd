"""Reductions over many elements split one output over thread blocks, which meet in a buffer in global memory.

    scratch = accumulator x outputs x blocks per output (x threads and vector width where the kept dimension is fastest)

Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig::global_memory_size`) and
aten/src/ATen/TensorIterator.cpp (`reorder_dimensions`, `coalesce_dimensions`, `can_use_32bit_indexing`), torch 2.4 to
2.13. Input addresses are taken to be aligned for vector loads.
"""

from __future__ import annotations

import dataclasses
import functools

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_MAX_OFFSET = 2**31 - 1
_WELFORD_BYTES = 16
"""`WelfordData<float, int32_t>`: mean, sum of squares, two counts."""
_VALUE_AND_INDEX_BYTES = 16
"""A value beside an int64 index, padded."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Dimension:
    size: int
    stride: int
    """Of the input, in elements."""
    out_stride: int
    """Of the output; 0 where the dimension is reduced."""


def reduction(
    layout: Layout, dims: tuple[int, ...] | None, *, accumulator_bytes: int, card: DeviceProfile
) -> list[int]:
    """Buffer and semaphores that one reduction takes; [] if one block does each output.

    Args:
        layout: of the input.
        dims: that are reduced; None or () for all.
    """
    if layout.numel == 0:
        return []
    return _of_iterator(_dimensions(layout, dims), layout.itemsize, accumulator_bytes, card)


def _of_iterator(dims: list[_Dimension], itemsize: int, accumulator_bytes: int, card: DeviceProfile) -> list[int]:
    while sum((dim.size - 1) * dim.stride for dim in dims) * itemsize + 1 > _MAX_OFFSET:
        widest = max(range(len(dims)), key=lambda place: (dims[place].size - 1) * dims[place].stride)
        dims = [
            dataclasses.replace(dim, size=dim.size // 2) if place == widest else dim for place, dim in enumerate(dims)
        ]
    reduced = [dim for dim in dims if dim.out_stride == 0]
    kept = [dim for dim in dims if dim.out_stride != 0]
    inputs, outputs = _product(reduced), _product(kept)
    on_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    width, height = (inputs, outputs) if on_fastest else (outputs, inputs)
    fastest = (reduced if on_fastest else kept)[:1]
    vector = 1
    if fastest and fastest[0].stride == 1:
        if on_fastest and width >= 128 and len(reduced) == 1:
            width //= 4
        elif not on_fastest:
            vector = _output_vector(kept[0].size, [dim.stride for dim in dims if dim is not kept[0]])
            width //= vector
    block_width, block_height = _block(width, height, _MAX_THREADS // vector)
    step_input, step_output = (block_width, 1) if on_fastest else (1, block_width)
    across_warps = -(-inputs // step_input) >= min(block_height * 16, _MAX_VALUES_PER_THREAD)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
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
    """Reduced dimensions first, then by stride; neighbours that lie behind each other are one."""
    rank = len(layout.shape)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    out_stride, found = 1, []
    for place in reversed(range(rank)):
        kept_stride = 0 if place in reduced else out_stride
        out_stride *= 1 if place in reduced else layout.shape[place]
        if layout.shape[place] > 1:
            found.append(_Dimension(size=layout.shape[place], stride=layout.stride[place], out_stride=kept_stride))
    found.sort(key=functools.cmp_to_key(_order))
    merged: list[_Dimension] = []
    for dim in found:
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


def _order(one: _Dimension, other: _Dimension) -> int:
    if (one.out_stride == 0) != (other.out_stride == 0):
        return -1 if one.out_stride == 0 else 1
    for first, second in ((one.out_stride, other.out_stride), (one.stride, other.stride)):
        if first and second and first != second:
            return -1 if first < second else 1
    return 0


def _product(dims: list[_Dimension]) -> int:
    product = 1
    for dim in dims:
        product *= dim.size
    return product


def _output_vector(size: int, strides: list[int]) -> int:
    vector = 4
    for number in (size, *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """`set_block_dimension`."""
    width_power = _last_power(width) if width < most else most
    height_power = _last_power(height) if height < most else most
    block_width = min(width_power, _WARP)
    block_height = min(height_power, most // block_width)
    return min(width_power, most // block_height), block_height


def _last_power(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)


def _dims(call: KernelCall) -> tuple[int, ...] | None:
    dims = call.arguments.get("dim")
    return (dims,) if isinstance(dims, int) else dims


@takes_scratch(
    "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.nansum.default",
    "aten.prod.default", "aten.prod.dim_int", "aten.linalg_vector_norm.default", "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
)  # fmt: skip
def sums(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Sums and their like accumulate in fp32 (fp64 for doubles, int64 for integers)."""
    layout = call.tensor("self")
    return reduction(layout, _dims(call), accumulator_bytes=layout.accumulator_bytes, card=card)


@takes_scratch("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremes(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Values alone, in their own type (ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu)."""
    layout = call.tensor("self")
    return reduction(layout, _dims(call), accumulator_bytes=layout.itemsize, card=card)


@takes_scratch("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def places(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Values with their indices."""
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=_VALUE_AND_INDEX_BYTES, card=card)


@takes_scratch("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def truths(call: KernelCall, card: DeviceProfile) -> list[int]:
    """One byte each."""
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=1, card=card)


@takes_scratch("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def moments(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Welford's running moments."""
    return reduction(call.tensor("self"), _dims(call), accumulator_bytes=_WELFORD_BYTES, card=card)


@takes_scratch("aten.logsumexp.default")
def log_sum_exp(call: KernelCall, card: DeviceProfile) -> list[int]:
    """The maxima, and the exponentials of everything (ReduceOps.cpp, `logsumexp_out_impl`)."""
    layout = call.tensor("self")
    sums_bytes = reduction(layout, _dims(call), accumulator_bytes=layout.accumulator_bytes, card=card)
    return [call.outputs[0].nbytes, layout.nbytes, *sums_bytes]
