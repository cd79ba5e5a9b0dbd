"""What the autograd engine does in place on real tensors is recorded so, though fakes are given copies."""

from __future__ import annotations

import torch

from planner.recording.rehearsal import rehearse_program
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.backend import Target


def recorded(program) -> StepGraph:
    return rehearse_program(program, Target(compute_capability=(8, 0)))


def sums_in_backward(graph: StepGraph, name: str = "aten.add.Tensor") -> list[bool]:
    """For each such op of a backward: whether it wrote into what it read."""
    return [set(op.outputs) <= set(op.inputs) for op in graph.ops if op.name == name and op.phase == "backward"]


def test_a_second_gradient_is_added_into_the_first():
    def program(device):
        x = torch.zeros(8, 8, device=device, requires_grad=True)
        y = x * 2
        (torch.sigmoid(y) * torch.tanh(y)).sum().backward()

    assert sums_in_backward(recorded(program)) == [True]


def test_a_gradient_that_somebody_else_holds_is_not_written_to():
    kept = []

    def program(device):
        x = torch.zeros(8, 8, device=device, requires_grad=True)
        y = x * 2
        first, second = torch.sigmoid(y), torch.tanh(y)
        second.grad_fn.register_hook(lambda inputs, outputs: kept.append(inputs[0]))
        (first * second).sum().backward()

    assert sums_in_backward(recorded(program)) == [False]


def test_one_gradient_for_both_arguments_of_a_sum_is_not_written_to():
    def program(device):
        x = torch.zeros(8, 8, device=device, requires_grad=True)
        y = x * 2
        ((y + y) * x.detach()).sum().backward()

    assert sums_in_backward(recorded(program)) == [False]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        copy = grad * 1
        return copy + copy


def test_a_sum_in_a_users_backward_is_what_it_says():
    def program(device):
        x = torch.zeros(8, 8, device=device, requires_grad=True)
        (Doubled.apply(x * 1) * x.detach()).sum().backward()

    assert sums_in_backward(recorded(program)) == [False]


def test_the_backward_of_a_maximum_fills_its_zeros():
    def program(device):
        x = torch.zeros(8, 8, device=device, requires_grad=True)
        torch.max(x * 2, dim=-1)[0].sum().backward()

    assert sums_in_backward(recorded(program), "aten.scatter.src") == [True]
