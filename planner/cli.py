"""The `plan` command. One JSON object or a report on standard output, everything else on standard error.

Exit code 0: the plan fits; 1: no plan fits; 2: could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from rich.console import Console

from planner.decisions import KINDS, Fidelity
from planner.errors import PlanFileError, PlannerError, WorkloadError
from planner.plan_file import SCHEMA_VERSION, Plan, write_text_atomically

FITS, DOES_NOT_FIT, COULD_NOT_RUN = 0, 1, 2


class _Arguments(argparse.ArgumentParser):
    """Usage errors travel like all others, so that --json holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise WorkloadError(f"{message}; see plan --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = sys.stdout
    try:
        options = _parser().parse_args(given)  # leaves by SystemExit for --help and --version
    except PlannerError as error:
        return _refuse(error, as_json="--json" in given, out=out)
    try:
        with _standard_output_to_error():  # what a model prints is not our answer
            made = _plan(options)
            _write(made, options)
    except PlannerError as error:
        return _refuse(error, as_json=options.json, out=out)
    except KeyboardInterrupt:
        return _refuse(PlannerError("interrupted"), as_json=options.json, out=out)
    except SystemExit as error:
        message = f"the model's code called sys.exit({error.code!r}): give a function that only builds the model"
        return _refuse(WorkloadError(message), as_json=options.json, out=out)
    except Exception as error:
        traceback.print_exc()
        message = (
            f"{type(error).__name__}: {error}; this is a fault of the planner, please report it with the text above"
        )
        return _refuse(PlannerError(" ".join(message.split())), as_json=options.json, out=out)
    if options.json:
        print(json.dumps(made.to_json(), indent=2), file=out)
    else:
        from planner.report import render

        Console(file=out).print(render(made))
        for path in (options.save, options.emit, options.report):
            if path is not None:
                print(f"wrote {path}", file=sys.stderr)
    return FITS if made.fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = _Arguments(
        prog="plan",
        description="Plan a PyTorch training step that fits a card, without a GPU and without weights.",
        epilog="Sizes: GiB and MiB are binary, GB and MB decimal, % is of the card. "
        "Exit code 0: fits, 1: no plan fits, 2: could not be run.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="config.json, a transformers folder or hub id, path/file.py:name or package.module:name "
        "(returns a model, (model, batch) or (model, batch, loss_fn)), or a saved plan",
    )
    parser.add_argument(
        "--vram", metavar="SIZE", help="budget for the whole process, such as 6GiB; without it: only rehearse"
    )
    parser.add_argument("--batch-size", type=_positive, metavar="N", help="samples in one optimizer step (a config: 1)")
    parser.add_argument(
        "--seq-len", type=_positive, metavar="N", help="tokens in a sample (a config: 512, or what the model takes)"
    )
    parser.add_argument(
        "--optimizer", default=None, metavar="NAME", help="adamw (default), adam, sgd, sgd-momentum, ..."
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="a card such as rtx-2060, a profile's TOML file, or bare (counts bytes only)"
    )
    parser.add_argument(
        "--fidelity", choices=[f.name.lower() for f in Fidelity], default=None, help="how far a plan may go (rounded)"
    )
    kinds = ", ".join(KINDS)
    parser.add_argument("--force", action="append", default=[], metavar="NAME", help=f"must be used: {kinds}")
    parser.add_argument("--forbid", action="append", default=[], metavar="NAME", help="must not be used")
    parser.add_argument("--version", action="version", version=f"plan {_version()}")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, also for an error")
    parser.add_argument("--save", type=pathlib.Path, metavar="plan.json", help="save the plan")
    parser.add_argument(
        "--emit", type=pathlib.Path, metavar="train_step.py", help="write the training step as a Python file"
    )
    parser.add_argument("--report", type=pathlib.Path, metavar="report.html", help="write the report as a page")
    return parser


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


def _plan(options: argparse.Namespace) -> Plan:
    """Load what MODEL names and plan it, or rehearse the plan that it is."""
    _refuse_to_overwrite(options)
    for library in ("bitsandbytes", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with _working("loading torch"):
        from planner import pipeline
        from planner.options import Rules
        from planner.references import load_workload

    saved = _saved_plan(options.model)
    if saved is not None:
        for name in ("batch_size", "seq_len", "optimizer", "fidelity", "force", "forbid"):
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise WorkloadError(
                    f"{option} does not go with a saved plan, which says it already: plan the model anew"
                )
        return pipeline.replan(saved, vram=options.vram, gpu=options.gpu)
    rules = Rules(
        fidelity=Fidelity.parse(options.fidelity or "rounded"),
        forced=_names(options.force),
        forbidden=_names(options.forbid),
    )
    card, vram_bytes = pipeline.card_and_budget(options.gpu, options.vram)
    with _working(f"loading {options.model}"):
        work = load_workload(
            options.model,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            optimizer=options.optimizer or "adamw",
        )
    with _working("rehearsing and searching"):
        return pipeline.plan_workload(work, card, vram_bytes=vram_bytes, rules=rules)


def _names(given: list[str]) -> tuple[str, ...]:
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def _saved_plan(reference: str) -> Plan | None:
    """The plan, if MODEL is a file that holds one."""
    path = pathlib.Path(reference)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise PlanFileError(
            f"'{path}' is not JSON ({error}): give a transformers config.json or a saved plan"
        ) from error
    return Plan.from_json(data) if isinstance(data, dict) and "schema_version" in data else None


# ---- files --------------------------------------------------------------------------------------------------------


def _refuse_to_overwrite(options: argparse.Namespace) -> None:
    """A file of the kind to be written may be replaced; anything else that is there stays. Checked before any work."""
    wanted = [path.resolve() for path in (options.save, options.emit, options.report) if path is not None]
    if len(set(wanted)) < len(wanted):
        raise PlanFileError("--save, --emit and --report name the same file: give each its own")
    for path, kind, is_ours in (
        (options.save, "a saved plan", _is_plan),
        (options.emit, "an emitted training step", lambda text: "One training step of " in text[:200]),
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


def _write(made: Plan, options: argparse.Namespace) -> None:
    if options.save is not None:
        made.save(options.save)
    if options.emit is not None:
        from rewrite.emit import emit

        emit(made, options.emit)
    if options.report is not None:
        from planner.report import html

        write_text_atomically(options.report, html(made))


# ---- talking ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Python's standard output and that of subprocesses and C code go to standard error meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _working(what: str) -> Iterator[None]:
    """A moving line on standard error while something takes time; nothing where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _refuse(error: PlannerError, *, as_json: bool, out) -> int:
    if as_json:
        told = {"type": type(error).__name__, "message": str(error)}
        print(json.dumps({"schema_version": SCHEMA_VERSION, "fits": None, "error": told}, indent=2), file=out)
    print(f"plan: {error}", file=sys.stderr)
    return COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
