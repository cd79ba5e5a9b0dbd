"""Formulas for the scratch memory of ops: blocks that a CUDA kernel allocates and frees inside one op.

A rehearsal with fake tensors does not run the kernels, so it does not show this memory. A formula computes it from the
arguments of the call and the card (`registry`). Each op has a formula, or is listed as one that needs no scratch memory
(`nothing`), or counts as unknown. `planner.estimate.add_workspaces` adds the memory to a recording, together with the
workspaces that cuBLAS keeps.
"""

from planner.workspaces import (
    attention,
    convolutions,
    cudnn_attention,
    cudnn_recurrent,
    gemm,
    indexing,
    norms,
    reductions,
    upsampling,
)
from planner.workspaces.registry import blocks_of, has_formula, is_known

FORMULAS = (attention, convolutions, cudnn_attention, cudnn_recurrent, gemm, indexing, norms, reductions, upsampling)
"""The modules that define formulas. Importing them registers the formulas."""

__all__ = ["FORMULAS", "blocks_of", "has_formula", "is_known"]
