"""The options of the `plan` command. This module does not import torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import pathlib
import sys
import textwrap
from typing import Any, NoReturn, get_args

from planner import profiles
from planner.cli.glossary import explain
from planner.cli.run_options import add_cards, add_run, positive
from planner.errors import WorkloadError
from planner.plan_types.sizes import format_size
from planner.plan_types.techniques import KINDS
from planner.plan_types.words import FidelityName, Loop

_USAGE = "plan MODEL [--vram SIZE] [options] [-- arguments of your script]"
_DESCRIPTION = (
    "Plan a PyTorch training step that fits a GPU. Needs neither a GPU nor weights: the step is rehearsed on a virtual "
    "GPU, and the fastest plan inside the memory budget is certified by rehearsing the rewritten step."
)
_EPILOG = """\
examples:
  plan examples/roberta_84m --vram 6GiB --batch-size 64 --seq-len 128
  plan examples/llama_1b --vram 24GB --gpu rtx-3090 --batch-size 4 --seq-len 1024
  plan examples/unet.py:build --vram 4GiB --emit train_step.py
  plan train.py:build --vram 6GiB -- --config small.yaml     arguments for train.py, in its sys.argv
  plan examples/roberta_84m --vram 6GiB --seq-len 128 --largest-batch
  plan examples/roberta_84m --batch-size 64 --seq-len 128 --tradeoff --svg front.svg
  plan plan.json --vram 5GiB                        check a saved plan under another budget
  plan diff old.json new.json                       what differs between two saved plans
  plan explain snapshot.pickle plan.json            why a run ran out of memory, or took more than planned

sizes: GiB and MiB are binary, GB and MB are decimal, and % is a share of the card's memory.

exit code: 0 if the plan fits (with --verify: and keeps its promise), 1 if it does not, 2 if the
command could not run, the time limit ended it before any plan was certified, or Ctrl-C ended it
before everything was written or verified, 3 if the machine ended a process of the planner or
started none.
"""

_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""The functions with which shells complete the name of a file, as shtab needs them (`shtab.FILE`)."""


class Arguments(argparse.ArgumentParser):
    """A parser that raises usage errors as `WorkloadError`, so that --json reports them like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise WorkloadError(f"{message}; see plan --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the text of --help or --version. argparse's own method ignores an `OSError`."""
        print(message, end="", file=file or sys.stderr)


class _ListGpus(argparse.Action):
    """Prints the known cards with their memory, from the smallest to the largest, and exits."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, *_: object) -> NoReturn:
        for card in sorted(map(profiles.load, profiles.known()), key=lambda card: (card.vram_bytes, card.name)):
            print(f"{card.name:18} {format_size(card.vram_bytes):>10}  {card.title}")
        raise SystemExit(0)


class _Explain(argparse.Action):
    """Prints what the glossary says about a word, and exits."""

    def __call__(self, _parser: object, _namespace: object, value: object, _option: object = None) -> NoReturn:
        for entry in explain(str(value)):
            print(textwrap.fill(entry, 98, break_on_hyphens=False))
        raise SystemExit(0)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps help texts between words only: names such as step-in-backward stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser. For wrong usage it raises `WorkloadError` instead of exiting the process."""
    arguments = Arguments(
        prog="plan",
        usage=_USAGE,
        description=textwrap.fill(_DESCRIPTION, 98),
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        add_help=False,
    )
    _add_model(arguments.add_argument_group("model"))
    add_run(arguments.add_argument_group("the whole run"))
    _add_budget(arguments.add_argument_group("budget and card"))
    add_cards(arguments.add_argument_group("several cards"))
    _add_techniques(arguments.add_argument_group("techniques"))
    _add_questions(arguments.add_argument_group("questions (at most one; default: the fastest plan inside --vram)"))
    _add_outputs(arguments.add_argument_group("outputs"))
    for action in arguments._actions:
        if action.dest == "model" or action.type is pathlib.Path:
            vars(action)["complete"] = _FILES
    return arguments


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "model",
        metavar="MODEL",
        help="a transformers config.json, model folder or hub id; path/file.py:name or package.module:name, a "
        "function or class that returns a model, (model, batch), (model, batch, loss_fn), or a dict with a step; or a "
        "saved plan",
    )
    group.add_argument(
        "--trust-reference",
        action="store_true",
        help="allow a saved plan to import and run the Python code that it names: its model, or the function of "
        "--parallelize (default: such a plan is refused)",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help=(
            "samples in one optimizer step (default: for a transformers model with --vram, the largest power of two up "
            "to 64 that is predicted to fit without a plan; 1 without --vram; otherwise the function's own)"
        ),
    )
    group.add_argument(
        "--seq-len",
        type=positive,
        metavar="N",
        help="tokens in one sample of a transformers model (default: 512, or the model's limit if that is lower)",
    )
    group.add_argument(
        "--input-shapes",
        type=pathlib.Path,
        metavar="shapes.json",
        help="make the batch from a JSON file of shapes, such as "
        '{"x": [8, 3, 224, 224], "labels": {"shape": [8], "dtype": "int64", "below": 1000}}',
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights of a transformers model (default: the dtype that from_pretrained loads)",
    )
    adapters = group.add_mutually_exclusive_group()
    for name, weights in (("--lora", "frozen weights"), ("--qlora", "frozen 4-bit weights (bitsandbytes NF4)")):
        adapters.add_argument(
            name,
            nargs="?",
            const="16",
            metavar="RANK[:LAYERS]",
            help=f"train LoRA adapters of peft on {weights}; give the rank, and optionally the layers, as in "
            "16:q_proj,v_proj or 16:all-linear (default: rank 16, on the layers that peft chooses), or a folder of "
            "saved adapters to train them further",
        )
    group.add_argument(
        "--dora",
        action="store_true",
        help="with --lora: train DoRA adapters, which also train the weights' magnitudes",
    )
    group.add_argument(
        "--optimizer", default=None, metavar="NAME", help="adamw, adam, sgd, sgd-momentum, ... (default: adamw)"
    )
    group.add_argument(
        "--accumulating-loop",
        "--gradients-alive",
        dest="gradients_alive",
        action="store_true",
        help="your own loop accumulates gradients over several batches: the plan then counts the gradients of earlier "
        "batches, which the step adds to",
    )
    group.add_argument(
        "--by-sample",
        metavar="NAMES",
        help="tensors of the batch whose dimension 0 is the batch dimension, such as x,labels; a plan may only split "
        "these (default: guessed from the shapes, and checked by rehearsing the model on twice the samples)",
    )

    group.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="LINE=N",
        help="the value that a line of the model's code reads from a tensor, or the largest number of elements that it "
        "selects, such as model.py:42=100; may be repeated",
    )
    group.add_argument(
        "--batch-values",
        action="store_true",
        help="use the batch's own masks and lengths (default: masks are taken as full, lengths as the longest one)",
    )


def _add_budget(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--vram",
        metavar="SIZE",
        help="GPU memory for the whole process, such as 6GiB or 80%% (default: none; the step is only rehearsed)",
    )
    group.add_argument(
        "--margin",
        metavar="SIZE",
        help="memory of the card that the plan leaves free, such as 500MiB or 5%% (default: 3%% of the card; 0 for the "
        "generic card, and if --vram already leaves that much of the card free)",
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help="a known card such as rtx-2060, the path of a profile's TOML file, or bare, which counts only the bytes "
        "of tensors (default: this machine's CUDA card if there is one, else a generic Ampere GPU as large as --vram)",
    )
    group.add_argument("--list-gpus", action=_ListGpus, help="list the known cards and their memory, and exit")
    group.add_argument(
        "--alloc-conf",
        metavar="OPTIONS",
        help="options of PyTorch's caching allocator with which you train, such as expandable_segments:True; '' for "
        "its defaults (default: the options that are set in this environment, in PYTORCH_ALLOC_CONF)",
    )
    group.add_argument(
        "--cudnn-benchmark",
        action="store_true",
        help="you train with torch.backends.cudnn.benchmark = True: count an upper bound of the workspaces of "
        "convolutions, and the memory in which PyTorch tries their algorithms (default: the setting of MODEL's code)",
    )
    group.add_argument(
        "--max-slowdown",
        type=_ratio,
        metavar="X",
        help="refuse plans whose step takes more than X times as long as the baseline's (default: no limit)",
    )


def _add_techniques(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fidelity",
        choices=get_args(FidelityName),
        default=None,
        help="how closely training must match the original: exact (same math), rounded (lower precision), adapted "
        "(train LoRA adapters if nothing else fits), partial (freeze layers); default rounded",
    )
    group.add_argument(
        "--force",
        action="append",
        default=[],
        metavar="NAMES",
        help=f"use these techniques, separated by commas; known are {', '.join(KINDS)}",
    )
    group.add_argument(
        "--forbid", action="append", default=[], metavar="NAMES", help="do not use these techniques (default: none)"
    )
    group.add_argument(
        "--only", action="append", default=[], metavar="NAMES", help="use no techniques but these (default: all)"
    )


def _add_questions(group: argparse._ArgumentGroup) -> None:
    questions = group.add_mutually_exclusive_group()
    questions.add_argument(
        "--tradeoff",
        action="store_true",
        help="list certified plans from the fastest to the smallest; --vram marks the fastest that fits",
    )
    questions.add_argument(
        "--largest-batch",
        action="store_true",
        help="find the largest batch that fits --vram in one step without gradient accumulation",
    )
    questions.add_argument(
        "--smallest-card", action="store_true", help="find the known card with the least memory on which a plan fits"
    )
    group.add_argument(
        "--time-limit",
        metavar="TIME",
        help="end planning after this time, such as 30s or 2min, with the best plan that is certified by then; Ctrl-C "
        "does the same (default: none; 30s with --tradeoff)",
    )
    group.add_argument(
        "--no-cache",
        action="store_true",
        help="rehearse everything anew, and keep nothing for later calls; without it, recordings of a model that a "
        "config describes are kept in the cache folder",
    )
    group.add_argument("--seconds", type=_ratio, metavar="S", help="the time limit of --tradeoff, in seconds")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--for",
        dest="loop",
        choices=get_args(Loop),
        help="use only techniques that this kind of training loop supports, and print the lines to paste into your "
        "script; for axolotl and llama-factory, print the config for the program instead",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="print the plan in one line, for logs and scripts")
    group.add_argument("--json", action="store_true", help="print one JSON object on standard output, errors included")
    group.add_argument("--save", type=pathlib.Path, metavar="plan.json", help="save the plan")
    group.add_argument(
        "--emit",
        type=pathlib.Path,
        metavar="train_step.py",
        help="write the training step as a Python file; with --for trainer and a .json file, the Trainer's arguments; "
        "with --for axolotl or llama-factory and a .yaml file, the config; with --for accelerate and --cards, that of "
        "accelerate launch",
    )
    group.add_argument(
        "--report",
        type=pathlib.Path,
        metavar="report.html",
        help="write an HTML page: memory over the training step, the tensors in it, and the price of each technique",
    )
    group.add_argument(
        "--snapshot",
        type=pathlib.Path,
        metavar="step.pickle",
        help="write memory snapshots for PyTorch's visualizer (pytorch.org/memory_viz): of the step with the plan "
        "(step.pickle), and of the step without it (step.baseline.pickle)",
    )
    group.add_argument("--svg", type=pathlib.Path, metavar="front.svg", help="draw the result of --tradeoff")
    group.add_argument(
        "--verify",
        action="store_true",
        help="train for a few steps with the plan and without it, and compare memory and results: on the CUDA card of "
        "this machine, limited to --vram; without a card on the CPU, where the memory is that of tensors only",
    )
    group.add_argument(
        "--explain",
        action=_Explain,
        default=argparse.SUPPRESS,
        metavar="WORD",
        help="explain a word of the report, such as slack or certified, and exit",
    )
    group.add_argument("--version", action="version", version=f"plan {_version()}", help="print the version and exit")
    group.add_argument("-h", "--help", action="help", help="print this help and exit")


def _version() -> str:
    try:
        return importlib.metadata.version("torch-planner")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"


def _ratio(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number
