"""Plain words: docstrings, attribute notes, comments, messages and pages are sentences of ordinary technical English.

CONTRIBUTING.md has the rules. A file that fails names the line, the words and the rule.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("planner", "rewrite", "profiles")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("CONTRIBUTING.md")])
BANNED = (
    "told",
    "beside",
    "so many",
    "as it is",
    "by itself",
    "gets through",
    "held against",
    "lies in",
)
_BANNED = re.compile(
    r"(?<!soon\s)\b(?:" + "|".join(words.replace(" ", r"\s+") for words in BANNED) + r")\b", re.IGNORECASE
)
_HEADLESS = re.compile(r"(?:Of|What(?!-if)|Whether|None\s+where|Nothing\s+where)\b(?!.*\?)|Where\b[^,.]*\.", re.DOTALL)
"""A docstring or note that starts so has no subject, unless it is a question or goes on with a main clause."""
ALLOWED: dict[str, tuple[str, ...]] = {
    "CONTRIBUTING.md": BANNED,  # it lists them
}
"""By file, texts that quote a name or a message of somebody else; each with the reason in a comment."""


def files() -> list[pathlib.Path]:
    """Returns all files that are checked. Links such as planner/rewrite are left out: the folder itself is checked."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    own = {path for path in found if path.resolve().relative_to(ROOT) == path.relative_to(ROOT)}
    return [*sorted(own), *PAGES]


def notes(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields docstrings, and the strings below an attribute or a constant."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each string literal and each block of comments in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield begin, " ".join(comment)
                comment = []
            begin = token.start[0] if not comment else begin
            last = token.start[0]
            comment.append(token.string.lstrip("# "))
    if comment:
        yield begin, " ".join(comment)


def faults(path: pathlib.Path) -> list[str]:
    """Returns one line for each fault in a file."""
    source = path.read_text()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    allowed = ALLOWED.get(name, ())
    found = []
    for line, text in texts(source) if path.suffix == ".py" else [(1, source)]:
        for match in _BANNED.finditer(text):
            at = line + text.count("\n", 0, match.start())
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            if not any(quoted in around for quoted in allowed):
                found.append(f"{name}:{at}: '{match.group()}' is not plain: ... {around} ...")
    if path.suffix == ".py":
        found += [
            f"{name}:{note.lineno}: has no subject: {note.value.strip().splitlines()[0]}"
            for note in notes(ast.parse(source))
            if _HEADLESS.match(note.value.strip())
        ]
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_written_in_plain_words(path):
    found = faults(path)
    assert not found, "\n".join(found)


def test_the_allow_list_names_files_that_exist_and_texts_that_are_in_them():
    for name, quoted in ALLOWED.items():
        source = (ROOT / name).read_text()
        assert all(text in " ".join(source.split()) for text in quoted), name


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""Of a module."""\n', "has no subject"),
        ('"""What it takes."""\n', "has no subject"),
        ('class A:\n    size: int\n    """Whether it fits."""\n', "has no subject"),
        ('"""Is it so?"""\nA = f"{1} is Told"\n', "'Told' is not plain"),
        ("A = 1  # stays as\nB = 2  # it is here\n", "'as it is' is not plain"),
        ("# so\n# many words\n", "'so many' is not plain"),
        ('"""Where it went."""\n', "has no subject"),
        ('"""Where it went, it stays."""\n', None),
        ('"""What can go wrong? See below."""\n# Office, toldo\nA = "besides"\n', None),
    ],
)
def test_faults_are_seen_in_docstrings_notes_comments_and_messages(tmp_path, source, fault):
    (tmp_path / "it.py").write_text(source)
    found = faults(tmp_path / "it.py")
    assert [fault in text for text in found] == ([True] if fault else [])
