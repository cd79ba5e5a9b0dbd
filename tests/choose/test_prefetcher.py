"""The prefetcher reads ahead in the order of the search, and starts what will be needed."""

from __future__ import annotations

import pytest

from planner.choose.candidates import ChunkedCandidates
from planner.choose.prefetcher import Prefetcher, with_upcoming
from planner.plan_types.decisions import Checkpoint, ChunkedLoss, OptimizerKernel, Precision
from planner.space.lm_head import ChunkedLossOption
from planner.space.micro_batches import MicroBatching

BF16, FUSED = (Precision(dtype="bf16"),), (OptimizerKernel(kernel="fused"),)
RECOMPUTED = Checkpoint(modules=("block",))
WHOLE, HALVES, QUARTERS = (MicroBatching(micro_batches=count, size=8 // count) for count in (1, 2, 4))
CHUNKS = ChunkedLossOption(module="head", chunks=8)


class Started:
    """Stands for candidates and certificates: notes what is started, in order."""

    def __init__(self, *known) -> None:
        self.known, self.events = known, []

    def prefetch(self, config, splits, *, updates_only=False) -> None:
        self.events.append(("update" if updates_only else "record", config, splits))

    def get(self, config, split):
        return (config, split) if (config, split) in self.known else None

    def foresee(self, decisions) -> None:
        self.events.append(("certify", decisions))

    def forget(self, decisions) -> None:
        self.events.append(("forget", decisions))


def prefetcher(started: Started, chunks: ChunkedLossOption | None = None) -> Prefetcher:
    return Prefetcher(ChunkedCandidates(started, chunks), started)


@pytest.mark.parametrize("number", range(6))
def test_each_item_comes_once_with_those_that_follow(number):
    windows = list(with_upcoming(range(number), 3))
    assert [window[0] for window in windows] == list(range(number))
    assert windows == [tuple(range(first, min(first + 3, number))) for first in range(number)]


def test_it_reads_no_further_ahead_than_it_has_to():
    read = []
    windows = with_upcoming((read.append(item) or item for item in range(10)), 3)
    assert next(windows) == (0, 1, 2) and read == [0, 1, 2]
    assert next(windows) == (1, 2, 3) and read == [0, 1, 2, 3]


def test_several_configurations_start_with_their_first_split():
    started = Started()
    prefetcher(started).several([(BF16, (WHOLE, HALVES)), (FUSED, (HALVES,))])
    assert started.events == [("record", BF16, (WHOLE,)), ("record", FUSED, (HALVES,))]


@pytest.mark.parametrize(
    ("guess", "certified"),
    [
        ({"best": (), "is_likely": False}, None),
        ({"best": (), "is_likely": True}, BF16),
        ({"best": FUSED, "is_likely": False}, FUSED),
        ({"best": FUSED, "is_likely": True}, FUSED),
        ({"best": (*FUSED, RECOMPUTED), "is_likely": False}, None),
    ],
)
def test_a_configuration_is_recorded_and_the_likely_choice_is_certified(guess, certified):
    started = Started()
    prefetcher(started).first_split(BF16, (WHOLE, HALVES), **guess)
    assert started.events == [("record", BF16, (WHOLE,)), *([("certify", certified)] if certified else [])]


def test_nothing_is_started_ahead_of_what_is_known():
    started = Started((FUSED, WHOLE))
    prefetcher(started).first_split(FUSED, (WHOLE,), best=BF16, is_likely=True)
    prefetcher(started).first_split(BF16, (), best=FUSED, is_likely=True)
    assert started.events == []


def test_only_the_updates_are_started():
    started = Started()
    prefetcher(started).updates([(FUSED, (WHOLE, HALVES)), ((*BF16, *FUSED), (WHOLE,)), (BF16, ())])
    assert started.events == [("update", FUSED, (WHOLE,)), ("update", (*BF16, *FUSED), (WHOLE,))]


def test_splits_with_as_many_chunks_are_started_together():
    started, loss = Started(), CHUNKS.for_whole_batch()
    prefetcher(started, CHUNKS).all_splits((*BF16, *loss), (WHOLE, HALVES, QUARTERS))
    fewer = ChunkedLoss(module="head", chunks=4)
    assert started.events == [
        ("forget", (*BF16, *loss)),  # the first split does not fit without recompute
        ("record", (*BF16, *loss), (WHOLE,)),
        ("record", (*BF16, fewer), (HALVES, QUARTERS)),
    ]
