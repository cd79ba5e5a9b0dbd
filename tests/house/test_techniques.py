"""House rules of techniques: a decision, a rule in a file of its name, and one entry in the search."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_every_decision_has_one_rule_in_a_file_of_its_name():
    from planner.plan_types.decisions import KINDS

    files = {path.stem for path in (ROOT / "rewrite/rules").glob("*.py")} - {"__init__"}
    names = {kind.replace("-", "_") for kind in KINDS}
    assert files == names
    for kind in names:
        tree = ast.parse((ROOT / f"rewrite/rules/{kind}.py").read_text())
        assert kind in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_decision_is_a_choice_of_the_search():
    from planner.plan_types.decisions import KINDS

    names = {
        node.func.id
        for path in (
            ROOT / "planner" / f"{name}.py"
            for name in (
                "space/outer_choices",
                "space/micro_batches",
                "space/frozen_prefixes",
                "space/lm_head",
                "recompute/units",
            )
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {decision.__name__ for decision in KINDS.values()} <= names
