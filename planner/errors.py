"""What can go wrong before a plan exists. Every message names the value, the place and a way out."""

from __future__ import annotations


class PlannerError(Exception):
    """Base of all refusals. The command line prints `str(error)` on one line and exits with code 2."""


class WorkloadError(PlannerError):
    """A model reference, batch or loss function that cannot be used."""


class SizeError(PlannerError):
    """A memory size that cannot be read."""


class DeviceProfileError(PlannerError):
    """A card that is not known, or a profile file that is not well formed."""


class RehearsalError(PlannerError):
    """The virtual GPU could not run the step: an operator, its module and its source line."""


class DecisionError(PlannerError):
    """A decision that cannot be applied to this model, or that contradicts another one."""


class PlanFileError(PlannerError):
    """A plan file that cannot be read, or that was made for another model."""


class RehearsalProcessError(PlannerError):
    """The rehearsing child process ended without an answer."""


class SnapshotError(PlannerError):
    """A record of the caching allocator that cannot be read, or that cannot be replayed."""


class PromiseError(PlannerError):
    """A training step that took more memory than its plan promised."""


class MeasurementError(PlannerError):
    """A card that is not there, or a measuring process that failed; the text is the end of what it said."""
