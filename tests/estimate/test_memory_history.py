"""The simulated history of a recorded step, and the snapshot that PyTorch's visualizer opens."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from planner import pipeline
from planner.estimate.footprint import measure
from planner.estimate.memory_history import memory_history, snapshot_origins, source_of, tick_times_ns
from planner.plan_types.decisions import Accumulation, Allocator
from planner.recording.step_graph import Category, Phase
from planner.snapshot import load, replay_history, write_snapshot
from planner.workload.workload import workload
from tests.support.workloads import CARD

SAMPLES, WIDTH = 64, 96


def work():
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)]
    batch = (torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH))
    return workload(torch.nn.Sequential(*layers), batch, loss_fn=mean_square)


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


@pytest.fixture(scope="module")
def graph():
    return pipeline.record_step(work(), CARD)


@pytest.fixture(scope="module")
def history(graph):
    return memory_history(graph, CARD, capacity_bytes=None)


@pytest.mark.parametrize("decisions", [(), (Allocator(expandable_segments=True),), (Allocator(max_split_size_mb=21),)])
def test_the_history_has_the_peaks_of_the_footprint(graph, decisions):
    history = memory_history(graph, CARD, decisions, capacity_bytes=None)
    footprint = measure(graph, CARD, vram_bytes=None, decisions=decisions).footprint
    reserved = history.reserved_bytes(graph.ticks)
    assert history.simulated.peak_reserved_bytes == footprint.reserved_bytes == reserved.max()
    assert (reserved >= graph.live_bytes(granularity_bytes=512)).all()
    tick = history.ticks[history.simulated.peak_allocated_request]
    assert graph.op_at(tick).name == footprint.op
    again = memory_history(graph, CARD, decisions, capacity_bytes=footprint.reserved_bytes)
    assert again == history


@pytest.mark.parametrize("decisions", [(), (Allocator(expandable_segments=True),), (Allocator(max_split_size_mb=21),)])
def test_the_snapshot_of_a_step_replays_to_the_byte_and_pytorchs_visualizer_reads_it(graph, decisions, tmp_path):
    from torch.cuda import _memory_viz

    history = memory_history(graph, CARD, decisions, capacity_bytes=None)
    path = tmp_path / "step.pickle"
    times = tick_times_ns(graph, CARD, micro_batches=1)
    write_snapshot(path, history.simulated, snapshot_origins(graph, history, times))
    result = replay_history(load(path))
    assert result.is_equal
    assert result.recorded.peak_reserved_bytes == history.simulated.peak_reserved_bytes
    assert result.recorded.peak_requested_bytes == graph.live_bytes().max()
    data = pickle.loads(path.read_bytes())
    events = _memory_viz.trace(data).splitlines()
    if not data["allocator_settings"]["expandable_segments"]:
        assert len([line for line in events if "cudaMalloc" in line]) == len(data["segments"])
    assert "0.weight (exp_avg)" in _memory_viz.memory(data, format_flamegraph=str)
    assert f"seg_{data['segments'][0]['address']}" in _memory_viz.segments(data, format_flamegraph=str)
    for plot in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert plot.count("<script") == 1


def test_frames_name_the_op_its_line_the_modules_and_the_phase(graph, history):
    times = tick_times_ns(graph, CARD, micro_batches=1)
    origins = snapshot_origins(graph, history, times)
    frames = [origin.frames for origin in origins if origin.frames[0].name == "aten.addmm.default"]
    assert [frame.name for frame in frames[0]] == ["aten.addmm.default", "0 (Linear)", "step 1, forward"]
    loss = next(index for index, op in enumerate(graph.ops) if op.name == "aten.mse_loss.default")
    backward = next(op for op in graph.ops if op.phase is Phase.BACKWARD and not op.source)
    assert source_of(graph, graph.ops[loss])[0] == __file__
    assert source_of(graph, dataclasses.replace(backward, forward_op=loss)) == source_of(graph, graph.ops[loss])
    assert source_of(graph, dataclasses.replace(backward, forward_op=None)) == ("", 0)


def test_storages_know_the_parameter_that_they_belong_to(graph):
    names = {name for name, _ in work().model.named_parameters()}

    def named(category):
        return {storage.name for storage in graph.storages if storage.category is category}

    assert named(Category.PARAMETER) == named(Category.GRADIENT) == names
    assert named(Category.INPUT) == {"0", "1"}
    state = [storage for storage in graph.storages if storage.name == "0.weight (exp_avg)"]
    assert [(storage.category, storage.shape, storage.dtype) for storage in state] == [
        (Category.OPTIMIZER_STATE, (WIDTH, WIDTH), "float32")
    ]


def test_tied_weights_have_their_first_name():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    tied = workload(model, (torch.zeros(2, 8), torch.zeros(2, 8)), loss_fn=mean_square)
    named = {(storage.category, storage.name) for storage in pipeline.record_step(tied, CARD).storages if storage.name}
    assert named == {
        (Category.PARAMETER, "0.weight"),
        (Category.GRADIENT, "0.weight"),
        (Category.OPTIMIZER_STATE, "0.weight (exp_avg)"),
        (Category.OPTIMIZER_STATE, "0.weight (exp_avg_sq)"),
        (Category.INPUT, "0"),
        (Category.INPUT, "1"),
    }


def test_ops_of_the_step_itself_have_no_source_line_of_the_program_that_plans(graph):
    optimizer = [op for op in graph.ops if op.phase is Phase.OPTIMIZER]
    assert optimizer and not any(op.source for op in optimizer)
    split = pipeline.record_step(work(), CARD, (Accumulation(micro_batch_size=SAMPLES // 2, micro_batches=2),))
    of_loss = {op.source.rpartition(":")[0] for op in split.ops if op.phase is Phase.FORWARD and not op.module}
    assert of_loss <= {"", __file__}
    lines = {op.source for op in split.ops if op.source.startswith(__file__)}
    assert len(lines) == 1  # of the loss function; the tests' own frames are not model code


def test_the_time_of_the_last_step_is_that_of_the_footprint():
    decisions = (Accumulation(micro_batch_size=8, micro_batches=8),)
    graph = pipeline.record_step(work(), CARD, decisions)
    times = tick_times_ns(graph, CARD, micro_batches=8)
    start = min(op.tick for op in graph.ops if op.step == 1)
    step_ns = measure(graph, CARD, vram_bytes=None, decisions=decisions).footprint.step_ns
    assert times[-1] - times[start] == step_ns
    assert (times[1:] >= times[:-1]).all()
