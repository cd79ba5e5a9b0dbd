"""Integer and boolean tensors of the batch have their values in a rehearsal: what follows from them is exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import rewrite
from planner.errors import RehearsalError
from planner.plan_types.decision_base import micro_batches_of
from planner.recording.step_graph import StepGraph
from tests.support.truth import Case, rehearsal, truth

pytestmark = pytest.mark.slow

SAMPLES, TOKENS, WIDTH = 8, 16, 32


class Encoder(nn.Module):
    """Embeds tokens, and does with them what `use` does."""

    def __init__(self, use) -> None:
        super().__init__()
        self.embedding, self.layer, self.use = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), use
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.use(self, **batch)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))


def batch() -> dict[str, torch.Tensor]:
    """Tokens, the length of each sample, and where there are tokens and no padding."""
    lengths = torch.tensor([16, 12, 9, 7, 5, 5, 3, 1])
    tokens = torch.randint(1, 50, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "lengths": lengths, "present": torch.arange(TOKENS)[None] < lengths[:, None]}


def logged(model, tokens, **rest):
    model.count = (tokens > 3).sum().item()
    return model.hidden(tokens)


def asserted(model, tokens, lengths, **rest):
    assert lengths.max().item() <= tokens.shape[1]
    return model.hidden(tokens)


def branched(model, tokens, present, **rest):
    hidden = model.hidden(tokens)
    return hidden if present.all() else hidden * present[..., None]


def selected(model, tokens, present, **rest):
    return model.hidden(tokens)[present]


def masked(model, tokens, present, **rest):
    return torch.masked_select(model.hidden(tokens), present[..., None])


def positions(model, tokens, present, **rest):
    return model.hidden(tokens)[present.nonzero(as_tuple=True)]


def unpadded(model, tokens, present, **rest):
    hidden = model.hidden(tokens).flatten(0, 1)
    places = present.flatten().nonzero().squeeze(1)
    return torch.zeros_like(hidden).index_copy(0, places, model.layer(hidden.index_select(0, places)))


def unique(model, tokens, **rest):
    found, inverse = torch.unique(tokens, return_inverse=True)
    return model.layer(model.embedding(found))[inverse]


def cut(model, tokens, lengths, **rest):
    return model.hidden(tokens[:, : int(lengths[2:].max())])


def listed(model, tokens, lengths, **rest):
    return torch.cat([row[:length] for row, length in zip(model.hidden(tokens), lengths.tolist(), strict=True)])


def one_hot(model, tokens, **rest):
    return model.hidden(tokens).sum() * F.one_hot(tokens).float().sum(-1)


def repeated(model, tokens, lengths, **rest):
    return model.hidden(tokens).repeat_interleave(lengths, dim=0)


def counted(model, tokens, **rest):
    return model.hidden(tokens).sum() * tokens.flatten().bincount().float().mean()


USES = (logged, asserted, branched, selected, masked, positions, unpadded, unique, cut, listed, one_hot, repeated)
USES += (counted,)


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def planned(use, given=None, **options) -> planner.Plan:
    options = {"vram": "1GiB", "gpu": "bare", "optimizer": "sgd", **options}
    return planner.plan(Encoder(use), given or batch(), loss_fn=squares, **options)


OTHER_KERNELS = (selected, masked, one_hot)
"""Uses for which a rehearsal runs other ops than a CPU: it finds the positions of a mask first, as CUDA does."""


def kernels(graph: StepGraph) -> list[tuple]:
    """Returns the ops that allocate, with their shapes and the bytes that are alive."""
    live = graph.live_bytes()
    return [(op.name, op.phase, op.shapes, int(live[op.tick])) for op in graph.ops if not op.is_view]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_what_follows_from_values_of_the_batch_is_rehearsed_as_it_really_happens(use):
    case = Case(build=lambda: (Encoder(use), batch(), squares), optimizer="sgd")
    real, rehearsed = truth(case), rehearsal(case)
    assert any("every batch has the values of" in assumption for assumption in rehearsed.assumptions)
    if use in OTHER_KERNELS:
        losses = [[op.shapes for op in graph.ops if "pow" in op.name] for graph in (real, rehearsed)]
        assert losses[0] == losses[1]
    else:
        assert kernels(real) == kernels(rehearsed)


@pytest.mark.parametrize("use", [selected, unpadded, unique], ids=lambda use: use.__name__)
def test_a_plan_with_values_of_the_batch_trains_as_the_baseline(use):
    plan = planned(use, force=["checkpoint"])
    assert plan.solver.promised_bytes == plan.solver.certified_bytes
    assert rewrite.verify(plan, Encoder(use), batch(), loss_fn=squares).passed


def test_fewer_tokens_take_fewer_bytes():
    few = batch()
    few["present"] = few["present"] & (torch.arange(SAMPLES)[:, None] > 3)
    full, part = planned(unpadded, vram=None), planned(unpadded, few, vram=None)
    assert part.peak.allocated_bytes < full.peak.allocated_bytes
    assert any("the values of 'present': in module" in note for note in part.notes)


def test_accumulation_is_not_offered_where_memory_may_depend_on_values():
    plan = planned(selected, vram="16KiB")
    assert micro_batches_of(plan.decisions) == 1
    assert any(
        "no accumulation: the memory of a micro-batch may depend on the values of its samples" in note
        for note in plan.notes
    )
    forced = planned(selected, force=["accumulation"])
    assert any("it may take more memory" in note for note in forced.notes)


def test_accumulation_is_offered_where_values_are_not_needed():
    def plain_use(model, tokens, **rest):
        if not (tokens >= 0).all():
            raise ValueError("a check, which passes with any batch")
        return model.hidden(tokens)

    plan = planned(plain_use, force=["accumulation"])
    assert micro_batches_of(plan.decisions) > 1
    assert not any("every batch has the values of" in note or "may take more" in note for note in plan.notes)


def test_floats_of_the_batch_and_tensors_without_values_stay_unknown():
    with pytest.raises(RehearsalError, match=r"test_batch_values.py:\d+; rewrite that line"):
        planned(lambda model, tokens, weight: model.hidden(tokens) * weight.sum().item(),
                {"tokens": batch()["tokens"], "weight": torch.rand(SAMPLES)})  # fmt: skip
    with pytest.raises(RehearsalError, match=r"test_batch_values.py:\d+; rewrite that line"):
        planned(logged, {name: tensor.to("meta") for name, tensor in batch().items()})


def test_packed_sequences_are_refused_with_a_way_out():
    def packed(model, tokens, lengths, **rest):
        embedded = model.embedding(tokens)
        sequence = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(model.recurrent(sequence)[0], batch_first=True)[0]

    with pytest.raises(RehearsalError, match=r"_pack_padded_sequence.*plan the model with padded sequences"):
        planned(packed)
