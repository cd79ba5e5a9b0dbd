"""A size of micro-batches with which a model fails is not tried again in another configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import WorkloadError
from planner.plan_types.decisions import Precision
from planner.space.micro_batches import MicroBatching
from planner.space.refused_sizes import RefusedSizes
from planner.workload.workload import workload
from tests.support.lengthening import recordings_of

CONFIG, OTHER = (), (Precision(dtype="bf16"),)


def fails(sizes: RefusedSizes, config, numbers: tuple[int, ...]) -> str:
    with pytest.raises(WorkloadError) as caught, sizes.named(config, numbers):
        raise WorkloadError("no groups")
    return str(caught.value)


def test_a_size_is_remembered_if_the_whole_batch_ran():
    sizes = RefusedSizes()
    sizes.ran_whole(CONFIG)
    error = "the model fails with micro-batches of 2 samples: no groups"
    assert fails(sizes, CONFIG, (2, 2)) == error
    with pytest.raises(WorkloadError, match=error), sizes.named(OTHER, (2, 2)):
        pytest.fail("a size that is known to fail is tried")
    with sizes.named(OTHER, (3, 3)):
        pass


def test_a_size_is_not_remembered_if_something_else_may_be_the_reason():
    sizes = RefusedSizes()
    assert fails(sizes, OTHER, (2, 2)).endswith("of 2 samples: no groups")  # the configuration may be the reason
    sizes.ran_whole(OTHER)
    assert fails(sizes, OTHER, (8, 2)).endswith("of 8 and 2 samples: no groups")  # one of the two
    sizes.forget_whole()
    assert fails(sizes, OTHER, (2, 2)).endswith("of 2 samples: no groups")
    for numbers in ((2, 2), (8, 8)):
        with sizes.named(CONFIG, numbers):
            pass


class Groups(nn.Module):
    """Takes samples in groups."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.linear = samples, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.unflatten(0, (-1, self.samples))).square().mean()


@pytest.mark.parametrize("samples", [2, 4])
def test_a_recording_starts_none_of_a_size_that_is_known_to_fail(samples):
    recordings, started = recordings_of(workload(Groups(samples), torch.zeros(16, 8))), []
    start = recordings._start

    def noting(decisions, sizes, runs):
        started.append(sizes)
        return start(decisions, sizes, runs)

    recordings._start = noting
    try:
        for config in (CONFIG, OTHER):
            recordings.of(config, MicroBatching(micro_batches=1, size=16))
            recordings.prefetch(config, [MicroBatching(micro_batches=4, size=4)])
            recordings.of(config, MicroBatching(micro_batches=4, size=4))
    finally:
        recordings.close()
    assert started == [(16,), (2, 2), (3, 3), (4, 4), (16,), (4, 4)]
