"""The `plan` command. It prints a report or one JSON object on standard output, everything else on standard error.

Exit code 0: the plan fits, and --verify (if given) confirmed it; 1: no plan fits, or --verify found that training takes
more memory than the planner predicts or gives other results; 2: the command could not run, its time limit was over
before any plan was certified, or Ctrl-C ended it before everything was written or verified; 3: the machine ended a
process of the planner, or started none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from planner.cli import keep_imports
from planner.cli.hub import refuse_unreachable
from planner.cli.option_checks import emitted_form, refuse_unknown_values, refuse_what_does_not_go_together
from planner.cli.options import parser
from planner.cli.output_files import lines_to_paste, refuse_to_overwrite, write_outputs
from planner.errors import (
    BudgetError,
    MachineError,
    PlannerError,
    TimeLimitError,
    WorkloadError,
    broken_import,
    first_line,
    plain_line,
)
from planner.plan_types.decision_base import cards_of
from planner.plan_types.plan import SCHEMA_VERSION
from planner.plan_types.tradeoff import Tradeoff
from planner.plan_types.words import DEFAULT_SECONDS
from planner.progress import Watch, streams
from planner.progress.display import shown
from planner.progress.durations import parse_duration
from planner.progress.stuck import ended_if_stuck
from planner.spawned.interrupts import interrupts_held_back

if TYPE_CHECKING:
    import pathlib

    from rich.console import Console

    from planner.plan_types.plan import Plan
    from planner.rewrite.on_cpu.verification import CpuVerification
    from planner.rewrite.on_gpu.verification import Verification

_LEAST_COLUMNS = 20
"""Smallest width of the report. With COLUMNS=0, rich would print nothing."""
FITS, DOES_NOT_FIT, COULD_NOT_RUN, ENDED_BY_MACHINE = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return streams.answered("plan", lambda out: _run(words, out), COULD_NOT_RUN)


def _run(words: list[str], out: TextIO) -> int:
    try:
        is_of_files = words[:1] in (["diff"], ["explain"])
        return _on_files(words[0], words[1:], out) if is_of_files else _on_model(words, out)
    except OSError:
        raise  # the answer cannot be written
    except Exception as error:  # the answer cannot be shown: rich is missing, or a table has a fault
        return _refuse(_refusal(error, Watch()), as_json="--json" in words, out=out)


def _on_model(words: list[str], out: TextIO) -> int:
    """Runs the command on a model or a saved plan, and returns its exit code."""
    cut = words.index("--") if "--" in words else len(words)
    words, script_arguments = words[:cut], words[cut + 1 :]
    try:
        options = parser().parse_args(words)  # raises SystemExit for --help and --version
        options.arguments = script_arguments
    except PlannerError as error:
        return _refuse(error, as_json="--json" in words, out=out)
    except KeyboardInterrupt:
        return _refuse(PlannerError("interrupted"), as_json="--json" in words, out=out)
    watch = Watch()  # until the options are read
    try:
        is_shown = not (options.json or options.quiet)
        # The model's code may print, and must not mix with the answer.
        with (
            _ending_at_once(options, out) as end,
            streams.only_in_this_process(COULD_NOT_RUN),
            streams.standard_output_to_error(),
            streams.without_sudden_exit(),
            shown(is_shown) as report,
        ):
            watch = Watch(seconds=_limit_seconds(options), report=report)
            answer = _answer(options, watch, lambda: end(watch))
            afterwards = Watch(report=report, elapsed_seconds=watch.elapsed_seconds)
            outputs = _make_outputs(answer, options, afterwards)
    except BaseException as error:
        return _refuse(_refusal(error, watch), as_json=options.json, out=out)
    with contextlib.suppress(KeyboardInterrupt), interrupts_held_back():  # raised when all is printed
        _print_answer(answer, outputs, options, out)
    if outputs.missing:
        return COULD_NOT_RUN
    is_kept = outputs.verification is None or outputs.verification.kept
    return FITS if answer.fits and is_kept else DOES_NOT_FIT


@dataclasses.dataclass(kw_only=True)
class _Outputs:
    """Results of the command other than its report."""

    lines: str = ""
    """Lines to paste into a script, with their heading."""
    written: list[pathlib.Path] = dataclasses.field(default_factory=list)
    """Paths of the files that were written."""
    verification: Verification | CpuVerification | None = None
    missing: str = ""
    """Words that say what is missing because of Ctrl-C; empty if nothing is missing."""


def _make_outputs(answer: Plan | Tradeoff, options: argparse.Namespace, watch: Watch) -> _Outputs:
    """Write the files that the options name, and verify the plan if they ask for it.

    If Ctrl-C ends this, no error is raised, because the answer must still be printed.
    """
    outputs = _Outputs(missing="not everything was written" + (", and the plan was not verified" * options.verify))
    try:
        outputs.lines = lines_to_paste(answer, options)
        for path in write_outputs(answer, options, watch):
            outputs.written.append(path)
        outputs.missing = "the plan was not verified"
        outputs.verification = _verify(answer, options, watch)
        outputs.missing = ""
    except BaseException as error:
        if not _was_interrupted(error, watch):
            raise
    return outputs


def _print_answer(answer: Plan | Tradeoff, outputs: _Outputs, options: argparse.Namespace, out: TextIO) -> None:
    """Print the answer in the form that the options ask for, and the names of the files that were written."""
    verification = outputs.verification
    if options.json:
        measured = {} if verification is None else {"verification": verification.to_json()}
        print(json.dumps({**answer.to_json(), "seconds": answer.seconds, **measured}, indent=2), file=out)
    elif options.quiet and not isinstance(answer, Tradeoff):
        verdict = "" if verification is None else f"; verification: {'kept' if verification.kept else 'not kept'}"
        print(f"{answer.summary()}{verdict}", file=out)
    else:
        _print(answer, verification, out)
        if outputs.lines:
            print(outputs.lines, file=out)
        for path in outputs.written:
            print(f"wrote {plain_line(str(path))}", file=sys.stderr)
        is_emitted = options.emit in outputs.written and emitted_form(options) == "python"
        if is_emitted and not isinstance(answer, Tradeoff) and cards_of(answer.decisions) > 1:
            from planner.rewrite.emitted_code import torchrun

            print(f"start it with: {torchrun(answer)} {options.emit}", file=sys.stderr)
    if outputs.missing:
        print(f"plan: interrupted: {outputs.missing}", file=sys.stderr)


def _refusal(error: BaseException, watch: Watch) -> PlannerError:
    """Returns the error to show instead of any other. For a bug of the planner, the traceback is printed, too."""
    if isinstance(error, PlannerError):
        return error
    if _was_interrupted(error, watch):
        return PlannerError("interrupted")
    if isinstance(error, SystemExit):
        what = f"ended the process with code {error.code!r} (sys.exit or os._exit)"
        return WorkloadError(f"the model's code {what}: give a function that only builds the model")
    if not isinstance(error, Exception):
        return WorkloadError(f"the model's code raised {first_line(error)}: give a function that only builds the model")
    if isinstance(error, MemoryError):
        return MachineError(
            "this machine does not have enough memory for the command: close other programs, or raise "
            "the memory limit of the shell (ulimit -v)"
        )
    if (broken := broken_import(error)) is not None:
        return PlannerError(broken)
    if isinstance(error, OSError) and error.filename is not None:
        return PlannerError(f"'{os.fsdecode(error.filename)}' cannot be used: {error.strerror}")
    if isinstance(error, FileNotFoundError) and _is_without_folder():
        return PlannerError("the working directory was deleted: change to another one")
    if isinstance(error, RecursionError):
        return WorkloadError("the model, its batch or its config is nested too deeply for Python's recursion limit")
    traceback.print_exception(error)
    message = f"{type(error).__name__}: {plain_line(str(error), 1000)}"
    if (line := _line_outside(error)) is not None:
        return WorkloadError(
            f"{message}, raised at {line}: the planner ran this line to read the model or the batch; fix it there"
        )
    return PlannerError(f"{message}; this is a bug of the planner, please report it with the traceback above")


def _is_without_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _line_outside(error: BaseException) -> str | None:
    """Returns 'file.py:line' of the line that raised an error, if it belongs to the user.

    None for a line of the planner, an installed package or the standard library, and before torch is imported.
    """
    if "torch" not in sys.modules:  # no code of the user has run yet
        return None
    from planner.virtual_gpu.source_lines import is_model_code

    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    name = frame.f_code.co_filename
    return f"{name}:{line}" if is_model_code(name) and "-packages" not in name else None


def _was_interrupted(error: BaseException | None, watch: Watch) -> bool:
    """True if Ctrl-C caused the error: libraries turn an exception of an import into one of their own."""
    if watch.is_ended and not watch.is_checked:
        return True
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _on_files(command: str, words: Sequence[str], out: TextIO) -> int:
    """Runs `plan diff` or `plan explain` and returns its exit code: 1 if plans differ, or if memory is a surprise."""
    from planner.cli import plan_diff, plan_explain

    module = plan_diff if command == "diff" else plan_explain
    try:
        options = module.parser().parse_args(words)  # raises SystemExit for --help, and OSError if it cannot be printed
    except PlannerError as error:
        return _refuse(error, as_json="--json" in words, out=out)
    try:
        is_found, answer = module.run(options)
    except (Exception, KeyboardInterrupt) as error:
        return _refuse(_refusal(error, Watch()), as_json="--json" in words, out=out)
    if isinstance(answer, str):
        print(answer, file=out)
    else:
        _console(out).print(answer)
    return int(is_found)


def _console(out: TextIO) -> Console:
    """Return a console for the answer. Without a terminal it has 200 columns, so that lines in logs stay whole."""
    from planner.progress.terminal import console

    is_set = out.isatty() or bool(os.environ.get("COLUMNS"))
    return console(file=out, width=None if is_set else 200, least_columns=_LEAST_COLUMNS)


def _print(answer: Plan | Tradeoff, verification: Verification | CpuVerification | None, out: TextIO) -> None:
    """Print the report as text (not JSON)."""
    if isinstance(answer, Tradeoff):
        from planner.cli.tradeoff_report import render_tradeoff

        _console(out).print(render_tradeoff(answer))
    else:
        from planner.cli.report import render

        _console(out).print(render(answer, verified=verification is not None))
    if verification is None:
        return
    from planner.rewrite.on_cpu.report import render_cpu_verification
    from planner.rewrite.on_cpu.verification import CpuVerification
    from planner.rewrite.on_gpu.report import render_verification

    if isinstance(verification, CpuVerification):
        _console(out).print(render_cpu_verification(verification))
    else:
        _console(out).print(render_verification(verification))


def _limit_seconds(options: argparse.Namespace) -> float | None:
    """Return the time limit in seconds, from the start of the command; None for no limit."""
    if options.time_limit is not None:
        return parse_duration(options.time_limit)
    return options.seconds or DEFAULT_SECONDS if options.tradeoff else None


def _answer(options: argparse.Namespace, watch: Watch, end: Callable[[], None]) -> Plan | Tradeoff:
    """Check the options, then import torch and plan. The check comes first, since importing torch takes seconds.

    Args:
        end: ends the process. It is called if the time limit is over and the model's code does not return.
    """
    refuse_to_overwrite(options)
    refuse_what_does_not_go_together(options)
    refuse_unknown_values(options)
    refuse_unreachable(options.model)
    for library in ("bitsandbytes", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    watch.stage("loading torch")
    with _ended_by_ctrl_c(watch), ended_if_stuck(watch, end):
        from planner.cli import answer

        keep_imports()
        return answer.answer(options, watch)


@contextlib.contextmanager
def _ending_at_once(options: argparse.Namespace, out: TextIO) -> Iterator[Callable[[Watch], None]]:
    """Yield a function that ends the process from any thread, with the line and the code of an exceeded time limit."""
    leave, output = os._exit, os.dup(1)  # both are replaced while the model's code runs

    def end(watch: Watch) -> None:
        os.dup2(output, 1)
        error = TimeLimitError(
            f"planning ended {watch.cause} while {watch.doing}: give more time (--time-limit), or a function that only "
            "builds the model"
        )
        code = _refuse(error, as_json=options.json, out=out)
        out.flush()
        leave(code)

    try:
        yield end
    finally:
        os.close(output)


@contextlib.contextmanager
def _ended_by_ctrl_c(watch: Watch) -> Iterator[None]:
    """Let the first Ctrl-C end planning with the best plan so far, and the second one end the command at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def end(*_: object) -> None:
        is_first = not watch.is_ended
        watch.end()
        if not is_first or not watch.is_checked:
            raise KeyboardInterrupt
        os.write(2, b"plan: ending with the best plan so far; Ctrl-C again ends at once\n")

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _verify(
    answer: Plan | Tradeoff, options: argparse.Namespace, watch: Watch
) -> Verification | CpuVerification | None:
    """Train with the plan, and compare its memory and its results with what the plan promises.

    On a machine without a CUDA card, train on the CPU, and compare with a rehearsal of the same step there.

    Returns None without --verify, or if no plan fits.
    """
    if not options.verify or not answer.fits or isinstance(answer, Tradeoff):  # --verify with --tradeoff was refused
        return None
    from planner.rewrite.on_cpu.verification import cpu_verification
    from planner.rewrite.on_gpu.verification import verification
    from planner.workload.cards import has_cuda_card

    on_card = has_cuda_card()
    watch.stage(f"training on the {'card' if on_card else 'CPU'}, with the plan and without it")
    with watch.reporting():
        return verification(answer) if on_card else cpu_verification(answer)


# ---- output -------------------------------------------------------------------------------------------------------


def _refuse(error: PlannerError, *, as_json: bool, out: TextIO) -> int:
    """Print the error as one line on standard error, with --json also as one object on standard output.

    Returns the exit code.
    """
    if as_json:
        fields = {"type": type(error).__name__, "message": str(error)}
        fits = False if isinstance(error, BudgetError) else None
        print(json.dumps({"schema_version": SCHEMA_VERSION, "fits": fits, "error": fields}, indent=2), file=out)
    print(f"plan: {plain_line(str(error))}", file=sys.stderr)
    if isinstance(error, BudgetError):
        return DOES_NOT_FIT
    return ENDED_BY_MACHINE if isinstance(error, MachineError) else COULD_NOT_RUN
