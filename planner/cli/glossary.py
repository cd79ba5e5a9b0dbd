"""Explains words of the report: finds entries of the glossary, which is also a page of the documentation."""

from __future__ import annotations

import difflib
import importlib.resources
import re

from planner.errors import PlannerError

_ENTRY = re.compile(r"^\*\*(?P<terms>[^*]+)\*\*\n: (?P<text>.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_MOST_NAMED = 5
"""Maximum number of words that the message for an unknown word names."""


def entries() -> dict[tuple[str, ...], str]:
    """Returns the entries of the glossary: their terms, and the text without line breaks and emphasis."""
    page = (importlib.resources.files("planner.cli") / "glossary.md").read_text(encoding="utf-8")
    return {
        tuple(match["terms"].split(", ")): " ".join(match["text"].replace("*", "").split())
        for match in _ENTRY.finditer(page)
    }


def explain(word: str) -> list[str]:
    """Returns the entries of the glossary for a word, each as 'term, other term: text'.

    The word may be a term, a part of a term ('slack'), or a plural or singular of these, in upper or lower case.

    Raises:
        PlannerError: the glossary does not have the word; the message names the nearest ones.
    """
    known = entries()
    asked = _normal(word)
    found = [terms for terms in known if asked in map(_normal, terms)]
    found = found or [terms for terms in known if any(asked in _normal(term).split() for term in terms)]
    if not found:
        terms = [term for terms in known for term in terms]
        by_spelling = {part: term for term in reversed(terms) for part in (*_normal(term).split(), _normal(term))}
        near = difflib.get_close_matches(asked, by_spelling, n=_MOST_NAMED)
        names = dict.fromkeys(by_spelling[name] for name in near)
        remedy = f"did you mean {' or '.join(names)}?" if near else f"it has {', '.join(terms)}"
        raise PlannerError(f"the glossary does not have '{word}': {remedy}")
    return [f"{', '.join(terms)}: {known[terms]}" for terms in found]


def _normal(term: str) -> str:
    """Returns a term in lower case with blanks for hyphens, and its words without the plural's s."""
    return " ".join(re.sub(r"(?<=ch)es$|s$", "", word) for word in term.lower().replace("-", " ").split())
