"""All planted faults."""

from __future__ import annotations

from benchmarks.faults import (
    in_bad_input,
    in_checks,
    in_command,
    in_emitter,
    in_estimates,
    in_first_step,
    in_fuzzed,
    in_kept,
    in_lengthened,
    in_losses,
    in_page,
    in_ranks,
    in_recompute,
    in_runs,
    in_search,
    in_second_step,
    in_step,
    in_time_limits,
    in_updates,
    in_workspaces,
)
from benchmarks.faults.fault import Fault

_LISTS = (
    in_step,
    in_kept,
    in_lengthened,
    in_losses,
    in_page,
    in_updates,
    in_recompute,
    in_emitter,
    in_bad_input,
    in_checks,
    in_first_step,
    in_fuzzed,
    in_estimates,
    in_workspaces,
    in_runs,
    in_ranks,
    in_search,
    in_second_step,
    in_command,
    in_time_limits,
)

FAULTS: tuple[Fault, ...] = tuple(fault for module in _LISTS for fault in module.FAULTS)
