"""Prepares models as LLaMA-Factory 0.9.5 does (`src/llamafactory/model`)."""

from __future__ import annotations

from typing import Any

from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.workload.programs.program import Program, Terms, Wish


class LlamaFactory(Program):
    """LLaMA-Factory loads the weights in the dtype in which they are saved, and trains in float32 or bfloat16."""

    title = "LLaMA-Factory"
    upcasts_before_adapters = False

    def _terms(self, wish: Wish) -> Terms:
        if wish.adapter is None:
            dtype = wish.dtype or "float32"
            if dtype != "float32" and not dtype == wish.stored == "bfloat16":
                raise WorkloadError(
                    "LLaMA-Factory trains all weights in float32, or in bfloat16 if they are saved in bfloat16, but "
                    f"these are saved in {wish.stored}: give --dtype float32, or leave --dtype out"
                )
            return Terms(dtype=dtype, forbidden=() if dtype == "float32" else ("mixed-precision",))
        if wish.dtype not in (None, wish.stored):
            raise WorkloadError(
                f"LLaMA-Factory loads frozen weights in the dtype in which they are saved, which is {wish.stored}: "
                "leave --dtype out"
            )
        return Terms(dtype=wish.stored, forced=("mixed-precision",) if wish.adapter.is_quantized else ())

    def _convert(self, model: Any, adapter: Adapter | None, dtype: str) -> None:
        """Converts nothing: `terms` returns the dtype that the weights have in training, and adapters are float32."""
