"""The planted faults fit the source, and the driver reports what it should."""

from __future__ import annotations

import collections
import pathlib
import subprocess

import pytest

from benchmarks.faults.fault import Fault, why_stale
from benchmarks.faults.listed import FAULTS
from benchmarks.faults.running import BaselineFails, Verdict, outcomes

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_source_and_its_tests_exist(fault):
    assert why_stale(fault, ROOT) is None
    assert fault.new != fault.old and fault.why


def test_names_are_unique():
    counts = collections.Counter(fault.name for fault in FAULTS)
    assert not [name for name, count in counts.items() if count > 1]


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A small checkout with one function and its test."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "sums.py").write_text("def double(x):\n    return x + x\n")
    (root / "test_sums.py").write_text("from sums import double\n\n\ndef test_double():\n    assert double(3) == 6\n")
    (root / "link.py").symlink_to("sums.py")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def fault(old: str, new: str, *, tests: tuple[str, ...] = ("test_sums.py::test_double",)) -> Fault:
    return Fault(name="it", path="sums.py", old=old, new=new, tests=tests, why="it is wrong")


@pytest.mark.slow
@pytest.mark.thorough
def test_each_fault_gets_its_verdict_and_they_do_not_mix(checkout):
    expected = {
        fault("x + x", "x + 4"): (Verdict.KILLED, "test_sums.py::test_double"),
        fault("x + x", "2 * x"): (Verdict.SURVIVED, "it is wrong"),
        fault("return", "retrun"): (Verdict.BROKEN, "SyntaxError"),
        fault("x + y", "x"): (Verdict.STALE, "occurs 0 times in sums.py"),
        fault("x", "y"): (Verdict.STALE, "occurs 3 times in sums.py"),
        fault("x + x", "x", tests=("test_sums.py::test_half",)): (Verdict.STALE, "there is no test test_sums.py::test"),
        fault("x + x", "x", tests=()): (Verdict.STALE, "names no test"),
    }
    found = list(outcomes(list(expected), checkout))
    assert [outcome.verdict for outcome in found] == [verdict for verdict, _ in expected.values()]
    for outcome in found:
        assert expected[outcome.fault][1] in outcome.detail
    assert (checkout / "sums.py").read_text() == "def double(x):\n    return x + x\n"


def test_tests_that_fail_without_a_fault_are_an_error(checkout):
    (checkout / "sums.py").write_text("def double(x):\n    return x\n")
    with pytest.raises(BaselineFails, match="test_double"):
        list(outcomes([fault("return x", "return 2 * x")], checkout))
