"""Sparse tensors of the model and of the batch count with their indices and values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import DecisionError, PlannerError, WorkloadError

pytestmark = pytest.mark.slow

NODES, EDGES, WIDTH = 200, 4000, 16
ELEMENT_BYTES = 2 * 8 + 4
"""Bytes of two int64 indices and a float value."""


def adjacency() -> torch.Tensor:
    """A sparse matrix [NODES, NODES] with `EDGES` elements."""
    places = torch.randperm(NODES * NODES)[:EDGES]
    indices = torch.stack([places // NODES, places % NODES])
    return torch.sparse_coo_tensor(indices, torch.rand(EDGES), (NODES, NODES), check_invariants=True).coalesce()


class WithBuffer(nn.Module):
    def __init__(self, use=torch.sparse.mm, matrix=None) -> None:
        super().__init__()
        self.layer, self.head, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), use
        self.register_buffer("adjacency", adjacency() if matrix is None else matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.use(self.adjacency, self.layer(x))))


class WithArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(adjacency @ self.layer(x)))


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def planned(model: nn.Module, batch: object, *, vram=None, **options):
    return planner.plan(model, batch, vram=vram, gpu="bare", loss_fn=squares, optimizer="sgd", **options)


def dense_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_sparse_buffer_counts_with_its_indices_and_values():
    model = WithBuffer()
    plan = planned(model, (torch.randn(NODES, WIDTH),))
    assert plan.peak.breakdown["parameters"] == dense_bytes(model) + EDGES * ELEMENT_BYTES
    assert "workspaces of cuSPARSE" in " ".join(plan.notes)


def test_a_sparse_tensor_of_the_batch_counts_with_its_indices_and_values():
    x = torch.randn(NODES, WIDTH)
    plan = planned(WithArgument(), {"x": x, "adjacency": adjacency()})
    assert plan.peak.breakdown["inputs"] == x.nbytes + EDGES * ELEMENT_BYTES


def test_a_batch_with_a_sparse_tensor_is_not_split():
    batch = {"x": torch.randn(NODES, WIDTH), "adjacency": adjacency()}
    with pytest.raises(DecisionError, match=r"'adjacency' .* is sparse"):
        planned(WithArgument(), batch, vram="1GiB", only=["accumulation"], force=["accumulation"])


def test_flops_of_a_product_are_those_of_its_elements():
    batch = (torch.randn(NODES, WIDTH),)
    sparse, dense = (
        planned(WithBuffer(), batch),
        planned(WithBuffer(matrix=adjacency().to_dense(), use=torch.mm), batch),
    )
    # A product in the forward and one in the backward.
    assert dense.peak.flops - sparse.peak.flops == 2 * 2 * (NODES * NODES - EDGES) * WIDTH


USES = {
    "product": lambda a, x: a @ x,
    "transposed": lambda a, x: a.t() @ x,
    "scaled": lambda a, x: torch.sparse.mm(a * 0.5, x),
    "sum of two": lambda a, x: (a + a.t()) @ x,
    "dense": lambda a, x: a.to_dense() @ x,
    "coalesced": lambda a, x: a.coalesce() @ x,
    "elements": lambda a, x: torch.zeros_like(x).index_add(0, a.indices()[0], x[a.indices()[1]] * a.values()[:, None]),
}


@pytest.mark.parametrize("use", USES)
def test_ops_on_sparse_tensors_are_rehearsed(use):
    batch = (torch.randn(NODES, WIDTH),)
    model = WithBuffer(USES[use])
    before = model.adjacency.clone()
    assert planned(model, batch).peak.allocated_bytes > dense_bytes(model) + EDGES * ELEMENT_BYTES
    assert torch.equal(model.adjacency.to_dense(), before.to_dense())
    squares(model(*batch), batch).backward()


def test_what_an_op_makes_of_a_sparse_tensor_counts_too():
    """The transposed matrix is kept for backward."""
    batch = (torch.randn(NODES, WIDTH),)
    plain, scaled = planned(WithBuffer(), batch), planned(WithBuffer(USES["scaled"]), batch)
    assert scaled.peak.allocated_bytes - plain.peak.allocated_bytes >= EDGES * ELEMENT_BYTES


def test_ops_of_unknown_size_are_refused_with_their_line():
    with pytest.raises(PlannerError, match=r"_sparse_sparse_matmul.*test_sparse_tensors.py:\d+; use a dense tensor"):
        planned(WithBuffer(lambda a, x: torch.sparse.mm(a, a) @ x), (torch.randn(NODES, WIDTH),))


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_result_of_unknown_size_is_refused_with_a_way_out(convert):
    with pytest.raises(PlannerError, match=r"test_sparse_tensors.py:\d+; use a dense tensor there, or make the sparse"):
        planned(WithBuffer(lambda a, x: a @ convert(x.relu()).to_dense()), (torch.randn(NODES, WIDTH),))


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_layouts_are_refused_by_name(layout):
    matrix = adjacency().to_sparse(layout=layout)
    with pytest.raises(WorkloadError, match=r"'adjacency' of the model has layout .*\.to_sparse_coo\(\)"):
        planned(WithBuffer(matrix=matrix), (torch.randn(NODES, WIDTH),))
    with pytest.raises(WorkloadError, match=r"'adjacency' of the batch has layout .*\.to_sparse_coo\(\)"):
        planned(WithArgument(), {"x": torch.randn(NODES, WIDTH), "adjacency": matrix})
