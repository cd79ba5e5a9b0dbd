"""Check the guess of which tensors of a batch have a row for each sample, by rehearsing the model with more samples.

To split a batch, the planner must know in which tensors dimension 0 is the batch dimension. Unless the user says it,
the planner takes the tensors whose dimension 0 has the size of the batch. A mask [T, T] or a weight for each of D
features has that size too if T or D happens to equal the batch size. In micro-batches of one sample it would be cut to
one row, which broadcasts, and the step would train something else without any error.

A tensor with another number of rows, such as the edges [2, E] of a graph with N nodes, may be the same for all samples
or may refer to them. No rehearsal can tell: indices have no values in it. So the batch is not split unless the user
names the tensors.

Otherwise forward and loss are rehearsed with twice the samples. A tensor that was taken wrongly then gets twice its
rows, which do not broadcast, so that the model raises an error. A right guess can fail too, if the model has a maximum
batch size. So if twice the samples fail, the model is rehearsed with half of them, and the guess counts as right if
that works.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import final

from planner.errors import StepError, WorkloadError
from planner.plan_types.words import counted
from planner.virtual_gpu.forked_process import Child
from planner.workload.workload import Workload, tensors_of

StartForward = Callable[[Workload, int], Child]
"""Starts the rehearsal of forward and loss on a number of samples. `.result()` raises if the model fails on them."""


@final
class BySampleCheck:
    """Rehearses a workload on twice the samples. The first rehearsal starts at once, in another process.

    Args:
        workload: the workload. Nothing is rehearsed if it is known which tensors have a row for each sample, because
            the user named them or the planner made the batch, or if the batch is a single sample.
        start: starts a rehearsal.
    """

    def __init__(self, workload: Workload, start: StartForward) -> None:
        self._workload, self._start = workload, start
        needed = not workload.is_by_sample_stated and workload.batch_size > 1 and not workload.with_other_rows
        self._child = start(workload, 2 * workload.batch_size) if needed else None

    @functools.cached_property
    def why_not(self) -> str | None:
        """The reason why it is not known which tensors of the batch have a row for each sample; None if it is known."""
        if other := self._workload.with_other_rows:
            return (
                f"the batch has {counted(self._workload.batch_size, 'sample')}, and {other}, so the planner cannot "
                "tell whether this tensor is the same for all samples: if it is, name the tensors that have a row for "
                "each sample with --by-sample (by_sample=[...] in Python); if it refers to samples, like the edges of "
                "a graph, the batch cannot be split"
            )
        child, self._child = self._child, None
        if child is None or (error := _error(child)) is None:
            return None
        half = self._workload.batch_size // 2
        if half > 1 and _error(self._start(self._workload, half)) is None:
            return None
        return (
            f"the planner assumes that every tensor of the batch with {self._workload.batch_size} rows has a row for "
            f"each sample, and the model then fails with another number of samples ({error}){self._exception()}: name "
            "the tensors that have a row for each sample with --by-sample (by_sample=[...] in Python)"
        )

    def close(self) -> None:
        """End the rehearsal if it is still running."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _exception(self) -> str:
        """Returns words that name the tensor that must keep its rows, so that the model runs on twice the samples.

        They are empty unless exactly one tensor is such.
        """
        workload, runs = self._workload, []
        guessed = [path for path, _ in tensors_of(workload.batch) if path not in workload.not_by_sample]
        for path in guessed if len(guessed) > 1 else ():
            without = dataclasses.replace(workload, not_by_sample=(*workload.not_by_sample, path))
            if _error(self._start(without, 2 * workload.batch_size)) is None:
                runs.append(path)
        return f"; it runs if '{runs[0]}' is the same for all samples" if len(runs) == 1 else ""


def _error(child: Child) -> str | None:
    """Waits for a rehearsal. Returns the error that the model raised with the batch; None if it raised none."""
    try:
        child.result()
    except WorkloadError as error:  # the error of the model or of the loss function
        return str(error).removeprefix("the training step failed with this batch: ").partition(": check that")[0]
    except StepError as error:
        return str(error)
    return None
