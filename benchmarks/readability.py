"""Draw docstrings and messages at random, for readers who do not know the code to say which they understand.

    python -m benchmarks.readability [--docstrings 60] [--messages 40] [--seed 7] > sample.txt

Each docstring or attribute note comes with the name that it documents and the line that defines it, as an editor would
show it; a message comes alone, as a user would see it. A reader marks each one as understood at first reading or not.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import pathlib
import random
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("planner", "rewrite", "profiles")
MIN_MESSAGE_WORDS = 4
"""Minimum number of words of a text in a `raise` or a log call to count as a message."""


def trees() -> Iterator[tuple[pathlib.Path, list[str], ast.Module]]:
    """Yield every source file with its lines and its syntax tree."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            yield path.relative_to(ROOT), text.splitlines(), ast.parse(text)


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield (place, defining line, text) of every docstring and attribute note."""
    for path, lines, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                number = getattr(node, "lineno", 1)
                yield f"{path}:{number}", "" if isinstance(node, ast.Module) else lines[number - 1].strip(), text
            body = getattr(node, "body", [])
            for before, after in itertools.pairwise(body) if isinstance(body, list) else ():
                is_note = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if is_note and isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after.value.value, str):
                    yield f"{path}:{before.lineno}", lines[before.lineno - 1].strip(), after.value.value


def messages() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every message that is raised or logged; what is filled in stands in braces."""
    for path, _, tree in trees():
        for node in ast.walk(tree):
            is_log = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warning", "info", "warn")
            if not (isinstance(node, ast.Raise) or is_log):
                continue
            for text in ast.walk(node):
                if isinstance(text, ast.JoinedStr) or (isinstance(text, ast.Constant) and isinstance(text.value, str)):
                    words = _as_written(text)
                    if len(words.split()) >= MIN_MESSAGE_WORDS:
                        yield f"{path}:{node.lineno}", words
                        break


def _as_written(text: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(text, ast.Constant):
        return str(text.value)
    parts = (p.value if isinstance(p, ast.Constant) else "{" + ast.unparse(p.value) + "}" for p in text.values)
    return "".join(map(str, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docstrings", type=int, default=60, help="number of docstrings and attribute notes (60)")
    parser.add_argument("--messages", type=int, default=40, help="number of messages (40)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the draw (7)")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for number, (place, line, text) in enumerate(draw.sample(list(docstrings()), options.docstrings), 1):
        print(f"D{number} [{place}]\n    {line}\n{text}\n")
    for number, (place, text) in enumerate(draw.sample(list(messages()), options.messages), 1):
        print(f"M{number} [{place}]\n{text}\n")


if __name__ == "__main__":
    main()
