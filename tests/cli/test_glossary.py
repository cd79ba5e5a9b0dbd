"""`--explain` knows every word that the report prints."""

from __future__ import annotations

import pathlib

import pytest

from planner.cli import main
from planner.cli.glossary import entries, explain
from planner.errors import PlannerError
from planner.plan_types.categories import Category
from planner.plan_types.decision_base import Fidelity
from planner.plan_types.techniques import KINDS

pytestmark = pytest.mark.no_torch

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "glossary.md"
OF_THE_REPORT = (
    "at most|allocated, as blocks|reserved by the allocator|total of the process|step time|baseline|peak|budget|margin|"
    "to spare|certified by rehearsal|promised|rehearsed|gap|optimal|solver|shortfall|x baseline|micro-batches|segments|"
    "slack|certified|kept op outputs|autocast|LoRA|pinned host memory"
)


@pytest.mark.parametrize(
    "word",
    [*map(str, Category), *KINDS, *(fidelity.name.lower() for fidelity in Fidelity), *OF_THE_REPORT.split("|")],
)
def test_every_word_of_the_report_is_explained(word):
    assert explain(word.split(",")[0])
    assert explain(word.upper().split(",")[0]) == explain(word.split(",")[0])


def test_every_entry_of_the_page_is_read():
    assert len(entries()) == sum(line.startswith("**") for line in PAGE.read_text().splitlines())
    assert all(text.endswith((".", ".)")) for text in entries().values())


def test_the_command_prints_the_entry(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--explain", "slack"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("allocator slack: Reserved minus")


def test_an_unknown_word_is_answered_with_the_nearest(capsys):
    assert main(["--explain", "slak"]) == 2
    assert "the glossary does not have 'slak': did you mean allocator slack?" in capsys.readouterr().err
    with pytest.raises(PlannerError, match=r"'qqq': it has .*workspaces"):
        explain("qqq")
