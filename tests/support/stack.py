"""A model of many layers that look identical, of which one may differ in one of several ways."""

from __future__ import annotations

import contextlib

import torch

from planner.workload.workload import Workload, workload


class Layer(torch.nn.Module):
    """A layer that may differ from the others in one of several ways."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.linear, self.way, self.calls = torch.nn.Linear(16, 16), way, 0
        if way == "a forward hook":
            self.register_forward_hook(lambda layer, inputs, output: None)

    def forward(self, x, table):
        x = x + table
        if self.way == "it counts its calls":
            self.calls += 1
        if self.way == "more ops in its first call" and not self.calls:
            self.calls, _ = 1, x.detach() * 2
        if self.way in ("another kernel for equal shapes", "kernels of one kind"):
            far = 2 if self.way == "another kernel for equal shapes" else 1
            filters = self.linear.weight.detach().new_ones(16, 16, 3)
            x = torch.nn.functional.conv1d(x[None], filters, padding=far, dilation=far)[0]
        is_cast = self.way != "no autocast"
        with contextlib.nullcontext() if is_cast else torch.autocast("cuda", enabled=False):
            x = torch.relu(self.linear(x if is_cast else x.float()))
        if self.way == "the gradient of its output is kept":
            x.retain_grad()
            self.output = x
        return x


class Stack(torch.nn.Module):
    """Eighteen layers that look identical, of which one may differ."""

    def __init__(self, way: str, differs: int = 9) -> None:
        super().__init__()
        self.way, self.differs = way, differs
        others = "kernels of one kind" if way == "another kernel for equal shapes" else None
        self.register_buffer("table", torch.zeros(16))
        self.register_buffer("other_table", torch.zeros(16))
        self.layers = torch.nn.ModuleList(Layer(way if number == differs else others) for number in range(18))

    def forward(self, x):
        loss, outputs = 0, []
        for number, layer in enumerate(self.layers):
            reads_other = self.way == "it reads another tensor of the model" and number == self.differs
            x = layer(x, self.other_table if reads_other else self.table)
            if self.way == "all outputs are kept":
                outputs.append(x)
            if self.way == "its output is part of the loss" and number == self.differs:
                loss = x.mean()
            if self.way == "all outputs are doubled by the model":
                x = x * 2
            if self.way == "its output is doubled by the model" and number == self.differs:
                x = x * 2
        if self.way == "its weight is part of the loss":
            return x.square().mean() + self.layers[self.differs].linear.weight.mean()
        if self.way == "rows for layers from the tenth on":
            return x.square().mean() * x.new_ones(max(0, len(self.layers) - 9), 8).sum()
        return x.square().mean() + loss


def stack(way: str, differs: int = 9) -> Workload:
    with torch.device("meta"):
        return workload(Stack(way, differs), torch.zeros(16, 16))
