"""What is on the card before the first step arrives there as `Module.to` and the user's loop bring it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from planner import profiles
from planner.estimate.allocation_stream import allocation_stream
from planner.rewrite.rehearse import certifying_graph
from planner.workload.workload import workload


class Nested(nn.Module):
    """Parameters and buffers at every level, one of them and one module shared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3000))
        self.first = nn.Sequential(nn.Linear(700, 500), nn.BatchNorm1d(500))
        self.register_buffer("table", torch.zeros(1100))
        self.second = nn.Sequential(nn.Linear(500, 900), nn.Linear(900, 500))
        self.again = self.second[1]
        self.tied = nn.Linear(700, 500, bias=False)
        self.tied.weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.again(self.second[0](self.first(x))).sum() * self.scale.mean()).mean()


def test_parameters_and_buffers_arrive_in_the_order_in_which_to_moves_them():
    model = Nested()
    moved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        moved.setdefault(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
        return tensor

    copy.deepcopy(model)._apply(note)  # what `to` calls with its own function
    work = workload(model, torch.randn(16, 700))
    ids, sizes, _ = allocation_stream(certifying_graph(work, (), profiles.load("h100")))
    assert sizes.tolist()[: len(moved) + 1] == [*moved.values(), work.batch_bytes]
    assert len(set(ids.tolist()[: len(moved) + 1])) == len(moved) + 1
