"""Makes a row of the ledger: the promise for a case, the measurement on a card, and the ops that differ."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.card.by_op import differing
from benchmarks.card.cases import Case
from benchmarks.card.comparing import Finding, compare_steps
from benchmarks.card.history import History, numbered, signed
from benchmarks.card.measuring import Measured
from benchmarks.card.predicting import Prediction
from planner.allocator.replay import replay
from planner.allocator.settings import AllocatorSettings
from planner.profiles.device import DeviceProfile
from planner.workload.workload import Workload, described

SHOWN_OPS = 20
"""Maximum number of ops that a row lists."""
MEASURED_KEYS = ("allocated_bytes", "reserved_bytes", "total_bytes", "step_ms")
"""Keys of both halves of a row. `total_bytes` is the memory of the process on the card, context included."""


def promised(prediction: Prediction) -> dict[str, Any]:
    """Returns the half of a row that needs no card."""
    return {
        "allocated_bytes": prediction.allocated_bytes,
        "reserved_bytes": prediction.reserved_bytes,
        "total_bytes": prediction.total_bytes,
        "step_ms": round(prediction.step_ns / 1e6, 3),
    }


def facts(case: Case, work: Workload, card: DeviceProfile) -> dict[str, Any]:
    """Returns the fields that describe the training step."""
    return {
        "case": case.name,
        "card": card.name,
        "card_source": card.source,
        "model": type(work.model).__name__,
        "parameters": sum(parameter.numel() for parameter in work.model.parameters()),
        "batch": [[path, list(shape), dtype] for path, shape, dtype in described(work.batch)],
        "optimizer": case.optimizer,
        "plan": [_brief(decision.to_json()) for decision in case.decisions(work)],
        "command": f"python -m benchmarks.fidelity --out DIR --cases {case.name}",
    }


def predicted_row(about: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """Returns a row without a measurement."""
    return {
        **about,
        "promised": promised(prediction),
        "events": len(prediction.sizes),
        "unknown_ops": prediction.unknown_ops,
        "error": None,
    }


def measured_row(about: dict[str, Any], prediction: Prediction, measured: Measured) -> dict[str, Any]:
    """Returns a row with a measurement: both halves, the relative errors of the promise, and the compared streams."""
    half = {
        "allocated_bytes": measured.allocated_bytes,
        "reserved_bytes": measured.reserved_bytes,
        "total_bytes": measured.process_bytes,
        "step_ms": round(measured.step_ms, 3),
        "step_ms_spread": round(measured.step_ms_spread, 3),
        "process_source": measured.process_source,
        "context_bytes": measured.context_bytes,
        "peaks": [list(pair) for pair in measured.peaks],
        "loss": measured.loss,
        "scale": measured.scale,
    }
    promise = promised(prediction)
    errors = {key: promise[key] / half[key] - 1 for key in MEASURED_KEYS}
    return {
        **about,
        "promised": promise,
        "measured": half,
        "errors": {key: round(error, 6) for key, error in errors.items()},
        "replayed": replayed(measured.history),
        "stream": stream_part(measured, prediction),
        "by_op": dict(list(differing(measured.taken_by_op, prediction.taken_by_op).items())[:SHOWN_OPS]),
        "unknown_ops": prediction.unknown_ops,
        "error": None,
    }


def replayed(history: History) -> dict[str, int]:
    """Returns the peaks of the recorded stream in the simulated allocator.

    If they differ from the card's, the simulator is wrong, not the stream.
    """
    outcome = replay(numbered(history), AllocatorSettings(), None)
    return {"allocated_bytes": outcome.peak_allocated_bytes, "reserved_bytes": outcome.peak_reserved_bytes}


def stream_part(measured: Measured, prediction: Prediction) -> dict[str, Any]:
    """Returns the comparison of the streams, or the reason why they cannot be compared."""
    if not prediction.whole_batch:
        return {"matched_share": None, "why": "not all micro-batches are rehearsed: the streams differ by design"}
    found: Finding = compare_steps(signed(measured.history), measured.step_ends, prediction)
    return {**dataclasses.asdict(found), "matched_share": round(found.matched_share, 6)}


def _brief(decision: dict[str, Any]) -> dict[str, Any]:
    """Returns the decision without a long list of modules."""
    modules = decision.get("modules")
    if modules is None or len(modules) <= 3:
        return decision
    return {**decision, "modules": [*modules[:2], f"... {len(modules)} in all"]}
