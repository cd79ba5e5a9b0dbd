"""Measure the main job: time and host memory of the command, promised and certified peaks, recompute at half memory.

    python -m benchmarks.main_job [--quick] [--only recompute|commands|square]

Times depend on this machine and its load; bytes and FLOPs are exact and repeatable.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table

from planner import profiles
from planner.assemble import versions
from planner.pipeline import plan_workload
from planner.plan_types.constraints import Constraints, parse_constraints
from planner.plan_types.decisions import Fidelity
from planner.plan_types.recompute_decisions import Checkpoint
from planner.workload.loading import load_workload
from planner.workload.synthetic_batch import synthetic_batch
from planner.workload.workload import Workload, workload

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MIB = 1 << 20

COMMANDS = {
    "RoBERTa-84M, 64 x 128, 6 GiB": ("roberta_84m", "--vram 6GiB --batch-size 64 --seq-len 128"),
    "Llama-3-8B, 1 x 2048, H200, 141 GB": ("llama_8b", "--vram 141GB --batch-size 1 --seq-len 2048 --gpu h200"),
    "Llama-3-8B, 1 x 2048, H100, 80 GB": ("llama_8b", "--vram 80GB --batch-size 1 --seq-len 2048 --gpu h100"),
}
SQUARE = {
    "roberta_84m": (64, 128),
    "unet.py:build": (16, None),
    "sequential.py:build": (4096, None),
    "convnet.py:build": (32, None),
    "gpt2": (8, 512),
    "llama_1b": (2, 1024),
}
SHARES = (0.9, 0.75, 0.6, 0.5)


def proportional_bytes(pid: int) -> int:
    """Returns the proportional set size of a process and its children: pages shared by a fork count once."""
    total = 0
    for process in [pid, *_children(pid)]:
        try:
            text = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _children(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process."""
    try:
        direct = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in direct] + [g for child in direct for g in _children(int(child))]


def run_command(example: str, options: str, watch: Callable[[int], None]) -> dict:
    """Run `plan` in its own process, call `watch` with its id until it ends, and return its JSON."""
    arguments = [sys.executable, "-m", "planner.cli", str(EXAMPLES / example), *options.split(), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(arguments, stdout=out, stderr=errors, env=environment)
        watch(process.pid)
        process.wait()
        out.seek(0)
        return json.loads(out.read())


def host_memory(example: str, options: str) -> int:
    """Returns the peak memory of the process tree in bytes. Sampling takes time, so this run is not the timed one."""
    largest = 0

    def watch(pid: int) -> None:
        nonlocal largest
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            largest = max(largest, proportional_bytes(pid))
            time.sleep(0.05)

    run_command(example, options, watch)
    return largest


def additions_seconds() -> float:
    """Seconds for ten million additions in Python: a measure of how fast the machine is now."""
    began, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - began


def commands(console: Console) -> None:
    """Print time and host memory of the command."""
    table = Table(title="the command: wall time and host memory")
    for column in (
        "case",
        "wall s",
        "of which planning s",
        "10 M additions s",
        "host memory MiB",
        "fits",
        "slowdown",
        "decisions",
    ):
        table.add_column(column)
    for name, (example, options) in COMMANDS.items():
        additions = additions_seconds()
        began = time.perf_counter()
        data = run_command(example, options, lambda pid: None)
        seconds = time.perf_counter() - began
        largest = host_memory(example, options)
        kinds = ", ".join(decision["kind"] for decision in data["decisions"]) or "none"
        row = (f"{seconds:.1f}", f"{data['seconds']:.2f}", f"{additions:.2f}", f"{largest / MIB:,.0f}")
        table.add_row(name, *row, str(data["fits"]), f"{data['slowdown']:.2f}", kinds)
    console.print(table)


def square(console: Console, shares: tuple[float, ...]) -> None:
    """Print the peaks that the search promised and the rehearsal certified, for each model and budget."""
    table = Table(title="promised and certified peak of tensors (rtx-3090; budget as a share of the baseline's total)")
    for column in (
        "model",
        "budget",
        "fits",
        "total MiB",
        "budget MiB",
        "promised bytes",
        "certified bytes",
        "off by",
        "x baseline",
    ):
        table.add_column(column)
    card = profiles.load("rtx-3090")
    for example, (batch, seq_len) in SQUARE.items():
        work = load_workload(str(EXAMPLES / example), batch_size=batch, seq_len=seq_len, optimizer="adamw")
        constraints = Constraints(fidelity=Fidelity.ROUNDED, forced=(), forbidden=())
        whole = plan_workload(work, card, vram_bytes=None, constraints=constraints).baseline.total_bytes
        for share in shares:
            budget = int(share * whole)
            plan = plan_workload(work, card, vram_bytes=budget, constraints=constraints)
            promised, certified = plan.solver.promised_bytes, plan.solver.certified_bytes
            table.add_row(
                example,
                f"{share:.0%}",
                str(plan.fits),
                f"{plan.peak.total_bytes / MIB:,.0f}",
                f"{budget / MIB:,.0f}",
                f"{promised:,}",
                f"{certified:,}",
                f"{abs(promised - certified) / certified:.3%}",
                f"{plan.slowdown:.2f}",
            )
    console.print(table)


def roberta_12(attention: str, optimizer: str) -> Workload:
    """RoBERTa with 12 layers, 64 x 128. 'eager' attention saves its probabilities, 'sdpa' uses the fused kernel."""
    settings = json.loads((EXAMPLES / "roberta_12/config.json").read_text())
    config = transformers.AutoConfig.for_model(**settings)
    config.use_cache, config._attn_implementation = False, attention
    with torch.device("meta"):
        model = transformers.RobertaForMaskedLM(config)
    return workload(model.train(), synthetic_batch(model, batch_size=64, seq_len=128), optimizer=optimizer, seq_len=128)


def llama_80(optimizer: str) -> Workload:
    """A Llama with 80 layers of 8192, 70.6 B parameters, 8 x 2048."""
    config = transformers.LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128_256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return workload(
        model.train(), synthetic_batch(model, batch_size=8, seq_len=2048), optimizer=optimizer, seq_len=2048
    )


RECOMPUTED: dict[str, Callable[[], Workload]] = {
    "RoBERTa, fused attention, AdamW": lambda: roberta_12("sdpa", "adamw"),
    "RoBERTa, attention by hand, AdamW": lambda: roberta_12("eager", "adamw"),
    "RoBERTa, attention by hand, SGD": lambda: roberta_12("eager", "sgd"),
    "Llama, 80 layers, SGD": lambda: llama_80("sgd"),
}


def recompute(console: Console) -> None:
    """Print the recomputed FLOPs with checkpointing only, at budgets down to half of the baseline's peak."""
    table = Table(title="RoBERTa, 12 layers, 64 x 128, and Llama, 80 layers, 8 x 2048: fp32, checkpointing only")
    for column in (
        "model, optimizer",
        "budget",
        "budget MiB",
        "peak MiB",
        "recompute FLOPs",
        "modules",
        "search s",
        "status",
    ):
        table.add_column(column)
    constraints = parse_constraints(fidelity="exact", force=(), forbid=(), only=("checkpoint",))
    for name, build in RECOMPUTED.items():
        work = build()
        whole = plan_workload(work, profiles.bare(), vram_bytes=None, constraints=constraints).baseline
        for share in (0.9, 0.8, 0.7, 0.6, 0.5):
            budget = int(share * whole.total_bytes)
            plan = plan_workload(work, profiles.bare(), vram_bytes=budget, constraints=constraints)
            modules = sum(len(d.modules) for d in plan.decisions if isinstance(d, Checkpoint))
            more = (plan.peak.flops - whole.flops) / whole.flops
            peak = f"{plan.peak.total_bytes / MIB:,.1f}" + ("" if plan.fits else " (smallest)")
            solver = plan.solver
            row = (f"{share:.0%}", f"{budget / MIB:,.1f}", peak, f"{more:.2%}", str(modules))
            table.add_row(name, *row, f"{solver.seconds:.2f}", solver.status)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer budgets")
    parser.add_argument("--only", choices=("recompute", "commands", "square"), help="print one of the tables only")
    options = parser.parse_args()
    console = Console(width=150)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores; " + ", ".join(f"{k} {v}" for k, v in versions().items())
    )
    if options.only in (None, "recompute"):
        recompute(console)
    if options.only in (None, "commands"):
        commands(console)
    if options.only in (None, "square"):
        square(console, SHARES[:1] if options.quick else SHARES)


if __name__ == "__main__":
    main()
