"""The ways in which accelerate trains a model on several cards, each without and with activation checkpointing.

accelerate and transformers' `Trainer` checkpoint all blocks or none. With FSDP2 these are the modules of the classes
whose modules are units (`fsdp_config: activation_checkpointing`). With DistributedDataParallel they are the layers that
transformers' own checkpointing runs again (`GradientCheckpointingLayer`).

FSDP2's blocks are recomputed with other random numbers than in the forward (`preserve_rng_state=False` in
`fsdp2_apply_ac` of accelerate 1.15). So a block that draws random numbers, for dropout for example, would get wrong
gradients. Such blocks are not checkpointed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from planner import pipeline
from planner.errors import DecisionError
from planner.plan_types.decision_base import Decision
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.recompute.units import CHECKPOINT, whole_modules
from planner.recording.step_graph import StepGraph
from planner.space.accelerate_units import blocks_of
from planner.workload.workload import Workload

_NONE = "no activation checkpointing"
_LAYER = "GradientCheckpointingLayer"
"""Name of the class in `transformers.modeling_layers`, which need not be installed here."""


def with_checkpointed(
    workloads: Sequence[Workload], card: DeviceProfile, watch: Watch | None, *, is_forced: bool = False
) -> tuple[Workload, ...]:
    """Returns each workload, followed by the same one with all blocks checkpointed where that is possible.

    Args:
        workloads: the work of one card in each way, as accelerate prepares it.
        watch: limits the time of the rehearsal that finds ops with random numbers; None for no limit.
        is_forced: True to return only workloads with checkpointed blocks.

    Raises:
        DecisionError: activation checkpointing is forced, but not possible in any of these ways.
    """
    graph: StepGraph | None = None
    found: list[Workload] = []
    for work in workloads:
        found.append(work)
        sharding = next(iter(work.sharding))
        if sharding.divides_parameters_by > 1:
            blocks = blocks_of(work.model, sharding.classes_of_units)
        else:
            blocks = _layers(work.model)
        if not blocks or any(_is_inside(block, other) for block in blocks for other in blocks if block != other):
            continue
        if sharding.divides_parameters_by > 1:
            graph = graph or pipeline.record_step(dataclasses.replace(work, sharding=()), card, watch=watch)
            if (drawing := _drawing(graph, blocks)) is not None:
                note = (
                    f"{_NONE} with FSDP2: accelerate would recompute a block with other random numbers "
                    f"than in its forward, and '{drawing}' draws random numbers, for dropout for example"
                )
                found[-1] = dataclasses.replace(work, notes=(*work.notes, note))
                continue
        decisions: tuple[Decision, ...] = (sharding, whole_modules(blocks))
        found.append(dataclasses.replace(work, sharding=decisions))
    if not is_forced:
        return tuple(found)
    checkpointed = tuple(work for work in found if len(work.sharding) > 1)
    if not checkpointed:
        notes = [note for work in found for note in work.notes if note.startswith(_NONE)]
        why = notes[0] if notes else f"{_NONE}: the model has no blocks that the library checkpoints"
        raise DecisionError(f"{CHECKPOINT} is forced, but there is {why}; do not force it")
    return checkpointed


def _layers(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the paths of the layers that transformers' own checkpointing runs again."""
    return tuple(
        path for path, module in model.named_modules() if any(kind.__name__ == _LAYER for kind in type(module).__mro__)
    )


def _drawing(graph: StepGraph, blocks: Sequence[str]) -> str | None:
    """Returns the path of a module in a block that draws random numbers; None if there is none."""
    drawing = {op.module for op in graph.ops if op.draws_random_numbers}
    return next((path for path in sorted(drawing) if any(_is_inside(path, block) for block in blocks)), None)


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")
