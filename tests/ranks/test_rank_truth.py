"""One rank of several, rehearsed without the others, compared with real processes that talk by gloo.

Every storage is born and dies in the same order, with the same bytes. What differs has a test of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from planner.plan_types.decisions import Accumulation, Decision, Precision, Shard, ShardedPrecision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.step_graph import StepGraph
from tests.support.rank_truth import RankCase, events, rehearsal, truth
from tests.support.truth import LANGUAGE, Case, convolutions_with_batch_norm, foreach, hugging_face, loop, with_loss

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

WIDE = {**LANGUAGE, "hidden_size": 64, "num_hidden_layers": 3}
LLAMA = hugging_face("llama", "LlamaForCausalLM", **WIDE, num_key_value_heads=2)
BERT = hugging_face("bert", "BertForMaskedLM", **{**WIDE, "num_hidden_layers": 2})
NARROW = with_loss(
    lambda: torch.nn.Sequential(
        torch.nn.Linear(24, 2, bias=False), torch.nn.GELU(), torch.nn.Linear(2, 64), torch.nn.Linear(64, 8)
    ),
    4,
    24,
)
LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
FSDP = Shard(way="fsdp", mesh=(2,), units=LAYERS)
ONCE = dataclasses.replace(FSDP, reduces_once=True)
SIX_SAMPLES = hugging_face("llama", "LlamaForCausalLM", **WIDE, num_key_value_heads=2, batch_size=6)
TIED_SIX_SAMPLES = hugging_face("bert", "BertForMaskedLM", **{**WIDE, "num_hidden_layers": 2}, batch_size=6)
THREE = Accumulation(micro_batch_size=2, micro_batches=3)


def case(*decisions: Decision, build=LLAMA, optimizer=foreach, max_grad_norm: float | None = None) -> RankCase:
    cards = next(decision.cards for decision in decisions if isinstance(decision, Shard))
    step = Case(build=build, decisions=decisions, optimizer=optimizer, max_grad_norm=max_grad_norm)
    return RankCase(step=step, cards=cards)


CASES = {
    "FSDP2": case(FSDP),
    "FSDP2, kept between forward and backward": case(dataclasses.replace(FSDP, kept=LAYERS[1:])),
    "FSDP2, mixed precision": case(ShardedPrecision(), FSDP),
    "FSDP2, checkpointed": case(FSDP, Checkpoint(modules=LAYERS[:2])),
    "FSDP2, autocast": case(Precision(dtype="bf16"), FSDP),
    "FSDP2, a loop in the optimizer": case(FSDP, optimizer=loop),
    "FSDP2, accumulation": case(FSDP, Accumulation(micro_batch_size=1, micro_batches=2)),
    "FSDP2, reduced once": case(ONCE, Accumulation(micro_batch_size=1, micro_batches=2)),
    "FSDP2, reduced once, mixed precision": case(
        ShardedPrecision(), dataclasses.replace(ONCE, kept=LAYERS[:1]), THREE, build=SIX_SAMPLES
    ),
    "FSDP2, reduced once, tied weights": case(
        Shard(way="fsdp", mesh=(2,), units=("bert.encoder.layer.0",), reduces_once=True), THREE, build=TIED_SIX_SAMPLES
    ),
    "FSDP2, one unit": case(Shard(way="fsdp", mesh=(2,))),
    "FSDP2, tied weights": case(
        Shard(way="fsdp", mesh=(2,), units=("bert.encoder.layer.0", "bert.encoder.layer.1")), build=BERT
    ),
    "FSDP2, uneven shards": case(Shard(way="fsdp", mesh=(3,), units=LAYERS)),
    "hybrid": case(Shard(way="fsdp", mesh=(2, 2), units=LAYERS)),
    "FSDP2, fewer rows than cards": case(Shard(way="fsdp", mesh=(4,), units=("0", "2")), build=NARROW),
    "hybrid, reduced once": case(dataclasses.replace(ONCE, mesh=(2, 2)), THREE, build=SIX_SAMPLES),
}


@pytest.mark.parametrize("name", CASES)
def test_each_storage_is_born_and_dies_as_in_real_processes(name):
    real = truth(CASES[name])
    for rank in (0, CASES[name].cards - 1):
        assert events(real[rank]) == events(rehearsal(CASES[name], rank))


@pytest.mark.parametrize("name", [name for name in CASES if name != "FSDP2, uneven shards"])
def test_the_first_and_the_last_rank_have_the_same_memory_if_shards_are_even(name):
    first, last = (rehearsal(CASES[name], rank) for rank in (0, CASES[name].cards - 1))
    assert first.live_bytes().tolist() == last.live_bytes().tolist()


def test_the_first_rank_has_most_if_shards_are_uneven():
    first, last = (rehearsal(CASES["FSDP2, uneven shards"], rank) for rank in (0, 2))
    assert first.live_bytes().max() > last.live_bytes().max()


def test_clipping_frees_the_norms_of_shards_in_another_order():
    clipped = case(FSDP, max_grad_norm=1.0)
    real, rehearsed = truth(clipped)[0], rehearsal(clipped, 0)
    assert Counter(events(real)) == Counter(events(rehearsed))
    differing = [(a, b) for a, b in zip(events(real), events(rehearsed), strict=True) if a != b]
    assert {size for pair in differing for size, _ in pair} <= {120, -120}  # views of the norms of 30 shards


# ---- copies of the model ------------------------------------------------------------------------------------------


class Wide(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))


COPIES = {
    "DDP": case(Shard(way="ddp", mesh=(2,)), build=with_loss(Wide, 6, 48)),
    "DDP, accumulation": case(Shard(way="ddp", mesh=(2,)), THREE, build=with_loss(Wide, 6, 48)),
    "DDP, reduced once": case(Shard(way="ddp", mesh=(2,), reduces_once=True), THREE, build=with_loss(Wide, 6, 48)),
    "ZeRO-1, reduced once": case(Shard(way="zero1", mesh=(2,), reduces_once=True), THREE, build=with_loss(Wide, 6, 48)),
    "ZeRO-1": case(Shard(way="zero1", mesh=(2,)), build=with_loss(Wide, 6, 48)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_model_take_the_memory_of_real_processes_apart_from_indices_on_the_host(name):
    """Here the device of the real processes is the host, where the reducer's indices and the optimizer's steps are."""
    real = truth(COPIES[name])
    for rank in range(2):
        assert _of_floats(real[rank]) == _of_floats(rehearsal(COPIES[name], rank, "vgpu"))


def _of_floats(graph: StepGraph) -> list[tuple[int, str]]:
    """Returns the births and deaths of storages of more than one floating-point number."""
    kept = [s for s in graph.storages if s.dtype == "float32" and s.size_bytes > 4]
    return events(dataclasses.replace(graph, storages=kept))


def test_the_truth_has_collectives_and_another_world_would_be_noticed():
    of_two, of_four = case(FSDP), case(dataclasses.replace(FSDP, mesh=(4,)))
    real = truth(of_two)[0]
    kinds = Counter(op.collective.kind for op in real.ops if op.collective)
    assert kinds == {
        "allreduce_": 2,  # the number of targets on all cards, once a step
        "_allgather_base_": 2 * (4 + 3),  # four units, three of them again in backward
        "_reduce_scatter_base_": 2 * 4,
    }
    assert events(real) != events(rehearsal(of_four, 0))


def test_batch_norm_keeps_its_own_statistics_on_each_card():
    images = case(
        Shard(way="ddp", mesh=(2,)), build=with_loss(convolutions_with_batch_norm, 4, 3, 16, 16), optimizer="sgd"
    )
    real, rehearsed = truth(images)[1], rehearsal(images, 1, "vgpu")
    gathered = [[op.collective.kind for op in graph.ops if op.collective] for graph in (real, rehearsed)]
    assert gathered[1].count("allreduce_") == 4  # in each of two steps: the number of samples, and the gradients
    assert gathered[0].count("allreduce_") == 4
