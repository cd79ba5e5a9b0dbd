"""Scratch memory of indexing: gradients of lookups and accumulating writes sort their indices first."""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_UNSORTED_AT_MOST = 3072
"""Maximum number of indices that are processed without sorting them in global memory."""
_ROWS_PER_THREAD = 10
"""Number of rows that one thread sums (`NROWS_PER_THREAD`)."""
_INDEX_BYTES = 8


@takes_scratch("aten.embedding_dense_backward.default")
def embedding_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Allocates sorted indices, the start of each segment of equal indices, and partial sums of segments in fp32.

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
    """Returns the scratch memory of cub's `DeviceRadixSort`.

    Few keys are sorted in one block. For more keys it swaps keys and values with a second buffer.
    """
    return 1 if positions <= _UNSORTED_AT_MOST else 2 * _INDEX_BYTES * positions


@takes_scratch("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")
def index_put(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Sorts the linear indices if values are accumulated (Indexing.cu, `index_put_with_sort_kernel`).

    The blocks are the linear indices and their positions, both again in sorted order, and a second buffer to sort.
    """
    if not call.arguments["accumulate"]:
        return []
    indices = [index for index in call.arguments["indices"] if isinstance(index, Layout)]
    positions = max((index.numel for index in indices), default=0)
    return [_INDEX_BYTES * positions] * 4 + [_radix_sort_bytes(positions)]


@takes_scratch("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.topk.default")
def sort(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Allocates a second buffer of keys and positions, which a radix sort swaps with (Sort.cu, TensorTopK.cu).

    This is an upper bound: small sorts and selections take less.
    """
    layout = call.tensor("self")
    return [layout.nbytes, _INDEX_BYTES * layout.numel]
