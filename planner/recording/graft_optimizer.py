"""One recording of forward and backward serves every optimizer: its update is cut off and another one is put there.

What an optimizer does depends on parameters and gradients alone, not on how the gradients came about. So the update of
each optimizer is recorded once, and not once for every precision and split of the batch. A recording of the whole step
with that optimizer would give the same curve, tick by tick, from the first op of the forward on (which is a test).
"""

from __future__ import annotations

import dataclasses

from planner.recording.step_graph import Category, Op, Phase, Save, StepGraph, Storage


def can_be_grafted(graph: StepGraph) -> bool:
    """Whether the update can be told from the rest: one primed step, whose optimizer announces that it begins."""
    return graph.primed and graph.steps == 1 and graph.update_tick is not None


def graft_update(step: StepGraph, update: StepGraph) -> StepGraph:
    """`step` with the optimizer of `update`.

    Args:
        step: primed recording of one step.
        update: primed recording of an update of the same parameters, from gradients that were there before.
    """
    cut, shift = step.update_tick, step.update_tick - update.update_tick
    ticks = update.ticks + shift
    storages = [_until(storage, cut, ticks) for storage in step.storages]
    renumbered: dict[int, int] = {}
    for index, storage in enumerate(update.storages):
        lives = _lives_in_update(storage, update.update_tick, update.ticks, shift)
        if lives:
            renumbered[index] = len(storages)
            storages.append(dataclasses.replace(storage, lives=lives, op=None))
    ops = [op for op in step.ops if op.tick < cut]
    for index, op in enumerate(update.ops):
        if op.tick > update.update_tick:
            for output in op.outputs:
                if output in renumbered and update.storages[output].op == index:
                    storages[renumbered[output]].op = len(ops)
            ops.append(_moved(op, shift, renumbered))
    return dataclasses.replace(
        step,
        ops=ops,
        storages=storages,
        saves=[_released(save, cut) for save in step.saves],
        ticks=ticks,
        assumptions=tuple(dict.fromkeys((*step.assumptions, *update.assumptions))),
    )


def _until(storage: Storage, cut: int, ticks: int) -> Storage:
    """Without what the old optimizer had to do with it; what outlives the cut stays to the end."""
    if storage.category is Category.OPTIMIZER_STATE:
        return dataclasses.replace(storage, lives=[])
    lives = [(birth, death if death <= cut else ticks) for birth, death in storage.lives if birth < cut]
    return dataclasses.replace(storage, lives=lives)


def _lives_in_update(storage: Storage, begin: int, end: int, shift: int) -> list[tuple[int, int]]:
    """State is there from the start; beside it only what the update makes counts."""
    if storage.category is Category.OPTIMIZER_STATE:
        return [(0, end + shift)] if storage.lives else []
    return [(birth + shift, death + shift) for birth, death in storage.lives if birth > begin]


def _moved(op: Op, shift: int, renumbered: dict[int, int]) -> Op:
    return dataclasses.replace(
        op,
        tick=op.tick + shift,
        phase=Phase.OPTIMIZER,  # which an update alone does not show, where no backward came before
        inputs=tuple(renumbered[index] for index in op.inputs if index in renumbered),
        outputs=tuple(renumbered[index] for index in op.outputs if index in renumbered),
    )


def _released(save: Save, cut: int) -> Save:
    outlives = save.release is None or save.release > cut
    return dataclasses.replace(save, release=None) if outlives else save
