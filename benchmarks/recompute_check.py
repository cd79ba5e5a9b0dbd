"""Measure what the check of recomputed values adds to a step in which it runs.

    python -m benchmarks.recompute_check [--steps 20] [--samples 8] [--tokens 256] [--width 768]

A GPT-2 with 12 layers is trained on the CPU by one technique after the other. Checked and unchecked steps take turns in
one process. The table shows the CPU time of each kind (median) and their ratio, the time that the check adds, the
number of tensors that were compared, and the bytes of host memory that the copies take. The copies take no memory on
the device.

The added time depends on the number of tensors and not on their sizes. Where a step takes seconds, noise hides it:
measure it with a small width and few tokens.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table

from planner.plan_types.decisions import Decision
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.rewrite.application import apply_decisions
from planner.workload.call_convention import Calling

LAYERS = tuple(f"transformer.h.{number}" for number in range(12))
TECHNIQUES: dict[str, Decision] = {
    "checkpoint": Checkpoint(modules=LAYERS),
    "checkpoint, keeping products 0 and 2": Checkpoint(modules=LAYERS, kept=((0, 2),) * len(LAYERS)),
    "replay of whole layers": Replay(modules=LAYERS, stretches=((0, 99),) * len(LAYERS), kept=((),) * len(LAYERS)),
}


def measured(decision: Decision, steps: int, samples: int, tokens: int, width: int) -> tuple[float, float, int, int]:
    """Returns CPU seconds of an unchecked and of a checked step, and the number and bytes of the samples of a step."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=5000, n_embd=width, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    inputs = torch.randint(5000, (samples, tokens))
    batch = {"input_ids": inputs, "labels": inputs}
    rewritten = apply_decisions((decision,), model, optimizer="sgd", calling=Calling.KEYWORDS, batch_size=samples)
    check = rewritten.step.observers[0]._check
    check.steps = set(range(2, 2 * steps + 1, 2))
    taken: dict[bool, list[float]] = {True: [], False: []}
    count = size = 0
    plain = check.compare

    def counting(samples_of_step):
        nonlocal count, size
        count, size = len(samples_of_step), sum(2 * sample.before.nbytes for sample in samples_of_step)
        plain(samples_of_step)

    check.compare = counting
    for step in range(1, 2 * steps + 1):
        began = time.process_time()
        rewritten.step(batch)
        if step > 2:
            taken[step in check.steps].append(time.process_time() - began)
        if step in check.steps:
            compared = count, size
    return statistics.median(taken[False]), statistics.median(taken[True]), *compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="number of steps of each kind (20)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a batch (8)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sample (256)")
    parser.add_argument("--width", type=int, default=768, help="dimensions of a token, a multiple of 12 (768)")
    options = parser.parse_args()
    table = Table(
        title=f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"
    )
    times = ("unchecked (CPU s)", "checked (CPU s)", "ratio", "added (ms)")
    for column in ("technique", *times, "tensors compared", "host bytes"):
        table.add_column(column)
    for name, decision in TECHNIQUES.items():
        plain, checked, count, size = measured(decision, options.steps, options.samples, options.tokens, options.width)
        added = 1000 * (checked - plain)
        figures = f"{plain:.3f}", f"{checked:.3f}", f"{checked / plain:.3f}", f"{added:.1f}", f"{count}", f"{size:,}"
        table.add_row(name, *figures)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
