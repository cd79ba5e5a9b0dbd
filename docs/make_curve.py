"""Draw docs/images/memory-curve.svg: the memory of one training step, before and after each decision of a plan.

    python docs/make_curve.py

The curves are real recordings: RoBERTa with 12 layers, 32 x 128 tokens, AdamW, fp32, rehearsed without a GPU on the
profile `bare`, which counts the bytes of tensors and nothing else. The script also prints the figures that
docs/how-it-works.md quotes.
"""

from __future__ import annotations

import pathlib

import numpy as np

from planner.estimate.roofline import op_ns
from planner.pipeline import plan_workload
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.sizes import GIB, format_size
from planner.profiles.device import DeviceProfile
from planner.recording.step_graph import StepGraph
from planner.rewrite.rehearse import certifying_graph
from planner.workload.cards import resolve_card
from planner.workload.loading import load_workload

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "roberta_12"
BATCH_SIZE, SEQ_LEN = 32, 128
ONLY = ("chunked-loss", "step-in-backward", "checkpoint")
BUDGET_SHARE = 0.35
"""Budget as a fraction of the baseline's peak."""

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 846, 24, 300
COLOURS = ("#9ca3af", "#d97706", "#7c3aed", "#2563eb")


def curve(graph: StepGraph, card: DeviceProfile) -> tuple[np.ndarray, np.ndarray]:
    """The last recorded step: predicted time in ms, and bytes alive, at each op."""
    first = next(op.tick for op in graph.ops if op.step == graph.steps - 1)
    live = graph.live_bytes()[first:]
    ticks = [op.tick - first for op in graph.ops if op.step == graph.steps - 1]
    ends = np.cumsum([op_ns(op, card) for op in graph.ops if op.step == graph.steps - 1]) / 1e6
    # The value at an op is the largest from its own tick up to the next op's: births and deaths have ticks too.
    highest = np.maximum.reduceat(live, ticks)
    return ends, highest


def columns(times: np.ndarray, live: np.ndarray, scale: float) -> list[tuple[float, int]]:
    """The largest value in each pixel column, so that the drawing keeps every peak."""
    pixels = np.minimum((times * scale).astype(int), RIGHT - LEFT)
    return [(LEFT + int(pixel), int(live[pixels == pixel].max())) for pixel in np.unique(pixels)]


def svg(curves: list[tuple[str, np.ndarray, np.ndarray]], budget_bytes: int) -> str:
    """The picture: one line per curve, the budget as a dashed line, and a legend with each peak."""
    longest = max(times[-1] for _, times, _ in curves)
    top_gib = int(max(live.max() for _, _, live in curves) / GIB) + 1
    scale = (RIGHT - LEFT) / longest

    def up(n_bytes: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * n_bytes / (top_gib * GIB)

    def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#374151") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Memory of one training step over time, for four sets of decisions">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for gib in range(top_gib + 1):
        lines.append(f'<path d="M{LEFT},{up(gib * GIB):.1f}H{RIGHT}" stroke="#e5e7eb"/>')
        lines.append(text(LEFT - 8, up(gib * GIB) + 4, f"{gib} GiB", "end"))
    lines.append(
        text((LEFT + RIGHT) / 2, BOTTOM + 20, f"predicted time in the step (0 to {longest:,.0f} ms)", "middle")
    )
    lines.append(f'<path d="M{LEFT},{up(budget_bytes):.1f}H{RIGHT}" stroke="#dc2626" stroke-dasharray="6 4"/>')
    lines.append(text(RIGHT, up(budget_bytes) - 6, f"budget {format_size(budget_bytes)}", "end", "#dc2626"))
    for number, (label, times, live) in enumerate(curves):
        points = columns(times, live, scale)
        # Bytes are constant while an op runs, so the line goes up or down first, and then across to the op's end.
        path = f"M{LEFT},{up(points[0][1]):.1f}" + "".join(f"V{up(n_bytes):.1f}H{x}" for x, n_bytes in points)
        lines.append(f'<path d="{path}" fill="none" stroke="{COLOURS[number]}" stroke-width="1.8"/>')
        y = BOTTOM + 42 + 17 * number
        lines.append(f'<path d="M{LEFT},{y - 4}h24" stroke="{COLOURS[number]}" stroke-width="3"/>')
        lines.append(text(LEFT + 32, y, f"{label}: peak {format_size(int(live.max()))}"))
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    work = load_workload(str(MODEL), batch_size=BATCH_SIZE, seq_len=SEQ_LEN, optimizer="adamw")
    card = resolve_card("bare", None)
    baseline = curve(certifying_graph(work, (), card), card)
    budget_bytes = int(baseline[1].max() * BUDGET_SHARE)
    constraints = parse_constraints(fidelity="exact", force=(), forbid=(), only=ONLY)
    plan = plan_workload(work, card, vram_bytes=budget_bytes, constraints=constraints)
    print(
        f"fits: {plan.fits}; promised {plan.solver.promised_bytes:,}, certified {plan.solver.certified_bytes:,} bytes"
    )
    curves = [("baseline", *baseline)]
    for count, decision in enumerate(plan.decisions, start=1):
        print(f"- {decision.describe()}")
        curves.append((f"+ {decision.kind}", *curve(certifying_graph(work, plan.decisions[:count], card), card)))
    for label, times, live in curves:
        print(f"{label}: peak {format_size(int(live.max()))}, step {times[-1]:,.1f} ms")
    (ROOT / "docs" / "images" / "memory-curve.svg").write_text(svg(curves, budget_bytes))


if __name__ == "__main__":
    main()
