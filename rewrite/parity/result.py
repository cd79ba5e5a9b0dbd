"""What a comparison of two trainings says: one row for each loss, gradient, parameter, buffer and piece of state.

A difference is told relative to the largest entry of what it is a difference of. Where a sum vanishes, such as the
gradient of the keys' bias in attention, all that is left of it is rounding: so the largest entry is taken over the
tensors of one module, whose gradients are sums over the same terms, and is not below the rounding of the largest entry
of the whole model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

TERMS = 4096
"""How often a rounding error may add up where only the order of a sum differs: n terms are off by at most n roundings
of the largest one, and by about the square root of n as a rule (Higham, Accuracy and Stability of Numerical
Algorithms, 4.2): 4096 are enough for sums of 2^12 terms at worst, of 2^24 as a rule. In double that is 9.1e-13."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of the planned step, compared with that of the plain one."""

    comparison: str
    """Of which comparison: 'as planned', 'kept', 'overflow', 'in double', 'freeze', 'rounding', '8-bit state'."""
    kind: str
    """'loss', 'gradient', 'parameter', 'buffer', 'state', 'random', 'frozen', 'updates', 'embedding', 'applied',
    'undone' or 'run'."""
    name: str
    bound: float
    """Largest relative difference that passes; 0.0: every bit must be equal."""
    measured: float
    """Largest relative difference; NaN where there is nothing to compare."""
    bit_equal: bool
    passed: bool
    why: str = ""
    """What is wrong, where it is not a difference."""

    def __str__(self) -> str:
        wrong = self.why or f"relative difference {self.measured:.2g}, bound {self.bound:.2g}"
        return f"{self.comparison}: {self.kind} {self.name}: {wrong}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """Whether a plan trains as the step that it replaces. `str()` is a report for people."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What was done differently from training, and why."""

    @property
    def passed(self) -> bool:
        """True only if something was compared, and all of it is inside its bounds."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
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
    passed, equal = sum(row.passed for row in rows), sum(row.bit_equal for row in rows)
    text = f"{passed} of {len(rows)} pass, {equal} equal to the bit"
    differing = [row for row in rows if not row.bit_equal and math.isfinite(row.measured)]
    if differing:
        worst = max(differing, key=lambda row: row.measured / row.bound if row.bound else math.inf)
        text += f"; worst {worst.measured:.2g} ({worst.name}), bound {worst.bound:.2g}"
    return text


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor).item()


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
    """A row for every name that either side has.

    Args:
        plain, planned: tensors or numbers by name.
        bound: of all, or by name.
        size: of a difference and of a tensor, the largest entry or the norm.
        scales: what differences are relative to, by name; else the size of the tensors of the same module.
    """
    if bound == 0.0:
        scales = {name: size(_wide(value)) for name, value in plain.items()}
    elif scales is None:
        scales = module_scales({name: size(_wide(value)) for name, value in plain.items()})
    rows = []
    for name in dict.fromkeys([*plain, *planned]):
        limit = bound if isinstance(bound, float) else bound.get(name, 0.0)
        if name not in planned or name not in plain:
            why = f"only the {'planned' if name in planned else 'plain'} step has one"
            rows.append(failed(comparison, kind, name, why, bound=limit))
        else:
            rows.append(_compared(comparison, kind, name, plain[name], planned[name], limit, size, scales[name]))
    return rows


def failed(comparison: str, kind: str, name: str, why: str, *, bound: float = 0.0) -> Row:
    """The row of something that could not be compared."""
    return Row(
        comparison=comparison, kind=kind, name=name, bound=bound, measured=math.nan, bit_equal=False, passed=False,
        why=why,
    )  # fmt: skip


def held(comparison: str, kind: str, name: str, why_not: str) -> Row:
    """The row of a condition that is met, or not, for a reason."""
    if why_not:
        return failed(comparison, kind, name, why_not)
    return Row(
        comparison=comparison, kind=kind, name=name, bound=0.0, measured=0.0, bit_equal=True, passed=True
    )  # fmt: skip


def module_scales(sizes: Mapping[str, float]) -> dict[str, float]:
    """By name of a tensor: the largest size in its module, or the model's largest one over `TERMS` if that is more."""
    by_module: dict[str, float] = {}
    for name, found in sizes.items():
        owner = name.rpartition(".")[0]
        by_module[owner] = max(by_module.get(owner, 0.0), found)
    floor = max(sizes.values(), default=0.0) / TERMS
    return {name: max(by_module[name.rpartition(".")[0]], floor) for name in sizes}


def _compared(comparison, kind, name, plain, planned, bound, size, scale) -> Row:
    plain, planned = _tensor(plain), _tensor(planned)
    for what in ("layout", "dtype", "shape"):
        ours, theirs = getattr(planned, what), getattr(plain, what)
        if ours != theirs:
            return failed(comparison, kind, name, f"{what} is {ours} instead of {theirs}", bound=bound)
    plain, planned = dense(plain), dense(planned)
    if not (torch.isfinite(plain).all() and torch.isfinite(planned).all()):
        return failed(comparison, kind, name, "is not finite", bound=bound)
    equal = torch.equal(plain, planned)
    difference = 0.0 if equal else size(_wide(planned) - _wide(plain))
    measured = difference / scale if scale else (0.0 if not difference else math.inf)
    exact = bound == 0.0 or not (plain.is_floating_point() or plain.is_complex())
    return Row(
        comparison=comparison, kind=kind, name=name, bound=0.0 if exact else bound, measured=measured, bit_equal=equal,
        passed=equal if exact else measured <= bound,
    )  # fmt: skip


def _tensor(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _wide(value: object) -> torch.Tensor:
    tensor = dense(_tensor(value))
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
