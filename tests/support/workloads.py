"""Workloads for the planner's tests: the examples, and small models with one difficulty each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import random

import torch

from planner import profiles
from planner.estimate.roofline import HostCopies
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.recompute.units import Units, units_of
from planner.recording.step_graph import StepGraph
from planner.rewrite.rehearse import certifying_graph, start_rehearsal
from planner.search.curve import CompiledProblem
from planner.workload.loading import load_workload
from planner.workload.workload import Workload, workload

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CARD = profiles.load("rtx-3090")
BARE = profiles.bare()


@functools.cache
def example(name: str, batch_size: int | None = None, seq_len: int | None = None) -> Workload:
    """Returns a workload from `examples/`, such as 'gpt2' or 'unet.py:build'."""
    return load_workload(str(EXAMPLES / name), batch_size=batch_size, seq_len=seq_len, optimizer="adamw")


def transformer(kind: str, head: str, *, batch_size: int, seq_len: int, **settings: object) -> Workload:
    """A small transformers model on the meta device."""
    import transformers

    from planner.workload.synthetic_batch import synthetic_batch

    config = transformers.AutoConfig.for_model(kind, **settings)
    config.use_cache = False
    with torch.device("meta"):
        model = getattr(transformers, head)(config)
    model.train()
    return workload(model, synthetic_batch(model, batch_size=batch_size, seq_len=seq_len), seq_len=seq_len)


def what_if(work: Workload, decisions=(), *, sizes: tuple[int, ...] | None = None, card=BARE) -> StepGraph:
    """Returns the what-if recording of one step whose optimizer has its state."""
    sizes = sizes or (work.batch_size,)
    return start_rehearsal(work, decisions, card, sizes=sizes, steps=1, primed=True, what_if=True).result()


def plain(work: Workload, decisions=(), *, sizes: tuple[int, ...] | None = None, card=BARE) -> StepGraph:
    """Returns the record of one step as PyTorch runs it, whose optimizer has its state."""
    sizes = sizes or (work.batch_size,)
    return start_rehearsal(work, decisions, card, sizes=sizes, steps=1, primed=True, what_if=False).result()


def units(graph: StepGraph, *, kinds=(Checkpoint, Replay, Offload)) -> tuple[Units, CompiledProblem]:
    copies = HostCopies(card=dataclasses.replace(CARD, host_link_bytes_per_s=10**18, launch_ns=0), repeats=(1,))
    found = units_of(graph, [1] * len(graph.ops), granularity_bytes=1, kinds=kinds, host_copies=copies)
    return found, CompiledProblem(found.problem)


def some_units(found: Units, draws: random.Random, *, least: int, most: int) -> tuple[int, ...]:
    """Returns up to `most` units, drawn at random. Units whose calls are nested in those of others are left out."""
    count = len(found.units)
    chosen = set(draws.sample(range(count), draws.randint(least, min(count, most))))
    return tuple(
        unit for unit in chosen if not any(unit in path and chosen & {*path} - {unit} for path in found.problem.paths)
    )


def layers_of_similar_widths() -> Workload:
    """Returns a workload for which the allocator reserves 24 MiB more in the third step than in the first two."""
    widths = [700 + 37 * number for number in range(6)]
    pairs = itertools.pairwise(widths)
    model = torch.nn.Sequential(*[part for i, o in pairs for part in (torch.nn.Linear(i, o), torch.nn.ReLU())])
    return workload(model, torch.randn(3000, 700), loss_fn=lambda output, batch: output.pow(2).mean())


__all__ = [
    "BARE",
    "CARD",
    "certifying_graph",
    "example",
    "layers_of_similar_widths",
    "plain",
    "some_units",
    "transformer",
    "units",
    "what_if",
]
