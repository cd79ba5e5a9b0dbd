"""Makes the page: one HTML file that contains its data, style, scripts and the chart library, and loads nothing."""

from __future__ import annotations

import importlib.resources
import json
import string
from collections.abc import Iterator
from html import escape
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from planner.cli.page import sections
from planner.cli.page.recorded import PlanRecordings, Stage
from planner.cli.page.timeline import STACK, recording_data
from planner.cli.report import UNCHECKED, headline, provenance
from planner.cli.tradeoff_svg import front_svg
from planner.plan_types.decision_base import cards_of
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import format_size
from planner.plan_types.tradeoff import Tradeoff
from planner.plan_types.words import counted

_ASSETS = importlib.resources.files("planner.cli.page") / "assets"
_SCRIPTS = ("recording.js", "timeline.js", "treemap.js", "page.js")
_TITLES = {"baseline": "Baseline", "plan": "With the plan"}


def page_data(plan: Plan, recordings: PlanRecordings) -> dict[str, Any]:
    """Returns the data that the page's scripts draw, as JSON data.

    Keys: `stack`, the categories from the bottom of the charts to the top; `budget_bytes`, None without a budget;
    `recordings`, the results of `recording_data` for 'baseline' and, if the plan changes something, for 'plan'.
    """
    return {
        "stack": [str(category) for category in STACK],
        "budget_bytes": plan.limit_bytes,
        "recordings": {name: recording_data(recorded) for name, recorded in recordings.named.items()},
    }


def page(
    plan: Plan,
    recordings: PlanRecordings,
    stages: tuple[Stage, ...],
    code: str,
    tradeoff: Tradeoff | None = None,
) -> str:
    """Returns the page as text.

    Args:
        plan: the plan.
        recordings: its step without and with the decisions.
        stages: the steps in which the techniques are added one by one.
        code: the emitted training step.
        tradeoff: the trade-off from which the plan was taken; None if none was computed.
    """
    data = json.dumps(page_data(plan, recordings), separators=(",", ":"))
    verdict = sections.verdict(plan)
    notes = (*plan.notes, *((UNCHECKED,) if plan.fits and plan.decisions else ()), *_differences(recordings))
    return string.Template(_asset("page.html")).substitute(
        title=escape(f"{plan.model.name}: {verdict}"),
        mood=_mood(plan),
        verdict=escape(verdict),
        facts=escape(str(headline(plan))).replace("\n", "<br>"),
        figures=sections.figures(plan),
        lead=_lead(plan, recordings),
        steps=_buttons([(str(number), f"step {number + 1}") for number in range(recordings.baseline.graph.steps)]),
        charts="\n".join(_chart(plan, name) for name in recordings.named),
        columns="".join(f'<th scope="col">{name}</th>' for name in recordings.named),
        places="\n".join(
            f'<p class="place"><strong>{name}</strong> <span id="where-{name}"></span></p>' for name in recordings.named
        ),
        choices=_buttons([(name, _TITLES[name].lower()) for name in recordings.named]),
        plan=sections.plan_section(plan, stages),
        peak=sections.peak_section(plan) + sections.run_section(plan.run),
        tradeoff=sections.tradeoff_section(tradeoff, "" if tradeoff is None else front_svg(tradeoff)),
        code=_code(code),
        notes=sections.notes_list(notes),
        provenance=escape(str(provenance(plan))),
        style="\n".join((_asset("uplot/uPlot.min.css"), _asset("page.css"), _code_style())),
        data=data.replace("<", "\\u003c"),
        library=f"/*\n{_asset('uplot/LICENSE')}*/\n{_asset('uplot/uPlot.iife.min.js')}",
        script="\n".join(_asset(name) for name in _SCRIPTS),
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _mood(plan: Plan) -> str:
    return "" if plan.vram_bytes is None else "good" if plan.fits else "bad"


def _lead(plan: Plan, recordings: PlanRecordings) -> str:
    """Returns the sentences above the charts."""
    text = "Every byte that the process holds on the card, by category."
    if recordings.planned is not None:
        text += " Both charts have the same scales."
    text += " Two steps were rehearsed. The first creates optimizer state, and later ones run the ops of the second."
    if (cards := cards_of(plan.decisions)) > 1:
        text += f" The charts show one of {counted(cards, 'card')}."
        text += " Their time axis is that of computation, without communication."
    shown = len(recordings.planned.graph.micro_batch_sizes) if recordings.planned else 1
    real = max((decision.micro_batch_count for decision in plan.decisions), default=1)
    if shown < real:
        text += (
            f" The plan has {real} micro-batches. Those that allocate the same memory are drawn once, and take the "
            "time of all of them together."
        )
    return text


def _differences(recordings: PlanRecordings) -> Iterator[str]:
    """Yields a note for each recording whose peak is not that of the plan."""
    for name, recorded in recordings.named.items():
        if recorded.total_bytes != recorded.footprint.total_bytes:
            drawn, planned = format_size(recorded.total_bytes), format_size(recorded.footprint.total_bytes)
            why = (
                f"the chart shows the first {recorded.graph.steps} steps, and in a later step, free memory is more "
                "fragmented, so that the allocator reserves more"
                if recorded.is_as_planned
                else "two rehearsals of this step ran different ops, for example because the step draws random numbers "
                "on the host"
            )
            yield f"the chart of the {name} peaks at {drawn} and not at {planned}: {why}"


def _chart(plan: Plan, name: str) -> str:
    footprint = plan.baseline if name == "baseline" else plan.peak
    zoom = "".join(
        f'<button type="button" data-chart="{name}" data-zoom="{factor}" aria-label="{label}">{sign}</button> '
        for factor, label, sign in (("2", "zoom in", "+"), ("0.5", "zoom out", "&minus;"))
    )
    label = f"{_TITLES[name]}: memory over the training step, peak {format_size(footprint.total_bytes)}"
    return (
        f"<figure><figcaption><h3>{_TITLES[name]}: peak {format_size(footprint.total_bytes)}, "
        f"step {footprint.step_ns / 1e6:,.1f} ms</h3><span>{zoom}</span></figcaption>"
        f'<div class="chart" id="chart-{name}" tabindex="0" role="group" aria-label="{label}"></div></figure>'
    )


def _buttons(choices: list[tuple[str, str]]) -> str:
    return "".join(f'<button type="button" value="{value}">{label}</button>' for value, label in choices)


def _code(code: str) -> str:
    """Returns the section with the emitted training step."""
    body = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
    return (
        '<section aria-labelledby="code-title">\n<h2 id="code-title">The training step as code</h2>\n'
        "<p>This file is plain PyTorch and runs without this package; <code>--emit</code> writes it.</p>\n"
        f'<button type="button" id="copy">Copy</button>\n<pre tabindex="0"><code id="code">{body}</code></pre>\n'
        "</section>"
    )


def _code_style() -> str:
    light = HtmlFormatter(style="friendly").get_style_defs("#code")
    dark = HtmlFormatter(style="github-dark").get_style_defs("#code")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n#code {{ background: none; }}"
