"""The published JSON schema is that of the plan's types, and plans follow it."""

from __future__ import annotations

import json
import pathlib

import pytest

from planner.cli.plan_schema import plan_schema
from tests.plan_types.test_plan import example, full_example

pytestmark = pytest.mark.no_torch

PUBLISHED = pathlib.Path(__file__).parents[2] / "docs" / "plan.schema.json"


def test_the_published_schema_is_that_of_the_types():
    """If this fails: python -m planner.cli.plan_schema > docs/plan.schema.json"""
    assert json.loads(PUBLISHED.read_text()) == plan_schema()


def test_every_key_of_a_plan_is_in_the_schema():
    schema, data = plan_schema(), full_example().to_json()
    assert set(data) == set(schema["properties"]) == set(schema["required"])
    for name in ("model", "workload", "solver"):
        assert set(data[name]) == set(schema["properties"][name]["properties"])
    assert set(data["plan"]) == set(schema["$defs"]["footprint"]["properties"])


def test_plans_are_valid_and_changed_ones_are_not():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(plan_schema())
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    for plan in (example(), full_example()):
        data = json.loads(json.dumps(plan.to_json()))
        assert [error.message for error in validator.iter_errors(data)] == []
    for change in (
        {"schema_version": 1},
        {"vram_bytes": "6GiB"},
        {"decisions": [{"kind": "prune"}]},
        {"plan": data["plan"] | {"breakdown": {"CUDA context": 3}}},
    ):
        assert list(validator.iter_errors(data | change)), change
