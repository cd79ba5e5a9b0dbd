"""Draws a trade-off as SVG: memory on the x axis, step time on the y axis, plans as points, the budget as a line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from planner.plan_types.sizes import GIB, MIB, format_size
from planner.plan_types.tradeoff import Tradeoff

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 736, 64, 396
_LINE, _GREY, _RED, _GREEN = "#2563a8", "#6b7280", "#b91c1c", "#15803d"
_TICKS = 6
"""Approximate number of labeled values on a linear axis."""
_LOG_FROM = 8
"""The time axis is logarithmic if the slowest step takes more than this many times as long as the fastest."""


def front_svg(tradeoff: Tradeoff) -> str:
    """Returns the SVG document. Memory is the total of the process; time is the predicted time of one training step."""
    footprints = [tradeoff.baseline, *(plan.peak for plan in tradeoff.points)]
    sizes = [footprint.total_bytes for footprint in footprints]
    if tradeoff.vram_bytes is not None and tradeoff.vram_bytes <= 1.5 * max(sizes):
        sizes.append(tradeoff.vram_bytes)
    across = _Axis(0, 1.06 * max(sizes), _LEFT, _RIGHT, logarithmic=False)
    times = [footprint.step_ns / 1e6 for footprint in footprints]
    logarithmic = max(times) > _LOG_FROM * min(times)
    up = _Axis(0.7 * min(times) if logarithmic else 0, 1.12 * max(times), _BOTTOM, _TOP, logarithmic=logarithmic)
    workload = tradeoff.as_it_is.workload
    title = (
        f"{tradeoff.as_it_is.model.name}, batch {workload.batch_size}, {workload.optimizer}: memory against step time"
    )
    body = [
        _text(_LEFT, 30, title, size=16, weight="bold"),
        *_frame(across, up),
        *_budget(tradeoff, across),
        *_line(tradeoff, across, up),
        *_baseline(tradeoff, across, up),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="system-ui, sans-serif" role="img" aria-label={quoteattr(title)}>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


class _Axis:
    """One axis: maps values to pixels, and chooses the round values that get a label."""

    def __init__(self, low: float, high: float, start: float, stop: float, *, logarithmic: bool) -> None:
        self._low, self._high, self._start, self._stop = low, high, start, stop
        self._logarithmic = logarithmic

    def at(self, value: float) -> float:
        """Returns the pixel coordinate of a value."""
        if self._logarithmic:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self, unit: float = 1) -> list[float]:
        """Returns the values that get a label: multiples of 1, 2 or 5 times a power of ten.

        Args:
            unit: what a round number counts, such as the bytes of 1 GiB. A logarithmic axis ignores it.
        """
        if self._logarithmic:
            powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
            values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [value for value in values if self._low <= value <= self._high]
        rough = (self._high - self._low) / unit / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = unit * power * next(digit for digit in (1, 2, 5, 10) if digit * power >= rough)
        return [step * number for number in range(math.ceil(self._low / step), math.floor(self._high / step) + 1)]


def _frame(across: _Axis, up: _Axis) -> Iterator[str]:
    """Yields the SVG elements of the grid lines with their labels, and of the titles of the axes."""
    unit, name = (GIB, "GiB") if across.ticks(MIB)[-1] >= GIB else (MIB, "MiB")
    for size in across.ticks(unit):
        x = across.at(size)
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}" stroke="#e5e7eb"/>'
        yield _text(x, _BOTTOM + 20, f"{size / unit:g}", anchor="middle")
    for milliseconds in up.ticks():
        y = up.at(milliseconds)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield _text(_LEFT - 8, y + 4, f"{milliseconds:,g}", anchor="end")
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 46, f"total memory of the process ({name})", anchor="middle", size=14)
    middle = (_TOP + _BOTTOM) / 2
    yield _text(
        22, middle, "predicted step time (ms)", anchor="middle", size=14, more=f' transform="rotate(-90 22 {middle})"'
    )


def _line(tradeoff: Tradeoff, across: _Axis, up: _Axis) -> Iterator[str]:
    """Yields a point for each plan, and a staircase line: the step time of the fastest plan inside each budget."""
    points = [(across.at(p.peak.total_bytes), up.at(p.peak.step_ns / 1e6)) for p in reversed(tradeoff.points)]
    if not points:
        return
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:]) + f"H{_RIGHT}"
    yield f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
    for plan, (x, y) in zip(reversed(tradeoff.points), points, strict=True):
        colour, radius = (_GREEN, 7) if plan is tradeoff.chosen else (_LINE, 5)
        techniques = ", ".join(decision.kind for decision in plan.decisions) or "baseline"
        label = f"{format_size(plan.peak.total_bytes)}, {plan.peak.step_ns / 1e6:,.1f} ms: {techniques}"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{escape(label)}</title></circle>'


def _baseline(tradeoff: Tradeoff, across: _Axis, up: _Axis) -> Iterator[str]:
    """Yields the point of the baseline and its label."""
    x, y = across.at(tradeoff.baseline.total_bytes), up.at(tradeoff.baseline.step_ns / 1e6)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#ffffff" stroke="{_GREY}" stroke-width="2"/>'
    yield _text(x - 10, y - 10, "baseline", anchor="end", colour=_GREY)


def _budget(tradeoff: Tradeoff, across: _Axis) -> Iterator[str]:
    """Yields a dashed line at the budget, or only a note if the axis ends before it; nothing without a budget."""
    if tradeoff.vram_bytes is None:
        return
    x = across.at(tradeoff.vram_bytes)
    if x > _RIGHT:
        yield _text(
            _RIGHT, _TOP - 8, f"budget {format_size(tradeoff.vram_bytes)}; more than all of these", anchor="end"
        )
        return
    yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}" stroke="{_RED}" stroke-dasharray="6 4"/>'
    yield _text(x, _TOP - 8, f"budget {format_size(tradeoff.vram_bytes)}", anchor="middle", colour=_RED)


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = "#111827", **more: str
) -> str:
    weight = f' font-weight="{more["weight"]}"' if "weight" in more else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}'
        f"{more.get('more', '')}>{escape(text)}</text>"
    )
