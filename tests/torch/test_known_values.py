"""Whole numbers that a model makes itself have values; what depends on the batch has none."""

from __future__ import annotations

import pytest
import torch
from planner_cases import CARD, plain, transformer

from planner.decisions import Precision
from planner.errors import RehearsalError
from planner.workload import workload


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
