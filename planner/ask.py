"""Answers a question about a live model: the arguments of `planner.plan`, `planner.tradeoff` and `planner.record`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner import pipeline
from planner.errors import WorkloadError
from planner.fewest_cards import plan_on_cards
from planner.plan_types.answers import Answers
from planner.plan_types.constraints import Constraints
from planner.plan_types.plan import Plan
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.progress import Report, Watch
from planner.progress.display import shown
from planner.progress.durations import parse_duration
from planner.recording.step_graph import StepGraph
from planner.safe_process import in_safe_process
from planner.space.sharding import Cards
from planner.whole_run.request import RunRequest, plan_step_or_run
from planner.workload.batch_source import candidate_batches
from planner.workload.budget import card_and_budget
from planner.workload.cards import resolve_card, with_allocator_options
from planner.workload.workload import Workload, workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveWorkload:
    """The arguments of `planner.plan` that say what is trained."""

    model: Any
    batch: Any
    loss_fn: Any = None
    step: Any = None
    optimizer: Any = "adamw"
    gradients_alive: bool = False
    by_sample: Sequence[str] | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    worst_case: bool = True
    parallelize: Any = None

    def resolve(self, card: DeviceProfile, watch: Watch) -> Workload:
        """Returns the workload. From a source of batches, takes the batch whose step needs the most memory."""
        batches, notes, stream = candidate_batches(self.batch, worst_case=self.worst_case, watch=watch)
        workloads = [
            workload(
                self.model,
                batch,
                notes=notes,
                loss_fn=self.loss_fn,
                step=self.step,
                optimizer=self.optimizer,
                gradients_alive=self.gradients_alive,
                by_sample=self.by_sample,
                answers=Answers(values=self.values, worst_case=self.worst_case),
            )
            for batch in batches
        ]
        largest = pipeline.largest_step(workloads, card, watch)
        return dataclasses.replace(largest, stream=stream, parallelize=self.parallelize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question of the user: the arguments that `planner.plan` and `planner.tradeoff` share."""

    work: LiveWorkload
    gpu: str | None
    vram: str | int | None = None
    constraints: Constraints | None = None
    """None to record the step only."""
    alloc_conf: str | None = None
    """Options of the caching allocator; None for those in the environment of this process."""
    cudnn_benchmark: bool | None = None
    """The setting `torch.backends.cudnn.benchmark`; None for that of this process."""
    is_tradeoff: bool = False
    run: RunRequest = dataclasses.field(default_factory=RunRequest)
    cards: Cards | None = None
    """The cards that train together; None for one card."""

    def answer(self, watch: Watch) -> Plan | Tradeoff | StepGraph:
        """Plans in this process. Raises `PlannerError` if an argument cannot be used."""
        with _without_warnings_of("bitsandbytes"):
            return self._answer(watch)

    def _answer(self, watch: Watch) -> Plan | Tradeoff | StepGraph:
        if self.constraints is None:
            card = resolve_card(self.gpu, None)
            return pipeline.record_step(self.work.resolve(card, watch), card, watch=watch)
        card, vram_bytes = card_and_budget(self.gpu, self.vram)
        card, notes = with_allocator_options(card, self.alloc_conf)
        card = dataclasses.replace(card, cudnn_benchmark=self.cudnn_benchmark)
        compute = (
            pipeline.tradeoff_workload if self.is_tradeoff else functools.partial(plan_step_or_run, request=self.run)
        )
        work = self.work.resolve(card, watch)
        work = dataclasses.replace(work, notes=(*work.notes, *notes))
        if self.cards is not None:
            if self.run.activities(work) or (work.stream is not None and len(work.stream.different) > 1):
                raise WorkloadError(
                    "a whole run cannot be planned for several cards: give one batch, the largest one, and leave out "
                    "eval_batch_size and between"
                )
            return plan_on_cards(
                work, card, self.cards, vram_bytes=vram_bytes, constraints=self.constraints, watch=watch
            )
        return compute(work, card, vram_bytes=vram_bytes, constraints=self.constraints, watch=watch)


@contextlib.contextmanager
def _without_warnings_of(library: str) -> Iterator[None]:
    """Hide log records below errors of a library within the context, such as hints about its kernels for the CPU."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


def ask(question: Question, *, progress: bool | Report | None, time_limit: str | float | None) -> Any:
    """Returns the answer to a question, and shows progress meanwhile.

    Args:
        progress: as for `planner.plan`.
        time_limit: a duration such as "30s", or a number of seconds; None for no limit.
    """
    seconds = None if time_limit is None else parse_duration(time_limit)
    with shown(progress) as report:
        return in_safe_process(question.answer, Watch(seconds=seconds, report=report))
