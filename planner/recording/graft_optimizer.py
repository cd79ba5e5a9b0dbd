"""Replaces the optimizer in a recording: the recorded update is cut off and the update of another optimizer appended.

An update depends on parameters and gradients alone, not on how the gradients were computed. So the update of each
optimizer is recorded once, and not once for every precision and micro-batching. A recording of the whole step with that
optimizer has the same memory curve, tick by tick, from the first op of the forward on (tests compare the two).
"""

from __future__ import annotations

import dataclasses

from planner.recording.step_graph import Category, Op, Phase, Save, StepGraph, Storage


def can_be_grafted(graph: StepGraph) -> bool:
    """True if the update can be separated from the step.

    The recording must be one step whose optimizer state already exists, and the tick of its update must be known.
    """
    return graph.primed and graph.steps == 1 and graph.update_tick is not None


def graft_update(step: StepGraph, update: StepGraph) -> StepGraph:
    """Returns `step` with the optimizer of `update`.

    Args:
        step: primed recording of one step, for which `can_be_grafted` is true.
        update: primed recording of an update of the same parameters, from gradients that existed before.

    Raises:
        ValueError: the update of a recording cannot be cut off.
    """
    cut, begin = step.update_tick, update.update_tick
    if cut is None or begin is None:
        raise ValueError("the update of a recording cannot be cut off: check `can_be_grafted` first")
    shift = cut - begin
    ticks = update.ticks + shift
    # Storages of the update get new numbers after those of the step. Parameters and gradients are not taken over.
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
    """Returns the storage without the old optimizer: state is removed, and what outlives the cut lives to the end."""
    if storage.category is Category.OPTIMIZER_STATE:
        return dataclasses.replace(storage, lives=[])
    lives = [(birth, death if death <= cut else ticks) for birth, death in storage.lives if birth < cut]
    return dataclasses.replace(storage, lives=lives)


def _lives_in_update(storage: Storage, begin: int, end: int, shift: int) -> list[tuple[int, int]]:
    """Returns the lives of a storage of the update: state from the start, else only what the update itself makes."""
    if storage.category is Category.OPTIMIZER_STATE:
        return [(0, end + shift)] if storage.lives else []
    return [(birth + shift, death + shift) for birth, death in storage.lives if birth > begin]


def _moved(op: Op, shift: int, renumbered: dict[int, int]) -> Op:
    """Returns an op of the update, at its tick and with its storages in the grafted recording."""
    return dataclasses.replace(
        op,
        tick=op.tick + shift,
        phase=Phase.OPTIMIZER,  # a recording of an update alone has no backward, from which the phase would follow
        inputs=tuple(renumbered[index] for index in op.inputs if index in renumbered),
        outputs=tuple(renumbered[index] for index in op.outputs if index in renumbered),
    )


def _released(save: Save, cut: int) -> Save:
    """Returns a save that is held to the end if it outlives the cut."""
    outlives = save.release is None or save.release > cut
    return dataclasses.replace(save, release=None) if outlives else save
