"""The ledger of plans that were verified on the CPU: every row is complete, and every broken one has an explanation."""

from __future__ import annotations

import collections
import json
import pathlib

import pytest

pytestmark = pytest.mark.no_torch

LEDGER = pathlib.Path(__file__).parents[2] / "profiles" / "ledger" / "cpu.jsonl"
TOLERANCE = 1.01
ROW = {
    "model": str, "class": str, "parameters": int, "date": str, "python": str, "torch": str, "transformers": str,
    "batch_size": int, "optimizer": str, "techniques": list, "plan": list, "kept": bool, "steps": list, "parity": dict,
    "notes": list,
}  # fmt: skip
STEP = {"predicted_bytes": int, "measured_bytes": int, "kernel_bytes": int, "outside_bytes": int, "why": str}


def problems(row: dict) -> list[str]:
    """Returns the faults of a row: what it lacks, contradicts or leaves unexplained."""
    if row.get("error") is not None:
        return [] if row["error"] else ["an error needs words"]
    found = [f"'{key}' is {row.get(key)!r}" for key, kind in ROW.items() if not isinstance(row.get(key), kind)]
    if found:
        return found
    steps = row["steps"]
    for step in steps:
        found += [
            f"a step's '{key}' is {step.get(key)!r}" for key, kind in STEP.items() if type(step.get(key)) is not kind
        ]
    if found:
        return found
    if len(steps) != 3 or not row["plan"] or len(row["plan"]) != len(row["techniques"]):
        found.append("three steps, and a text for each technique, are needed")
    if any((step["predicted_bytes"] == step["measured_bytes"]) is bool(step["why"]) for step in steps):
        found.append("the steps that differ are not those with a reason")
    within = all(step["measured_bytes"] <= TOLERANCE * step["predicted_bytes"] for step in steps)
    if row["kept"] is not (within and row["parity"]["passed"]):
        found.append("'kept' is not what the numbers say")
    if row["parity"]["passed"] is bool(row["parity"]["failures"]) or not row["parity"]["quantities"]:
        found.append("parity contradicts itself")
    if any(step["why"] for step in steps) and not row.get("explained"):
        found.append("bytes differ, and the row does not explain it")
    if not row["kept"] and not row.get("explained"):
        found.append("broken, and not explained")
    return found


def rows() -> list[dict]:
    return [json.loads(line) for line in LEDGER.read_text().splitlines()]


def test_every_row_is_complete_agrees_with_itself_and_explains_what_differs():
    assert {row["model"]: found for row in rows() if (found := problems(row))} == {}


def test_it_has_many_models_each_once_with_every_technique():
    verified = [row for row in rows() if row["error"] is None]
    names = collections.Counter(row["model"] for row in rows())
    assert len(verified) >= 60 and set(names.values()) == {1}
    counts = collections.Counter(kind for row in verified for kind in row["techniques"])
    assert len(counts) >= 8 and min(counts.values()) >= 3


def test_most_are_equal_to_the_byte():
    verified = [row for row in rows() if row["error"] is None]
    equal = [row for row in verified if not any(step["why"] for step in row["steps"])]
    assert len(equal) >= 0.9 * len(verified)
    assert sum(row["kept"] for row in verified) >= 0.95 * len(verified)


def made_up(**changes) -> dict:
    step = {"predicted_bytes": 100, "measured_bytes": 100, "kernel_bytes": 1, "outside_bytes": 2, "why": ""}
    made = {key: kind() for key, kind in ROW.items()}
    parity = {"passed": True, "quantities": 9, "failures": [], "notes": []}
    made |= {"plan": ["bf16"], "techniques": ["mixed-precision"], "steps": [step] * 3, "parity": parity, "kept": True}
    return {**made, "error": None, **changes}


def test_rows_that_lack_something_contradict_themselves_or_explain_nothing_are_found():
    assert problems(made_up()) == []
    assert problems({key: value for key, value in made_up().items() if key != "torch"}) == ["'torch' is None"]
    assert problems(made_up(error="")) and not problems(made_up(error="refused"))
    more = {**made_up()["steps"][0], "measured_bytes": 102, "why": "aten.mm +2 B"}
    assert problems(made_up(steps=[more] * 3))
    assert problems(made_up(steps=[more] * 3, kept=False)) == [
        "bytes differ, and the row does not explain it", "broken, and not explained",
    ]  # fmt: skip
    assert problems(made_up(steps=[more] * 3, kept=False, explained="a reason")) == []
    assert problems(made_up(steps=[{**more, "why": ""}] * 3, kept=False, explained="a reason"))
    assert problems(made_up(parity={**made_up()["parity"], "passed": False}))
    assert problems(made_up(steps=made_up()["steps"][:2]))
