"""Which tensors of a batch are by sample is found out, or asked for; a batch is never cut by a guess from shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner import rewrite
from planner.cli import main
from planner.errors import DecisionError, WorkloadError
from planner.plan_types.decision_base import micro_batches_of

pytestmark = pytest.mark.slow

SIZE = 8
"""Number of samples, of tokens and of features at once."""
FORCED = {"vram": "1GiB", "gpu": "bare", "optimizer": "sgd", "only": ["accumulation"], "force": ["accumulation"]}


class Attention(nn.Module):
    """One layer of attention with a mask [T, T] in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(mask == 0, -1e9)
        return self.out(scores.softmax(-1) @ v)


class Weighted(nn.Module):
    """A layer whose features are weighted by a tensor [D] in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.layer(x * weight)


class Bounded(nn.Module):
    """A model that takes at most 8 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) <= SIZE, "too many samples"
        return self.layer(x)


class Graph(nn.Module):
    """One layer of messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.out(torch.relu(self.layer(sums)))


def squares(output: torch.Tensor, batch: dict) -> torch.Tensor:
    return output.pow(2).mean()


def with_mask() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SIZE, SIZE, 16), "mask": torch.ones(SIZE, SIZE).tril()}


def with_edges() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(20, 16), "edge_index": torch.randint(0, 20, (2, 80))}


def with_weight() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SIZE, SIZE), "weight": torch.rand(SIZE)}


@pytest.mark.parametrize(
    ("model", "batch", "name"), [(Attention, with_mask, "mask"), (Weighted, with_weight, "weight")]
)
@pytest.mark.thorough
def test_a_tensor_that_has_the_size_of_the_batch_by_chance_is_asked_for(model, batch, name):
    with pytest.raises(DecisionError, match=f"it runs if '{name}' is the same for all samples: .*by_sample="):
        planner.plan(model(), batch(), loss_fn=squares, **FORCED)
    free = planner.plan(model(), batch(), loss_fn=squares, vram="16KiB", gpu="bare", optimizer="sgd")
    assert micro_batches_of(free.decisions) == 1
    assert f"'{name}' is the same for all samples" in " ".join(free.notes)


@pytest.mark.parametrize(("make", "batch"), [(Attention, with_mask), (Weighted, with_weight)])
@pytest.mark.thorough_after(1)
def test_with_the_names_stated_a_batch_trains_the_same_in_parts(make, batch, tmp_path):
    torch.manual_seed(0)
    model, data = make().double(), {name: tensor.double() for name, tensor in batch().items()}
    plan = planner.plan(model, data, loss_fn=squares, by_sample=["x"], **FORCED)
    assert micro_batches_of(plan.decisions) > 1
    assert len(plan.workload.not_by_sample) == 1
    plan.save(tmp_path / "plan.json")
    plan = planner.Plan.load(tmp_path / "plan.json")
    parity = rewrite.verify(plan, model, data, loss_fn=squares)
    assert parity.passed, parity.failures
    squares(model(**data), data).backward()
    expected = {name: p.detach() - 1e-3 * p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    rewrite.apply(plan, model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn=squares).step(data)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)
    rewrite.emit(plan, tmp_path / "emitted.py")
    assert "NOT_BY_SAMPLE = (" in (tmp_path / "emitted.py").read_text()


def test_a_graph_is_not_split_between_its_nodes():
    with pytest.raises(DecisionError, match=r"'edge_index' \[2, 80\] has 2 rows.*by_sample="):
        planner.plan(Graph(), with_edges(), loss_fn=squares, **FORCED)
    free = planner.plan(Graph(), with_edges(), loss_fn=squares, vram="16KiB", gpu="bare", optimizer="sgd")
    assert micro_batches_of(free.decisions) == 1
    assert "'edge_index' [2, 80]" in " ".join(free.notes)


def test_a_tensor_with_other_rows_is_shared_once_the_names_are_stated():
    batch = {"x": torch.randn(6, SIZE, 16), "mask": torch.ones(SIZE, SIZE).tril()}
    with pytest.raises(DecisionError, match=r"'mask' \[8, 8\]"):
        planner.plan(Attention(), batch, loss_fn=squares, **FORCED)
    plan = planner.plan(Attention(), batch, loss_fn=squares, by_sample=["x"], **FORCED)
    assert micro_batches_of(plan.decisions) > 1


@pytest.mark.parametrize("rows", [1, None])
def test_tensors_that_are_surely_not_by_sample_need_no_names(rows):
    weight = torch.rand(1, SIZE) if rows else torch.tensor(0.5)
    plan = planner.plan(Weighted(), {"x": torch.randn(6, SIZE), "weight": weight}, loss_fn=squares, **FORCED)
    assert micro_batches_of(plan.decisions) > 1


def test_a_model_that_takes_half_of_the_batch_need_not_take_twice_as_much():
    plan = planner.plan(Bounded(), torch.randn(SIZE, SIZE), loss_fn=squares, **FORCED)
    assert micro_batches_of(plan.decisions) == 2


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["y"], "by_sample names 'y', which the batch does not have: it has x, mask"),
        (["x", "other"], "by_sample names 'other'"),
    ],
)
def test_names_that_the_batch_does_not_have_are_refused(names, error):
    with pytest.raises(WorkloadError, match=error):
        planner.plan(Attention(), with_mask(), loss_fn=squares, vram=None, by_sample=names)


def test_names_of_tensors_of_different_lengths_are_refused():
    batch = {"x": torch.randn(4, SIZE), "weight": torch.rand(SIZE)}
    with pytest.raises(WorkloadError, match="'x' has 4, 'weight' has 8"):
        planner.plan(Weighted(), batch, loss_fn=squares, vram=None, by_sample=["x", "weight"])


def test_the_command_takes_names_too(tmp_path, capsys, monkeypatch):
    (tmp_path / "user_model.py").write_text(
        "from tests.space.test_by_sample import Weighted, squares, with_weight\n"
        "def build():\n    return Weighted(), with_weight(), squares\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "user_model.py:build --vram 1GiB --gpu bare --force accumulation --only accumulation".split()
    assert main(words) == 2
    assert "--by-sample" in capsys.readouterr().err
    assert main([*words, "--batch-size", "16", "--by-sample", "x", "--json"]) == 0
    assert '"not_by_sample": [\n' in capsys.readouterr().out


def test_the_command_does_not_resize_a_graph_by_its_nodes(tmp_path, capsys, monkeypatch):
    (tmp_path / "user_graph.py").write_text(
        "from tests.space.test_by_sample import Graph, squares, with_edges\n"
        "def build():\n    return Graph(), with_edges(), squares\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main("user_graph.py:build --gpu bare --batch-size 40".split()) == 2
    assert "'edge_index' [2, 80] has 2 rows" in capsys.readouterr().err
