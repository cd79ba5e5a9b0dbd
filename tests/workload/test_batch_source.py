"""Batches from data loaders, and batches from a file of shapes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import time

import pytest
import torch
from torch import nn

import planner
from planner import rewrite
from planner.cli.command import main
from planner.errors import TimeLimitError, WorkloadError
from planner.plan_types.recompute_decisions import Checkpoint
from planner.workload.batch_source import batch_of_shapes, candidate_batches

SOURCE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def build():
    batches = [(torch.randn(rows, 8), torch.randn(rows, 1)) for rows in (4, 32, 16)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    return model(), loader, lambda output, batch: (output - batch[1]).square().mean()
"""


def texts(*shapes):
    return [{"input_ids": torch.zeros(shape, dtype=torch.int64), "mask": torch.ones(shape)} for shape in shapes]


def shapes_of(batches):
    return [tuple(batch["input_ids"].shape) for batch in batches]


def test_a_batch_that_another_batch_covers_is_left_out():
    loader = torch.utils.data.DataLoader(texts((4, 8), (2, 8), (8, 2), (4, 8)), batch_size=None)
    kept, notes, _ = candidate_batches(loader)
    assert shapes_of(kept) == [(4, 8), (8, 2)]
    assert notes == ("the plan is for the batch that needs the most memory among the 4 batches",)


def test_a_batch_with_a_smaller_and_a_larger_tensor_is_kept():
    wide, long = {"a": torch.zeros(2, 9), "b": torch.zeros(2, 3)}, {"a": torch.zeros(2, 3), "b": torch.zeros(2, 9)}
    assert len(candidate_batches(iter([wide, long]))[0]) == 2


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (texts((4, 8), (8, 2)), 2),
        ([(torch.zeros(4, 8), torch.zeros(4)), (torch.zeros(8, 2), torch.zeros(8))], 2),
        (list(torch.utils.data.DataLoader(list(zip(torch.zeros(6, 2), range(6), strict=True)), batch_size=4)), 1),
        ([([torch.zeros(3, 4)] * 2, [{"boxes": torch.zeros(1, 4)}] * 2), ([torch.zeros(3, 8)], [{}])], 2),
        ([torch.zeros(4, 8), torch.zeros(4)], 1),
        ([[torch.zeros(3, 4)] * 2, [{"boxes": torch.zeros(1, 4)}] * 2], 1),
    ],
)
def test_a_list_of_batches_is_read_as_batches_and_a_list_of_tensors_as_one(batch, count):
    kept, notes, _ = candidate_batches(batch)
    assert len(kept) == count and bool(notes) == (kept[0] is not batch)


def test_one_batch_is_returned_unchanged():
    batch = texts((2, 2))[0]
    kept, notes, _ = candidate_batches(batch)
    assert kept[0] is batch and len(kept) == 1 and notes == ()
    assert candidate_batches([batch])[1] == ()


def test_a_list_that_could_be_the_arguments_of_one_call_is_noted():
    pairs = [[torch.zeros(4, 8), torch.zeros(4)], [torch.zeros(4, 8), torch.zeros(4)]]
    assert "give them as a tuple" in candidate_batches(pairs)[1][0]
    assert candidate_batches(tuple(pairs)) == ([tuple(pairs)], (), None)


def test_reading_a_source_changes_nothing_here():
    loader = torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2, shuffle=True)
    iterator, torch_state, python_state = iter(texts((1, 2), (2, 2))), torch.get_rng_state(), random.getstate()
    candidate_batches(loader)
    candidate_batches(iterator)
    assert len(list(iterator)) == 2
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state


def test_an_endless_source_is_read_in_part():
    def endless():
        while True:
            yield torch.zeros(2, 2)

    assert "the first 200 batches" in candidate_batches(endless())[1][0]


def broken(rows):
    raise ValueError("cannot read 5.jpg")


IN_WORKER = torch.utils.data.DataLoader([1, 2], num_workers=1, collate_fn=broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, words",
    [
        (iter([]), "is empty"),
        ((1 / 0 for _ in range(2)), "ZeroDivisionError"),
        (IN_WORKER, "ValueError: cannot read 5.jpg; "),
    ],
)
def test_a_source_that_gives_no_batch_is_refused(source, words):
    with pytest.raises(WorkloadError, match=words):
        candidate_batches(source)


def test_workers_of_a_data_loader_need_not_import_its_functions(monkeypatch):
    forkserver = multiprocessing.get_context("forkserver")  # the default of Python 3.14
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", forkserver)
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, collate_fn=lambda rows: torch.zeros(2, 3))
    assert [batch.shape for batch in candidate_batches(loader)[0]] == [(2, 3)]


@pytest.mark.slow
def test_the_plan_is_for_the_step_that_needs_the_most_memory():
    """The batch with fewer elements needs more memory, because its sequences are longer."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    many, long = torch.randn(40, 16, 8), torch.randn(2, 256, 8)

    def peak(batch):
        options = {"loss_fn": lambda output, batch: output.mean(), "gpu": "bare", "vram": None}
        return planner.plan(model, batch, **options)

    plan = peak(iter([many, long]))
    assert plan.peak == max(peak(many).peak, peak(long).peak, key=lambda footprint: footprint.total_bytes)
    assert "the plan is for the batch that needs the most memory among the 2 batches" in plan.notes


def test_a_file_of_shapes_describes_a_nested_batch():
    stated = {"x": [2, 3], "target": {"ids": {"shape": [2], "dtype": "int64", "below": 5}}, "weight": {"shape": []}}
    batch = batch_of_shapes(stated, "cpu")
    assert batch["x"].shape == (2, 3) and batch["x"].dtype is torch.float32
    assert batch["target"]["ids"].dtype is torch.int64 and int(batch["target"]["ids"].max()) < 5
    assert batch["weight"].shape == ()
    assert [tensor.shape for tensor in batch_of_shapes([[2, 3], [2]], "meta")] == [(2, 3), (2,)]


@pytest.mark.parametrize(
    "stated",
    [
        {"x": "8x3"},
        {"x": {"shape": [2], "size": 3}},
        {"x": {"shape": [2], "dtype": "i"}},
        {"x": {"shape": [2], "dtype": "qint8"}},
        {"x": [1 << 40, 1 << 40]},
        {"x": [2, 1 << 70]},
        {},
    ],
)
def test_other_data_is_refused(stated):
    with pytest.raises(WorkloadError, match="input shapes"):
        batch_of_shapes(stated, "meta")


class Graph:
    """An object like `torch_geometric.data.Data`."""

    def __init__(self, **tensors):
        self.tensors, self.count = tensors, 3

    def __copy__(self):
        return Graph(**self.tensors)

    def to_dict(self):
        return {**self.tensors, "count": self.count}

    def apply(self, function):
        function(self.count)
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return self


class OfGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, graph):
        return self.layer(graph.tensors["x"])[graph.tensors["edges"][0]].square().mean()


def test_a_graph_is_a_batch():
    graph, model = Graph(x=torch.randn(6, 4), edges=torch.randint(6, (2, 9))), OfGraph()
    plan = planner.plan(model, graph, vram=None, gpu="bare")
    assert [path for path, _, _ in plan.workload.batch] == ["x", "edges"] and plan.workload.batch_size == 6
    assert rewrite.verify(dataclasses.replace(plan, decisions=(Checkpoint(modules=("layer",)),)), model, graph).passed
    assert type(graph.tensors["x"]) is torch.Tensor


@pytest.mark.parametrize("batch", [torch.utils.data.TensorDataset(torch.zeros(2)), range(3), None, {torch.zeros(2)}])
def test_a_batch_of_an_unknown_type_is_refused_with_those_that_are_known(batch):
    with pytest.raises(
        WorkloadError,
        match=r"a batch of type .* a tuple or a tensor, or several batches as a DataLoader, an iterator or a list",
    ):
        planner.plan(nn.Linear(2, 2), batch, vram=None, gpu="bare")


@pytest.mark.slow
def test_the_command_plans_the_largest_batch_of_a_data_loader(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    assert main(["net.py:build", "--gpu", "bare", "--vram", "1GiB", "--save", "plan.json", "--emit", "step.py"]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["workload"]["batch_size"] == 32
    assert main(["plan.json", "--trust-reference"]) == 0
    assert "32" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_plans_a_model_without_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(8, 1)\n"
        "    def forward(self, x, y): return (super().forward(x) - y).square().mean()\n"
    )
    (tmp_path / "shapes.json").write_text('{"x": [6, 8], "y": [6, 1]}')
    shapes = ["--input-shapes", "shapes.json"]
    assert main(["net.py:Net", "--gpu", "bare", "--vram", "1GiB", "--save", "plan.json", *shapes]) == 0
    saved = json.loads((tmp_path / "plan.json").read_text())["workload"]
    assert saved["batch_size"] == 6 and saved["input_shapes"] == {"x": [6, 8], "y": [6, 1]}
    assert main(["plan.json", "--trust-reference"]) == 0
    assert main(["net.py:Net", "--batch-size", "12", "--save", "plan.json", *shapes]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["workload"]["batch_size"] == 12
    assert main(["net.py:Net", "--seq-len", "12", *shapes]) == 2


@pytest.mark.parametrize("shapes", [64, 65])
def test_a_run_over_too_many_different_shapes_is_noted(shapes):
    found = candidate_batches(iter([torch.zeros(2, length) for length in range(1, shapes + 1)]))
    assert (found.stream is None) == ("the run was not simulated" in found.notes[0]) == (shapes > 64)


def test_if_one_batch_has_padding_all_are_taken_as_padded():
    batches = [
        {"tokens": torch.zeros(2, size), "attention_mask": torch.ones(2, size, dtype=torch.int64)} for size in (3, 5)
    ]
    assert all(batch["attention_mask"].all() for batch in candidate_batches(batches)[0])
    short = {name: tensor.clone() for name, tensor in batches[0].items()}
    short["attention_mask"][1, :2] = 0
    kept, _, stream = candidate_batches([*batches, short])
    assert [batch["attention_mask"].tolist() for batch in kept] == [[[1, 1, 1, 1, 0]] * 2]
    assert [batch["attention_mask"].tolist() for batch in stream.different] == [[[1, 1, 0]] * 2, [[1, 1, 1, 1, 0]] * 2]
    assert candidate_batches([*batches, short], worst_case=False)[0][0]["attention_mask"].all()


def test_a_loader_that_does_not_return_ends_with_the_time_limit():
    def waiting():
        yield torch.zeros(2, 8)
        time.sleep(30)

    with pytest.raises(TimeLimitError, match="while the data loader was read: give more time, or one batch"):
        planner.plan(nn.Linear(8, 8), waiting(), vram=None, gpu="bare", loss_fn=lambda y, x: y.sum(), time_limit="1s")


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), MemoryError()])
def test_a_loader_that_raises_anything_midway_is_named(error):
    def source():
        yield torch.zeros(2, 8)
        raise error

    with pytest.raises(WorkloadError, match=f"the data loader raised {type(error).__name__}: .* without the planner"):
        candidate_batches(source())


def test_a_loader_that_ends_its_process_is_named():
    def source():
        os._exit(0)
        yield

    with pytest.raises(WorkloadError, match=r"the data loader ended the process that reads it .*exit code 0"):
        candidate_batches(source())
