"""A rank makes its own shard of a parameter, not those of all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from planner.virtual_gpu.ranks import ShardsOnDemand


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(("shape", "dim"), [((8, 3), 0), ((7, 2), 0), ((3,), 0), ((1, 5), 1), ((4, 6), 1), ((0, 2), 0)])
def test_a_shard_that_is_made_on_demand_is_that_of_fsdp(shape, dim, ranks):
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    shards = ShardsOnDemand(tensor, ranks, dim)
    for rank, expected in enumerate(_chunk_with_empty(tensor, ranks, dim)):
        assert shards[rank].shape == expected.shape and torch.equal(shards[rank], expected)
        assert not expected.numel() or shards[rank].data_ptr() == expected.data_ptr()
