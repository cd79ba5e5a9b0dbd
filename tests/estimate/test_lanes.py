"""The time for which a step waits for collectives, in two lanes."""

from __future__ import annotations

import dataclasses

import pytest

from planner import profiles
from planner.estimate.lanes import collective_ns, exposed_ns
from planner.profiles.device import DeviceProfile
from planner.profiles.links import Link, Links, known, with_links
from planner.recording.step_graph import Collective, Op, Phase, StepGraph

SLOW, FAST = (
    Link(name=name, title=name, bytes_per_s=rate, latency_ns=10, nccl_bytes=0, nccl_most_bytes=0)
    for name, rate in (("slow", 10**9), ("fast", 10**10))
)
CARD: DeviceProfile = dataclasses.replace(
    profiles.load("h100"), links=Links(within=FAST, between=SLOW, cards_per_node=8)
)


def op(name: str, phase: Phase = Phase.FORWARD, kind: str = "", size_bytes: int = 0) -> Op:
    collective = Collective(kind=kind, size_bytes=size_bytes, cards=2, span=2) if kind else None
    return Op(
        name=name, tick=0, phase=phase, module="", call=None, source="", flops=0, moved_bytes=0, host_bytes=0,
        dtype="fp32", is_view=False, step=0, micro_batch=0, collective=collective,
    )  # fmt: skip


def waited(*ops_and_times: tuple[Op, int], card: DeviceProfile = CARD) -> int:
    ops, times = zip(*ops_and_times, strict=True)
    graph = StepGraph(
        ops=list(ops), storages=[], saves=[], calls=[], ticks=1, steps=1, primed=True, micro_batch_sizes=(1,),
        module_types={}, batch_statistics=(),
    )  # fmt: skip
    return exposed_ns(graph, card, times, [1] * len(times))


GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
COPY_OUT = op("fsdp.split_with_sizes_copy.default")


def gather(nanoseconds: int) -> Op:
    """A gather that takes so long: half of its bytes are sent, 10 a nanosecond, after a latency of 10 ns."""
    return op("gather", kind=GATHER, size_bytes=(nanoseconds - 10) * 20)


@pytest.mark.parametrize(
    ("kind", "cards", "span", "nanoseconds"),
    [
        (GATHER, 2, 2, 10 + 50),
        (SCATTER, 4, 4, 10 + 75),
        (REDUCE, 2, 2, 10 + 100),
        ("all_reduce", 2, 2, 10 + 100),
        (GATHER, 16, 16, 10 + 938),
        (GATHER, 2, 9, 10 + 500),
    ],
)
def test_a_collective_takes_its_latency_and_the_bytes_that_it_sends(kind, cards, span, nanoseconds):
    assert collective_ns(Collective(kind=kind, size_bytes=1000, cards=cards, span=span), CARD) == nanoseconds


def test_a_card_without_links_waits_for_nothing():
    alone = dataclasses.replace(CARD, links=None)
    assert waited((gather(100), 0), (COPY_OUT, 5), card=alone) == 0


def test_the_first_gather_is_waited_for():
    assert waited((gather(100), 0), (COPY_OUT, 5), (op("mm"), 50)) == 100


def test_a_gather_overlaps_with_the_computation_of_the_unit_before_it():
    first = (gather(100), 0), (COPY_OUT, 5), (op("mm"), 70)
    assert waited(*first, (gather(60), 0), (COPY_OUT, 5), (op("mm"), 50)) == 100
    assert waited(*first, (gather(80), 0), (COPY_OUT, 5), (op("mm"), 50)) == 110


def test_a_reduce_scatter_overlaps_with_the_rest_of_the_backward_and_the_update_waits_for_it():
    scatter = op("scatter", Phase.BACKWARD, SCATTER, 90 * 20)
    rest, update = (op("mm", Phase.BACKWARD), 60), (op("adam", Phase.OPTIMIZER), 30)
    assert waited((op("mm", Phase.BACKWARD), 50), (scatter, 0), rest, update) == 40
    assert waited((op("mm", Phase.BACKWARD), 50), (scatter, 0), rest, (scatter, 0), update) == 40 + 100


def test_buckets_of_copies_are_reduced_during_backward():
    reduce = op("reduce", Phase.BACKWARD, REDUCE, 45 * 20)
    assert waited((reduce, 0), (op("mm", Phase.BACKWARD), 300), (op("adam", Phase.OPTIMIZER), 1)) == 0


def test_collectives_of_tensor_parallelism_are_waited_for():
    assert waited((op("mm"), 50), (op("reduce", kind="all_reduce", size_bytes=900), 0), (op("mm"), 50)) == 100


@pytest.mark.parametrize("name", known())
def test_each_link_has_a_rate(name):
    card = with_links(profiles.load("a100-80gb"), within=name)
    assert card.links.within.bytes_per_s > 10**9


@pytest.mark.parametrize(
    ("card", "title"),
    [("a100-40gb", "NVLink 3"), ("h200", "NVLink 4"), ("v100-16gb", "NVLink 2"), ("rtx-3090", "PCIe")],
)
def test_a_card_uses_its_fastest_link(card, title):
    assert with_links(profiles.load(card)).links.within.title.startswith(title)
