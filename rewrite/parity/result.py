"""The result of a comparison of two trainings: one row for each loss, gradient, parameter, buffer and optimizer state.

A difference is divided by the largest entry of all tensors of its module, and not by that of its own tensor: some
gradients, such as that of the key bias in attention, are sums that cancel to zero except for rounding errors. The
divisor is at least the largest entry of the whole model, divided by `TERMS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

MAY_BE_INFINITE = ("buffer", "parameter")
"""Kinds of quantities that may have entries that are not finite, if these are the same on both sides: a mask of -inf is
often a buffer. A loss or a gradient that is not finite shows nothing about the plan, so it does not pass."""

TERMS = 4096
"""Maximum number of rounding errors by which two orders of the same sum may differ.

The error of a sum of n terms is at most n rounding errors of the largest term, and typically about the square root of n
rounding errors (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). So 4096 covers sums of 2^12 terms in the
worst case, and of 2^24 terms typically. In double that is a relative difference of 9.1e-13."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of the planned step, compared with the same quantity of the reference step."""

    comparison: str
    """Name of the comparison: 'as planned', 'kept', 'overflow', 'in double', 'freeze', 'rounding', '8-bit state'."""
    kind: str
    """Kind of the quantity: 'loss', 'gradient', 'parameter', 'buffer', 'state' (of the optimizer), 'random', 'frozen',
    'updates', 'embedding', 'applied', 'undone' or 'run'."""
    name: str
    """Name of the tensor in the model; for a loss, the number of the step."""
    bound: float
    """Maximum relative difference that passes; 0.0 if every bit must be equal."""
    measured: float
    """Relative difference of the two quantities; NaN if they could not be compared."""
    bit_equal: bool
    passed: bool
    why: str = ""
    """Description of the fault, if it is not a numerical difference."""

    def __str__(self) -> str:
        wrong = self.why or f"relative difference {self.measured:.2g}, bound {self.bound:.2g}"
        return f"{self.comparison}: {self.kind} {self.name}: {wrong}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """The result of `rewrite.verify`: does the plan train like the step that it replaces? `str()` gives a report."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """Remarks on how the comparison differed from normal training, and why."""

    @property
    def passed(self) -> bool:
        """True if at least one quantity was compared, and all are within their bounds."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that did not pass."""
        return tuple(row for row in self.rows if not row.passed)

    def __str__(self) -> str:
        failed = self.failures
        lines = [f"parity: {'passed' if self.passed else f'FAILED, {len(failed)} of {len(self.rows)} quantities'}"]
        groups: dict[str, dict[str, list[Row]]] = {}
        for row in self.rows:
            groups.setdefault(row.comparison, {}).setdefault(row.kind, []).append(row)
        for comparison, kinds in groups.items():
            lines += [comparison, *(f"  {kind:<10}{_summary(rows)}" for kind, rows in kinds.items())]
        lines += [f"failed: {row}" for row in failed[:20]]
        if len(failed) > 20:
            lines.append(f"failed: {len(failed) - 20} more")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _summary(rows: list[Row]) -> str:
    """Summarize the rows of one kind in a line, which shows the largest difference (in relation to its bound)."""
    passed, equal = sum(row.passed for row in rows), sum(row.bit_equal for row in rows)
    text = f"{passed} of {len(rows)} pass, {equal} equal to the bit"
    differing = [row for row in rows if not row.bit_equal and math.isfinite(row.measured)]
    if differing:
        worst = max(differing, key=lambda row: row.measured / row.bound if row.bound else math.inf)
        text += f"; worst {worst.measured:.2g} ({worst.name}), bound {worst.bound:.2g}"
    return text


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of the finite entries, 0.0 if there are none."""
    return _finite_part(tensor).abs().max().item() if tensor.numel() else 0.0


def norm(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm of the finite entries."""
    return torch.linalg.vector_norm(_finite_part(tensor)).item()


def _finite_part(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isfinite(), tensor, 0)


def compare(
    comparison: str,
    kind: str,
    plain: Mapping[str, object],
    planned: Mapping[str, object],
    *,
    bound: float | Mapping[str, float],
    size: Callable[[torch.Tensor], float] = largest,
    scales: Mapping[str, float] | None = None,
) -> list[Row]:
    """Return one row for every name in `plain` or `planned`.

    Args:
        plain, planned: tensors or numbers of the reference step and of the planned step, by name.
        bound: maximum relative difference, one number for all rows or one number by name; 0.0 demands equal bits.
        size: function that measures a difference or a tensor, `largest` or `norm`.
        scales: by name, the sizes by which differences are divided; None for `module_scales`.
    """
    if bound == 0.0:
        scales = {name: size(_wide(value)) for name, value in plain.items()}
    elif scales is None:
        # A buffer that is the same on both sides, such as a mask of -1e38, does not make other buffers look alike.
        same = {name for name in plain if kind == "buffer" and name in planned and _equal(plain[name], planned[name])}
        scales = module_scales({name: 0.0 if name in same else size(_wide(value)) for name, value in plain.items()})
    rows = []
    for name in dict.fromkeys([*plain, *planned]):
        limit = bound if isinstance(bound, float) else bound.get(name, 0.0)
        if name not in planned or name not in plain:
            why = f"only the {'planned' if name in planned else 'reference'} step has one"
            rows.append(failed(comparison, kind, name, why, bound=limit))
        else:
            rows.append(_compared(comparison, kind, name, plain[name], planned[name], limit, size, scales[name]))
    return rows


def failed(comparison: str, kind: str, name: str, why: str, *, bound: float = 0.0) -> Row:
    """Return a row that did not pass, because of a fault `why` or because the quantity could not be compared."""
    return Row(
        comparison=comparison, kind=kind, name=name, bound=bound, measured=math.nan, bit_equal=False, passed=False,
        why=why,
    )  # fmt: skip


def held(comparison: str, kind: str, name: str, why_not: str) -> Row:
    """Return the row of a condition. It passes if `why_not`, the description of the fault, is empty."""
    if why_not:
        return failed(comparison, kind, name, why_not)
    return Row(
        comparison=comparison, kind=kind, name=name, bound=0.0, measured=0.0, bit_equal=True, passed=True
    )  # fmt: skip


def module_scales(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return, for each tensor, the magnitude by which its difference is divided to make it relative.

    It is the largest magnitude of a tensor in the same module, but at least the largest in the model divided by the
    number of roundings that are allowed for (`TERMS`).

    Args:
        sizes: magnitude of each tensor by name.
    """
    by_module: dict[str, float] = {}
    for name, size in sizes.items():
        owner = name.rpartition(".")[0]
        by_module[owner] = max(by_module.get(owner, 0.0), size)
    floor = max(sizes.values(), default=0.0) / TERMS
    return {name: max(by_module[name.rpartition(".")[0]], floor) for name in sizes}


def _compared(
    comparison: str,
    kind: str,
    name: str,
    plain_value: object,
    planned_value: object,
    bound: float,
    size: Callable[[torch.Tensor], float],
    scale: float,
) -> Row:
    """Compare one quantity: layout, dtype and shape first, then the numbers. Integers must be equal."""
    plain, planned = _tensor(plain_value), _tensor(planned_value)
    for attribute in ("layout", "dtype", "shape"):
        actual, expected = getattr(planned, attribute), getattr(plain, attribute)
        if actual != expected:
            return failed(comparison, kind, name, f"{attribute} is {actual} instead of {expected}", bound=bound)
    plain, planned = dense(plain), dense(planned)
    if not (torch.isfinite(plain).all() and torch.isfinite(planned).all()):
        if kind not in MAY_BE_INFINITE:
            return failed(comparison, kind, name, "is not finite", bound=bound)
        where, planned_where = ~plain.isfinite(), ~planned.isfinite()
        if not torch.equal(where, planned_where) or not _equal(plain[where], planned[where]):
            return failed(comparison, kind, name, "is not finite in the same entries on both sides", bound=bound)
    equal = _equal(plain, planned)
    difference = 0.0 if equal else size(_wide(planned) - _wide(plain))
    measured = difference / scale if scale else (0.0 if not difference else math.inf)
    exact = bound == 0.0 or not (plain.is_floating_point() or plain.is_complex())
    return Row(
        comparison=comparison, kind=kind, name=name, bound=0.0 if exact else bound, measured=measured, bit_equal=equal,
        passed=equal if exact else measured <= bound,
    )  # fmt: skip


def _equal(plain: object, planned: object) -> bool:
    """True if two quantities have the same dtype, shape and values. NaN equals NaN."""
    first, second = dense(_tensor(plain)), dense(_tensor(planned))
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _tensor(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a dense one."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _wide(value: object) -> torch.Tensor:
    """Return the value in double, or complex double, so that the comparison itself does not round."""
    tensor = dense(_tensor(value))
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
