"""Formulas for the scratch memory of ops that sort: sorting, the gradient of an embedding, and `index_put`.

The gradient of an embedding, and `index_put` with `accumulate=True`, sort their indices to sum the rows that belong to
the same index.
"""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

_UNSORTED_AT_MOST = 3072
"""Maximum number of indices for which a kernel needs no buffer in global memory to sort them."""
_ROWS_PER_THREAD = 10
"""Number of rows of the gradient that one thread sums (`NROWS_PER_THREAD` in PyTorch)."""
_INDEX_BYTES = 8


@takes_scratch("aten.embedding_dense_backward.default")
def embedding_backward(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of the gradient of an embedding.

    The blocks are the sorted indices and their positions, the places in the sorted list where a run of equal indices
    begins, and partial sums of such runs in fp32. Few indices need none of these.

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
    """Returns the scratch memory in bytes of cub's `DeviceRadixSort` for `positions` keys with as many values.

    One thread block sorts few keys without a buffer. For more keys, the sort needs a second buffer for keys and values.
    """
    return 1 if positions <= _UNSORTED_AT_MOST else 2 * _INDEX_BYTES * positions


@takes_scratch("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")
def index_put(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the scratch blocks of `index_put`.

    With `accumulate=True` the indices are sorted. The blocks are the linear indices and their positions, a sorted copy
    of both, and the buffer of the sort. With `accumulate=False` there are none.

    Source: Indexing.cu, `index_put_with_sort_kernel`.
    """
    if not call.arguments["accumulate"]:
        return []
    indices = [index for index in call.arguments["indices"] if isinstance(index, Layout)]
    positions = max((index.numel for index in indices), default=0)
    return [_INDEX_BYTES * positions] * 4 + [_radix_sort_bytes(positions)]


@takes_scratch("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.topk.default")
def sort(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the second buffers, for keys and for positions, that a radix sort needs.

    This is an upper bound: sorts of few elements and `topk` may need less.

    Source: Sort.cu, TensorTopK.cu.
    """
    layout = call.tensor("self")
    return [layout.nbytes, _INDEX_BYTES * layout.numel]
