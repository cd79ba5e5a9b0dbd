"""Exceptions that the planner raises for its users. Each message states the wrong value, its location and a remedy."""

from __future__ import annotations

import pathlib
import re
import traceback


class PlannerError(Exception):
    """Base class of the planner's errors. The `plan` command prints `str(error)` on one line and exits with code 2."""

    def __str__(self) -> str:
        """Returns the message on one line, without characters that control a terminal.

        A message may repeat the text of a file or of a library.
        """
        return plain_line(super().__str__())


class StepError(PlannerError):
    """This training step cannot be planned. Another model, batch, budget or technique may be possible."""


class WorkloadError(StepError):
    """The model reference, the batch or the loss function cannot be used."""


class ArgumentError(WorkloadError, TypeError):
    """An argument of a function has the wrong type."""


class SizeError(PlannerError):
    """The memory size cannot be parsed."""


class BudgetError(StepError):
    """The budget cannot hold the model whatever the plan. The `plan` command exits with code 1, as if nothing fits."""


class DeviceProfileError(PlannerError):
    """The card is not known, or its profile file is not well formed."""


class RehearsalError(StepError):
    """The virtual GPU could not run the step. The message names the operator, its module and its source line."""


class DecisionError(StepError):
    """A decision cannot be applied to this model, or cannot be combined with another decision or constraint."""


class PlanFileError(PlannerError):
    """A plan file cannot be read or was saved for another model, or an output file cannot be written."""


class RehearsalProcessError(StepError):
    """The child process that rehearses the step ended without a result."""


class MachineError(PlannerError):
    """The machine ended a process of the planner, or refused to start one. The command exits with code 3.

    It says nothing about the step: a plan made without that process would depend on the load of the machine.
    """


class TimeLimitError(PlannerError):
    """The time limit was over, or the user ended planning, before any plan was certified."""


class SnapshotError(PlannerError):
    """The allocator's memory snapshot cannot be read or replayed."""


class PromiseError(PlannerError):
    """A training step took more memory than its plan promised."""


class MeasurementError(PlannerError):
    """The CUDA card is missing, or the measuring process failed. The message ends with that process's last output."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message, which may come from anybody's code."""
    try:
        text = str(error).strip()
    except Exception as failure:  # a class of the user's, whose __str__ has a fault
        text = f"its message cannot be shown ({type(failure).__name__})"
    return f"{type(error).__name__}: {plain_line(text.splitlines()[0], 400)}" if text else type(error).__name__


def plain_line(text: str, most: int = 4000) -> str:
    """Returns a text of others on one line, without characters that control a terminal, and not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 10 * most])
    line = re.sub(r"\S{500,}", lambda word: f"{word[0][:60]}...{word[0][-40:]}", line)
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def broken_import(error: BaseException) -> str | None:
    """Returns a line for an error that an import of an installed library raised; None for any other error."""
    name = _imported(error)
    if name is None:
        return None
    return (
        f"{name} cannot be imported ({first_line(error)}): install it again, or unset environment variables that "
        "change what Python imports, such as PYTHONPATH"
    )


def _imported(error: BaseException) -> str | None:
    """Returns the name of the library whose import raised an error; None for any other error."""
    if isinstance(error, SyntaxError) and error.filename is not None:  # a file of a library is damaged
        return pathlib.PurePath(error.filename).parent.name or None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package not in ("planner", "__main__"):
            return package
    if isinstance(error, ImportError) and error.name is not None:
        name = error.name.partition(".")[0]
        return None if name == "planner" else name
    return None
