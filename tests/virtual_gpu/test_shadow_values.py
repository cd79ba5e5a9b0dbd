"""What a rehearsal knows of values: true answers, stated assumptions, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import RehearsalError
from planner.plan_types.decisions import Precision
from planner.recording.step_graph import Category, Phase
from planner.workload.workload import workload
from tests.support.workloads import BARE, CARD, certifying_graph, plain, transformer, what_if

pytestmark = pytest.mark.slow


class Asking(nn.Module):
    """A linear layer whose forward calls `ask` with the input and keeps the answer."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.inner, self.ask = nn.Linear(4, 4), ask

    def forward(self, x, attention_mask=None):
        wanted = self.ask(x, attention_mask) if attention_mask is not None else self.ask(x)
        return (self.inner(x) * wanted).mean()


def recorded(ask, *, record=plain, batch=None):
    return record(workload(Asking(ask), torch.zeros(2, 4) if batch is None else batch))


def answered(ask, expected, **more) -> tuple[str, ...]:
    """Assumptions of a rehearsal in which `ask` must give `expected`; a wrong answer is an error in the child."""

    def check(*given):
        found = ask(*given)
        if found != expected:
            raise ValueError(f"expected {expected}, found {found}")
        return 1.0

    return recorded(check, **more).assumptions


TRUE_ANSWERS = {
    "a shape": (lambda x: torch.tensor(x.shape, device=x.device).tolist(), [2, 4]),
    "arithmetic": (lambda x: int((torch.arange(5, device=x.device) * 3 % 4).max()), 3),
    "views and in-place": (lambda x: _views_and_in_place(x), [[0, 7, 7], [9, 7, 7]]),
    "a mask selects": (
        lambda x: torch.arange(6, device=x.device)[torch.arange(6, device=x.device) > 3].tolist(),
        [4, 5],
    ),
    "nonzero": (lambda x: torch.eye(3, dtype=torch.bool, device=x.device).nonzero().tolist(), [[0, 0], [1, 1], [2, 2]]),
    "to the host and back": (lambda x: torch.arange(3).to(x.device).cpu().numpy().sum().item(), 3),
    "unique": (lambda x: torch.tensor([3, 1, 3], device=x.device).unique().tolist(), [1, 3]),
    "a large mask": (
        lambda x: bool(torch.ones(512, 1024, dtype=torch.bool, device=x.device).logical_not().any()),
        False,
    ),
    "a text": (lambda x: f"{torch.arange(3, device=x.device)[2]}", "2"),
    "overwritten by a constant": (lambda x: x.clone().long().fill_(3).sum().item(), 24),
}


def _views_and_in_place(x):
    table = torch.zeros(2, 3, dtype=torch.long, device=x.device)
    table[:, 1:].fill_(7)
    table.view(-1)[3] += 9
    return table.tolist()


def _positions(x, samples):
    """Positions of tokens, as transformers expand them to all samples."""
    return torch.arange(5, device=x.device)[None].expand(samples, -1)


def _packed(x, samples):
    """Asks for the sequences of each sample, as `find_packed_sequence_indices` of transformers does."""
    positions = _positions(x, samples)
    differences = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return bool(((differences != 1).cumsum(-1)[:, -1] == 0).all())


LARGE = 2**30 + 1
"""Number of samples with which no value may be computed for each of them."""
REPEATED_ROWS = {
    "packed sequences": (_packed, True),
    "rows of a sum": (lambda x, n: (_positions(x, n) + 2)[n - 1].tolist(), [2, 3, 4, 5, 6]),
    "a part of each row": (lambda x, n: (_positions(x, n) * 2)[:2, 1::2].tolist(), [[2, 6], [2, 6]]),
    "rows put together": (
        lambda x, n: torch.cat([_positions(x, n), _positions(x, n) + 7], dim=1)[3, 4:7].tolist(),
        [4, 7, 8],
    ),
    "sums along rows": (lambda x, n: (_positions(x, n) + 1).cumsum(1)[7].tolist(), [1, 3, 6, 10, 15]),
    "a comparison with a row": (
        lambda x, n: (_positions(x, n) + 1 > torch.arange(5, 0, -1, device=x.device))[9].tolist(),
        [False, False, False, True, True],
    ),
}


@pytest.mark.parametrize("tokens", [2**19 + 1, 10**6])
def test_positions_in_a_very_long_sequence_are_known(tokens):
    def are_consecutive(x):
        positions = torch.arange(tokens, device=x.device).unsqueeze(0)
        return bool((torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) == 1).all())

    assert answered(are_consecutive, True) == ()


@pytest.mark.parametrize("samples", [2, 64])
def test_positions_in_very_long_sequences_are_known_for_several_samples(samples):
    def are_consecutive(x):
        positions = torch.arange(10**6, device=x.device).unsqueeze(0).expand(samples, -1)
        diff = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        return bool(((diff != 1).cumsum(-1)[:, -1] == 0).all())

    assert answered(are_consecutive, True) == ()


@pytest.mark.parametrize("case", REPEATED_ROWS)
def test_rows_that_are_alike_are_known_for_any_number_of_samples(case):
    ask, expected = REPEATED_ROWS[case]
    assert answered(lambda x: ask(x, LARGE), expected) == ()


def _sums_of_columns(x):
    return (_positions(x, 2**20) + 1).cumsum(0)[1].tolist()


def _changed_in_one_row(x):
    rows = (_positions(x, 2**17) + 1).to(torch.uint8)  # many elements, and few bytes
    rows[3] = 0
    return rows[3].tolist()


def _in_lines_across_rows(x):
    return (_positions(x, LARGE) + 1).flatten()[3:7].tolist()


@pytest.mark.parametrize("ask", [_sums_of_columns, _changed_in_one_row, _in_lines_across_rows])
def test_rows_that_may_differ_are_not_known(ask):
    with pytest.raises(RehearsalError, match="computes no values"):
        recorded(ask)


@pytest.mark.parametrize("case", TRUE_ANSWERS)
def test_what_follows_from_shapes_and_constants_is_answered_truly(case):
    assert answered(*TRUE_ANSWERS[case]) == ()
    assert answered(*TRUE_ANSWERS[case], record=what_if) == ()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: int(x.argmin()),
        lambda x: torch.arange(4, device=x.device).mul_(x[0].long()).sum().item(),
        lambda x: torch.randn(3, device=x.device).long().tolist()[0],
    ],
    ids=["a sum", "a position", "overwritten by the batch", "chance"],
)
def test_what_follows_from_the_batch_is_refused_with_its_line(ask):
    with pytest.raises(RehearsalError, match=r"in module.*test_shadow_values.py:\d+; rewrite that line"):
        recorded(ask)


def test_a_mask_of_the_batch_is_assumed_to_be_full_and_reported():
    batch = {"x": torch.zeros(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    (reported,) = answered(lambda x, mask: bool((mask == 1).all()), True, batch=batch)
    assert "sequences have full length: in module 'the model itself' at" in reported
    assert "test_shadow_values.py:" in reported


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0], [1, 1, 1, 0]], [[0, 0, 1, 1], [1, 1, 1, 1]]], ids=["right", "left"])
def test_a_mask_with_padding_is_assumed_to_have_one_position_of_padding_in_every_sample(mask):
    batch = {"x": torch.zeros(2, 4), "attention_mask": torch.tensor(mask)}
    answers = [0, 1, 1, 1] if not mask[0][0] else [1, 1, 1, 0]
    (reported,) = answered(lambda x, mask: mask.tolist(), [answers] * 2, batch=batch)
    assert "every sample of the batch has one position of padding" in reported


def test_routing_is_assumed_to_be_balanced():
    def ask(x):
        experts = x.topk(1, dim=-1).indices.flatten()
        return [int((experts == number).sum()) for number in range(2)]

    (reported,) = answered(ask, [1, 1])
    assert "experts that receive equal numbers of tokens" in reported


def test_a_check_passes_whatever_the_values_are():
    def ask(x):
        if not (x < 1e9).all():
            raise ValueError("too large")
        return 1

    (reported,) = answered(ask, 1)
    assert "every check on tensor values (assert, or `if ...: raise`) passes" in reported


def test_assumptions_are_notes_of_the_plan():
    def ask(x):
        return 0 if torch.rand([]) < 0.1 else 1

    plan = planner.plan(Asking(ask), torch.zeros(2, 4), vram=None, gpu="bare")
    assert any("random numbers that the code branches on are all 0.5" in note for note in plan.notes)


def test_weights_of_a_recurrent_net_and_their_gradients_are_one_buffer_each():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 16, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.inner(x)[0].mean()

    net = Net()
    weight_bytes = sum(parameter.numel() * 4 for parameter in net.parameters())
    graph = certifying_graph(workload(net, torch.zeros(2, 5, 8)), (), BARE)
    sizes = {category: [s.size_bytes for s in graph.storages if s.category is category] for category in Category}
    assert sizes[Category.PARAMETER] == [weight_bytes]
    assert sizes[Category.GRADIENT] == [weight_bytes] * 2  # of two steps
    assert [op.name for op in graph.ops if op.flops and op.phase is Phase.FORWARD][:1] == ["aten._cudnn_rnn.default"]
    reserve = 2 * 5 * (2 * (4 + 1) + 1) * 16 * 4 + 256  # gates and cells of both layers, outputs of the first one
    assert reserve in [storage.size_bytes for storage in graph.storages]


def test_a_sparse_gradient_is_as_large_as_the_rows_that_were_looked_up():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(1000, 8, sparse=True)

        def forward(self, x):
            return self.inner(x).square().mean()

    work = workload(
        Net(), torch.zeros(2, 3, dtype=torch.long), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    graph = certifying_graph(work, (), BARE)
    gradients = [storage.size_bytes for storage in graph.storages if storage.category is Category.GRADIENT]
    assert gradients == [2 * 3 * 8 * 4] * 2


def test_an_optimizer_for_sparse_gradients_is_primed_with_sparse_ones():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1))
    table, head = [model[0].weight], list(model[2].parameters())

    class Both(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad.is_sparse != (parameter.shape == table[0].shape):
                    raise RuntimeError("a gradient of the wrong kind")
                if parameter not in self.state:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)

    work = workload(
        model,
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 1)),
        loss_fn=lambda output, batch: (output - batch[-1]).square().mean(),
        optimizer=Both,
    )
    graph = what_if(work)
    state_bytes = 4 * sum(parameter.numel() for parameter in (*table, *head))
    assert sum(s.size_bytes for s in graph.storages if s.category is Category.OPTIMIZER_STATE) == state_bytes


def test_a_causal_model_without_padding_gives_attention_no_mask():
    work = transformer("gpt2", "GPT2LMHeadModel", batch_size=2, seq_len=16, n_layer=1, vocab_size=64)
    names = {op.name for op in plain(work, (Precision(dtype="bf16"),), card=CARD).ops}
    assert "aten._scaled_dot_product_flash_attention.default" in names  # it takes no mask
