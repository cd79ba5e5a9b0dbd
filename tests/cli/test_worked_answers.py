"""The worked answers of docs/past-one-card.md: their commands are read, and one is answered for a smaller model."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shlex

import pytest

from planner.cli.command import main
from planner.cli.option_checks import refuse_what_does_not_go_together
from planner.cli.options import parser
from planner.plan_types.plan import Plan
from planner.profiles import load

ROOT = pathlib.Path(__file__).parents[2]
SECTION = re.compile(r"^## Worked answers\n(.*?)^## ", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^plan (.+)$", re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of each `plan` command in the section, in order."""
    section = SECTION.search((ROOT / "docs" / "past-one-card.md").read_text())
    assert section is not None
    blocks = re.findall(r"^```bash\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)
    return [shlex.split(found) for block in blocks for found in COMMAND.findall(block.replace("\\\n", " "))]


def test_there_are_three_worked_answers() -> None:
    assert len(commands()) == 3


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_of_a_worked_answer_can_be_given(words: list[str]) -> None:
    options = parser().parse_args(words)
    refuse_what_does_not_go_together(options)
    assert (ROOT / options.model / "config.json").is_file()
    assert load(options.gpu).cuda_names
    assert options.batch_size >= 2


@pytest.mark.slow
@pytest.mark.thorough
def test_the_question_for_the_fewest_cards_is_answered_for_a_smaller_model(tmp_path, monkeypatch, capsys) -> None:
    """The options of the first answer, for two narrow layers and a budget that one card exceeds."""
    words = next(found for found in commands() if "fewest" in found)
    config = json.loads((ROOT / words[0] / "config.json").read_text())
    heads = config["num_attention_heads"]
    small = {"hidden_size": 4 * heads, "head_dim": 4, "intermediate_size": 256, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **small, "vocab_size": 512}))
    monkeypatch.chdir(tmp_path)
    changed = {"--vram": "3MiB", "--batch-size": "8", "--seq-len": "16", "--gpu": "bare"}
    options = [changed.get(before, word) for before, word in itertools.pairwise(words)]
    assert main([str(tmp_path), *options, "--save", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    assert plan.fits
    cards = next(decision.cards for decision in plan.decisions if decision.kind == "shard")
    assert cards > 1
    assert "1 card: no plan fits" in capsys.readouterr().out
