"""Replaces the optimizer in a recording: the recorded update is cut off and the update of another optimizer appended.

An update depends only on parameters and gradients, not on how the gradients were computed. So the update of each
optimizer is recorded once, and not again for every precision and number of micro-batches. The result has the same
memory curve as a recording of the whole step with the other optimizer, tick by tick, from the first op of the forward
on (tests compare the two).
"""

from __future__ import annotations

import dataclasses

from planner.recording.step_graph import Category, Op, Phase, Save, StepGraph, Storage


def can_be_grafted(graph: StepGraph) -> bool:
    """True if the update in the recording can be replaced.

    The recording must be of one step, the optimizer state must exist before it (`primed`), and the tick at which the
    update begins must be known.
    """
    return graph.primed and graph.steps == 1 and graph.update_tick is not None


def graft_update(step: StepGraph, update: StepGraph) -> StepGraph:
    """Returns the recording `step` with its update replaced by the one of `update`.

    Args:
        step: recording of one step, for which `can_be_grafted` is true.
        update: primed recording that has only an update: of the same parameters, with gradients that exist before it.

    Raises:
        ValueError: `update_tick` of one of the recordings is None.
    """
    cut, begin = step.update_tick, update.update_tick
    if cut is None or begin is None:
        raise ValueError(
            "cannot replace the optimizer of this recording, because the tick at which its update begins is unknown: "
            "call `can_be_grafted` first"
        )
    shift = cut - begin
    ticks = update.ticks + shift
    # Storages of the update get new numbers after those of the step. Its parameters and gradients are left out, because
    # the step has them.
    storages = [_until(storage, cut, ticks) for storage in step.storages]
    renumbered: dict[int, int] = {}
    for index, storage in enumerate(update.storages):
        lives = _lives_in_update(storage, begin, update.ticks, shift)
        if lives:
            renumbered[index] = len(storages)
            storages.append(dataclasses.replace(storage, lives=lives, op=None))
    ops = [op for op in step.ops if op.tick < cut]
    for index, op in enumerate(update.ops):
        if op.tick > begin:
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
    """Returns a storage of the step without the old update, which begins at tick `cut`.

    The old optimizer's state has no lives. A life that lasts beyond `cut` ends at `ticks`, the end of the result.
    """
    if storage.category is Category.OPTIMIZER_STATE:
        return dataclasses.replace(storage, lives=[])
    lives = [(birth, death if death <= cut else ticks) for birth, death in storage.lives if birth < cut]
    return dataclasses.replace(storage, lives=lives)


def _lives_in_update(storage: Storage, begin: int, end: int, shift: int) -> list[tuple[int, int]]:
    """Returns the lives of a storage of the update in the result; empty if the storage is left out.

    Optimizer state lives during the whole step. Other storages are left out if they were made before the update begins.
    """
    if storage.category is Category.OPTIMIZER_STATE:
        return [(0, end + shift)] if storage.lives else []
    return [(birth + shift, death + shift) for birth, death in storage.lives if birth > begin]


def _moved(op: Op, shift: int, renumbered: dict[int, int]) -> Op:
    """Returns an op of the update with the tick and the storage numbers that it has in the result."""
    return dataclasses.replace(
        op,
        tick=op.tick + shift,
        phase=Phase.OPTIMIZER,  # a recording of an update alone has no backward, from which the phase would follow
        inputs=tuple(renumbered[index] for index in op.inputs if index in renumbered),
        outputs=tuple(renumbered[index] for index in op.outputs if index in renumbered),
        written=tuple(renumbered[index] for index in op.written if index in renumbered),
    )


def _released(save: Save, cut: int) -> Save:
    """Returns the save; if it is released after tick `cut`, it is held to the end instead."""
    outlives = save.release is None or save.release > cut
    return dataclasses.replace(save, release=None) if outlives else save
