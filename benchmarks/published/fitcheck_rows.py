"""Compares the formulas of fitcheck-llm with published runs: the same rows that this planner predicts.

    pip install fitcheck-llm==0.3.1
    python -m benchmarks.published.fitcheck_rows

The rows are LoRA and QLoRA runs of Lit-GPT (`benchmarks.published.language`) and runs of peft
(`benchmarks.published.peft_runs`; 641 tokens in the longest batch). Lit-GPT published bytes of tensors, and peft
reserved bytes. So fitcheck's total is taken without its overhead for Lit-GPT, and for peft without 500 MiB, which its
overhead holds for the CUDA context.
"""

from __future__ import annotations

import dataclasses

from benchmarks.published.lit_gpt import LLAMA_7B, LLAMA_13B, Sizes
from benchmarks.published.peft_runs import LLAMA_3B
from planner.plan_types.sizes import MIB

GB = 10**9
_CONTEXT_MIB = 500
_MLP = ["gate_proj", "up_proj", "down_proj"]
_LONGEST_TOKENS = 641


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published run. `lora_rank` is None if all weights were trained."""

    name: str
    model: Sizes | dict[str, object]
    published_gb: float
    samples: int
    tokens: int
    lora_rank: int | None
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    quantization: str = "none"
    has_quantized_scales: bool = False
    is_reserved: bool = False


def _lit_gpt(name: str, sizes: Sizes, published_gb: float, samples: int = 1, quantized: str = "") -> Row:
    return Row(
        name=f"{name} {quantized or 'LoRA'}, {samples} x 1304",
        model=sizes,
        published_gb=published_gb,
        samples=samples,
        tokens=1304,
        lora_rank=8,
        quantization="nf4" if quantized else "none",
        has_quantized_scales=quantized == "nf4-dq",
    )


def _peft(name: str, published_gb: float, rank: int | None, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Row:
    return Row(
        name=f"Llama-3.2-3B {name}",
        model=LLAMA_3B,
        published_gb=published_gb,
        samples=4,
        tokens=_LONGEST_TOKENS,
        lora_rank=rank,
        targets=targets,
        is_reserved=True,
    )


ROWS = (
    _lit_gpt("Llama-2-7B", LLAMA_7B, 21.30),
    _lit_gpt("Llama-2-7B", LLAMA_7B, 29.07, samples=2),
    _lit_gpt("Llama-2-13B", LLAMA_13B, 38.12),
    _lit_gpt("Llama-2-7B", LLAMA_7B, 14.14, quantized="nf4"),
    _lit_gpt("Llama-2-7B", LLAMA_7B, 13.84, quantized="nf4-dq"),
    _lit_gpt("Llama-2-13B", LLAMA_13B, 23.14, quantized="nf4"),
    _lit_gpt("Llama-2-13B", LLAMA_13B, 22.55, quantized="nf4-dq"),
    _peft("LoRA, rank 32", 22.29, 32),
    _peft("LoRA, rank 64", 22.55, 64),
    _peft("LoRA on the MLP, rank 10", 24.70, 10, tuple(_MLP)),
    _peft("all weights", 38.87, None),
)


def predicted_gb(row: Row) -> float:
    """Returns what fitcheck predicts for the figure that was published, in GB of 1e9 bytes."""
    import fitcheck

    is_in_fp32 = row.is_reserved and row.lora_rank is not None  # adapters of peft; other trained weights are in bf16
    training = fitcheck.TrainingConfig(
        precision="bf16",
        quantization=row.quantization,
        double_quant=row.has_quantized_scales,
        optimizer_dtype="fp32" if is_in_fp32 else "bf16",
        batch_size=row.samples,
        seq_len=row.tokens,
        lora_rank=row.lora_rank,
        lora_targets=list(row.targets),
        flash_attn=True,
    )
    report = fitcheck.estimate(_config(row.model), training, fitcheck.get_gpu("a100-80"))
    left_out = _CONTEXT_MIB if row.is_reserved else report.overhead_mib
    return (report.total_mib - left_out) * MIB / GB


def _config(model: Sizes | dict[str, object]):
    """Returns the model for fitcheck, with its number of parameters from the sizes of its layers."""
    import fitcheck

    if isinstance(model, Sizes):
        fields = (model.width, model.layers, model.heads, model.heads, model.hidden, model.vocabulary)
        head_dim, is_tied = model.width // model.heads, False
    else:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        fields = tuple(int(str(model[name])) for name in (*names, "vocab_size"))
        head_dim, is_tied = int(str(model["head_dim"])), True
    width, layers, heads, kv_heads, hidden, vocabulary = fields
    attention = 2 * width * head_dim * (heads + kv_heads)
    block = attention + 3 * width * hidden + 2 * width
    return fitcheck.ModelConfig(
        name="model",
        num_params=layers * block + width + vocabulary * width * (1 if is_tied else 2),
        hidden_size=width,
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        head_dim=head_dim,
        tie_word_embeddings=is_tied,
    )


def main() -> None:
    print("| run | published (GB) | fitcheck (GB) | error |\n|---|---:|---:|---:|")
    for row in ROWS:
        predicted = predicted_gb(row)
        error = predicted / row.published_gb - 1
        print(f"| {row.name} | {row.published_gb:.2f} | {predicted:.2f} | {error:+.1%} |")


if __name__ == "__main__":
    main()
