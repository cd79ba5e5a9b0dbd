"""The types of words are the words that are accepted when the program runs."""

from __future__ import annotations

import typing

import planner
from planner.cli.training_lines import LOOPS
from planner.plan_types import words
from planner.plan_types.decisions import Fidelity
from planner.plan_types.techniques import KINDS
from planner.workload.optimizer_choice import OPTIMIZERS


def test_each_type_has_exactly_the_words_that_are_accepted():
    assert typing.get_args(words.FidelityName) == tuple(fidelity.name.lower() for fidelity in Fidelity)
    assert typing.get_args(words.Technique) == tuple(KINDS)
    assert set(typing.get_args(words.OptimizerName)) == set(OPTIMIZERS)
    assert set(typing.get_args(words.Loop)) == set(LOOPS)


def test_the_public_functions_have_these_types():
    for function in (planner.plan, planner.tradeoff):
        types = function.__annotations__
        assert types["fidelity"] == "FidelityName" and types["optimizer"] == "OptimizerChoice"
        assert [types[name] for name in ("force", "forbid", "only")] == [
            "Techniques",
            "Techniques",
            "Techniques | None",
        ]


def test_a_number_has_its_noun_in_the_singular_or_the_plural():
    assert [words.counted(number, "card") for number in (0, 1, 2048)] == ["0 cards", "1 card", "2048 cards"]
    assert words.counted(2048, "step", with_commas=True) == "2,048 steps"
    assert typing.get_args(words.Sharding) == words.SHARDINGS
