"""Integer and boolean tensors of the batch have their values in a rehearsal: what follows from them is exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner import pipeline, rewrite
from planner.errors import RehearsalError
from planner.plan_types.answers import Answers
from planner.plan_types.decision_base import micro_batches_of
from planner.recording.step_graph import StepGraph
from planner.virtual_gpu.values import data_dependence
from planner.workload.cards import resolve_card
from planner.workload.workload import workload
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
@pytest.mark.thorough_after(1)
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


@pytest.mark.thorough
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


def packed(model, tokens, lengths, **rest):
    sequence = nn.utils.rnn.pack_padded_sequence(
        model.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    output, (hidden, _) = model.recurrent(sequence)
    padded, ends = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=TOKENS)
    assert padded.shape[:2] == tokens.shape
    assert ends.tolist() == lengths.tolist()
    return padded.sum(1) + hidden[0]


def test_packed_sequences_have_a_row_for_each_token():
    """The reserve of cuDNN, which has gates and cells (5 tensors) and 256 bytes, shows how many rows the layer ran."""
    shuffled = {name: tensor[torch.tensor([3, 0, 7, 1, 2, 5, 6, 4])] for name, tensor in batch().items()}
    tokens = int(batch()["lengths"].sum())
    for worst_case, rows in ((False, tokens), (True, SAMPLES * TOKENS)):
        answers = Answers(worst_case=worst_case)
        work = workload(Encoder(packed), shuffled, loss_fn=squares, optimizer="sgd", answers=answers)
        graph = pipeline.record_step(work, resolve_card("rtx-2060", None))
        reserve = next(op for op in graph.ops if op.name == "aten._cudnn_rnn.default").shapes[3]
        assert reserve == (rows * 5 * WIDTH * 4 + 256,)
        assert any(op.name == "aten._cudnn_rnn_backward.default" for op in graph.ops)


def test_lengths_are_the_longest_one_unless_the_batch_is_to_be_taken_exactly():
    def padded_to(model, tokens, lengths, **rest):
        return torch.cat([model.hidden(tokens)[i, :length] for i, length in enumerate(lengths.tolist())])

    worst, exact = planned(padded_to, vram=None), planned(padded_to, vram=None, worst_case=False)
    assert exact.peak.allocated_bytes < worst.peak.allocated_bytes
    assert any("all lengths of the batch are the longest" in note for note in worst.notes)
    assert any("the values of 'lengths'" in note for note in exact.notes)


def test_lengths_that_cut_another_tensor_keep_their_values():
    def cut_by_lengths(model, flat, lengths):
        return torch.stack([part.sum(0) for part in model.layer(flat).split(lengths.tolist())])

    lengths = torch.tensor([3, 2, 5])
    planned(cut_by_lengths, {"flat": torch.randn(10, WIDTH), "lengths": lengths}, vram=None)


def test_masks_have_their_own_values_if_the_batch_is_to_be_taken_exactly():
    def masked_out(model, tokens, mask):
        return model.hidden(tokens)[mask]

    given = {"tokens": batch()["tokens"], "mask": batch()["present"]}
    worst, exact = planned(masked_out, given, vram=None), planned(masked_out, given, vram=None, worst_case=False)
    assert exact.peak.allocated_bytes < worst.peak.allocated_bytes


def chosen(model, tokens, **rest):
    hidden = model.hidden(tokens)
    return hidden[hidden.mean(-1) > 0]


def repeated_by_activations(model, tokens, **rest):
    hidden = model.hidden(tokens)
    return hidden.flatten(0, 1).repeat_interleave((hidden.sum(-1) > 0).long().flatten(), dim=0)


def branched_on_activations(model, tokens, **rest):
    hidden = model.hidden(tokens)
    return torch.cat([hidden, hidden]) if hidden.mean() > 0 else hidden


def line_of(function, number: int) -> str:
    return f"test_batch_values.py:{function.__code__.co_firstlineno + number}"


def test_a_selection_by_activations_is_rehearsed_at_its_bound():
    bound = planned(chosen, vram=None)
    assert any("all elements are selected, which is an upper bound" in note for note in bound.notes)
    stated = planned(chosen, vram=None, values={line_of(chosen, 2): 5})
    assert stated.peak.allocated_bytes < bound.peak.allocated_bytes
    assert any("the value or the number of elements is 5, as you stated" in note for note in stated.notes)
    assert planned(chosen, vram=None, values={line_of(chosen, 2): SAMPLES * TOKENS + 1}).peak == bound.peak


def test_distinct_values_are_bounded_by_the_number_of_elements():
    def distinct(model, tokens, **rest):
        values, inverse, counts = model.hidden(tokens).detach().unique(return_inverse=True, return_counts=True)
        rows = model.hidden(tokens).detach().flatten(0, 1).unique(dim=0)
        assert values.numel() == counts.numel() == tokens.numel() * WIDTH
        return model.hidden(tokens) + values[inverse] + rows.sum()

    assert any("all values are distinct" in note for note in planned(distinct, vram=None).notes)


@pytest.mark.parametrize("use", [repeated_by_activations, branched_on_activations])
def test_what_has_no_bound_is_refused_until_the_user_states_a_value(use):
    with pytest.raises(RehearsalError, match=rf"state the value there, as in --value {line_of(use, 2)}=1"):
        planned(use)
    few, many = (planned(use, vram=None, values={line_of(use, 2): n}).peak.allocated_bytes for n in (0, 640))
    assert few < many


def test_a_stated_number_of_elements_holds_in_backward_too():
    def put(model, tokens, **rest):
        hidden, chosen = model.hidden(tokens).clone(), model.hidden(tokens).mean(-1) > 0
        hidden[chosen] = 2 * model.hidden(tokens)[chosen]
        return hidden

    for values in ({line_of(put, 2): 5}, {}):  # one note: the backward reports the line of the forward
        (note,) = planned(put, vram=None, values=values).notes
        assert line_of(put, 2) in note


def test_a_stated_number_replaces_an_assumed_one():
    def full(model, tokens, present, **rest):
        return model.hidden(tokens)[present]

    few = planned(full, vram=None, values={line_of(full, 1): 5})
    assert few.peak.allocated_bytes < planned(full, vram=None).peak.allocated_bytes


def test_a_note_names_a_stated_value_that_is_not_used():
    plan = planned(chosen, vram=None, values={line_of(chosen, 1): 5})
    assert any(note.startswith(f"the value stated for {line_of(chosen, 1)} was not used") for note in plan.notes)


def halved_while_large(model, tokens, **rest):
    hidden = model.hidden(tokens)
    while hidden.abs().max() > 1:
        hidden = hidden / 2
    return hidden


@pytest.mark.parametrize(
    ("use", "number", "value", "message"),
    [
        (chosen, 2, -3, "-3, which you stated, cannot be their number"),
        (chosen, 2, 2.5, "2.5, which you stated, cannot be their number"),
        (halved_while_large, 2, 1, "10 times in succession"),
    ],
)
def test_a_stated_value_that_cannot_be_is_refused_with_its_line(use, number, value, message, monkeypatch):
    monkeypatch.setattr(data_dependence, "_MOST_ANSWERS", 10)
    with pytest.raises(RehearsalError, match=message) as error:
        planned(use, vram=None, values={line_of(use, number): value})
    assert line_of(use, number) in str(error.value)
