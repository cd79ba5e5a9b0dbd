"""Formulas for the scratch memory that a kernel allocates inside one op, which no fake tensor shows.

A formula is a pure function of the layouts of a call and of the card, registered under the names of its ops
(`registry`). Each op has a formula, or is listed as needing nothing (`nothing`), or counts as unknown.
`planner.estimate.add_workspaces` adds the memory to a recording, together with the workspaces that cuBLAS keeps.
"""

from planner.workspaces import attention, gemm, indexing, norms, reductions
from planner.workspaces.registry import formula_of, has_formula, is_known

FORMULAS = (attention, gemm, indexing, norms, reductions)
"""The modules with formulas, which register them when they are imported."""

__all__ = ["FORMULAS", "formula_of", "has_formula", "is_known"]
