"""Plant faults in copies of the checkout, and run their tests there."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from benchmarks.faults.fault import Fault, why_stale

SECONDS = 300
"""Maximum time of the tests of one fault. A fault that makes them run forever is killed, too."""


class Verdict(enum.Enum):
    """Outcome of a fault."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    STALE = "STALE"
    BROKEN = "BROKEN"
    """The tests could not run, for example because the changed file cannot be imported. That shows nothing."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The verdict of one fault."""

    fault: Fault
    verdict: Verdict
    detail: str
    """The test that failed, or the reason of another verdict."""


class BaselineFails(Exception):
    """The tests fail on the unchanged checkout, so that they could not show any fault."""


def outcomes(faults: Sequence[Fault], root: pathlib.Path) -> Iterator[Outcome]:
    """Yield the outcome of each fault.

    Raises:
        BaselineFails: the tests of the faults fail without a fault.
    """
    reasons = [why_stale(fault, root) for fault in faults]
    usable = [fault for fault, why in zip(faults, reasons, strict=True) if why is None]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        clean = pathlib.Path(folder) / "clean"
        copy_checkout(root, clean)
        if usable:
            tests = list(dict.fromkeys(test for fault in usable for test in fault.tests))
            code, output = run_tests(tests, clean, seconds=SECONDS * len(usable))
            if code != 0:
                raise BaselineFails(output)
        for fault, why in zip(faults, reasons, strict=True):
            if why is not None:
                yield Outcome(fault, Verdict.STALE, why)
                continue
            changed = pathlib.Path(folder) / "changed"
            shutil.copytree(clean, changed, symlinks=True)
            fault.apply(changed)
            yield _outcome(fault, changed)
            shutil.rmtree(changed)


def _outcome(fault: Fault, changed: pathlib.Path) -> Outcome:
    """Run the tests of a fault in the checkout that has it."""
    try:
        code, output = run_tests(fault.tests, changed, seconds=SECONDS)
    except TimeoutError:
        return Outcome(fault, Verdict.KILLED, f"the tests do not end within {SECONDS} s")
    if code == 0:
        return Outcome(fault, Verdict.SURVIVED, fault.why)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if code != 1 or failed is None:  # pytest: 1 means that tests failed, other codes that it could not run them
        return Outcome(fault, Verdict.BROKEN, f"pytest ended with code {code}: {output.strip()[-400:]}")
    return Outcome(fault, Verdict.KILLED, failed[1])


def copy_checkout(root: pathlib.Path, target: pathlib.Path) -> None:
    """Copy the files that git tracks. Links stay links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name, follow_symlinks=False)


def run_tests(tests: Sequence[str], root: pathlib.Path, *, seconds: float) -> tuple[int, str]:
    """Run tests in a checkout until the first one fails. Return pytest's exit code and its output.

    pytest runs in a fork of this process, which saves most of the time if this process has imported the libraries that
    the tests need (`import_libraries`). Our own modules come from the checkout.

    Raises:
        TimeoutError: the tests do not end within `seconds`.
    """
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become_pytest(tests, root, output.fileno())
        code = _wait(child, seconds)
        output.seek(0)
        return code, output.read()


def import_libraries() -> None:
    """Import libraries that tests import, so that forks of this process have them."""
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    for library in ("numpy", "pytest", "torch", "torch.utils.checkpoint", "transformers", "hypothesis"):
        if importlib.util.find_spec(library.partition(".")[0]) is not None:
            importlib.import_module(library)


def _become_pytest(tests: Sequence[str], root: pathlib.Path, output: int) -> NoReturn:
    """Run pytest in this process, and end it with pytest's exit code."""
    code = 3  # pytest's own code for an internal error
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 (it is open as long as this process)
        os.setsid()  # a group of its own, so that what the tests start can be ended with them
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        here = pathlib.Path(__file__).parents[2]
        sys.path[:] = [str(root), *(path for path in sys.path if path and pathlib.Path(path).resolve() != here)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "planner", "tests")]:
            del sys.modules[name]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, seconds: float) -> int:
    """Wait for a process and return its exit code. Ends it and raises `TimeoutError` after `seconds`."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise TimeoutError
    except BaseException:  # also KeyboardInterrupt, which the child's own group does not get
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
