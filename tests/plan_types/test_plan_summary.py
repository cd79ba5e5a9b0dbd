"""A plan prints itself in one line, and as a table in a notebook."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib

import pytest

import planner
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan, Shortfall

pytestmark = pytest.mark.no_torch

SAVED = pathlib.Path(__file__).parents[1] / "fixtures" / "plans"


@pytest.fixture
def plan() -> Plan:
    loaded = Plan.load(sorted(SAVED.glob("*.json"))[0])
    times = {"baseline": 100, "peak": 125}
    changed = {
        name: dataclasses.replace(getattr(loaded, name), step_ns=ns, total_bytes=(5 + ns) << 20)
        for name, ns in times.items()
    }
    decisions = (Accumulation(micro_batch_size=2, micro_batches=4),)
    return dataclasses.replace(loaded, **changed, decisions=decisions, vram_bytes=200 << 20, shortfall=None)


def test_a_plan_is_one_line(plan) -> None:
    assert plan.summary() == (
        f"{plan.model.name} fits 200.0 MiB with 130.0 MiB (baseline 105.0 MiB), step 1.25 x slower than the baseline: "
        "accumulation"
    )
    assert repr(plan) == f"<Plan: {plan.summary()}>"


def test_a_plan_that_does_not_fit_says_so(plan) -> None:
    missing = Shortfall(missing_bytes=1, binding="activations", binding_bytes=1, next_step=None)
    assert "does not fit 200.0 MiB" in dataclasses.replace(plan, shortfall=missing).summary()
    assert "is too slow" in dataclasses.replace(plan, shortfall=dataclasses.replace(missing, missing_bytes=0)).summary()


def test_without_a_budget_it_says_what_the_step_needs(plan) -> None:
    assert dataclasses.replace(plan, vram_bytes=None).summary() == f"{plan.model.name} needs 130.0 MiB"


def test_a_notebook_shows_a_table_and_the_decisions(plan) -> None:
    page = dataclasses.replace(plan, model=dataclasses.replace(plan.model, name="<Net>"))._repr_html_()
    assert "&lt;Net&gt;" in page and "<td>130.0 MiB</td>" in page
    assert f"<li>{plan.decisions[0].describe()}</li>" in page


def test_the_package_knows_its_version() -> None:
    assert planner.__version__ == importlib.metadata.version("torch-planner")
