"""Answers `bool(tensor)` when a model asks for it only in order to raise an error.

    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        raise ValueError(...)

A rehearsal has no values, so it cannot know whether `boxes` are valid. It plans a step that succeeds, so it answers
such that the error is not raised, and the plan's notes say so.

How it works: **this module reads the source code of the function that evaluates `bool(tensor)`.** It takes the position
(line and column) of the bytecode instruction that this function is executing, and parses its source file. Then it looks
for a *check* whose test contains that position: an `assert`, or an `if` without `else` whose only statement is a
`raise`. In a test with `not`, `and` and `or` it finds the operand that is being evaluated.

What can go wrong:

- A real step may fail the check. It then raises the error, whereas the rehearsal continued: the plan does not apply to
  that batch.
- If code catches the error (`try` around the check), the rehearsal takes only the branch without the error.
- A check of another form (one that logs before it raises, or that calls a function which raises) is not recognized. The
  rehearsal then ends with an error that names the line. The same holds for code without a source file (`exec`, a
  notebook cell), and for code without positions (`python -X no_debug_ranges`).
- The source file is read during the rehearsal. If it was edited after its import, positions may match another
  statement. A match still needs a check at exactly that position.
- If two operands at the same position need different answers, there is no answer.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from types import FrameType

_ALL_TRUE = (("_check_tensor_all_with", "torch/__init__.py"), ("__init__", "torch/distributions/distribution.py"))
"""(function name, end of the file name) of functions of torch that raise an error if the boolean is false.

They are listed because their source does not match a check: `_check_tensor_all_with`, for example, passes the boolean
to another function, which raises the error.
"""


def assertion_outcome(frame: FrameType) -> bool | None:
    """Returns the boolean with which the check that `frame` is executing does not raise an error.

    Returns None if the frame is executing no check: then it needs the boolean for another purpose.
    """
    code = frame.f_code
    if any(code.co_name == name and code.co_filename.endswith(file) for name, file in _ALL_TRUE):
        return True
    asked = _position(frame)
    if asked is None:
        return None
    for statement, test, wanted in _checks(code.co_filename):
        # A conditional jump has the position of its operand. If the test is simple, it has that of the whole statement.
        if _span(statement) == asked or _contains(test, asked):
            answers = {answer for leaf, answer in _leaves(test, wanted) if asked in (_span(leaf), _span(statement))}
            return answers.pop() if len(answers) == 1 else None
    return None


_Span = tuple[int, int, int, int]
"""A source position: first line, first column, last line, last column."""


def _position(frame: FrameType) -> _Span | None:
    """Returns the source position of the instruction that `frame` is executing; None if the code has no positions."""
    # An instruction takes two bytes, and `co_positions` has one entry for each.
    line, last_line, column, last_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


@functools.cache
def _checks(filename: str) -> tuple[tuple[ast.stmt, ast.expr, bool], ...]:
    """Returns the checks in a file: (statement, test, value of the test with which no error is raised)."""
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
    """True if the statement has the form `if test: raise ...` and nothing else."""
    return not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the innermost operands of `not`, `and` and `or`, each with its value if the test is to be `wanted`.

    If `a or b` is to be true, both operands get the value True, although one would be enough. This is safe: Python
    evaluates `b` only if `a` was false. In the same way both get False if `a and b` is to be false.
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
    """True if the position is inside of the node's source."""
    span = _span(node)
    return span[:2] <= asked[:2] and asked[2:] <= span[2:]
