"""`planner.plan` takes the options of the command for several cards."""

from __future__ import annotations

import pytest

import planner
from planner.errors import WorkloadError
from planner.plan_types.decision_base import Role, with_roles
from tests.ranks.test_rank_plans import batch, llama


@pytest.mark.slow
def test_shards_may_be_in_host_memory_and_machines_may_have_two_cards():
    plan = planner.plan(
        llama(1), batch(), vram=None, gpu="h100", cards=4, sharding="fsdp", offload_shards=True, cards_per_node=2
    )
    (shard,) = with_roles(plan.decisions, Role.SHARDING)
    assert (shard.mesh, shard.keeps_parameters_on_host, plan.cards_per_node) == ((4,), True, 2)


@pytest.mark.parametrize("options", [{"offload_shards": True}, {"cards_per_node": 2}])
def test_without_cards_the_options_are_refused(options):
    with pytest.raises(WorkloadError, match=f"{next(iter(options))} is for two or more cards"):
        planner.plan(llama(1), batch(), vram=None, gpu="h100", **options)
