"""Files of lengths."""

from __future__ import annotations

import pytest

from planner.errors import WorkloadError
from planner.run_memory.lengths import read_lengths

pytestmark = pytest.mark.no_torch


@pytest.mark.parametrize(
    "text",
    ["5\n3\n3\n", "5 1\n3 2\n", "5,1\n3,2", "5\t1\n3\t2\n", "[5, 3, 3]", '{"5": 1, "3": 2}', "[[5, 1], [3, 2]]"],
)
def test_each_form_gives_the_lengths(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths") == [5, 3, 3]


@pytest.mark.parametrize("text", ["", "a", "3 4 5", "[0]", "[1.5]", "{", "-2", "[true]", '{"5": {"6": 7}}', "[null]"])
def test_other_content_is_refused_with_the_forms(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(WorkloadError, match="one length per line") as refused:
        read_lengths(tmp_path / "lengths")
    assert "int()" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_lengths(tmp_path / "none")
