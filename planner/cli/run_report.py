"""The part of a plan's report that describes the memory of the whole run."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan_types.plan import RunFacts
from planner.plan_types.plan_parts import TRAINING_STEP
from planner.plan_types.sizes import format_size
from planner.plan_types.words import counted
from planner.whole_run.activities import AVERAGING, EVALUATION, RESUMING

_ADVICE = {
    EVALUATION: "lower --eval-batch-size, or keep fewer logits on the card (a lower --eval-samples, or none)",
    AVERAGING: "keep the average on the CPU, and leave it out of --between",
    RESUMING: 'load with map_location="cpu", and leave it out of --between',
}
"""Advice about a moment that needs too much memory, by its name."""


def run_parts(run: RunFacts) -> list[RenderableType]:
    """Returns the table of the moments of a run, the lines about it, and the table of changes that would help."""
    table = Table(title="Memory of the whole run", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("its tensors,\nat most", justify="right")
    table.add_column("takes from\nthe card", justify="right")
    for moment in run.moments:
        style = "bold" if moment.name == run.binding else None
        table.add_row(
            moment.name,
            format_size(moment.tensor_bytes),
            format_size(moment.new_bytes) if moment.new_bytes else "-",
            style=style,
        )
    return [table, Text(run_sentence(run)), *_changes(run)]


def run_advice(run: RunFacts) -> str:
    """Returns a sentence that says what the user can do about a run that does not fit."""
    if run.binding != TRAINING_STEP:
        advice = _ADVICE.get(run.binding, "keep fewer tensors on the card")
        return f"No plan for the training step makes the {run.binding} smaller: {advice}."
    return "Try shorter samples (--seq-len), a smaller batch, or a lower fidelity (--fidelity)."


def run_sentence(run: RunFacts) -> str:
    """Returns sentences about the simulated steps, and about when memory reaches its maximum."""
    is_step = run.binding == TRAINING_STEP
    batches = "one shape of batches"
    if run.shapes > 1:
        (fewest, most), (shortest, longest) = run.samples, run.lengths
        samples = f", {fewest:,} to {most:,} samples" if fewest < most else ""
        lengths = f", lengths {shortest:,} to {longest:,}" if shortest < longest else ""
        batches = f"{run.shapes} different shapes of batches{samples}{lengths}"
    rehearsed = f"; {run.shapes - run.predicted_shapes} of them rehearsed" if run.predicted_shapes else ""
    which = f"The {run.binding} number {run.settled:,}" if is_step else f"The {run.binding}"
    reaches = "reaches the maximum of memory" if run.fits else "does not fit"
    steps = counted(run.steps, "step", with_commas=True)
    text = f"{steps} simulated ({batches}{rehearsed}; order: {run.order}). {which} {reaches}."
    if run.retries:
        times = "once" if run.retries == 1 else f"{run.retries:,} times"
        text += f" To stay inside the budget, the allocator empties its cache {times}; each time makes a step wait."
    return text


def _changes(run: RunFacts) -> list[RenderableType]:
    """Returns the table of the changes of the run; empty if there are none."""
    if not run.changes:
        return []
    table = Table(title="The same run with a change", title_justify="left", title_style="bold", box=None)
    table.add_column("total, without a limit", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("change", overflow="fold")
    for change in run.changes:
        table.add_row(format_size(change.total_bytes), f"{change.relative_time:.2f} x", change.change)
    return [Text(), table]
