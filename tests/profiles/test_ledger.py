"""The ledger of runs on cards: every row is complete, and the promises were kept within the bounds that we state."""

from __future__ import annotations

import json
import pathlib
import statistics

import pytest

pytestmark = pytest.mark.no_torch

LEDGER = pathlib.Path(__file__).parents[2] / "profiles" / "ledger"
MEDIAN = {"allocated_bytes": 0.005, "reserved_bytes": 0.01}
WORST = {"allocated_bytes": 0.02, "reserved_bytes": 0.04}
"""Largest relative errors of a promise that are accepted."""

ROW = {
    "case": str, "card": str, "card_source": str, "cuda_name": str, "driver": str, "date": str, "python": str,
    "torch": str, "transformers": str, "cuda": str, "cudnn": int, "model": str, "parameters": int, "batch": list,
    "optimizer": str, "plan": list, "command": str, "promised": dict, "measured": dict, "errors": dict,
    "replayed": dict, "stream": dict, "seconds": (int, float),
}  # fmt: skip
HALF = {"allocated_bytes": int, "reserved_bytes": int, "total_bytes": int, "step_ms": (int, float)}


def problems(row: dict) -> list[str]:
    """What a row lacks or has wrong."""
    found = [f"'{key}' is {row.get(key)!r}" for key, kind in ROW.items() if not isinstance(row.get(key), kind)]
    if found:
        return found
    for side in ("promised", "measured"):
        found += [
            f"{side} '{key}' is {row[side].get(key)!r}"
            for key, kind in HALF.items()
            if not isinstance(row[side].get(key), kind) or row[side][key] <= 0
        ]
    if found:
        return found
    for side in ("promised", "measured"):
        half = row[side]
        if not half["allocated_bytes"] <= half["reserved_bytes"] <= half["total_bytes"]:
            found.append(f"{side}: allocated, reserved and total do not grow")
    for key in HALF:
        if abs(row["errors"].get(key, 9.0) - (row["promised"][key] / row["measured"][key] - 1)) > 1e-5:
            found.append(f"the error of '{key}' is not that of the two numbers")
    if row.get("error") is not None:
        found.append("a row with an error is no measurement")
    return found


PROMISE = {
    "pair": str, "case": str, "budget": str, "card": str, "card_source": str, "driver": str,
    "date": str, "torch": str, "model": str, "parameters": int, "plan": list, "promised": dict, "kept": bool,
    "seconds": (int, float),
}  # fmt: skip


def rows_of_the_ledger(*, promises: bool = False) -> list[tuple[str, dict]]:
    """Rows of one kind, with their places."""
    rows = [
        (f"{path.name}:{number}", json.loads(line))
        for path in sorted(LEDGER.glob("*.jsonl"))
        if path.name.startswith("promise-") is promises and path.name != "cpu.jsonl"
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    if not rows:
        pytest.skip("the ledger holds no row yet: docs/gpu.md says how to measure on a card")
    return rows


def broken_promises(rows: list[tuple[str, dict]]) -> list[str]:
    """Bounds that these rows do not keep."""
    found = []
    for key in MEDIAN:
        errors = {f"{place} {row['case']}": abs(row["errors"][key]) for place, row in rows}
        if (median := statistics.median(errors.values())) > MEDIAN[key]:
            found.append(f"median error of {key}: {median:.3%}")
        found += [f"{name}: error of {key} {error:.3%}" for name, error in errors.items() if error > WORST[key]]
    return found


def test_every_row_is_complete_and_agrees_with_itself():
    assert {place: found for place, row in rows_of_the_ledger() if (found := problems(row))} == {}


def test_promises_were_kept_within_the_bounds():
    assert broken_promises(rows_of_the_ledger()) == []


def row_with(allocated_error: float, reserved_error: float) -> dict:
    promised = {"allocated_bytes": 1000, "reserved_bytes": 2000, "total_bytes": 3000, "step_ms": 1.0}
    measured = {
        **promised,
        "allocated_bytes": round(1000 / (1 + allocated_error)),
        "reserved_bytes": round(2000 / (1 + reserved_error)),
    }
    made = {key: (kind if isinstance(kind, type) else kind[0])() for key, kind in ROW.items()}
    errors = {key: promised[key] / measured[key] - 1 for key in HALF}
    return {**made, "case": "made up", "promised": promised, "measured": measured, "errors": errors, "error": None}


def test_a_row_within_the_bounds_passes_and_one_outside_is_named():
    good, bad = row_with(0.001, 0.002), row_with(0.05, 0.0)
    assert problems(good) == problems(bad) == []
    assert broken_promises([("a:1", good), ("a:2", good)]) == []
    assert any("a:3 made up" in line for line in broken_promises([("a:1", good), ("a:2", good), ("a:3", bad)]))


def test_a_row_that_lacks_something_or_contradicts_itself_is_refused():
    row = row_with(0.0, 0.0)
    assert problems({key: value for key, value in row.items() if key != "driver"}) == ["'driver' is None"]
    assert problems({**row, "errors": {**row["errors"], "allocated_bytes": 0.5}})
    assert problems({**row, "measured": {**row["measured"], "reserved_bytes": 1}})


def unexplained(rows: list[tuple[str, dict]]) -> list[str]:
    """Promises that a card broke, or that rows contradict, and of which nobody has written down why ('explained')."""
    found = []
    for place, row in rows:
        if lacking := [key for key, kind in PROMISE.items() if not isinstance(row.get(key), kind)]:
            found.append(f"{place}: {lacking[0]} is {row.get(lacking[0])!r}")
            continue
        measured, promised = row["measured"], row["promised"]
        names = ("allocated_bytes", "reserved_bytes", "total_bytes")
        over = measured is None or any(measured[name] > 1.01 * promised[name] for name in names)
        if row["kept"] and over:
            found.append(f"{place} {row['pair']}: it says kept, and its numbers say otherwise")
        if not row["kept"] and not row.get("explained"):
            found.append(f"{place} {row['pair']}: broken, and not explained")
    return found


def test_every_broken_promise_of_the_ledger_is_explained():
    assert unexplained(rows_of_the_ledger(promises=True)) == []


def promise_row(**changes) -> dict:
    made = {key: (kind if isinstance(kind, type) else kind[0])() for key, kind in PROMISE.items()}
    half = {"allocated_bytes": 100, "reserved_bytes": 200, "total_bytes": 300}
    return {**made, "promised": half, "measured": half, "kept": True, **changes}


def test_a_broken_promise_needs_an_explanation_and_a_kept_one_numbers_that_agree():
    more = {"allocated_bytes": 102, "reserved_bytes": 200, "total_bytes": 300}
    good, explained = promise_row(), promise_row(kept=False, measured=more, explained="a driver that takes more")
    assert unexplained([("a:1", good), ("a:2", explained)]) == []
    assert unexplained([("a:1", promise_row(kept=False, measured=more))])
    assert unexplained([("a:1", promise_row(kept=False, measured=None))])
    assert unexplained([("a:1", promise_row(measured=more))])
    assert unexplained([("a:1", {**good, "driver": None})])
