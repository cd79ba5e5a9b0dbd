"""Questions that are asked only to raise an error: a run that goes on has had them answered well.

    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ValueError(...)

A rehearsal is of a step that succeeds, so the answer is the one that does not raise, whatever the values are.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from types import FrameType

_ALL_TRUE = (("_check_tensor_all_with", "torch/__init__.py"), ("__init__", "torch/distributions/distribution.py"))
"""Functions of torch that raise unless the boolean they ask for is true: name, and where they are."""


def assertion_outcome(frame: FrameType) -> bool | None:
    """The answer to the boolean that `frame` is asking for with which it goes on; None if it is no mere check."""
    code = frame.f_code
    if any(code.co_name == name and code.co_filename.endswith(file) for name, file in _ALL_TRUE):
        return True
    asked = _position(frame)
    for statement, test, wanted in _checks(code.co_filename) if asked else ():
        if _span(statement) == asked or _contains(test, asked):
            leaves = {answer for leaf, answer in _leaves(test, wanted) if asked in (_span(leaf), _span(statement))}
            return leaves.pop() if len(leaves) == 1 else None
    return None


_Span = tuple[int, int, int, int]
"""First line, first column, last line, last column."""


def _position(frame: FrameType) -> _Span | None:
    """Where the instruction that is running comes from; a jump on a test comes from the test or its statement."""
    line, last_line, column, last_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return None if None in (line, last_line, column, last_column) else (line, column, last_line, last_column)


@functools.cache
def _checks(filename: str) -> tuple[tuple[ast.stmt, ast.expr, bool], ...]:
    """Every statement of a file that may only raise, its test, and the outcome with which it does not."""
    path = pathlib.Path(filename)
    if not path.is_file():
        return ()
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Assert):
            found.append((node, node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node):
            found.append((node, node.test, False))
    return tuple(found)


def _only_raises(node: ast.If) -> bool:
    return not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """What `not`, `and` and `or` are made of, each with an answer that leads to the wanted outcome."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _leaves(part, wanted)
    else:
        yield test, wanted


def _span(node: ast.stmt | ast.expr) -> _Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _contains(node: ast.expr, asked: _Span) -> bool:
    span = _span(node)
    return span[:2] <= asked[:2] and asked[2:] <= span[2:]
