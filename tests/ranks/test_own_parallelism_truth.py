"""A model that a function of the user's own divides: one rehearsed rank, compared with real processes (gloo).

Every storage is born and dies in the same order, with the same bytes, in tensor parallelism with and without FSDP2.
"""

from __future__ import annotations

from collections import Counter

import pytest

from planner.plan_types.decisions import Accumulation, Decision, Precision, Shard
from planner.plan_types.recompute_decisions import Checkpoint
from tests.support import own_parallelism as own
from tests.support.rank_truth import RankCase, events, rehearsal, truth
from tests.support.truth import LANGUAGE, Case, foreach, hugging_face, loop

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

WIDE = {**LANGUAGE, "hidden_size": 64, "num_hidden_layers": 2}
LLAMA = hugging_face("llama", "LlamaForCausalLM", **WIDE, num_key_value_heads=2)
LAYERS = ("model.layers.0", "model.layers.1")


def case(parallelize, *others: Decision, optimizer=foreach, max_grad_norm: float | None = None, **mesh) -> RankCase:
    shard = Shard(way="own", mesh=tuple(mesh.values()), dimensions=tuple(mesh))
    step = Case(build=LLAMA, decisions=(shard, *others), optimizer=optimizer, max_grad_norm=max_grad_norm)
    return RankCase(step=step, cards=shard.cards, parallelize=parallelize)


CASES = {
    "TP": case(own.tensor_parallel, tp=2, optimizer=loop),
    "TP, checkpointed": case(own.tensor_parallel, Checkpoint(modules=LAYERS), tp=2, optimizer=loop),
    "TP, autocast": case(own.tensor_parallel, Precision(dtype="bf16"), tp=2, optimizer=loop),
    "TP, accumulation": case(
        own.tensor_parallel, Accumulation(micro_batch_size=1, micro_batches=2), tp=2, optimizer=loop
    ),
    "sequence parallel": case(own.sequence_parallel, tp=2),
    "sequence parallel, checkpointed": case(own.sequence_parallel, Checkpoint(modules=LAYERS[:1]), tp=2),
    "TP x FSDP2": case(own.tensor_parallel_and_sharded, dp=2, tp=2),
    "TP x FSDP2, checkpointed": case(own.tensor_parallel_and_sharded, Checkpoint(modules=LAYERS), dp=2, tp=2),
    "sequence parallel x FSDP2": case(own.sequence_parallel_and_sharded, dp=2, tp=2),
    "FSDP2 alone": case(own.sharded, dp=2),
}


@pytest.mark.parametrize("name", CASES)
def test_each_storage_is_born_and_dies_as_in_real_processes(name):
    real = truth(CASES[name])
    for rank in (0, CASES[name].cards - 1):
        assert events(real[rank]) == events(rehearsal(CASES[name], rank))


def test_the_truth_has_collectives_and_another_mesh_would_be_noticed():
    real = truth(CASES["TP"])[0]
    kinds = Counter(op.collective.kind for op in real.ops if op.collective and op.step == 1)
    assert kinds == {"all_reduce": 2 * 7}  # in each block two in forward, and five in backward
    assert events(real) != events(rehearsal(case(own.sequence_parallel, tp=2, optimizer=loop), 0))
