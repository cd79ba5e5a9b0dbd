"""Memory that a kernel takes for itself inside one op, which no fake tensor shows.

A formula is a pure function of the call's layouts and the card, registered under the names of its ops (`registry`). An
op is either listed with a formula, or listed as needing nothing (`nothing`), or counted as unknown; `stream.add` puts
what the formulas say into a recording, and what cuBLAS keeps.
"""

from planner.workspaces import attention, gemm, indexing, norms, reductions
from planner.workspaces.registry import formula_of, has_formula, is_known

FORMULAS = (attention, gemm, indexing, norms, reductions)
"""The files whose import registers their formulas."""

__all__ = ["FORMULAS", "formula_of", "has_formula", "is_known"]
