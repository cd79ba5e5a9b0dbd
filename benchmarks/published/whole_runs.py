"""Compares published peaks of reserved memory of whole runs with predictions. Nothing is fitted.

    python -m benchmarks.published.whole_runs [--only NAME]

The programs are rehearsed from model creation through training steps and what the runs do between them, on an empty
card. All batches of these runs have one shape.

- GPT-2 small: github.com/rasbt/LLMs-from-scratch, `ch05/10_llm-training-speed/README.md` (commit 908dd2f, February
  2025): one A100, torch 2.6.0, CUDA 12.4; `torch.cuda.memory_reserved()` after an epoch, in GiB. The last rows of that
  table are compiled, and are left out. The scripts between the first and the last one are not published.
- ViT-L/16: github.com/rasbt/pytorch-memory-optim, `logs.md` (commit f6eddcd, June 2023): one A100, torch
  2.1.0.dev20230623, CUDA 11.8; `torch.cuda.max_memory_reserved()` in GB of 1e9 bytes. The runs on four cards are left
  out. The kernels of that nightly build are not known, so that there are two readings (`Script.earlier_kernels`).

Which of the two A100 (40 or 80 GB) was used is not known, and does not matter below 40 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published import small_gpt, vit_finetuning
from benchmarks.published.rehearsing import outcome
from benchmarks.published.small_gpt import Changes
from benchmarks.published.vit_finetuning import Script
from planner import profiles
from planner.assemble import versions

GB, GIB = 10**9, 1 << 30
CARD = "a100-40gb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: `reserved` is in units of `unit_bytes`, `unknown` says what the publication leaves open."""

    name: str
    setting: str
    reserved: float
    unit_bytes: int
    torch_version: str
    program: Callable[[torch.device], None]
    unknown: str


def _gpt(setting: str, reserved: float, unknown: str, changes: Changes) -> Run:
    return Run(
        name="GPT-2 small",
        setting=setting,
        reserved=reserved,
        unit_bytes=GIB,
        torch_version="2.6.0",
        program=functools.partial(small_gpt.first_epoch, changes=changes),
        unknown=unknown,
    )


def _vit(setting: str, reserved: float, script: Script) -> tuple[Run, Run]:
    """Returns both readings of a run."""
    readings = (
        (script, "kernels as in torch 2.13"),
        (dataclasses.replace(script, earlier_kernels=True), "kernels as in torch 2.0"),
    )
    first, second = (
        Run(
            name="ViT-L/16",
            setting=setting,
            reserved=reserved,
            unit_bytes=GB,
            torch_version="2.1.0",
            program=functools.partial(vit_finetuning.one_epoch, script=reading),
            unknown=unknown,
        )
        for reading, unknown in readings
    )
    return first, second


_STEP = "script of this step"
_MASK = Changes(mask_on_the_fly=True)
_FUSED = dataclasses.replace(_MASK, fused_optimizer=True)
_BF16 = dataclasses.replace(_FUSED, bfloat16=True)
_MODULES = dataclasses.replace(_BF16, own_modules=False)
RUNS = (
    _gpt("fp32, 8 x 1024, AdamW", 26.2617, "-", Changes()),
    _gpt("+ mask on the fly", 26.2422, _STEP, _MASK),
    _gpt("+ TF32", 26.2422, _STEP, _MASK),
    _gpt("+ fused AdamW", 26.2422, _STEP, _FUSED),
    _gpt("+ pinned memory", 26.2422, _STEP, _FUSED),
    _gpt("+ bf16 weights", 13.7871, _STEP, _BF16),
    _gpt("+ LayerNorm and GELU of PyTorch", 11.5645, _STEP, _MODULES),
    _gpt("+ flash attention", 5.9004, _STEP, dataclasses.replace(_MODULES, flash_attention=True)),
    *_vit("fp32, 64, Adam", 26.79, Script(samples=64, fabric=False)),
    *_vit("fp32, 64, Adam, Fabric", 26.84, Script(samples=64)),
    *_vit("fp16 autocast, 64, Adam", 18.21, Script(samples=64, precision="fp16")),
    *_vit("bf16, 64, Adam", 13.82, Script(samples=64, precision="bf16")),
    *_vit("bf16, 16, Adam", 5.69, Script(samples=16, precision="bf16")),
    *_vit("bf16, 4 x 4, Adam", 3.91, Script(samples=4, precision="bf16", steps_a_update=4)),
    *_vit("bf16, 4 x 4, SGD", 2.02, Script(samples=4, precision="bf16", steps_a_update=4, sgd=True)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="beginning of the name of a model")
    arguments = parser.parse_args()
    runs = [run for run in RUNS if run.name.startswith(arguments.only or "")]
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    table = Table(title="reserved memory of whole runs; nothing fitted")
    for column in ("model", "setting", "published", "allocated", "reserved", "total", "error", "not known"):
        table.add_column(column, justify="left" if column in ("model", "setting", "not known") else "right")
    for run in track(runs, console=Console(stderr=True)):
        found = outcome(run.program, CARD, run.torch_version)
        reserved = found.peak_reserved_bytes
        total = reserved + profiles.load(CARD).context_bytes
        error = reserved / (run.reserved * run.unit_bytes) - 1
        unit, digits = ("GB", 2) if run.unit_bytes == GB else ("GiB", 4)
        cells = (f"{size / run.unit_bytes:.{digits}f}" for size in (found.peak_allocated_bytes, reserved, total))
        published = f"{run.reserved:.{digits}f} {unit}"
        table.add_row(run.name, run.setting, published, *cells, f"{error:+.2%}", run.unknown)
    console.print(table)


if __name__ == "__main__":
    main()
