"""Micro-batches give the loss and the gradient of the full batch, whatever terms its loss is a mean over."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import planner
from planner import rewrite
from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.rewrite import loss_terms
from planner.rewrite.portable.loss_terms import counted_labels, samples_only
from planner.rewrite.rules import accumulation
from planner.workload import model_loss
from planner.workload.workload import batch_size_of, resized
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    gpt2,
    images,
    largest_relative_error,
    plan_for,
    rewritten,
    roberta,
    seeded,
    tokens,
    train,
    vectors,
)

pytestmark = pytest.mark.slow

UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
"""A batch of 6 samples becomes micro-batches of 4 and 2."""


def ForCausalLMLoss(logits, labels, vocab_size, **_):
    """The loss of transformers' causal models, without the cast to fp32."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def causal_model() -> nn.Module:
    model = seeded(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    model.loss_function = ForCausalLMLoss
    return model


def masked_model() -> nn.Module:
    return seeded(roberta, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()


@pytest.mark.parametrize("samples", [8, 10, 11], ids="batch of {}".format)
def test_sample_means_equal_the_full_batch(samples):
    decision = Accumulation(micro_batch_size=4, micro_batches=-(-samples // 4))
    batches = [vectors(samples, seed, torch.float64) for seed in range(10)]
    model = seeded(Perceptron, dropout=0.0).double()
    assert largest_relative_error(model, decision, batches=batches, loss_fn=cross_entropy) < 1e-12


@pytest.mark.parametrize("build", [masked_model, causal_model])
def test_token_means_over_uneven_padding_equal_the_full_batch(build):
    batches = [tokens(seed=seed) for seed in range(10)]
    assert largest_relative_error(build(), UNEVEN, batches=batches) < 1e-12


@pytest.mark.parametrize("build", [masked_model, causal_model])
def test_weighting_tokens_by_samples_would_be_seen(build, monkeypatch):
    monkeypatch.setattr(loss_terms, "counted_labels", lambda batch, samples, **_: samples)
    assert largest_relative_error(build(), UNEVEN, batches=[tokens()]) > 1e-3


def test_counting_the_first_label_of_a_causal_model_would_be_seen(monkeypatch):
    monkeypatch.setattr(model_loss, "shifts_labels", lambda model: False)
    assert largest_relative_error(causal_model(), UNEVEN, batches=[tokens()]) > 1e-4


@pytest.mark.parametrize("build", [masked_model, causal_model])
def test_a_micro_batch_without_a_counted_label_takes_no_part(build):
    batch = tokens()
    batch["labels"][4:] = -100
    assert largest_relative_error(build(), UNEVEN, batches=[batch]) < 1e-12


@pytest.mark.parametrize(
    ("name", "shifted"),
    [
        ("GPT2LMHeadModel", True),
        ("LlamaForCausalLM", True),
        ("BertLMHeadModel", True),
        ("GPT2DoubleHeadsModel", True),
        ("RobertaForMaskedLM", False),
        ("XLNetLMHeadModel", False),
        ("BartForCausalLM", False),
        ("T5ForConditionalGeneration", False),
        ("BertForTokenClassification", False),
    ],
)
def test_whether_a_model_shifts_its_labels_is_read_from_its_forward(name, shifted):
    kind = getattr(transformers, name)
    with torch.device("meta"):
        assert model_loss.shifts_labels(kind(kind.config_class())) is shifted


def test_live_models_shift_as_their_classes_do():
    class Wrapped(type(gpt2())):
        def forward(self, **inputs):
            return super().forward(**inputs)

    assert model_loss.shifts_labels(gpt2())
    assert model_loss.shifts_labels(Wrapped(gpt2().config))
    assert not model_loss.shifts_labels(roberta())
    assert not model_loss.shifts_labels(Perceptron())


def test_a_stated_weight_replaces_samples():
    def summed(output, batch):
        return (output.sum(1) * batch[-1]).sum() / batch[-1].sum()

    batches = [(vectors(6, seed, torch.float64)[0], torch.arange(1.0, 7.0).double()) for seed in range(3)]
    options = {"batches": batches, "loss_fn": summed}
    model = seeded(Perceptron, dropout=0.0).double()
    assert largest_relative_error(model, UNEVEN, loss_weight=lambda batch: batch[-1].sum(), **options) < 1e-12
    assert largest_relative_error(model, UNEVEN, **options) > 1e-3


def test_one_micro_batch_is_the_plain_step_to_the_bit():
    decision = Accumulation(micro_batch_size=4, micro_batches=2)
    model = seeded(Perceptron)
    small = [vectors(3, seed) for seed in range(2)]
    plain = rewritten(seeded(Perceptron), batch=vectors(8), loss_fn=cross_entropy)
    split = rewritten(model, decision, batch=vectors(8), loss_fn=cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(train(plain, small)[0], train(split, small)[0], strict=True))


def test_a_smaller_last_batch_is_split_by_its_own_size():
    model = seeded(Perceptron, dropout=0.0).double()
    options = {"batch": vectors(8, dtype=torch.float64), "loss_fn": cross_entropy}
    last = vectors(7, dtype=torch.float64)
    split = rewritten(model, Accumulation(micro_batch_size=3, micro_batches=3), **options)
    plain = rewritten(seeded(Perceptron, dropout=0.0).double(), **options)
    assert torch.allclose(split.step(last), plain.step(last), rtol=1e-14)


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str | torch.Tensor
    more: dict | None = None


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_every_nesting_is_split_and_everything_else_is_shared():
    shared = torch.zeros(3, 5)
    scalar = torch.tensor(2.0)
    batch = {
        "list": [torch.arange(5), shared],
        "tuple": (torch.arange(10).view(5, 2), None),
        "pair": Pair(left=torch.arange(5.0), right="text"),
        "sample": Sample(image=torch.ones(5, 1), name="name"),
        "ordered": collections.OrderedDict(a=scalar, b=torch.arange(5)),
    }
    parts = list(accumulation.micro_batches(batch, micro_batch_size=2, batch_size=5, loss_terms=samples_only))
    assert [weight for _, weight in parts] == [0.4, 0.4, 0.2]
    last = parts[-1][0]
    assert last["list"][0].tolist() == [4]
    assert last["list"][1] is shared
    assert last["tuple"][0].shape == (1, 2)
    assert last["pair"] == Pair(left=torch.tensor([4.0]), right="text")
    assert last["sample"].image.shape == (1, 1)
    assert type(last["ordered"]) is collections.OrderedDict
    assert last["ordered"]["a"] is scalar
    assert len(batch["list"][0]) == 5


def test_a_dataclass_trains_as_a_batch_live_and_from_a_file(tmp_path):
    """A nested batch with a tensor without samples, and a size that is no multiple of the micro-batch size."""
    path = tmp_path / "net.py"
    path.write_text("from torch import nn\n\ndef build():\n    return nn.Linear(4, 3)\n")
    pair = Sample(image=torch.ones(5, 4), name=torch.tensor(2.0))
    thirds = Accumulation(micro_batch_size=2, micro_batches=3)
    file: dict = {}
    exec(compile(rewrite.source(plan_for(nn.Linear(4, 3), pair, thirds, reference=f"{path}:build")), "f", "exec"), file)
    made, parts = file["synthetic_batch"]("cpu"), []
    assert (made.image.shape, made.name.shape) == ((5, 4), ())

    def model(batch):
        parts.append(len(batch.image))
        return (batch.image * weight * batch.name).mean()

    weight = torch.ones((), requires_grad=True)
    file["training_step"](model, torch.optim.SGD([weight], lr=1.0), made, loss_terms=file["samples_only"])
    assert parts == [2, 2, 1]
    torch.testing.assert_close(weight.detach(), 1.0 - (made.image * made.name).mean())

    class Net(Perceptron):
        def forward(self, batch):
            return cross_entropy(super().forward(batch.image) * batch.more["scale"], (batch.more["goal"][0],))

    x, y = vectors(6)
    batch = Sample(image=x, name="name", more={"scale": torch.tensor(2.0), "goal": [y]})
    model = seeded(Net)
    plan = planner.plan(model, batch, vram="1GiB", gpu="bare", force=("accumulation",), only=("accumulation",))
    found = rewrite.verify(plan, model, batch)
    assert found.passed, str(found)


def detected(samples: int, each: int = 3) -> dict:
    """The number of boxes in an image can equal the number of images in the batch."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"image": draw(samples, 8), "boxes": [{"where": draw(each, 3), "name": str(n)} for n in range(samples)]}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, image: torch.Tensor, boxes: list[dict]) -> torch.Tensor:
        assert [box["name"] for box in boxes] == sorted(box["name"] for box in boxes)
        errors = [(one - box["where"]).square().mean() for one, box in zip(self.head(image), boxes, strict=True)]
        return torch.stack(errors).mean()


@pytest.mark.parametrize("each", [1, 2, 4, 6, 7])
def test_a_list_of_a_mapping_for_each_sample_is_split(each):
    batch, split = detected(6, each), Accumulation(micro_batch_size=4, micro_batches=2)
    assert batch_size_of(batch) == 6
    assert batch_size_of(resized(batch, 9)) == 9
    assert largest_relative_error(seeded(Detector).double(), split, batches=[batch]) < 1e-12
    model = seeded(Detector).double()
    rewrite.apply(plan_for(model, batch, split, optimizer="sgd"), model).step(batch)


def test_a_loss_that_a_model_takes_of_such_a_list_is_not_planned_in_parts():
    """Detection models of transformers divide their loss by the number of boxes in the batch."""
    model, batch = Detector().double(), detected(6)
    options = {"gpu": "bare", "optimizer": "sgd", "only": ("accumulation",)}
    plan = planner.plan(model, batch, vram="1GiB", **options)
    assert plan.workload.batch_size == 6
    assert "the batch holds one dict for each sample" in " ".join(plan.notes)


def test_a_list_of_views_is_no_list_of_samples():
    views = [{"image": torch.arange(5)}, {"image": torch.arange(5, 10)}]
    for batch in ({"views": views}, {"views": views, "labels": torch.arange(5)}):
        assert batch_size_of(batch) == 5
        parts = list(accumulation.micro_batches(batch, micro_batch_size=3, batch_size=5, loss_terms=samples_only))
        assert [[view["image"].tolist() for view in part["views"]] for part, _ in parts] == [
            [[0, 1, 2], [5, 6, 7]],
            [[3, 4], [8, 9]],
        ]


def test_the_arguments_of_a_forward_are_no_list_of_samples():
    """`torch.utils.data.DataLoader` returns a list for a data set of tuples."""
    batch = [{"x": torch.ones(5, 2)}, {"y": torch.ones(5)}]
    assert batch_size_of(batch) == 5
    parts = list(accumulation.micro_batches(batch, micro_batch_size=3, batch_size=5, loss_terms=samples_only))
    assert [len(part[1]["y"]) for part, _ in parts] == [3, 2]


def test_transformers_outputs_and_encodings_are_split():
    import transformers
    from transformers.modeling_outputs import BaseModelOutput

    encoding = transformers.BatchEncoding({"input_ids": torch.arange(4).view(4, 1)})
    output = BaseModelOutput(last_hidden_state=torch.arange(4))
    parts = [
        next(accumulation.micro_batches(batch, micro_batch_size=3, batch_size=4, loss_terms=samples_only))[0]
        for batch in (encoding, output)
    ]
    assert type(parts[0]) is transformers.BatchEncoding
    assert parts[0].input_ids.shape == (3, 1)
    assert parts[1].last_hidden_state.tolist() == [0, 1, 2]


def test_a_batch_of_unknown_size_is_refused():
    batch = {"a": torch.zeros(5, 2), "b": torch.zeros(7, 2)}
    with pytest.raises(ValueError, match=r"\[5, 7\].*planned batch size 8"):
        next(accumulation.micro_batches(batch, micro_batch_size=2, batch_size=8, loss_terms=samples_only))


def test_parts_that_do_not_make_up_the_batch_are_refused():
    with pytest.raises(DecisionError, match="plan has 2 micro-batches of 4 samples, but a batch of 11 samples makes 3"):
        rewritten(seeded(Perceptron), UNEVEN, batch=vectors(11), loss_fn=cross_entropy)


def test_weights_are_made_without_asking_the_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        batch = {"labels": torch.ones(6, 4, dtype=torch.int64)}
        terms = functools.partial(counted_labels, shifted=True, ignored=-100)
        parts = list(accumulation.micro_batches(batch, micro_batch_size=4, batch_size=6, loss_terms=terms))
    assert [part["labels"].shape[0] for part, _ in parts] == [4, 2]


def test_nothing_but_gradients_lives_between_micro_batches():
    """When the next forward begins, no tensor with a graph is left from the micro-batch before."""
    import gc

    alive = []

    def note(module, inputs):
        gc.collect()
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        alive.append(sum(1 for tensor in tensors if tensor.grad_fn is not None))

    model = seeded(Perceptron)
    model.register_forward_pre_hook(note)
    result = rewritten(model, UNEVEN, batch=vectors(6), loss_fn=cross_entropy)
    result.step(vectors(6))
    # views of the inputs have no graph, and the model is a leaf: whatever other tests left behind is in both counts
    assert alive[1] == alive[0]


def test_batch_norm_sees_the_micro_batch():
    model = seeded(Convolutional)
    rewritten(model, UNEVEN, batch=images(6), loss_fn=cross_entropy).step(images(6))
    assert model.first[1].num_batches_tracked.item() == 2


class ShiftsAtTimes(nn.Module):
    """A language model that drops the first label only if it is asked to."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.embed, self.head, self.shift, self.pad = nn.Embedding(32, 8), nn.Linear(8, 32), shift, 5

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class IgnoresItsPadding(ShiftsAtTimes):
    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.pad)}


class LossElsewhere(ShiftsAtTimes):
    def forward(self, input_ids, labels):
        return {"loss": self.mean(self.head(self.embed(input_ids)), labels)}

    def mean(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Overrides(ShiftsAtTimes):
    """A model whose base class drops the first label, and which does not."""

    def forward(self, input_ids, labels):
        return {"loss": F.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten())}


def test_a_forward_that_a_subclass_overrides_is_not_read():
    assert not model_loss.shifts_labels(Overrides(True))


@pytest.mark.parametrize(
    ("build", "certain"),
    [
        (lambda: ShiftsAtTimes(False), False),
        (lambda: ShiftsAtTimes(True), False),
        (lambda: IgnoresItsPadding(False), False),
        (lambda: LossElsewhere(False), False),
        (gpt2, True),
        (roberta, True),
    ],
)
def test_an_emitted_file_asks_for_terms_that_the_source_of_the_model_leaves_open(build, certain, tmp_path):
    model = build()
    plan = plan_for(model, tokens(), Accumulation(micro_batch_size=2, micro_batches=3))
    assert plan.workload.own_loss.certain is certain
    path = rewrite.emit(plan, tmp_path / "train.py") or tmp_path / "train.py"
    assert ("LABELS_SHIFTED" in path.read_text()) is certain
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").workload == plan.workload


def test_a_small_error_of_the_weights_is_refused_although_gradients_nearly_agree():
    torch.manual_seed(0)
    model = IgnoresItsPadding(False)
    labels = torch.randint(6, 32, (8, 400))
    labels[0, 0] = model.pad  # 1599 and 1600 labels in the two micro-batches
    batch = {"input_ids": torch.randint(32, (8, 400)), "labels": labels}
    plan = plan_for(model, batch, Accumulation(micro_batch_size=4, micro_batches=2), optimizer="sgd")
    with pytest.raises(DecisionError, match="cross_entropy is a mean over 1599, 1600 terms"):
        rewrite.apply(plan, model).step(batch)
