"""Makes a batch of fake tensors, and sets those of their values that a rehearsal knows or assumes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.virtual_gpu.sparse_tensors import virtual_sparse
from planner.virtual_gpu.values.shadow_ops import (
    ASSUMED_LABELS,
    ASSUMED_LONGEST,
    ASSUMED_MASK,
    ASSUMED_PADDING,
    ASSUMED_VALUES,
)
from planner.virtual_gpu.values.shadow_values import ShadowValues, is_tracked
from planner.workload.batch_source import has_padding
from planner.workload.workload import map_batch, tensors_of


def virtual_batch(
    batch: Any, batch_size: int, wanted_size: int, device: str, *, not_by_sample: Collection[str] = ()
) -> Any:
    """Returns a batch of the same structure with fake tensors on a device. Call it while a `FakeTensorMode` is active.

    Dimension 0 of a tensor becomes `wanted_size` if it is `batch_size`; other sizes stay the same, and so do sparse
    tensors and those whose paths `not_by_sample` names. The memory format, for example channels_last, is kept.
    """
    unchanged = {id(tensor) for path, tensor in tensors_of(batch) if path in not_by_sample}

    def fake(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_sparse:
            return virtual_sparse(leaf, device)
        shape = list(leaf.shape)
        if shape and shape[0] == batch_size and id(leaf) not in unchanged:
            shape[0] = wanted_size
        order = _order_in_memory(leaf)
        return torch.empty_permuted(shape, order, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)

    return map_batch(fake, batch)


def _order_in_memory(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions of a tensor's copy on the card, from the largest stride to the smallest.

    `Tensor.to(device)` keeps the strides of a tensor that is non-overlapping and dense. Copies of other tensors are
    contiguous or channels_last.
    """
    with unset_fake_temporarily():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").to("meta", copy=True)
        is_contiguous = copy.is_contiguous() and suggest_memory_format(copy) == torch.contiguous_format
    dimensions = list(range(copy.dim()))
    if is_contiguous:
        return dimensions
    # A dimension of size 1 can have the same stride as another dimension. Then it comes after that one.
    return sorted(dimensions, key=lambda dim: (copy.stride(dim), copy.shape[dim] > 1), reverse=True)


def learn_values(known: ShadowValues, batch: Any, given: Any, *, worst_case: bool) -> None:
    """Sets the values of those tensors of a batch whose values are known or assumed.

    Args:
        batch: the batch in the rehearsal, with fake tensors.
        given: the batch that the user gave.
        worst_case: True to take masks as full, or attention masks with padding as full up to one position of each
            sample, and lengths as the longest one. Lengths keep their own values if their sum is the size of a
            dimension in the batch, because a tensor may be split by them.
    """
    real = dict(tensors_of(given))
    sizes = {size for tensor in real.values() for size in tensor.shape}
    for path, fake in tensors_of(batch):
        if worst_case:
            assume_full(known, path, fake)
        if path in real:
            _assume_padding(known, path, fake, real[path], worst_case=worst_case)
            if worst_case and _is_length(path, real[path]) and sum(lengths := _numbers(real[path])) not in sizes:
                known.assume(fake, max(lengths), ASSUMED_LONGEST)
            learn_batch(known, path, fake, real[path])
        if fake not in known:
            assume_full(known, path, fake)


def assume_full(known: ShadowValues, name: str, tensor: torch.Tensor) -> None:
    """Assumes that a tensor of the batch is 1 everywhere if it is a mask or has labels, so that none is ignored.

    Args:
        name: path of the tensor in the batch. A mask has "mask" in it, labels have "label" in the last name.
    """
    last = name.rsplit(".", 1)[-1].lower()
    if "mask" in name.lower():
        known.assume(tensor, 1, ASSUMED_MASK)
    elif "label" in last and not tensor.is_floating_point():
        known.assume(tensor, 1, ASSUMED_LABELS)


def _assume_padding(
    known: ShadowValues, name: str, fake: torch.Tensor, real: torch.Tensor, *, worst_case: bool
) -> None:
    """Assumes that one position of every sample is padding, if `real` is a padded attention mask [samples, tokens].

    Models ask whether a mask has padding: only then attention gets a mask of all pairs of tokens and cannot use the
    fastest kernel, so that a batch with padding needs more memory than a full one of the same shape. The assumption
    holds for every micro-batch. The position is the one at which the fewest samples have a token.

    Args:
        worst_case: if False, nothing is assumed unless the mask already has these values.
    """
    if not (_has_values(real) and is_tracked(fake)):
        return
    with unset_fake_temporarily():
        if not has_padding(name, real):
            return
        assumed = torch.ones(tuple(fake.shape), dtype=real.dtype, device="cpu")
        assumed[:, int(real.bool().sum(dim=0).argmin())] = 0
        if worst_case or bool((real == assumed[:1]).all()):
            known.learn(fake, assumed, frozenset((ASSUMED_PADDING,)))


def _has_values(tensor: torch.Tensor) -> bool:
    """True if the values of a tensor of the user's batch can be read here."""
    is_real = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    return is_real and tensor.layout is torch.strided and tensor.numel() > 0


def _is_length(name: str, tensor: torch.Tensor) -> bool:
    """True if a tensor of the batch has lengths: integers with values, one for each sample, and "len" in their name."""
    has_values = _has_values(tensor)
    is_named = "len" in name.rsplit(".", 1)[-1].lower()
    return is_named and has_values and tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)


def _numbers(tensor: torch.Tensor) -> list[int]:
    with unset_fake_temporarily():
        return tensor.tolist()


def learn_batch(known: ShadowValues, name: str, fake: torch.Tensor, real: torch.Tensor) -> None:
    """Sets the values of a fake tensor of the batch to those that the user gave, if it is small and has no floats.

    If more samples are rehearsed than the batch has, its samples are repeated.

    Args:
        name: path of the tensor in the batch, for the assumption that is noted where the values are needed.
        real: the tensor that the user gave. Its values are known if it is on the CPU.
    """
    if (
        not _has_values(real)
        or fake in known
        or real.dtype.is_floating_point
        or real.is_complex()
        or not is_tracked(fake)
    ):
        return
    with unset_fake_temporarily():
        if fake.dim() and len(fake) != len(real):
            real = real[torch.arange(len(fake), device="cpu") % max(len(real), 1)]
    known.learn(fake, real, frozenset((f"{ASSUMED_VALUES} '{name}'",)))
