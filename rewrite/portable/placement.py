"""Chooses the dimension along which FSDP2 divides a parameter."""

from __future__ import annotations

import torch.distributed.tensor

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def placement_on(cards):
    """Return the `shard_placement_fn` of FSDP2 for parameters that are divided among a number of cards.

    FSDP2 divides dimension 0, and pads the shards to equal sizes. If dimension 0 is smaller than the number of cards,
    as for the weights of a few experts, most of the memory would be padding. Such a parameter is divided along the
    first other dimension that can be divided evenly.
    """

    def placement(parameter):
        if parameter.dim() > 1 and parameter.shape[0] < cards:
            for dimension in range(1, parameter.dim()):
                if parameter.shape[dimension] % cards == 0:
                    return torch.distributed.tensor.Shard(dimension)
        return None

    return placement
