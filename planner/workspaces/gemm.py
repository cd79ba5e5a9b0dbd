"""The formula for the scratch memory of matrix products: copies of operands whose memory layout cuBLAS cannot read.

Source: `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas` in aten/src/ATen/native/cuda/Blas.cpp.
"""

from __future__ import annotations

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, Layout, takes_scratch

GEMM_OPS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
"""Matrix products that run on cuBLAS."""


@takes_scratch(*GEMM_OPS)
def products(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns the sizes in bytes of the copies of operands that are contiguous neither by rows nor by columns."""
    names = ("mat1", "mat2") if "mat1" in call.arguments else ("self", "mat2")
    names = ("batch1", "batch2") if "batch1" in call.arguments else names
    return [layout.nbytes for layout in map(call.tensor, names) if _must_be_copied(layout)]


def _must_be_copied(layout: Layout) -> bool:
    """True if cuBLAS cannot read a matrix, because it is contiguous neither by rows nor by columns."""
    (rows, columns), (row_stride, column_stride) = layout.shape[-2:], layout.stride[-2:]
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    return not by_rows and not by_columns and rows > 1 and columns > 1
