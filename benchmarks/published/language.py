"""Compares published peaks of allocated memory, for language models in bf16, with predictions. Nothing is fitted.

- Lit-GPT (github.com/Lightning-AI/litgpt, `tutorials/resource-tables.md`): LoRA, A100-SXM4-40GB, torch 2.1.0;
  `max_memory_allocated` in GB of 1e9 bytes. The table, of 20 October 2023, names commit 8641822, where RMSNorm is in
  bf16; it came in fp32 (6178c7cc) on 24 October, the table was published on the 27th. Both are rehearsed.
- torchtune (github.com/pytorch/torchtune, README, 18 November 2024): Llama-3.2-3B, packs of 4096 tokens, A100; peak
  active bytes in GiB. The row before it in that table has batches of unknown length, those after it are compiled.

Left out: Llama-2-7B with AdamW of torch and of bitsandbytes (51.6 and 39.3 GB on an A100, torchao): batch size,
length and checkpointing of these runs were not found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published import lit_gpt, torchtune
from benchmarks.published.rehearsing import outcome

GB, GIB = 10**9, 1 << 30
CACHE = "cache after validation"
"""Blocks that the allocator takes from the cache that validation left may be up to 1 MiB larger than requested."""
NAMED_COMMIT = f"why it is low, {CACHE}"
WIDE_NORM = f"if that was the code, {CACHE}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published run: `measured` is in units of `unit_bytes`, `unknown` says what the publication leaves open."""

    model: str
    setting: str
    measured: float
    unit_bytes: int
    card: str
    torch_version: str
    program: Callable[[torch.device], None]
    unknown: str


def lora(model: str, sizes: lit_gpt.Sizes, tokens: int, measured: dict[int, float], unknown: str) -> list[Published]:
    """Returns Lit-GPT's runs of one model, by micro-batch size."""
    method = f"QLoRA {sizes.quantized}" if sizes.quantized else "LoRA"
    norm = {(True, False): ", bf16 norms", (True, True): ", fp32 norms"}.get((sizes.llama, sizes.wide_norm), "")
    return [
        Published(
            model=model,
            setting=f"{method}, {samples} x {tokens}{norm}",
            measured=gigabytes,
            unit_bytes=GB,
            card="a100-40gb",
            torch_version="2.1.0",
            program=functools.partial(lit_gpt.first_iteration, sizes=sizes, samples=samples, tokens=tokens),
            unknown=unknown,
        )
        for samples, gigabytes in measured.items()
    ]


PACKED = (
    ("phi-1.5", lit_gpt.PHI, 1044, {"nf4": 3.78, "nf4-dq": 3.72}, CACHE),
    ("StableLM-3B", lit_gpt.STABLELM_3B, 1034, {"nf4": 6.35, "nf4-dq": 6.19}, CACHE),
    ("Llama-2-7B", lit_gpt.LLAMA_7B, 1304, {"nf4": 14.14, "nf4-dq": 13.84}, NAMED_COMMIT),
    ("Llama-2-13B", lit_gpt.LLAMA_13B, 1304, {"nf4": 23.14, "nf4-dq": 22.55}, NAMED_COMMIT),
)
"""The runs with 4-bit weights: micro-batches of one sample."""
LLAMAS = (
    ("Llama-2-7B", lit_gpt.LLAMA_7B, {1: 21.30, 2: 29.07}),
    ("Llama-2-13B", lit_gpt.LLAMA_13B, {1: 38.12}),
)
ROWS = (
    *lora("phi-1.5", lit_gpt.PHI, 1044, {1: 4.82, 2: 6.76, 4: 10.68}, CACHE),
    *lora("StableLM-3B", lit_gpt.STABLELM_3B, 1034, {1: 9.69, 2: 12.10, 4: 16.92}, CACHE),
    *(row for name, sizes, measured in LLAMAS for row in lora(name, sizes, 1304, measured, NAMED_COMMIT)),
    *(
        row
        for name, sizes, measured in LLAMAS
        for row in lora(name, dataclasses.replace(sizes, wide_norm=True), 1304, measured, WIDE_NORM)
    ),
    *(
        row
        for name, sizes, tokens, measured, unknown in PACKED
        for wide_norm in ((False, True) if sizes.llama else (False,))
        for quantized, gigabytes in measured.items()
        for row in lora(
            name,
            dataclasses.replace(sizes, quantized=quantized, wide_norm=wide_norm),
            tokens,
            {1: gigabytes},
            WIDE_NORM if wide_norm else unknown,
        )
    ),
    Published(
        model="Llama-3.2-3B",
        setting="all weights, AdamW, 2 x 4096 packed",
        measured=60.0,
        unit_bytes=GIB,
        card="a100-80gb",
        torch_version="2.5.0",
        program=functools.partial(torchtune.packed_steps, samples=2, tokens=4096),
        unknown="torch's version, FlexAttention's scratch",
    ),
)


def table() -> Table:
    result = Table(title="tensors at the peak; nothing fitted")
    for column in ("model", "setting", "published", "predicted", "error", "not known"):
        result.add_column(column, justify="right" if column in ("published", "predicted", "error") else "left")
    for row in track(ROWS, console=Console(stderr=True)):
        unit = "GB" if row.unit_bytes == GB else "GiB"
        predicted = outcome(row.program, row.card, row.torch_version).peak_allocated_bytes / row.unit_bytes
        off = f"{(predicted - row.measured) / row.measured:+.2%}"
        published = f"{row.measured:.{1 if unit == 'GiB' else 2}f} {unit}"
        result.add_row(row.model, row.setting, published, f"{predicted:.2f} {unit}", off, row.unknown)
    return result
