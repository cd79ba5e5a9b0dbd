"""Prepares models as axolotl 0.19 does (`src/axolotl/loaders/model.py`)."""

from __future__ import annotations

from typing import Any

import torch

from planner.errors import WorkloadError
from planner.plan_types.adapter import Adapter
from planner.plan_types.plan import TrainingProgram
from planner.workload.programs.program import Program, Terms, Wish

_EMBEDDINGS = {
    "gpt_neox": ("embed_in", "embed_out"),
    "falcon": ("word_embeddings", "lm_head"),
    "nemotron_h": ("embeddings", "lm_head"),
    "bailing_hybrid": ("word_embeddings", "lm_head"),
}
"""The names of input and output embeddings by type of model (`get_linear_embedding_layers`).

Other types of models have the usual names.
"""


class Axolotl(Program):
    """axolotl loads the weights in the dtype of autocast, whatever the dtype in which they are saved."""

    title = "axolotl"

    def _terms(self, wish: Wish) -> Terms:
        if wish.adapter is None:
            if wish.dtype not in (None, "float32"):
                raise WorkloadError(
                    "axolotl trains half-precision weights with norms and embeddings in float32, a mixture that cannot "
                    "be planned: give --dtype float32, or train adapters with --lora or --qlora"
                )
            return Terms(dtype="float32", forbidden=("mixed-precision",))
        dtype = wish.dtype or wish.autocast or "float32"
        if dtype == "float32":
            if wish.adapter.is_quantized:
                raise WorkloadError(
                    "axolotl computes products with 4-bit weights under autocast: leave --dtype out, and plan for a "
                    "card that computes bfloat16 or float16 faster than float32"
                )
            return Terms(dtype=dtype, forbidden=("mixed-precision",))
        if dtype != wish.autocast:
            raise WorkloadError(
                "axolotl loads the weights in the dtype of autocast, and on this card that is "
                f"{wish.autocast or 'float32, because it computes no other dtype faster'}: give --dtype "
                f"{wish.autocast or 'float32'}, or leave --dtype out"
            )
        return Terms(dtype=dtype, forced=("mixed-precision",))

    def _convert(self, model: Any, adapter: Adapter | None, dtype: str) -> None:
        """Does what `_convert_embedding_modules_dtype` does with adapters: norms and embeddings get the same dtype.

        Without adapters, the weights are float32 already.
        """
        if adapter is None:
            return
        embeddings = _EMBEDDINGS.get(model.config.model_type, ("embed_tokens", "lm_head"))
        for name, module in model.named_modules():
            if name.endswith(".gate") and dtype != "float32":
                raise WorkloadError(
                    f"axolotl keeps '{name}', which selects experts, in float32, a mixture that cannot be planned: "
                    "choose another loop with --for"
                )
            is_embedding = any(part in name for part in embeddings) and hasattr(module, "weight")
            if "norm" in name or is_embedding:
                getattr(module, "base_layer", module).to(getattr(torch, dtype))

    def _inputs_need_gradients(self, settings: TrainingProgram) -> bool:
        return True
