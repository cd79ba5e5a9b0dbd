"""Chooses the size of the batch for a transformers model if the user states none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from planner import pipeline
from planner.derive.extrapolate import BASE_SIZES, extrapolate
from planner.estimate.footprint import measure
from planner.plan_types.words import counted
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.workload.budget import Budget
from planner.workload.loading import ONE_SAMPLE
from planner.workload.workload import Workload

_MOST_SAMPLES = 64
"""Maximum size of the batch: a larger one would often change what is learned."""


def with_default_batch(
    workload: Workload,
    load: Callable[[int], Workload],
    card: DeviceProfile,
    budget: Budget,
    watch: Watch | None = None,
) -> Workload:
    """Return the workload with the largest power of two of samples whose baseline is predicted to fit the budget.

    The baseline is predicted from those of two and three samples. If no prediction is possible or two samples do not
    fit, the batch has one sample. A workload whose batch size was stated is returned unchanged.

    Args:
        load: function that takes a batch size and returns the workload with a batch of this size.
    """
    if ONE_SAMPLE not in workload.notes:
        return workload
    two, three = (pipeline.record_step(load(samples), card, watch=watch) for samples in BASE_SIZES)
    samples = 1
    while samples < _MOST_SAMPLES:
        predicted = extrapolate(two, three, 2 * samples)
        if predicted is None or not measure(predicted, card, vram_bytes=budget.usable_bytes).fits:
            break
        samples *= 2
    if samples == 1:
        return workload
    largest = f"the largest power of two up to {_MOST_SAMPLES} whose baseline is predicted to fit"
    or_search = "" if workload.program is not None else ", or find the largest that fits with --largest-batch"
    note = (
        f"the batch has {counted(samples, 'sample')}, {largest}, because no size was given: state yours with "
        f"--batch-size{or_search}"
    )
    chosen = load(samples)
    return dataclasses.replace(chosen, notes=(*chosen.notes, note))
