"""Compare the bytes that a compiled step saves for backward with those of the eager step.

    python -m benchmarks.compiled

Each model runs one forward and backward on the CPU, eagerly and compiled by AOTAutograd with the min-cut partitioner
that `torch.compile` uses, with `activation_memory_budget` 1.0, 0.5 and 0.0. The table shows the bytes of the tensors
that autograd saves, without parameters and inputs, as a share of the eager step's. The temporary buffers of
inductor's kernels are not measured, because they need a card.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

BUDGETS = (1.0, 0.5, 0.0)


def _language_model(name: str, **settings: Any) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        config = transformers.AutoConfig.for_model(name, vocab_size=1000, use_cache=False, **settings)
        tokens = torch.randint(1000, (4, 64))
        return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}

    return build


def _vision_transformer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=64
    )
    inputs = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(2, (4,))}
    return transformers.ViTForImageClassification(config), inputs


class _Convolutions(nn.Sequential):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels).square().mean()


def _convolutions() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layers = [[nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU()] for _ in range(4)]
    model = _Convolutions(nn.Conv2d(3, 32, 3), *(layer for block in layers for layer in block))
    return model, {"pixels": torch.randn(4, 3, 32, 32)}


_SMALL = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 3}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "GPT-2": _language_model("gpt2", n_layer=4, n_embd=192, n_head=3),
    "Llama": _language_model("llama", **_SMALL, num_key_value_heads=3, intermediate_size=512),
    "Qwen 2": _language_model("qwen2", **_SMALL, num_key_value_heads=3, intermediate_size=512),
    "OPT": _language_model("opt", num_hidden_layers=4, hidden_size=192, num_attention_heads=3, ffn_dim=768),
    "ViT": _vision_transformer,
    "convolutions": _convolutions,
}


def saved_bytes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Returns the bytes of the storages that autograd saves in a forward, without parameters, buffers and inputs."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            alive.append(tensor)  # keeps the storage alive, so that no address is used twice
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return sum(sizes.values())


def compiled_bytes(model: nn.Module, inputs: dict[str, torch.Tensor], budget: float) -> int:
    """Returns `saved_bytes` of the model compiled with an activation memory budget."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        return saved_bytes(compiled, inputs)


def main() -> None:
    table = Table(
        title=f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.python_version()}"
    )
    for column in ("model", "eager (MiB)", *(f"compiled, budget {budget}" for budget in BUDGETS)):
        table.add_column(column)
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, inputs = build()
        eager = saved_bytes(model, inputs)
        shares = (f"{compiled_bytes(model, inputs, budget) / eager:.2f}" for budget in BUDGETS)
        table.add_row(name, f"{eager / 2**20:.1f}", *shares)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
