"""A chunked loss gives the same loss and gradients, and never holds all logits at once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, ChunkedLoss
from planner.rewrite.application import apply_decisions
from planner.workload.call_convention import Calling

ROWS, WIDTH, WORDS = 24, 16, 37


class Tagger(torch.nn.Module):
    """A head over a small body, on tokens of shape (batch, length)."""

    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.words(tokens))))


def flat(logits, labels):
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def shifted(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))


def upcast_and_summed(logits, labels):
    labels = labels.view(-1).clamp(min=0)
    return F.cross_entropy(logits.float().reshape(-1, WORDS), labels, ignore_index=0, reduction="sum") / 7


def by_module(logits, labels):
    return torch.nn.CrossEntropyLoss()(logits.view((-1, WORDS)), labels.view(-1))


def smoothed(logits, labels):
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.1)


def with_class_weights(logits, labels):
    weight = torch.linspace(0.5, 2, WORDS, dtype=logits.dtype)
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), weight)


def classes_second(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


def with_a_penalty(logits, labels):
    return flat(logits, labels) + 1e-3 * (logits / 2 + 1).logsumexp(-1).square().mean()


def flattened(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).to(torch.float64), labels.flatten())


def inferred(logits, labels):
    labels = labels.view(-1).clamp(min=3)
    return F.cross_entropy(logits.view(len(labels), -1), labels, None, None, 3)


def in_bytes(logits, labels):
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1).clamp(min=0).to(torch.uint8))


def summed_by_an_old_option(logits, labels):
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), size_average=False)


def scaled_in_place(logits, labels):
    return flat(logits.div_(0.1), labels)


def masked_in_place(logits, labels):
    logits[..., 3] = -50.0
    return flat(logits, labels)


def through_data(logits, labels):
    logits.data.mul_(2)
    return flat(logits, labels)


def with_a_hook(logits, labels):
    logits.register_hook(lambda gradient: 10 * gradient)
    return flat(logits, labels)


def squared(logits, labels):
    return flat(logits**2, labels)


def compared(logits, labels):
    return flat(logits, labels) * (logits == 0).any()


CHUNKED = (flat, shifted, upcast_and_summed, by_module, flattened, inferred, in_bytes)
REFUSED = (
    smoothed,
    with_class_weights,
    classes_second,
    with_a_penalty,
    summed_by_an_old_option,
    scaled_in_place,
    masked_in_place,
    through_data,
    with_a_hook,
    squared,
    compared,
)


def tokens(dtype=torch.int64):
    torch.manual_seed(0)
    inputs, labels = torch.randint(WORDS, (4, ROWS // 4)), torch.randint(WORDS, (4, ROWS // 4))
    labels[0, :3] = -100
    return inputs, labels


def trained(model, loss, *, chunks: int | None, micro_batches: int = 1):
    """Return the loss and the gradients of one batch, with or without the rewritten head."""
    model, batch = copy.deepcopy(model), tokens()
    decisions = [] if chunks is None else [ChunkedLoss(module="head", chunks=chunks)]
    if micro_batches > 1:
        decisions.append(Accumulation(micro_batch_size=4 // micro_batches, micro_batches=micro_batches))
    rewritten = apply_decisions(
        decisions,
        model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        calling=Calling.ALL_BUT_LAST,
        batch_size=4,
        loss_fn=lambda output, part: loss(output, part[1]),
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    value = rewritten.step(batch)
    return value, {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunks", [2, 5, 64])
@pytest.mark.parametrize("loss", CHUNKED, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"tied": True}], ids=["bias", "no bias", "tied"])
def test_loss_and_gradients_are_those_of_the_whole(options, loss, chunks):
    torch.manual_seed(1)
    model = Tagger(**options).double()
    expected, gradients = trained(model, loss, chunks=None)
    value, others = trained(model, loss, chunks=chunks)
    assert value.dtype == expected.dtype
    tolerance = 1e-6 if loss is upcast_and_summed else 1e-12  # that one computes its loss in fp32
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_asks_for_all_logits_or_changes_them_is_refused(loss):
    with pytest.raises((AttributeError, TypeError), match=r"computed in chunks|'Logits'"):
        trained(Tagger().double(), loss, chunks=3)


def steps_in_parts(ignored: int):
    """Run a step with and without chunks on a batch whose first samples have no label that counts."""
    torch.manual_seed(1)
    inputs, labels = tokens()
    labels[:ignored] = -100
    models = [Tagger().double()]
    models.append(copy.deepcopy(models[0]))
    for model, decisions in zip(models, ([], [ChunkedLoss(module="head", chunks=2)]), strict=True):
        yield model, apply_decisions(
            [*decisions, Accumulation(micro_batch_size=2, micro_batches=2)],
            model,
            optimizer="sgd",
            calling=Calling.ALL_BUT_LAST,
            batch_size=4,
            loss_fn=lambda output, part: flat(output, part[1]),
            loss_weight=lambda part: (part[1] != -100).sum(),
        ), (inputs, labels)  # fmt: skip


def test_a_micro_batch_in_which_no_label_counts_trains_nothing():
    models = []
    for model, result, batch in steps_in_parts(ignored=2):
        result.step(batch)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(other, one)


def test_a_batch_in_which_no_label_counts_is_refused():
    for _, result, batch in steps_in_parts(ignored=4):
        with pytest.raises(ValueError, match="which is a mean over zero terms"):
            result.step(batch)


def test_a_mean_over_no_labels_has_the_gradient_zero():
    head = torch.nn.Linear(WIDTH, WORDS)
    apply_decisions(
        [ChunkedLoss(module="0", chunks=3)],
        torch.nn.Sequential(head), optimizer="sgd", calling=Calling.SINGLE, batch_size=ROWS,
    )  # fmt: skip
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = F.cross_entropy(head(hidden), torch.full((ROWS,), -100))
    loss.backward()
    assert loss.isnan()  # as that of `F.cross_entropy`
    assert not any(tensor.grad.any() for tensor in (hidden, head.weight, head.bias))


class Surrounded(Tagger):
    """A head that runs in its own context."""

    def __init__(self, context, *, before=lambda hidden: hidden) -> None:
        super().__init__()
        self.context, self.before = context, before

    def forward(self, tokens):
        hidden = self.before(torch.tanh(self.body(self.words(tokens))))
        with self.context():
            return self.head(hidden)


@pytest.mark.parametrize(
    "model",
    [
        Surrounded(lambda: torch.autocast("cpu", enabled=False), before=lambda hidden: hidden.float() * 20),
        Surrounded(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    ],
    ids=["fp32 in bf16", "bf16"],
)
@pytest.mark.parametrize("outside", [True, False], ids=["autocast outside", "none outside"])
def test_the_head_computes_in_the_precision_that_it_was_called_in(model, outside):
    inputs, labels = tokens()
    losses = []
    for decisions in ([], [ChunkedLoss(module="head", chunks=3)]):
        each = copy.deepcopy(model)
        apply_decisions(decisions, each, optimizer="sgd", calling=Calling.SINGLE, batch_size=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            losses.append(flat(each(inputs).float(), labels))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)


def test_a_head_without_gradients_stays_without():
    model, (inputs, labels) = Surrounded(torch.no_grad), tokens()
    apply_decisions(
        [ChunkedLoss(module="head", chunks=3)], model, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
    )
    assert not flat(model(inputs), labels).requires_grad


@pytest.mark.parametrize(
    ("rows", "mean", "certainty"), [(4096, 100.0, 0.0), (32, 0.0, 17.0)], ids=["a large sum", "small probabilities"]
)
def test_in_half_precision_sums_neither_overflow_nor_vanish(rows, mean, certainty):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 499)
    with torch.no_grad():
        head.weight.mul_(0.001)
        head.bias.zero_()[0] = certainty
    hidden, labels = torch.randn(rows, 16) + mean, torch.zeros(rows, dtype=torch.long)
    (F.cross_entropy(head(hidden), labels) * 64).backward()
    expected = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    model, chunked = torch.nn.Sequential(head), [ChunkedLoss(module="0", chunks=2)]
    apply_decisions(chunked, model, optimizer="sgd", calling=Calling.SINGLE, batch_size=rows)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(hidden), labels)
    (loss * 64).backward()
    for gradient, parameter in zip(expected, head.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())
    torch.testing.assert_close(head.bias.grad[1:], expected[1][1:], rtol=5e-2, atol=0)


@pytest.mark.parametrize(("hidden_size", "weight_size"), [(1e-4, 1e-3), (1e-2, 400.0)], ids=["small", "large weights"])
def test_in_half_precision_the_scale_suits_small_and_large_operands(hidden_size, weight_size):
    """A factor that is too large for small operands, or for large weights, gives infinite gradients."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(WIDTH, WORDS, bias=False), torch.randn(ROWS, WIDTH) * hidden_size
    with torch.no_grad():
        head.weight.mul_(weight_size)
    labels, gradients = torch.randint(WORDS, (ROWS,)), []
    for dtype in (torch.float32, torch.float16):
        if dtype is torch.float16:
            chunked, model = [ChunkedLoss(module="0", chunks=2)], torch.nn.Sequential(head)
            apply_decisions(chunked, model, optimizer="sgd", calling=Calling.SINGLE, batch_size=ROWS)
        rows = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=dtype is torch.float16):
            loss = F.cross_entropy(head(rows), labels)
        gradients.append(torch.autograd.grad(loss, (rows, head.weight)))
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_it_goes_together_with_micro_batches():
    torch.manual_seed(1)
    model = Tagger().double()
    expected, gradients = trained(model, flat, chunks=None, micro_batches=2)
    value, others = trained(model, flat, chunks=3, micro_batches=2)
    torch.testing.assert_close(value, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient)


def test_under_autocast_it_computes_as_the_whole_does():
    torch.manual_seed(1)
    model, (inputs, labels) = Tagger(), tokens()
    rewritten = copy.deepcopy(model)
    undo = apply_decisions(
        [ChunkedLoss(module="head", chunks=3)], rewritten, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
    )
    losses = []
    for each in (model, rewritten):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(flat(each(inputs), labels))
        losses[-1].backward()
    assert losses[0].dtype == losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), rewritten.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=5e-4)
    undo.undo()
    assert isinstance(rewritten(inputs), torch.Tensor)


def test_outside_of_training_the_head_returns_what_it_did():
    model, (inputs, _) = Tagger(), tokens()
    expected = model(inputs)
    apply_decisions(
        [ChunkedLoss(module="head", chunks=3)], model, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
    )
    logits = model(inputs)
    assert not isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(logits.whole(), expected) and torch.equal(logits[:, :-1].whole(), expected[:, :-1])
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
    assert torch.equal(model.eval()(inputs), expected)


def test_a_second_backward_is_refused_and_so_is_another_module():
    model, (inputs, labels) = Tagger(), tokens()
    apply_decisions(
        [ChunkedLoss(module="head", chunks=3)], model, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
    )
    loss = flat(model(inputs), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be used once"):
        loss.backward()
    with pytest.raises(DecisionError, match=r"'words', a Embedding: the head must be a torch.nn.Linear"):
        apply_decisions(
            [ChunkedLoss(module="words", chunks=3)], model, optimizer="sgd", calling=Calling.SINGLE, batch_size=4
        )


def test_a_rewritten_language_model_still_generates():
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    rewritten = copy.deepcopy(model)
    decisions = [ChunkedLoss(module="lm_head", chunks=4)]
    apply_decisions(decisions, rewritten, optimizer="adamw", calling=Calling.KEYWORDS, batch_size=2)
    prompt = torch.randint(1, WORDS, (2, 5))
    for options in ({"do_sample": False}, {"do_sample": True, "num_beams": 2}):
        answers = []
        for each in (model, rewritten):
            torch.manual_seed(1)
            answers.append(each.generate(prompt, max_new_tokens=5, pad_token_id=0, **options))
        assert torch.equal(*answers)
    torch.testing.assert_close(
        rewritten(input_ids=prompt, labels=prompt).loss, model(input_ids=prompt, labels=prompt).loss
    )
