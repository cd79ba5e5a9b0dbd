"""Separates a recording into the step before the optimizer update, and the bytes that the update adds to it.

Recordings of one configuration with several optimizers differ only in their updates (`graft_optimizer`). What is
computed from the step before the update holds for all of them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.recording.step_graph import Category, StepGraph, Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutRecording:
    """A recording in two parts."""

    before: StepGraph
    """The recording until its update begins at tick `update_tick`. This tick, the last one, stands for all later ones:
    no storage of this part is made or freed after it. Storages that exist only for the update are left out."""
    update_bytes: np.ndarray
    """int64[ticks of `before`]: bytes of the storages that are left out. At the last tick: their largest sum from the
    beginning of the update on."""


def cut_update(graph: StepGraph, *, granularity_bytes: int = 1) -> CutRecording | None:
    """Returns a recording of one step in two parts.

    For any choice of what is recomputed, the memory curve of the step is the curve of `before` plus `update_bytes`. The
    last tick stands for the whole update, and gives an upper bound for it.

    Args:
        granularity_bytes: storage sizes are rounded up to a multiple of it.

    Returns:
        None if the recording cannot be cut: the update is part of the backward, or storages or saved tensors that
        existed before the update are freed during it. Updates that `graft_update` has put in never free any.
    """
    cut = graph.update_tick
    if cut is None:
        return None
    ops = [op for op in graph.ops if op.tick < cut]
    used = {index for op in ops for index in (*op.inputs, *op.outputs, *op.written)}
    used.update(save.storage for save in graph.saves if save.storage is not None)
    used.update(index for call in graph.calls for index in (*call.inputs, *call.made_inputs))
    kept = [index for index, storage in enumerate(graph.storages) if index in used or _is_before(storage, cut)]
    lives = [life for index in kept for life in graph.storages[index].lives]
    if any(birth >= cut or cut < death < graph.ticks for birth, death in lives):
        return None
    if any(save.release is not None and save.release > cut for save in graph.saves):
        return None
    left_out = sorted({*range(len(graph.storages))}.difference(kept))
    if used and left_out and max(used) > left_out[0]:
        return None  # the indices of what is kept would change
    storages = [_until(graph.storages[index], cut) for index in kept]
    before = dataclasses.replace(graph, ops=ops, storages=storages, ticks=cut + 1, cache_releases=(), assumptions=())
    others = dataclasses.replace(graph, storages=[graph.storages[index] for index in left_out], saves=[])
    added_bytes = others.live_bytes(granularity_bytes=granularity_bytes)
    return CutRecording(before=before, update_bytes=np.append(added_bytes[:cut], added_bytes[cut:].max()))


def _is_before(storage: Storage, cut: int) -> bool:
    """True if a storage belongs to the step before the update. The state of the optimizer belongs to the update.

    Storages without lives, which take no memory, are those of another optimizer that `graft_update` has replaced.
    """
    return not storage.lives or (storage.category is not Category.OPTIMIZER_STATE and storage.lives[0][0] < cut)


def _until(storage: Storage, cut: int) -> Storage:
    """Returns a storage whose lives end with the tick at which the update begins."""
    lives = [(birth, min(death, cut + 1)) for birth, death in storage.lives]
    return storage if lives == storage.lives else dataclasses.replace(storage, lives=lives)
