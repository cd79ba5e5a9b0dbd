"""Measure by how much `plan` exceeds its time limit.

    python -m benchmarks.limits [--only WORDS] [--seconds 8 15 30]

Each row is a `plan` command in a new process, with one of the limits. "wall" is the time from the start of the process
to its end, with Python's own start and all imports. Recordings of earlier calls are not used. The last column is the
exit status: 0 if a plan fits, 1 if no allowed plan fits, and 2 if no plan was certified in time, or if the command
failed. Errors other than those of time limits are printed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

from benchmarks.planning import CONFIGS, EXAMPLES, ONE_CARD, console_with_versions, print_row, write_configs

QUESTIONS = {
    **{
        name: ONE_CARD[name]
        for name in (
            "GPT-2, 8 x 1024, 4 GiB",
            "Llama-1B, LoRA, 4 x 1024, 5 GiB",
            "Llama-3-8B, QLoRA, 1 x 2048, 12 GiB",
            "Llama-3-70B, 8 x 2048, 1 TB",
            "BERT-0.6M, 8 x 512, 5 MiB",
            "RoBERTa-84M, 128 tokens, largest batch in 6 GiB",
            "GPT-2-0.9M, largest batch in 300 MiB",
        )
    },
    "RoBERTa-84M, 64 x 128, trade-off": "roberta_84m --batch-size 64 --seq-len 128 --gpu rtx-2060 --tradeoff",
    "GPT-2, 8 x 1024, trade-off": "gpt2 --batch-size 8 --seq-len 1024 --gpu rtx-3090 --tradeoff",
    "U-Net, 16, trade-off": "unet.py:build --batch-size 16 --gpu rtx-3060 --tradeoff",
    "ResNet-152, 32, 2 GiB": "resnet-152 --vram 2GiB --batch-size 32 --gpu rtx-3060",
    "ResNet-152, 32, 1 GiB": "resnet-152 --vram 1GiB --batch-size 32 --gpu rtx-3060",
    "ResNet-152, 32, trade-off": "resnet-152 --batch-size 32 --gpu rtx-3060 --tradeoff",
}


def wall_and_status(words: str, limit_seconds: float, folder: pathlib.Path) -> tuple[float, int]:
    """Returns the wall time in seconds and the exit status of a `plan` command with a time limit.

    Args:
        words: the arguments of the command, beginning with the model.
        limit_seconds: the time limit in seconds.
        folder: the folder with the config files of the models.
    """
    model, *rest = shlex.split(words)
    path = folder / f"{model}.json" if model in CONFIGS else EXAMPLES / model
    command = [sys.executable, "-m", "planner.cli", str(path), *rest, "--time-limit", f"{limit_seconds:g}"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PLANNER_RECORDINGS": "none"})
    seconds = time.perf_counter() - began
    if done.returncode > 1 and "time limit" not in done.stderr:
        print(done.stderr[-2000:], file=sys.stderr)
    return seconds, done.returncode


def main() -> int:
    """Prints the table, one row at a time, and the largest overrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only questions whose name contains this text")
    parser.add_argument("--seconds", type=float, nargs="+", default=[8, 15, 30], help="time limits in seconds")
    options = parser.parse_args()
    questions = {question: words for question, words in QUESTIONS.items() if options.only in question}
    if not questions:
        parser.error(f"no question contains {options.only!r}")
    console, overruns = console_with_versions(), []
    print_row(console, ("question", "limit, s", "wall, s", "status"))
    print_row(console, ("---", "---:", "---:", "---:"))
    with tempfile.TemporaryDirectory() as folder:
        write_configs(pathlib.Path(folder))
        for question, words in questions.items():
            for limit_seconds in options.seconds:
                seconds, status = wall_and_status(words, limit_seconds, pathlib.Path(folder))
                overruns.append(seconds / limit_seconds - 1)
                print_row(console, (question, f"{limit_seconds:g}", f"{seconds:.1f}", str(status)))
    console.print(f"largest overrun: {max(overruns):+.1%} of the limit")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
