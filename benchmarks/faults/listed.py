"""All planted faults."""

from __future__ import annotations

from benchmarks.faults import in_checks, in_emitter, in_planner, in_rewriter
from benchmarks.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*in_rewriter.FAULTS, *in_emitter.FAULTS, *in_checks.FAULTS, *in_planner.FAULTS)
