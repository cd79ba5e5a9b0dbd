"""The record of the CPU's allocator: which allocations are tensors and which are temporaries, and where the peak is."""

from __future__ import annotations

import dataclasses

import torch

from planner.rewrite.on_cpu.allocations import BEFORE, AllocationRecord, MeasuredPeak, Peak
from planner.rewrite.on_cpu.run import compared

SIZE = 4 * 1000
"""Bytes of the tensors in these tests."""


def recorded(step, *ops: str) -> list[MeasuredPeak]:
    """Record two steps on a vector that exists before them."""
    record = AllocationRecord()
    with record.recording():
        x = torch.zeros(1000)
        for _ in range(2):
            with record.step():
                step(x)
    return record.peaks(ops)


def test_tensors_count_while_they_are_alive():
    def step(x):
        y = x + 1
        del y
        z = torch.cat([x, x])
        return z.sin() + z

    first, second = recorded(step, "aten.add.Tensor", "aten.cat.default", "aten.sin.default")
    assert first.tensor_bytes == second.tensor_bytes == SIZE + 3 * 2 * SIZE
    assert first.alive_by_op == {BEFORE: SIZE, "aten::cat": 2 * SIZE, "aten::sin": 2 * SIZE, "aten::add": 2 * SIZE}


def test_tensors_that_a_step_leaves_behind_count_in_the_next_one():
    kept = []
    first, second = recorded(lambda x: kept.append(x + x), "aten.add.Tensor")
    assert (first.tensor_bytes, second.tensor_bytes) == (2 * SIZE, 3 * SIZE)


def test_what_lives_and_dies_inside_a_recorded_op_is_a_temporary():
    def step(x):
        return torch.dist(x, x)  # its kernel makes the difference of both, as an op of its own

    inside = recorded(step, "aten.dist.default")[0]
    assert inside.tensor_bytes == SIZE + 4
    assert inside.kernel_bytes >= SIZE
    outside = recorded(step, "aten.sub.Tensor", "aten.norm.Scalar")[0]
    assert outside.tensor_bytes >= 2 * SIZE


def test_states_of_random_generators_are_made_by_no_op():
    found = recorded(lambda x: torch.get_rng_state())[0]
    assert found.tensor_bytes == SIZE
    assert found.outside_bytes == torch.get_rng_state().nbytes


def test_states_that_are_taken_while_an_op_saves_tensors_are_no_tensors_of_that_op():
    states = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        states.append(torch.get_rng_state())
        return tensor

    def step(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return (x.detach().requires_grad_() * x).exp()

    found = recorded(step, "aten.mul.Tensor", "aten.exp.default")[0]
    assert states and found.tensor_bytes == 3 * SIZE
    assert found.outside_bytes >= states[0].nbytes


def test_a_difference_names_the_ops_whose_tensors_differ():
    measured = MeasuredPeak(
        tensor_bytes=2600,
        alive_by_op={BEFORE: 100, "aten::mm": 500, "aten::cat": 2000},
        kernel_bytes=7,
        outside_bytes=8,
    )
    predicted = Peak(tensor_bytes=1600, alive_by_op={BEFORE: 100, "aten::mm": 1500})
    step = compared(predicted, measured)
    assert (step.predicted_bytes, step.measured_bytes, step.kernel_bytes, step.outside_bytes) == (1600, 2600, 7, 8)
    assert step.why == "aten.cat +2.0 KiB, aten.mm -1000 B"
    assert compared(predicted, dataclasses.replace(measured, tensor_bytes=1600)).why == ""
