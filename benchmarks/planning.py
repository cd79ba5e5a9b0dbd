"""Show where the time of planning goes: rehearsals by purpose, integer programs, CPU seconds and host memory.

    python -m benchmarks.planning [--only WORDS] [--cards | --tradeoffs | --extremes] [--again]

Each question is a `plan` command that runs in a new process. With `--cards`, the questions are those for several cards.
With `--tradeoffs`, they ask for a trade-off of memory against time, with limits from 15 to 600 s and no "first plan".
With `--extremes`, they are about a million tokens, thousands of experts and 100,000 modules.
With `--again`, each question is asked twice, and the second time the recordings of the first time are used.
"wall" is the time from the start of the command to its end, "planning" the time that the plan states: without imports
and loading. "first plan" is the time from the start of planning until a certified plan inside the budget is reported.
CPU seconds are those of the process and its children. "memory" is the largest resident set of one process.
Times depend on the machine and its load; numbers of rehearsals and programs depend on times only where a limit ends
the search.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import io
import json
import os
import pathlib
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import transformers
from rich.console import Console

from planner.assemble import versions

MIB = 1 << 20
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    }),
    "llama-3-70b": ("llama", {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    }),
    "llama-3-405b": ("llama", {
        **LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    }),
    "mixtral-8x22b": ("mixtral", {
        "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    "deepseek-v3": ("deepseek_v3", {}),
    "bert-0.6m": ("bert", {
        "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 512,
    }),
    "gpt2-0.9m": ("gpt2", {
        "vocab_size": 5000, "n_embd": 64, "n_layer": 12, "n_head": 4, "n_positions": 128,
        "bos_token_id": None, "eos_token_id": None,
    }),
    "resnet-152": ("resnet", {"depths": [3, 8, 36, 3]}),
    "qwen3-moe-2048": ("qwen3_moe", {
        "num_hidden_layers": 48, "num_experts": 2048, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }),
}  # fmt: skip
"""Models by name: the type of their config, and its arguments."""
H100, H200 = "--gpu h100", "--gpu h200"
ONE_CARD = {
    "RoBERTa-84M, 64 x 128, 6 GiB": "roberta_84m --vram 6GiB --batch-size 64 --seq-len 128 --gpu rtx-2060",
    "RoBERTa-84M, 64 x 128, breakdown": "roberta_84m --batch-size 64 --seq-len 128 --gpu rtx-2060",
    "GPT-2, 8 x 1024, 4 GiB": "gpt2 --vram 4GiB --batch-size 8 --seq-len 1024 --gpu rtx-3090",
    "Llama-1B, 2 x 1024, 16 GiB": "llama_1b --vram 16GiB --batch-size 2 --seq-len 1024 --gpu rtx-4090",
    "Llama-1B, LoRA, 4 x 1024, 6 GiB": "llama_1b --vram 6GiB --batch-size 4 --seq-len 1024 --gpu rtx-3090 --lora 16",
    "Llama-1B, LoRA, 4 x 1024, 5 GiB": "llama_1b --vram 5GiB --batch-size 4 --seq-len 1024 --gpu rtx-2060 --lora 16",
    "Llama-3-8B, 1 x 2048, 141 GB": f"llama_8b --vram 141GB --batch-size 1 --seq-len 2048 {H200}",
    "Llama-3-8B, 1 x 2048, 80 GB": f"llama_8b --vram 80GB --batch-size 1 --seq-len 2048 {H100}",
    "Llama-3-8B, QLoRA, 1 x 2048, 12 GiB": "llama_8b --vram 12GiB --batch-size 1 --seq-len 2048 --gpu rtx-4090 "
    "--qlora 16",
    "Llama-3-70B, 1 x 2048, breakdown": "llama-3-70b --batch-size 1 --seq-len 2048 --gpu bare",
    "Llama-3-405B, 1 x 2048, breakdown": "llama-3-405b --batch-size 1 --seq-len 2048 --gpu bare",
    "DeepSeek-V3, 1 x 2048, breakdown": "deepseek-v3 --batch-size 1 --seq-len 2048 --gpu bare",
    "Llama-3-70B, LoRA of rank 64, 1 x 2048, breakdown": "llama-3-70b --batch-size 1 --seq-len 2048 --gpu bare "
    "--lora 64:all-linear",
    "Llama-3-70B, 8 x 2048, 1 TB": "llama-3-70b --vram 1TB --batch-size 8 --seq-len 2048 --gpu bare",
    "BERT-0.6M, 64 x 512, 150 MiB": "bert-0.6m --vram 150MiB --batch-size 64 --seq-len 512 --gpu bare",
    "BERT-0.6M, 8 x 512, 5 MiB": "bert-0.6m --vram 5MiB --batch-size 8 --seq-len 512 --gpu bare",
    "BERT-0.6M, 8 x 512, 5 MiB, RTX 2060": "bert-0.6m --vram 5MiB --batch-size 8 --seq-len 512 --gpu rtx-2060",
    "RoBERTa-84M, 128 tokens, largest batch in 6 GiB": "roberta_84m --vram 6GiB --seq-len 128 --gpu rtx-2060 "
    "--forbid offload --largest-batch",
    "GPT-2-0.9M, largest batch in 300 MiB": "gpt2-0.9m --vram 300MiB --seq-len 128 --gpu bare --largest-batch",
    "ViT-base, 16, 3 GiB": "vit_base --vram 3GiB --batch-size 16 --gpu rtx-3060",
    "U-Net, 16, 3 GiB": "unet.py:build --vram 3GiB --batch-size 16 --gpu rtx-3060",
    "Mixtral-8x22B, 1 x 2048, breakdown": "mixtral-8x22b --batch-size 1 --seq-len 2048 --gpu bare",
}
SEVERAL_CARDS = {
    f"{title}, {tokens} tokens a card, {cards} cards": f"{name} {card} --batch-size {cards} --seq-len {tokens} "
    f"--cards {cards} --sharding fsdp"
    for title, name, card, tokens, counts in (
        ("Llama-3-8B", "llama-3-8b", f"--vram 80GB {H100}", 4096, (8, 64, 1024)),
        ("Llama-3-70B", "llama-3-70b", f"--vram 80GB {H100}", 4096, (32, 64, 1024)),
        ("Llama-3-405B", "llama-3-405b", f"--vram 80GB {H100}", 4096, (256, 1024)),
        ("Mixtral-8x22B", "mixtral-8x22b", f"--vram 80GB {H100}", 4096, (64, 1024)),
        ("DeepSeek-V3", "deepseek-v3", "--vram 180GB --gpu b200", 4096, (256, 1024)),
    )
    for cards in counts
}
TRADEOFFS = {
    f"{title}, {seconds} s": f"{words} --tradeoff --time-limit {seconds}s"
    for title, words, limits in (
        ("RoBERTa-84M, 64 x 128", "roberta_84m --batch-size 64 --seq-len 128 --gpu rtx-2060", (15, 20, 30, 600)),
        ("GPT-2, 8 x 1024", "gpt2 --batch-size 8 --seq-len 1024 --gpu rtx-3090", (30, 600)),
        ("Llama-1B, LoRA, 4 x 1024", "llama_1b --batch-size 4 --seq-len 1024 --gpu rtx-3090 --lora 16", (30,)),
        ("ViT-base, 16", "vit_base --batch-size 16 --gpu rtx-3060", (30, 600)),
        ("U-Net, 16", "unet.py:build --batch-size 16 --gpu rtx-3060", (30,)),
    )
    for seconds in limits
}
EXTREMES = {
    "Llama-1B, 1 x 1,000,000, breakdown": f"llama_1b --batch-size 1 --seq-len 1000000 {H200}",
    "Llama-1B, 1 x 1,000,000, 141 GB": f"llama_1b --vram 141GB --batch-size 1 --seq-len 1000000 {H200}",
    "Qwen3 MoE, 2,048 experts, 1 x 2048, breakdown": "qwen3-moe-2048 --batch-size 1 --seq-len 2048 --gpu bare",
    "Qwen3 MoE, 2,048 experts, 1 x 2048, 2 TB": "qwen3-moe-2048 --vram 2TB --batch-size 1 --seq-len 2048 --gpu bare",
    "2,048 experts, each a module, breakdown": "extremes.py:experts --gpu bare",
    "100,000 modules, breakdown": "extremes.py:modules --gpu bare",
    "100,000 modules, 300 MiB": "extremes.py:modules --vram 300MiB --gpu bare",
}
COLUMNS = (
    "question",
    "wall, s",
    "planning, s",
    "first plan, s",
    "CPU, s",
    "rehearsals (CPU s)",
    "programs (CPU s)",
    "memory, MiB",
    "plan",
)
PURPOSES = {
    "start_certificate": "certificate",
    "certifying_graph": "certificate",
    "start_forward": "check of samples",
    "start_update": "optimizer step",
    "with_gradient_names": "gradients",
}
"""Purposes of rehearsals by the name of the function that starts them."""


@dataclasses.dataclass
class Counts:
    """Number and CPU seconds of the rehearsals of one purpose, or of the integer programs."""

    number: int = 0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def watch_rehearsals(counts: dict[str, Counts]) -> None:
    """Counts the rehearsals that this process starts, by purpose, with CPU seconds and memory of their processes."""
    from planner.recording.rehearsal import Rehearsal
    from planner.virtual_gpu import forked_process

    purpose_of: dict[int, str] = {}
    start, fork = Rehearsal.start, forked_process._Fork.__init__
    current = ["other"]

    def counted_start(self: Rehearsal) -> Any:
        current[0] = "what-if" if self.what_if else purpose()
        try:
            return start(self)
        finally:
            current[0] = "other"

    def counted_fork(self: Any, function: Callable) -> None:
        fork(self, function)
        purpose_of[self._pid] = current[0]
        counts[current[0]].number += 1

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        pid, status, used = os.wait4(pid, options)
        if pid in purpose_of:
            count = counts[purpose_of.pop(pid)]
            count.cpu_seconds += used.ru_utime + used.ru_stime
            count.memory_bytes = max(count.memory_bytes, used.ru_maxrss << 10)
        return pid, status

    Rehearsal.start = counted_start
    forked_process._Fork.__init__ = counted_fork
    os.waitpid = waitpid


def purpose() -> str:
    """Returns the purpose of the rehearsal that is being started, from the functions on the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in PURPOSES:
            return PURPOSES[frame.f_code.co_name]
        frame = frame.f_back
    return "other"


def watch_programs(count: Counts) -> None:
    """Counts the runs of HiGHS and their CPU seconds."""
    from planner.search.integer_program import Solver

    run = Solver._run

    def counted(self: Solver, *args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return run(self, *args, **kwargs)
        finally:
            count.number += 1
            count.cpu_seconds += time.process_time() - began

    Solver._run = counted


def watch_plans(moments: list[float]) -> None:
    """Notes the time at which planning begins, and that at which the first certified plan in the budget is known."""
    from planner.progress import Watch

    stage, found = Watch.stage, Watch.found

    def noting_stage(self: Watch, name: str) -> None:
        if name == "rehearsing the step" and not moments:
            moments.append(time.monotonic())
        stage(self, name)

    def noting_plan(self: Watch, *plan: Any) -> None:
        if len(moments) == 1:
            moments.append(time.monotonic())
        found(self, *plan)

    Watch.stage, Watch.found = noting_stage, noting_plan


def answer(words: list[str]) -> dict[str, Any]:
    """Runs a `plan` command in this process, and returns its counts and figures as JSON data."""
    counts: dict[str, Counts] = collections.defaultdict(Counts)
    watch_rehearsals(counts)
    programs = Counts()
    watch_programs(programs)
    moments: list[float] = []
    watch_plans(moments)
    from planner.cli import main as plan

    printed, out = io.StringIO(), sys.stdout
    sys.stdout = printed
    try:
        status = plan([*words, "--json"])
    finally:
        sys.stdout = out
    own = resource.getrusage(resource.RUSAGE_SELF)
    text = printed.getvalue()
    printed_plan = json.loads(text) if text.startswith("{") else {}
    return {
        "status": status,
        "first_plan_seconds": moments[1] - moments[0] if len(moments) > 1 else None,
        "plan": printed_plan if "plan" in printed_plan or "points" in printed_plan else None,
        "rehearsals": {name: dataclasses.asdict(count) for name, count in counts.items()},
        "programs": dataclasses.asdict(programs),
        "own_cpu_seconds": own.ru_utime + own.ru_stime,
        "memory_bytes": max([own.ru_maxrss << 10, *(count.memory_bytes for count in counts.values())]),
    }


def asked(words: str, folder: pathlib.Path, *, kept: bool) -> tuple[dict[str, Any] | None, float]:
    """Returns the JSON data of `answer` in a new process, None if it failed, and the wall time in seconds.

    Args:
        folder: has the configs of the models.
        kept: True to keep the recordings in this folder, and to use those that are there.
    """
    model, *rest = shlex.split(words)
    path = folder / f"{model}.json" if model in CONFIGS else EXAMPLES / model
    if model.startswith("extremes.py"):
        path = pathlib.Path(__file__).with_name(model)
    where = {"PLANNER_RECORDINGS": "", "XDG_CACHE_HOME": str(folder)} if kept else {}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning", "--answer", str(path), *rest],
        capture_output=True,
        text=True,
        env={**os.environ, **where},
    )
    seconds = time.perf_counter() - began
    if not done.stdout.strip():
        print(done.stderr[-2000:], file=sys.stderr)
        return None, seconds
    return json.loads(done.stdout.splitlines()[-1]), seconds


def write_configs(folder: pathlib.Path) -> None:
    """Writes the config of each model of `CONFIGS` as a JSON file."""
    for name, (kind, arguments) in CONFIGS.items():
        config = transformers.AutoConfig.for_model(kind, **arguments)
        config.architectures = [_architecture(config)]
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))


def _architecture(config: Any) -> str:
    """Returns the name of the model class for language modeling, or for the classification of images."""
    others = {
        "bert": transformers.MODEL_FOR_MASKED_LM_MAPPING,
        "resnet": transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    }
    return others.get(config.model_type, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)].__name__


def cells(question: str, result: dict[str, Any], wall_seconds: float) -> Iterator[str]:
    """Yields the cells of one row."""
    plan, rehearsals = result["plan"], result["rehearsals"]
    yield question
    yield f"{wall_seconds:.1f}"
    yield "-" if plan is None else f"{plan['seconds']:.1f}"
    yield "-" if result["first_plan_seconds"] is None else f"{result['first_plan_seconds']:.1f}"
    children = sum(count["cpu_seconds"] for count in rehearsals.values())
    yield f"{result['own_cpu_seconds'] + children:.1f}"
    yield (
        ", ".join(
            f"{count['number']} {name} ({count['cpu_seconds']:.1f})" for name, count in sorted(rehearsals.items())
        )
        or "none"
    )
    yield f"{result['programs']['number']} ({result['programs']['cpu_seconds']:.1f})"
    yield f"{result['memory_bytes'] / MIB:,.0f}"
    yield f"refused (status {result['status']})" if plan is None else described(plan)


def described(plan: dict[str, Any]) -> str:
    """Returns the memory of a plan, and its slowdown if there is a budget. For a trade-off: those of each plan."""
    if "points" in plan:
        sizes = (f"{each['plan']['total_bytes'] / (1 << 30):.2f} GiB" for each in plan["points"])
        points = [f"{size} at {each['slowdown']:.2f} x" for size, each in zip(sizes, plan["points"], strict=True)]
        return f"{len(points)} plans{'' if plan['complete'] else ' before the time limit'}: {', '.join(points)}"
    size = f"{plan['plan']['total_bytes'] / (1 << 30):.2f} GiB"
    if plan["vram_bytes"] is None:
        return size
    return f"{size} at {plan['slowdown']:.2f} x{'' if plan['fits'] else ', does not fit'}"


def console_with_versions() -> Console:
    """Returns a console, on which the versions of the packages, the machine and the date have been printed."""
    console = Console()
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    console.print(f"{names}; {os.cpu_count()} CPUs, {platform.machine()}; {datetime.date.today()}")
    return console


def print_row(console: Console, row: Iterable[str]) -> None:
    """Prints a row of a table in Markdown."""
    console.print(f"| {' | '.join(row)} |", soft_wrap=True, highlight=False)


def main() -> int:
    """Prints the table, one row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only questions whose name contains this text")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--cards", action="store_true", help="the questions for several cards")
    kinds.add_argument("--tradeoffs", action="store_true", help="ask for trade-offs of memory against time")
    kinds.add_argument("--extremes", action="store_true", help="the questions about very long inputs and many modules")
    parser.add_argument("--again", action="store_true", help="ask each question twice, and keep the recordings")
    parser.add_argument("--answer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(answer(options.answer)))
        return 0
    console = console_with_versions()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        write_configs(pathlib.Path(folder))
        print_row(console, COLUMNS)
        print_row(console, ["---"] * len(COLUMNS))
        others = {"cards": SEVERAL_CARDS, "tradeoffs": TRADEOFFS, "extremes": EXTREMES}
        asked_for = next((others[name] for name in others if getattr(options, name)), ONE_CARD)
        for question, words in asked_for.items():
            for asking in (question, f"{question}, again") if options.again else (question,):
                if options.only in question:
                    result, seconds = asked(words, pathlib.Path(folder), kept=options.again)
                    failed += result is None
                    print_row(console, cells(asking, result, seconds) if result else (asking, "failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
