"""Values that users state for lines of code."""

from __future__ import annotations

import pytest

from planner.errors import WorkloadError
from planner.plan_types.answers import Answers, parse_answer


def test_the_longest_stated_line_that_matches_counts():
    answers = Answers(values={"model.py:42": 1, "b/model.py:42": 2})
    assert (answers.at("/a/model.py:42"), answers.at("/b/model.py:42"), answers.at("/b/my_model.py:42")) == (1, 2, None)
    assert answers.unused(["/b/model.py:42"]) == ()
    assert answers.unused(["/a/model.py:42", "/b/model.py:4"]) == ("b/model.py:42",)


@pytest.mark.parametrize(
    "values",
    [{"model.py": 1}, {"model.py:x": 1}, {"": 1}, {":4": 1}, {4: 1}, {"a.py:4": "1"}, {"a.py:4": None},
     {"a.py:4": float("nan")}, {"a.py:4": float("inf")}, [("a.py:4", 1)]],
)  # fmt: skip
def test_anything_but_numbers_by_line_is_refused(values):
    with pytest.raises(WorkloadError, match=r"model\.py:42': 100"):
        Answers(values=values)


def test_the_text_of_the_command_is_a_line_and_a_number():
    assert parse_answer("a/model.py:42=true") == ("a/model.py:42", 1)
    with pytest.raises(WorkloadError, match="does not state a value"):
        parse_answer("model.py=3")
