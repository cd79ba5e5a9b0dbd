"""Gradients of lookups sort their indices first."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_UNSORTED_AT_MOST = 3072
_ROWS_PER_THREAD = 10
_INDEX_BYTES = 8


@takes_scratch("aten.embedding_dense_backward.default")
def embedding_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Sorted indices, where segments of equal ones begin, and partial sums of each segment in fp32.

    Source: Embedding.cu, `embedding_dense_backward_cuda`; EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`.
    """
    indices, columns = call.tensor("indices").numel, call.tensor("grad_output").shape[-1]
    if indices <= _UNSORTED_AT_MOST and not call.arguments["scale_grad_by_freq"]:
        return []
    segments = min(indices, call.arguments["num_weights"])
    partial = indices // _ROWS_PER_THREAD + segments
    return [
        *[_INDEX_BYTES * indices] * 2,
        *[_INDEX_BYTES * segments] * 3,
        _INDEX_BYTES * partial,
        4 * partial * -(-columns // 32) * 32,
    ]


def _radix_sort_bytes(positions: int) -> int:
    """cub sorts few keys in one block; for more it swaps keys and values with a second buffer (DeviceRadixSort)."""
    return 1 if positions <= _UNSORTED_AT_MOST else 2 * _INDEX_BYTES * positions


@takes_scratch("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")
def index_put(call: KernelCall, card: DeviceProfile) -> list[int]:
    """An accumulating put sorts its linear indices (Indexing.cu, `index_put_with_sort_kernel`).

    Blocks: the linear indices, their places, both sorted, and what cub's radix sort swaps with.
    """
    if not call.arguments["accumulate"]:
        return []
    given = [index for index in call.arguments["indices"] if isinstance(index, Layout)]
    positions = max((index.numel for index in given), default=0)
    return [_INDEX_BYTES * positions] * 4 + [_radix_sort_bytes(positions)]


@takes_scratch("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.topk.default")
def sort(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Keys and places twice, at most: the radix sort swaps between two buffers (Sort.cu, TensorTopK.cu)."""
    layout = call.tensor("self")
    return [layout.nbytes, _INDEX_BYTES * layout.numel]
