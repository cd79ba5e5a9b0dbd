"""The outputs of the `plan` command other than its report, and the check that no other file is overwritten."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

from planner.cli.option_checks import emitted_form
from planner.errors import PlanFileError
from planner.files import reading
from planner.files.writing import write_atomically
from planner.plan_types.plan import Plan
from planner.plan_types.tradeoff import Tradeoff
from planner.progress import Watch


def refuse_to_overwrite(options: argparse.Namespace) -> None:
    """Refuse output files that cannot be written, or that exist and were not written by the same option.

    This check comes before anything is computed.

    Raises:
        PlanFileError: an output file is refused; the message names it.
    """
    if options.snapshot is not None and not options.snapshot.name:  # '.' or '/'
        raise PlanFileError(f"'{options.snapshot}' cannot be written: it is a folder; name a file in it")
    snapshots = (None, None) if options.snapshot is None else (options.snapshot, baseline_path(options.snapshot))
    given = (options.save, options.emit, options.report, options.svg, *snapshots)
    targets = [os.path.realpath(path) for path in given if path is not None]
    if len(set(targets)) < len(targets):
        raise PlanFileError(
            "two of --save, --emit, --report, --svg and --snapshot name the same file: give each option its own file"
        )
    for path, kind, is_ours in (
        (options.save, "a saved plan", _is_plan),
        (
            options.emit,
            "an emitted training step, the Trainer's arguments or a config",
            lambda text: (
                "One training step of " in text[:200]
                or '"per_device_train_batch_size"' in text
                or text.startswith("# Config for ")
            ),
        ),
        (options.svg, "a picture", lambda text: text.startswith("<svg")),
        (options.report, "a report", lambda text: text.lstrip().lower().startswith("<!doctype html")),
        *((path, "a memory snapshot", lambda text: "device_traces" in text) for path in snapshots),
    ):
        if path is None:
            continue
        refuse_strange_path(path)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise PlanFileError(
                f"'{path}' cannot be written: "
                + (
                    "it is a folder; name a file in it"
                    if path.is_dir()
                    else "its folder does not exist; create it first"
                )
            )
        if path.exists() and not _is_ours(path, is_ours):
            raise PlanFileError(f"'{path}' exists and is not {kind}, so it is not overwritten: choose another name")


def refuse_strange_path(path: pathlib.Path) -> None:
    """Refuse a path that the system does not take, and a file that is a device or a pipe.

    Raises:
        PlanFileError: the message says why.
    """
    try:
        if path.is_symlink() and os.path.islink(os.path.realpath(path)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        facts = path.stat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # such as a name that is too long, or with a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise PlanFileError(f"'{path}' cannot be written: {why}") from error
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
        raise PlanFileError(f"'{path}' cannot be written: it is a device or a pipe; name a file")


def _is_ours(path: pathlib.Path, is_ours: Callable[[str], bool]) -> bool:
    """True if an existing file has the content that the option writes. A file that is too large has not."""
    try:
        return is_ours(reading.content(path).decode(errors="replace"))
    except PermissionError as error:
        raise PlanFileError(f"'{path}' exists and cannot be read: {error.strerror}; choose another name") from error
    except OSError:
        return False


def baseline_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the file of the baseline's snapshot: 'step.baseline.pickle' for 'step.pickle'."""
    return path.with_name(f"{path.stem}.baseline{path.suffix}")


def _is_plan(text: str) -> bool:
    try:
        data = reading.parsed_json(text)
    except ValueError:
        return False
    return isinstance(data, dict) and {"schema_version", "decisions"} <= set(data)


def write_outputs(answer: Plan | Tradeoff, options: argparse.Namespace, watch: Watch) -> Iterator[pathlib.Path]:
    """Write the files that the options name, and yield the path of each one that is written."""
    if isinstance(answer, Tradeoff):
        if options.svg is not None:
            from planner.cli.tradeoff_svg import front_svg

            write_atomically(options.svg, front_svg(answer))
            yield options.svg
    else:
        if options.save is not None:
            answer.save(options.save)
            yield options.save
        form = emitted_form(options)
        if form == "json":
            from planner.rewrite.trainer.arguments import training_arguments

            settings = training_arguments(answer, output_dir="out")
            write_atomically(options.emit, json.dumps(settings, indent=2) + "\n")
        elif form == "config":
            from planner.cli.training_lines import config_text

            write_atomically(options.emit, config_text(answer, options.cards_per_node))
        elif form == "python":
            from planner.rewrite.emitter.emit import emit

            emit(answer, options.emit)
        if form is not None:
            yield options.emit
    if options.report is not None or options.snapshot is not None:
        from planner.cli.page.outputs import write_recordings

        watch.stage("rehearsing the step without and with the plan")
        yield from write_recordings(answer, options)


def lines_to_paste(answer: Plan | Tradeoff, options: argparse.Namespace) -> str:
    """Return the lines that `--for` asks for with their heading; '' without it, or if `--emit` writes them.

    Raises:
        PlannerError: that kind of loop cannot follow the plan.
    """
    if options.loop is None or isinstance(answer, Tradeoff):
        return ""
    if emitted_form(options) == "config" and answer.model.program:
        return ""
    from planner.cli.training_lines import training_lines

    where = "save as a config file" if answer.model.program else "paste into your script"
    return f"\n{where}:\n\n{training_lines(answer, options.loop, options.save)}"
