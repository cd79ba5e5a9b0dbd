"""A technique is three places: a decision, a rule and an entry in the search space (docs/add-a-technique.md).

Other files ask a decision for its role and properties. So the class of a decision is named in few files.
"""

from __future__ import annotations

import ast
import functools
import pathlib

import pytest

from planner.plan_types.decision_base import Decision
from planner.plan_types.techniques import KINDS

ROOT = pathlib.Path(__file__).parents[2]
MOST_FILES = 5
"""Maximum number of files that name one decision: its definition, its rule, its entry, and two with a good reason."""
ENTRIES = ("planner/space", "planner/recompute")
"""Rooms of the search space."""


def sources(*folders: str) -> list[pathlib.Path]:
    """Python files by their real paths, without the links `planner/rewrite` and `planner/profiles`."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    links = (ROOT / "planner/rewrite", ROOT / "planner/profiles")
    return sorted(path for path in found if not any(link in path.parents for link in links))


@functools.cache
def names_in(path: pathlib.Path) -> frozenset[str]:
    """Names that a file imports from ours or uses as plain names; `torch.optim.Optimizer` is none of them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("planner."):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "decisions":
            names.add(node.attr)
    return frozenset(names)


@functools.cache
def constructed_in(path: pathlib.Path) -> frozenset[str]:
    """Names that a file calls."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return frozenset(node.func.id for node in calls if isinstance(node.func, ast.Name))


def files_that_name(decision: type[Decision]) -> set[str]:
    paths = sources("planner", "rewrite", "profiles")
    return {str(path.relative_to(ROOT)) for path in paths if decision.__name__ in names_in(path)}


@pytest.mark.parametrize("decision", KINDS.values(), ids=KINDS)
def test_a_decision_is_named_in_few_files(decision):
    files = files_that_name(decision)
    definition = decision.__module__.replace(".", "/") + ".py"
    assert {definition, f"rewrite/rules/{decision.rule_name()}.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)


@pytest.mark.parametrize("decision", KINDS.values(), ids=KINDS)
def test_a_decision_has_one_entry_in_the_search_space(decision):
    entries = [path for path in sources(*ENTRIES) if decision.__name__ in constructed_in(path)]
    assert len(entries) == 1, entries


def test_every_decision_has_one_rule_in_a_file_of_its_name():
    files = {path.stem for path in (ROOT / "rewrite/rules").glob("*.py")} - {"__init__"}
    assert files == {decision.rule_name() for decision in KINDS.values()}


@pytest.mark.parametrize("decision", KINDS.values(), ids=KINDS)
def test_a_rule_has_a_function_for_live_models_and_one_for_emitted_files(decision):
    rule = decision.rule_name()
    tree = ast.parse((ROOT / f"rewrite/rules/{rule}.py").read_text())
    assert {rule, f"{rule}_source"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("decision", KINDS.values(), ids=KINDS)
def test_a_decision_says_what_others_ask(decision):
    assert decision.__doc__ and decision.kind and decision.role is not None and decision.fidelity is not None
    assert "describe" in vars(decision)
