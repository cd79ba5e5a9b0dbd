"""The workspaces of convolutions in the stream of allocations, in the simulated allocator, and in a plan's notes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import planner
from examples import convnet
from planner import profiles, rewrite
from planner.estimate.add_workspaces import (
    convolution_notes,
    has_searches,
    with_known_algorithms,
    with_workspaces,
    without_searches,
)
from planner.estimate.allocation_stream import allocation_stream
from planner.estimate.footprint import measure
from planner.estimate.smallest_total import smallest_total_bytes
from planner.plan_types.sizes import MIB, format_size
from planner.recording.rehearsal import rehearse_program
from planner.rewrite.rehearse import certifying_graph
from planner.virtual_gpu.backend import Target
from planner.workspaces import convolutions
from planner.workspaces.cudnn.dispatch import BACKWARD_OP, FORWARD_OP, placed_of
from planner.workspaces.cudnn.sources import Answer, Source
from tests.support.workloads import workload

CARD = profiles.load("a100-40gb")
SIZES = {"forward": 1001, "grad_input": 1003, "grad_weight": 1007}


def recorded(program):
    return rehearse_program(program, Target(compute_capability=CARD.compute_capability))


def test_each_workspace_is_born_after_its_output_and_dies_before_the_next(monkeypatch):
    """The order in which a public recording of the allocator has the blocks of `run_conv_plan` (JasperSolt/EoR_NN)."""
    monkeypatch.setattr(
        convolutions,
        "workspaces",
        lambda wanted, *_: {each: Answer((SIZES[each.kind.operation],), Source.TABLE, None, True) for each in wanted},
    )

    def program(device: torch.device) -> None:
        layer = nn.Conv2d(5, 7, 3, device=device)
        images = torch.rand(2, 5, 11, 11, device=device, requires_grad=True)
        layer(images).backward(torch.rand(2, 7, 9, 9, device=device))

    graph = with_workspaces(recorded(program), CARD, "2.13.0")
    ids, sizes, _ = allocation_stream(graph)
    names = {4 * 2 * 7 * 9 * 9: "output", 4 * 2 * 5 * 11 * 11: "image", 4 * 7 * 5 * 9: "weight", 4 * 7: "bias"}
    names |= {size: f"workspace of {operation}" for operation, size in SIZES.items()}
    born: dict[int, str] = {}
    story = []
    for block, size in zip(ids.tolist(), sizes.tolist(), strict=True):
        if size:
            born[block] = names.get(size, "other")
        story.append(f"{'' if size else '-'}{born[block]}")
    forward = story.index("workspace of forward")
    assert story[forward - 1 : forward + 2] == ["output", "workspace of forward", "-workspace of forward"]
    backward = story.index("workspace of grad_input")
    assert story[backward - 1 : backward + 6] == [
        *("image", "workspace of grad_input", "-workspace of grad_input"),
        *("weight", "workspace of grad_weight", "-workspace of grad_weight", "bias"),
    ]


def test_copies_for_another_memory_format_live_as_long_as_pytorch_keeps_them():
    """An image in channels_last and a weight that is not: the weight is copied, and the gradient of the output."""

    def program(device: torch.device) -> None:
        weight = torch.rand(7, 5, 3, 3, device=device, requires_grad=True)
        images = torch.rand(2, 5, 11, 11, device=device).to(memory_format=torch.channels_last).requires_grad_()
        output = nn.functional.conv2d(images, weight)
        output.backward(torch.rand(2, 7, 9, 9, device=device))

    plain = recorded(program)
    added = with_workspaces(plain, CARD, "2.13.0").storages[len(plain.storages) :]
    lives = {(each.size_bytes, each.lives[0][1] - each.lives[0][0]) for each in added}
    of_weight, of_gradient = 4 * 7 * 5 * 9, 4 * 2 * 7 * 9 * 9
    assert {(of_weight, 1), (of_gradient, 3)} <= lives


@pytest.mark.parametrize("shape", [(2, 5, 11, 11), (2, 5, 6, 7, 8)])
def test_layers_in_channels_last_hand_on_their_format_and_copy_nothing(shape):
    """If the image or the weight is in channels_last, so are the output and the gradients, as with cuDNN."""
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    convolve = nn.functional.conv2d if len(shape) == 4 else nn.functional.conv3d

    def program(device: torch.device) -> None:
        kernel = (3,) * (len(shape) - 2)
        first, second = (
            torch.rand(7, channels, *kernel, device=device).to(memory_format=memory_format).requires_grad_()
            for channels in (5, 7)
        )
        images = torch.rand(shape, device=device).to(memory_format=memory_format)
        output = convolve(torch.relu(convolve(images, first)), second)
        output.backward(torch.rand(output.shape, device=device).to(memory_format=memory_format))
        assert output.is_contiguous(memory_format=memory_format)
        assert first.grad.is_contiguous(memory_format=memory_format)

    calls = [op.kernel for op in recorded(program).ops if op.name in (FORWARD_OP, BACKWARD_OP)]
    assert len(calls) == 4
    assert not [each for call in calls for each in placed_of(call) if isinstance(each.taken, int)]


def test_the_time_of_a_convolution_counts_its_copies_and_workspaces(monkeypatch):
    monkeypatch.setattr(
        convolutions,
        "workspaces",
        lambda wanted, *_: {each: Answer((SIZES[each.kind.operation],), Source.TABLE, None, True) for each in wanted},
    )

    def program(device: torch.device) -> None:
        weight = torch.rand(7, 5, 3, 3, device=device, requires_grad=True)
        images = torch.rand(2, 5, 11, 11, device=device).to(memory_format=torch.channels_last)
        nn.functional.conv2d(images, weight).backward(torch.rand(2, 7, 9, 9, device=device))

    graph = with_workspaces(recorded(program), CARD, "2.13.0")
    of_weight, of_gradient = 4 * 7 * 5 * 9, 4 * 2 * 7 * 9 * 9
    assert {op.name: op.scratch_bytes for op in graph.ops if op.scratch_bytes} == {
        FORWARD_OP: of_weight + SIZES["forward"],
        BACKWARD_OP: of_gradient + SIZES["grad_weight"],
    }


def test_the_notes_of_a_plan_name_the_source_of_its_workspaces():
    model, batch, loss_fn = convnet.build(batch_size=32)
    plan = planner.plan(model, batch, loss_fn=loss_fn, vram=None, gpu="a100-40gb")
    (note,) = (note for note in plan.notes if "workspaces of convolutions" in note)
    assert note == (
        "59 of 59 workspaces of convolutions are those of cuDNN 9.20.0, which torch 2.13 runs "
        "(from the planner's tables)"
    )
    assert not any("unknown" in note and "convolution" in note for note in plan.notes)


def test_cudnn_benchmark_and_convolutions_that_are_not_cudnns_are_noted():
    def program(device: torch.device) -> None:
        images = torch.rand(2, 5, 11, 11, device=device)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            nn.functional.conv2d(images, torch.rand(7, 5, 3, 3, device=device))
        with torch.backends.cudnn.flags(enabled=False):
            nn.functional.conv2d(images, torch.rand(7, 5, 3, 3, device=device))
            nn.functional.conv_transpose2d(images, torch.rand(5, 7, 3, 3, device=device))

    notes = convolution_notes(recorded(program), CARD, "2.13.0")
    assert any("1 of 1 workspaces" in note and "by a formula" in note for note in notes)
    assert any("benchmark is on" in note for note in notes)
    assert any("bound is not known for 1 of 1 workspaces" in note for note in notes)
    assert any("do not run on cuDNN (1 ops)" in note for note in notes)


def test_with_cudnn_benchmark_the_plan_states_the_peak_without_it_and_an_upper_bound():
    model, batch, loss_fn = convnet.build(batch_size=32)
    arguments = {"loss_fn": loss_fn, "gpu": "a100-40gb", "vram": None}
    usual = planner.plan(model, batch, **arguments)
    plan = planner.plan(model, batch, **arguments, cudnn_benchmark=True)
    assert plan.cudnn_benchmark and not usual.cudnn_benchmark and not torch.backends.cudnn.benchmark
    assert plan.peak.total_bytes > usual.peak.total_bytes
    assert plan.peak.breakdown["workspaces"] > usual.peak.most["workspaces"]
    assert plan.tensors[0].category == "workspaces" and plan.tensors[0].size_bytes > plan.peak.allocated_bytes // 2
    (note,) = (note for note in plan.notes if note.startswith("without cudnn.benchmark"))
    assert format_size(usual.peak.total_bytes) in note and format_size(plan.peak.total_bytes) in note
    assert not any("bound is" in note for note in plan.notes)
    certificate = rewrite.certify(plan, model, batch, loss_fn=loss_fn)
    assert certificate.certified_bytes == plan.solver.certified_bytes > usual.solver.certified_bytes


def test_a_search_for_the_fastest_algorithm_ends_with_the_first_step():
    def program(device: torch.device) -> None:
        layer = nn.Conv2d(64, 64, 3, padding=1, device=device)
        images = torch.rand(32, 64, 56, 56, device=device)
        for _ in range(2):
            layer(images).sum().backward()

    searching = dataclasses.replace(CARD, cudnn_benchmark=True)
    graph = with_workspaces(recorded(program), searching, "2.13.0")
    usual = with_workspaces(recorded(program), CARD, "2.13.0")
    assert has_searches(graph) and not has_searches(usual)
    assert measure(without_searches(graph), CARD, vram_bytes=None) == measure(usual, CARD, vram_bytes=None)
    first, later = (measure(each, CARD, vram_bytes=None) for each in (graph, with_known_algorithms(graph)))
    assert first.footprint.allocated_bytes > later.footprint.allocated_bytes
    assert first.curve_bytes == later.curve_bytes >= measure(usual, CARD, vram_bytes=None).curve_bytes
    # The search takes what is free, so it needs no larger budget.
    whole = smallest_total_bytes(graph, CARD, fastest=True)
    under = measure(graph, CARD, vram_bytes=whole, fastest=True)
    assert under.fits and not under.slower and whole <= later.footprint.total_bytes + MIB
    tight = measure(graph, CARD, vram_bytes=smallest_total_bytes(graph, CARD))
    assert tight.fits and tight.slower


def test_near_the_budget_convolutions_take_the_algorithm_that_fits(monkeypatch):
    """Without room for the fastest algorithms, the step needs fewer bytes than with them."""
    sizes = {"forward": 300 * MIB, "grad_input": 200 * MIB, "grad_weight": 0}
    monkeypatch.setattr(
        convolutions,
        "workspaces",
        lambda wanted, *_: {
            each: Answer(tuple(dict.fromkeys((sizes[each.kind.operation], 0))), Source.TABLE, None, True)
            for each in wanted
        },
    )

    def program(device: torch.device) -> None:
        layer = nn.Conv2d(5, 7, 3, device=device)
        images = torch.rand(2, 5, 11, 11, device=device, requires_grad=True)
        layer(images).backward(torch.rand(2, 7, 9, 9, device=device))

    graph = with_workspaces(recorded(program), CARD, "2.13.0")
    fastest = smallest_total_bytes(graph, CARD, fastest=True)
    least = smallest_total_bytes(graph, CARD)
    assert fastest - least >= 298 * MIB and least - CARD.outside_bytes <= 4 * MIB
    roomy, between, tight = (
        measure(graph, CARD, vram_bytes=size) for size in (fastest, fastest - 50 * MIB, fastest - 250 * MIB)
    )
    assert [len(each.slower) for each in (roomy, between, tight)] == [0, 1, 2]
    assert [graph.ops[index].name for index in tight.slower] == [FORWARD_OP, BACKWARD_OP]
    assert all(each.fits for each in (roomy, between, tight))
    assert roomy.curve_bytes > 300 * MIB and roomy.least_bytes == between.curve_bytes == tight.curve_bytes < MIB
    assert between.footprint.allocated_bytes < roomy.footprint.allocated_bytes - 99 * MIB
    assert tight.footprint.breakdown.get("workspaces", 0) < MIB
    assert not measure(graph, CARD, vram_bytes=fastest - 50 * MIB, fastest=True).fits


@pytest.mark.slow
def test_a_plan_below_the_fastest_algorithms_names_the_convolutions_that_run_slower_ones():
    model, batch, loss_fn = convnet.build(batch_size=32, blocks_per_stage=(1, 1))
    arguments = {"loss_fn": loss_fn, "gpu": "a100-40gb", "only": ("optimizer-kernel",)}
    graph = certifying_graph(workload(model, batch, loss_fn=loss_fn), (), CARD)
    whole = smallest_total_bytes(graph, CARD, fastest=True)
    plan = planner.plan(model, batch, vram=whole - 4 * MIB, **arguments)
    assert plan.fits and plan.peak.total_bytes <= whole - 4 * MIB
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
    (note,) = (note for note in plan.notes if "slower algorithm" in note)
    assert note.endswith(f"with which the step needs {format_size(whole)}") and "1 x backward of 32 x 64 x " in note
    assert plan.baseline.total_bytes >= whole
    least = smallest_total_bytes(graph, CARD)
    roomy = planner.plan(model, batch, vram="20GiB", **arguments)
    (note,) = (note for note in roomy.notes if "fastest algorithms" in note)
    assert note.endswith(f"needs at least {format_size(least)}") and format_size(whole) in note
    certificate = rewrite.certify(plan, model, batch, loss_fn=loss_fn)
    assert certificate.fits and certificate.certified_bytes == plan.solver.certified_bytes
