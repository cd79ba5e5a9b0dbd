"""The check of the time model on the rows of the ledger."""

from __future__ import annotations

import json

import pytest

from benchmarks import times

pytestmark = pytest.mark.no_torch

GIB = 1 << 30


def row(budget_gib: float, step_ms: float, slowdown: float | None = 1.2, *, total_gib: float | None = None, **changes):
    made = {
        "pair": f"net at {budget_gib}GiB", "case": "net", "budget": f"{budget_gib}GiB", "card": "h200",
        "card_source": "calibrated 2026-11-22", "vram_bytes": int(budget_gib * GIB), "plan": [f"for {budget_gib}"],
        "promised": {"slowdown": 1.2, "step_ms": 10.0},
        "measured": {
            "slowdown": slowdown, "step_ms": step_ms, "total_bytes": int((total_gib or budget_gib) * GIB),
        },
    }  # fmt: skip
    return {**made, **changes}


def test_only_the_last_measurement_counts():
    rows = [row(2, 9.0), row(2, 8.0), row(3, 7.0, measured=None)]
    assert [one["measured"]["step_ms"] for one in times.trained(rows)] == [8.0]


def test_errors_of_slowdowns_and_of_times():
    rows = [row(1, 20.0, 1.0), row(2, 10.0, 1.2), row(3, 5.0, None)]
    assert times.slowdown_errors(rows).tolist() == pytest.approx([0.2, 0.0])
    assert times.step_errors(rows).tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_a_choice_is_held_against_all_plans_that_fit_the_budget():
    small, large, other = row(2, 10.0, total_gib=1.9), row(4, 12.0, total_gib=3.9), row(2, 1.0, case="another")
    rows = [small, large, other, row(3, 5.0, card="t4")]
    assert times.fastest(large, rows) is small
    assert times.missed(large, rows) == pytest.approx(0.2)
    assert times.missed(small, rows) == 0.0
    assert times.slower_choices(rows).row_count == 1
    assert not times.holds(rows)
    assert times.holds([small, row(4, 10.4, total_gib=3.9)])
    assert not times.holds([row(2, 10.0, 2.0)])


def test_the_table_tells_calibrated_cards_from_others(tmp_path, monkeypatch, capsys):
    path = tmp_path / "promise.jsonl"
    rows = [row(2, 10.0), row(4, 9.0), row(2, 30.0, card="t4", card_source="datasheet")]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    monkeypatch.setattr("sys.argv", ["times", str(path)])
    assert times.main() == 0
    shown = capsys.readouterr().out
    assert "calibrated" in shown and "datasheet" in shown and "2 of 2" in shown


def test_an_empty_ledger_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(times, "LEDGER", tmp_path)
    monkeypatch.setattr("sys.argv", ["times"])
    assert times.main() == 0
    assert "no plan has been trained on a card yet" in capsys.readouterr().out
