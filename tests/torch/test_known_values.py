"""Whole numbers that a model makes itself have values; what depends on the batch has none."""

from __future__ import annotations

import pytest
import torch
from planner_cases import CARD, plain, transformer

from planner.decisions import Precision
from planner.errors import RehearsalError
from planner.virtual_gpu import VirtualGpuMode
from planner.workload import workload


def test_positions_are_known_through_views_arithmetic_and_writes():
    with VirtualGpuMode() as mode:
        positions = torch.arange(6).view(2, 3)
        ones = torch.ones(2, 3, dtype=torch.long)
        ones[:, 1:] += positions[:, :2]
        steps = (positions.diff(dim=-1) != 1).cumsum(-1)
        assert positions[1, 2].item() == 5
        assert not steps.any()
        assert bool((positions >= 0).all())
    assert mode.known_values.of(ones).tolist() == [[1, 1, 2], [1, 4, 5]]


def test_what_is_written_into_known_numbers_from_unknown_ones_makes_them_unknown():
    with VirtualGpuMode() as mode:
        tokens = torch.empty(4, dtype=torch.long)
        positions = torch.arange(4)
        positions.view(2, 2).add_(tokens.view(2, 2))
        random = torch.randint(9, (4,))
    for unknown in (tokens, positions, random):
        assert not mode.known_values.knows(unknown)


def test_values_die_with_their_tensor():
    with VirtualGpuMode() as mode:
        positions = torch.arange(4)
        view = positions[1:]
        del positions
        assert mode.known_values.knows(view)
        del view
    assert not mode.known_values._twins


def test_a_causal_model_without_padding_gives_attention_no_mask():
    work = transformer("gpt2", "GPT2LMHeadModel", batch_size=2, seq_len=16, n_layer=1, vocab_size=64)
    names = {op.name for op in plain(work, (Precision(dtype="bf16"),), card=CARD).ops}
    assert "aten._scaled_dot_product_flash_attention.default" in names  # it takes no mask


class Looking(torch.nn.Module):
    """Looks at its positions, or at its batch."""

    def __init__(self, *, batch: bool) -> None:
        super().__init__()
        self.inner, self.batch = torch.nn.Linear(4, 4), batch

    def forward(self, x):
        looked_at = (x > 0) if self.batch else torch.arange(4, device=x.device) < 4
        y = self.inner(x)
        return y.mean() if looked_at.all() else y.sum()


def test_a_model_may_look_at_what_it_made_and_not_at_the_batch():
    assert "aten.mean.default" in {op.name for op in plain(workload(Looking(batch=False), torch.zeros(2, 4))).ops}
    with pytest.raises(RehearsalError, match="asks for the value of a tensor"):
        plain(workload(Looking(batch=True), torch.zeros(2, 4)))
