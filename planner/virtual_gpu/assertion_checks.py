"""Answers `bool(tensor)` when a model asks for it only in order to raise an error.

    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ValueError(...)

A rehearsal has no values, so it cannot know whether `boxes` are valid. It plans a step that succeeds, so it takes the
outcome that does not raise, and the plan's notes say so.

How it works: **this module reads the source code of the asking function.** It takes the position (line and column) of
the bytecode instruction that runs in the asking frame, parses the file of that frame, and looks for an `assert`, or for
an `if` whose only statement is a `raise` and which has no `else`, whose test contains that position. `not`, `and` and
`or` are followed down to the operand that is being asked.

What can go wrong:

- A real step may fail the check. Then it raises where the rehearsal went on; the plan does not apply to that batch.
- Code that uses the exception as control flow (`try` around the check) takes only the branch without the exception.
- A check of another form (one that logs before it raises, or that calls a function which raises) is not recognised,
  and the rehearsal refuses with the line. So does code without a source file (`exec`, a notebook cell), or without
  positions (`python -X no_debug_ranges`).
- The file is read when the question is asked. If it was edited after its import, positions may match another
  statement; a match still needs an `assert` or `if ...: raise` at exactly that place.
- Two operands at the same position that need different answers give no answer.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from types import FrameType

_ALL_TRUE = (("_check_tensor_all_with", "torch/__init__.py"), ("__init__", "torch/distributions/distribution.py"))
"""Functions of torch that raise unless the boolean they ask for is true: function name and end of the file name.

`_check_tensor_all_with` passes the boolean to another function, which raises, so its source does not match a check.
"""


def assertion_outcome(frame: FrameType) -> bool | None:
    """Returns the value with which the boolean that `frame` asks for does not raise an error.

    None means that the frame asks for a different reason than to raise an error, so that the answer is unknown.
    """
    code = frame.f_code
    if any(code.co_name == name and code.co_filename.endswith(file) for name, file in _ALL_TRUE):
        return True
    asked = _position(frame)
    if asked is None:
        return None
    for statement, test, wanted in _checks(code.co_filename):
        # A conditional jump carries the position of its operand, or of the whole statement for a simple test.
        if _span(statement) == asked or _contains(test, asked):
            answers = {answer for leaf, answer in _leaves(test, wanted) if asked in (_span(leaf), _span(statement))}
            return answers.pop() if len(answers) == 1 else None
    return None


_Span = tuple[int, int, int, int]
"""First line, first column, last line, last column."""


def _position(frame: FrameType) -> _Span | None:
    """Returns the source position of the instruction that `frame` executes; None if the code object has none."""
    # An instruction takes two bytes, and `co_positions` has one entry for each.
    line, last_line, column, last_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


@functools.cache
def _checks(filename: str) -> tuple[tuple[ast.stmt, ast.expr, bool], ...]:
    """Returns the checks of a file: the statement, its test, and the outcome of the test that does not raise."""
    path = pathlib.Path(filename)
    if not path.is_file():
        return ()
    checks: list[tuple[ast.stmt, ast.expr, bool]] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Assert):
            checks.append((node, node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node):
            checks.append((node, node.test, False))
    return tuple(checks)


def _only_raises(node: ast.If) -> bool:
    """True if the statement only raises an error if its test is true."""
    return not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the operands of nested `not`, `and` and `or`, each with an answer that leads to the wanted outcome.

    All operands of an `or` are taken to be true, although one true operand would be enough: an operand is evaluated
    only if the operands before it did not decide.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _leaves(operand, wanted)
    else:
        yield test, wanted


def _span(node: ast.stmt | ast.expr) -> _Span:
    """Returns the source position of a node."""
    assert node.end_lineno is not None and node.end_col_offset is not None  # `ast.parse` always sets them
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _contains(node: ast.expr, asked: _Span) -> bool:
    """True if the position lies inside the node."""
    span = _span(node)
    return span[:2] <= asked[:2] and asked[2:] <= span[2:]
