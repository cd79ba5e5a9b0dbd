"""What the `plan` command may be asked, and what does not go together. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import pathlib
from typing import NoReturn

from planner.errors import PlanFileError, WorkloadError
from planner.plan_types.decisions import KINDS, Fidelity


class _Arguments(argparse.ArgumentParser):
    """Usage errors travel like all others, so that --json holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise WorkloadError(f"{message}; see plan --help")


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments. Raises `WorkloadError` where other parsers leave the process."""
    made = _Arguments(
        prog="plan",
        description="Plan a PyTorch training step that fits a card, without a GPU and without weights.",
        epilog="Sizes: GiB and MiB are binary, GB and MB decimal, % is of the card. "
        "Exit code 0: fits (and keeps its promise, with --verify), 1: it does not, 2: could not be run.",
    )
    made.add_argument(
        "model",
        metavar="MODEL",
        help="config.json, a transformers folder or hub id, path/file.py:name or package.module:name "
        "(returns a model, (model, batch) or (model, batch, loss_fn)), or a saved plan",
    )
    made.add_argument(
        "--vram", metavar="SIZE", help="budget for the whole process, such as 6GiB; without it: only rehearse"
    )
    made.add_argument("--batch-size", type=_positive, metavar="N", help="samples in one optimizer step (a config: 1)")
    made.add_argument(
        "--seq-len", type=_positive, metavar="N", help="tokens in a sample (a config: 512, or what the model takes)"
    )
    made.add_argument("--optimizer", default=None, metavar="NAME", help="adamw (default), adam, sgd, sgd-momentum, ...")
    made.add_argument(
        "--gpu", metavar="NAME", help="a card such as rtx-2060, a profile's TOML file, or bare (counts bytes only)"
    )
    made.add_argument(
        "--fidelity", choices=[f.name.lower() for f in Fidelity], default=None, help="how far a plan may go (rounded)"
    )
    kinds = ", ".join(KINDS)
    made.add_argument("--force", action="append", default=[], metavar="NAME", help=f"must be used: {kinds}")
    made.add_argument("--forbid", action="append", default=[], metavar="NAME", help="must not be used")
    made.add_argument("--only", action="append", default=[], metavar="NAMES", help="forbid all but these: a,b,...")
    made.add_argument("--max-slowdown", type=_ratio, metavar="X", help="no plan slower than X times the step as it is")
    made.add_argument(
        "--gradients-alive",
        action="store_true",
        help="gradients of earlier batches are there before the step: for a loop that accumulates by itself",
    )
    questions = made.add_argument_group("other questions").add_mutually_exclusive_group()
    questions.add_argument(
        "--tradeoff", action="store_true", help="memory against step time, down to the smallest plan; --vram marks one"
    )
    questions.add_argument(
        "--largest-batch", action="store_true", help="the most samples in one step that fit, without accumulation"
    )
    questions.add_argument("--smallest-card", action="store_true", help="the smallest known card on which a plan fits")
    made.add_argument("--seconds", type=_ratio, metavar="S", help="time for the trade-off, about (30)")
    made.add_argument("--svg", type=pathlib.Path, metavar="front.svg", help="draw the trade-off")
    made.add_argument("--version", action="version", version=f"plan {_version()}")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output, also for an error")
    made.add_argument("--save", type=pathlib.Path, metavar="plan.json", help="save the plan")
    made.add_argument(
        "--emit", type=pathlib.Path, metavar="train_step.py", help="write the training step as a Python file"
    )
    made.add_argument(
        "--verify", action="store_true", help="train by the plan on the CUDA card here, under the budget, and compare"
    )
    made.add_argument("--report", type=pathlib.Path, metavar="report.html", help="write the report as a page")
    return made


def _version() -> str:
    try:
        return importlib.metadata.version("torch-planner")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return number


def _ratio(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return number


def refuse_what_does_not_go_together(options: argparse.Namespace) -> None:
    """Options that belong to another question than the one that is asked."""
    given = {name for name, value in vars(options).items() if value}
    question = next((name for name in _QUESTIONS if name in given), None)
    for name in sorted(given):
        needed = _BELONGS_TO.get(name)
        if needed is not None and needed != question:
            raise WorkloadError(f"{_option(name)} goes with {_option(needed)} alone")
        if question is not None and name in _QUESTIONS[question]:
            raise WorkloadError(f"{_option(name)} does not go with {_option(question)}: {_QUESTIONS[question][name]}")
    if question == "largest_batch" and "vram" not in given:
        raise WorkloadError("--largest-batch needs a budget: give --vram")


_MANY_PLANS = "it makes many plans; make the one you choose with --vram"
_QUESTIONS = {
    "tradeoff": dict.fromkeys(("save", "emit", "report", "verify"), _MANY_PLANS),
    "largest_batch": {
        "batch_size": "that is what it looks for",
        "max_slowdown": "it asks for the largest batch at any speed",
    },
    "smallest_card": {"vram": "the budget is what a card has", "gpu": "that is what it looks for"},
}
"""Questions, and options that have no place beside them."""
_BELONGS_TO = {"svg": "tradeoff", "seconds": "tradeoff"}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def names(given: list[str]) -> tuple[str, ...]:
    """Names as given, one or several an option: 'a,b'."""
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


# ---- files --------------------------------------------------------------------------------------------------------


def refuse_to_overwrite(options: argparse.Namespace) -> None:
    """A file of the kind to be written may be replaced; anything else that is there stays. Checked before any work."""
    wanted = [path.resolve() for path in (options.save, options.emit, options.report, options.svg) if path is not None]
    if len(set(wanted)) < len(wanted):
        raise PlanFileError("two of --save, --emit, --report and --svg name the same file: give each its own")
    for path, kind, is_ours in (
        (options.save, "a saved plan", _is_plan),
        (options.emit, "an emitted training step", lambda text: "One training step of " in text[:200]),
        (options.svg, "a picture", lambda text: text.startswith("<svg")),
        (options.report, "a report", lambda text: text.lstrip().lower().startswith("<!doctype html")),
    ):
        if path is None:
            continue
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise PlanFileError(
                f"'{path}' cannot be written: {'it is' if path.is_dir() else 'its folder is not'} a folder"
            )
        if path.exists() and not is_ours(path.read_text(errors="replace")):
            raise PlanFileError(f"'{path}' exists and is not {kind}: move it away or choose another name")


def _is_plan(text: str) -> bool:
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and {"schema_version", "decisions"} <= set(data)
