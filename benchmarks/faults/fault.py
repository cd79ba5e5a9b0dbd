"""A planted fault: one text of one file that is replaced by a wrong one, and the tests that have to fail then."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib


@dataclasses.dataclass(frozen=True)
class Fault:
    """A small wrong change that would train wrongly, promise too few bytes or mislead silently."""

    name: str
    path: str
    """The file that is changed, relative to the root of the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files or test ids, at least one of which has to fail. A few seconds at most: name precise ids."""
    why: str
    """The harm that the fault does, as a main clause."""

    def apply(self, root: pathlib.Path) -> None:
        """Plant the fault in the checkout at `root`. The compiled file is removed, so that Python reads the text."""
        path = root / self.path
        path.write_text(path.read_text().replace(self.old, self.new, 1))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()


def why_stale(fault: Fault, root: pathlib.Path) -> str | None:
    """Return the reason why a fault no longer fits the checkout at `root`; None if it does."""
    path = root / fault.path
    if not path.is_file():
        return f"{fault.path} does not exist"
    count = path.read_text().count(fault.old)
    if count != 1:
        return f"its text occurs {count} times in {fault.path}, and must occur once: change `old`"
    if not fault.tests:
        return "it names no test"
    missing = [test for test in fault.tests if not _test_exists(test, root)]
    return f"there is no test {missing[0]}" if missing else None


def _test_exists(test: str, root: pathlib.Path) -> bool:
    """True if a file has the test function that an id names, or if the id is an existing file.

    Parameters are ignored, because finding them would need imports.
    """
    name, _, function = test.partition("::")
    path = root / name
    if not path.is_file():
        return False
    if not function:
        return True
    return function.partition("[")[0] in _functions_in(path.read_text())


@functools.cache
def _functions_in(text: str) -> frozenset[str]:
    """Return the names of the functions that a source text defines."""
    return frozenset(node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
