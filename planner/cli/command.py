"""The `plan` command. One JSON object or a report on standard output, everything else on standard error.

Exit code 0: the plan fits, and keeps its promise where that is verified; 1: no plan fits, or the promise is broken;
2: could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from planner.cli.options import parser, refuse_to_overwrite, refuse_what_does_not_go_together
from planner.errors import PlannerError, WorkloadError
from planner.plan_types.plan import SCHEMA_VERSION, Plan, write_text_atomically
from planner.plan_types.tradeoff import Tradeoff

if TYPE_CHECKING:
    from planner.rewrite.on_gpu.verification import Verification

FITS, DOES_NOT_FIT, COULD_NOT_RUN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = sys.stdout
    try:
        options = parser().parse_args(given)  # leaves by SystemExit for --help and --version
    except PlannerError as error:
        return _refuse(error, as_json="--json" in given, out=out)
    try:
        with _standard_output_to_error():  # what a model prints is not our answer
            made = _answer(options)
            _write(made, options)
            verified = _verified(made, options)
    except PlannerError as error:
        return _refuse(error, as_json=options.json, out=out)
    except KeyboardInterrupt:
        return _refuse(PlannerError("interrupted"), as_json=options.json, out=out)
    except SystemExit as error:
        message = f"the model's code called sys.exit({error.code!r}): give a function that only builds the model"
        return _refuse(WorkloadError(message), as_json=options.json, out=out)
    except Exception as error:  # shown whole: a fault of ours
        traceback.print_exc()
        message = (
            f"{type(error).__name__}: {error}; this is a fault of the planner, please report it with the text above"
        )
        return _refuse(PlannerError(" ".join(message.split())), as_json=options.json, out=out)
    if options.json:
        verification = {} if verified is None else {"verification": verified.to_json()}
        print(json.dumps({**made.to_json(), **verification}, indent=2), file=out)
    else:
        _print(made, verified, out)
        for path in (options.save, options.emit, options.report, options.svg):
            if path is not None:
                print(f"wrote {path}", file=sys.stderr)
    return FITS if made.fits and (verified is None or verified.kept) else DOES_NOT_FIT


def _print(made: Plan | Tradeoff, verified: Verification | None, out: TextIO) -> None:
    if isinstance(made, Plan):
        from planner.cli.report import render

        Console(file=out).print(render(made))
    else:
        from planner.cli.tradeoff_report import render_tradeoff

        Console(file=out).print(render_tradeoff(made))
    if verified is not None:
        from planner.rewrite.on_gpu.report import render_verification

        Console(file=out).print(render_verification(verified))


def _answer(options: argparse.Namespace) -> Plan | Tradeoff:
    refuse_to_overwrite(options)
    refuse_what_does_not_go_together(options)
    for library in ("bitsandbytes", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with _working("loading torch"):
        from planner.cli import answer
        from planner.workload.cards import refuse_without_cuda
    if options.verify:
        refuse_without_cuda()
    with _working("rehearsing and searching"):
        return answer.answer(options)


def _verified(made: Plan | Tradeoff, options: argparse.Namespace) -> Verification | None:
    """What became of the plan on the card; None where that was not asked for, or nothing fits."""
    if not options.verify or not made.fits:
        return None
    from planner.rewrite.on_gpu.verification import verification

    with _working("training on the card"):
        return verification(made)


def _write(made: Plan | Tradeoff, options: argparse.Namespace) -> None:
    if options.svg is not None:
        from planner.cli.tradeoff_svg import front_svg

        write_text_atomically(options.svg, front_svg(made))
    if options.save is not None:
        made.save(options.save)
    if options.emit is not None:
        from planner.rewrite.emitter.emit import emit

        emit(made, options.emit)
    if options.report is not None:
        from planner.cli.report import html

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
