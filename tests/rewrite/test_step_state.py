"""A resumed training gives the same bits as one without a stop; a state of another plan is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from planner.errors import DecisionError, PlanFileError
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
)
from planner.plan_types.fingerprint import plan_fingerprint
from planner.plan_types.recompute_decisions import Checkpoint, Replay
from planner.rewrite import apply
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    gpt2,
    images,
    plan_for,
    rewritten,
    roberta,
    seeded,
    tokens,
    vectors,
)

BLOCKS = Checkpoint(modules=("first", "twice"))
UNEVEN = Accumulation(micro_batch_size=4, micro_batches=2)
LAYER = Checkpoint(modules=("roberta.encoder.layer.0",))
FLAT = Replay(modules=("layers",), stretches=((0, 8),), kept=((),))
IMAGES, VECTORS, MASKED = (Convolutional, images(6)), (Perceptron, vectors(6)), (roberta, tokens())


def wide() -> nn.Module:
    return roberta(hidden_size=64, vocab_size=80)


def stepped(result, batch, steps: int) -> list[torch.Tensor]:
    return [result.step(batch) for _ in range(steps)]


CASES = {
    "without decisions": (VECTORS, (), "adamw"),
    "momentum": (IMAGES, (BLOCKS, UNEVEN), "sgd-momentum"),
    "bf16": (IMAGES, (Precision(dtype="bf16"), BLOCKS), "adamw"),
    "fp16": (MASKED, (Precision(dtype="fp16"), UNEVEN, LAYER), "adamw"),
    "step in backward": (MASKED, (StepInBackward(), LAYER), "adamw"),
    "fused": (VECTORS, (OptimizerKernel(kernel="fused"), FLAT), "adamw"),
    "loop": (VECTORS, (OptimizerKernel(kernel="for-loop"),), "rmsprop"),
    "frozen": (IMAGES, (Freeze(modules=("first",)),), "adamw"),
    "chunks": (MASKED, (ChunkedLoss(module="lm_head.decoder", chunks=3),), "adagrad"),
    "8 bits": ((wide, tokens()), (Optimizer(), LAYER), "adamw"),
    "8 bits, step in backward": ((wide, tokens()), (Optimizer(), StepInBackward()), "adamw"),
}


@pytest.mark.parametrize("case", CASES)
def test_going_on_gives_the_same_bits_as_not_stopping(case, tmp_path):
    (build, batch), decisions, optimizer = CASES[case]
    if Optimizer() in decisions:
        pytest.importorskip("bitsandbytes")
    options = {"batch": batch, "loss_fn": None if isinstance(batch, dict) else cross_entropy, "optimizer": optimizer}
    straight = rewritten(seeded(build), *decisions, **options)
    if straight.step.scaler is not None:
        straight.step.scaler.set_growth_interval(3)
    torch.manual_seed(1)
    stepped(straight, batch, 2)
    saved = {
        "step": straight.step.state_dict(),
        "model": straight.module.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(saved, tmp_path / "state.pt")
    losses = stepped(straight, batch, 3)

    resumed = rewritten(seeded(build), *decisions, **options)
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    before = copy.deepcopy(loaded["step"])
    resumed.module.load_state_dict(loaded["model"])
    resumed.step.load_state_dict(loaded["step"])
    torch.set_rng_state(loaded["random"])
    assert all(torch.equal(a, b) for a, b in zip(losses, stepped(resumed, batch, 3), strict=True))
    for (name, a), b in zip(straight.module.state_dict().items(), resumed.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    states = zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True)
    pairs = [(a[key], b[key]) for a, b in states for key in a]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    assert pairs or optimizer == "sgd"
    if straight.step.scaler is not None:
        assert straight.step.scaler.state_dict() == resumed.step.scaler.state_dict()
        assert straight.step.scaler.get_scale() > 2.0**16
    assert_same(before, loaded["step"])  # what was loaded is not what is trained on


def assert_same(a, b) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def test_a_state_of_another_plan_is_refused_and_nothing_changes():
    options = {"batch": images(6), "loss_fn": cross_entropy, "optimizer": "adamw"}
    saved = rewritten(seeded(Convolutional), BLOCKS, **options)
    stepped(saved, images(6), 1)
    other = rewritten(seeded(Convolutional), Checkpoint(modules=("twice",)), UNEVEN, **options)
    stepped(other, images(6), 2)
    before = copy.deepcopy(other.optimizer.state_dict())
    message = (
        r"^the state was saved under another plan \(it had 'activation checkpointing: first, twice', this one "
        r"has 'activation checkpointing: twice; gradient accumulation: 2 micro-batches of 4'\): "
        r"apply that plan, or start with "
        r"new optimizer state$"
    )
    with pytest.raises(PlanFileError, match=message):
        other.step.load_state_dict(saved.step.state_dict())
    assert_same(before, other.optimizer.state_dict())


def test_a_state_of_another_model_optimizer_or_grouping_is_refused():
    options = {"batch": vectors(6), "loss_fn": cross_entropy}
    saved = rewritten(seeded(Perceptron), optimizer="adamw", **options).step.state_dict()
    with pytest.raises(PlanFileError, match="the same decisions for another model"):
        rewritten(seeded(Perceptron, depth=5), optimizer="adamw", **options).step.load_state_dict(saved)
    with pytest.raises(
        PlanFileError, match=r"saved from torch.optim.adamw.AdamW, but this step's optimizer is torch.optim.sgd"
    ):
        rewritten(seeded(Perceptron), optimizer="sgd", **options).step.load_state_dict(saved)

    def grouped(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": others}])

    with pytest.raises(
        PlanFileError, match=r"groups of \[10\] parameters, but this optimizer has groups of \[1, 9\]: create"
    ):
        rewritten(seeded(Perceptron), optimizer=grouped, **options).step.load_state_dict(saved)


@pytest.mark.parametrize("state", [None, {}, {"state": {}, "param_groups": []}])
def test_what_is_no_state_of_a_step_is_refused(state):
    result = rewritten(seeded(Perceptron), batch=vectors(6), loss_fn=cross_entropy)
    with pytest.raises(PlanFileError, match=r"not the state of a training step: give what its state_dict\(\) returned"):
        result.step.load_state_dict(state)


def test_an_undone_step_has_no_state():
    result = rewritten(seeded(Perceptron), batch=vectors(6), loss_fn=cross_entropy)
    state = result.step.state_dict()
    result.undo()
    with pytest.raises(DecisionError, match="was undone"):
        result.step.state_dict()
    with pytest.raises(DecisionError, match="was undone"):
        result.step.load_state_dict(state)


def test_the_fingerprint_of_a_plan_sees_every_field_and_the_model_but_no_order():
    model = seeded(Convolutional)
    prints = {
        plan_fingerprint(decisions, each)
        for each in (model, Convolutional().double())
        for decisions in ((), (BLOCKS,), (Checkpoint(modules=("first",)),), (BLOCKS, UNEVEN))
    }
    assert len(prints) == 8
    assert plan_fingerprint((BLOCKS, UNEVEN), model) == plan_fingerprint((UNEVEN, BLOCKS), Convolutional())


def test_a_saved_plan_goes_on_under_the_same_plan_read_from_its_file(tmp_path):
    plan = plan_for(seeded(Convolutional), images(6), BLOCKS, UNEVEN, loss_fn=cross_entropy)
    saved = apply(plan, seeded(Convolutional), loss_fn=cross_entropy)
    saved.step(images(6))
    plan.save(tmp_path / "plan.json")
    loaded = type(plan).load(tmp_path / "plan.json")
    resumed = apply(loaded, seeded(Convolutional), loss_fn=cross_entropy)
    resumed.step.load_state_dict(saved.step.state_dict())
    assert_same(resumed.optimizer.state_dict(), saved.optimizer.state_dict())


def test_the_state_that_was_there_is_gone_before_the_new_one_comes():
    result = rewritten(seeded(Perceptron), batch=vectors(6), loss_fn=cross_entropy)
    stepped(result, vectors(6), 1)
    state = copy.deepcopy(result.step.state_dict())
    held = []
    plain = result.optimizer.load_state_dict
    result.optimizer.load_state_dict = lambda given: (held.append(len(result.optimizer.state)), plain(given))
    result.step.load_state_dict(state)
    assert held == [0]
    assert len(result.optimizer.state) == len(list(result.module.parameters()))


# ---- the model itself -----------------------------------------------------------------------------------------------

APPLIED = {
    "checkpoints": (IMAGES, (BLOCKS, UNEVEN)),
    "kept products": (IMAGES, (Checkpoint(modules=("first", "twice"), kept=((0,), (0,))),)),
    "replay": (VECTORS, (FLAT,)),
    "chunks": (MASKED, (ChunkedLoss(module="lm_head.decoder", chunks=3), LAYER)),
}


@pytest.mark.parametrize("case", APPLIED)
def test_a_pickle_holds_the_model_without_the_plan_which_can_be_applied_again(case):
    (build, batch), decisions = APPLIED[case]
    options = {"batch": batch, "loss_fn": None if isinstance(batch, dict) else cross_entropy, "optimizer": "adamw"}
    result = rewritten(seeded(build), *decisions, **options)
    stepped(result, batch, 1)
    loaded = pickle.loads(pickle.dumps(result.module))
    for name, module in loaded.named_modules():
        assert module.forward.__func__ is type(module).forward, name
    assert_same(dict(loaded.state_dict()), dict(result.module.state_dict()))
    again = rewritten(loaded, *decisions, **options)
    again.step.load_state_dict(pickle.loads(pickle.dumps(result.step.state_dict())))
    torch.manual_seed(1)
    losses = stepped(result, batch, 2)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(losses, stepped(again, batch, 2), strict=True))


@pytest.mark.parametrize("build", [roberta, gpt2])
def test_transformers_models_are_saved_after_a_plan_was_applied(build, tmp_path):
    model = seeded(build)
    layer = "roberta.encoder.layer.0" if build is roberta else "transformer.h.0"
    head = "lm_head.decoder" if build is roberta else "lm_head"
    result = rewritten(model, Checkpoint(modules=(layer,)), UNEVEN, ChunkedLoss(module=head, chunks=3), batch=tokens())
    result.step(tokens())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    model.eval(), loaded.eval()
    assert torch.equal(model(**tokens()).logits, loaded(**tokens()).logits)
    assert not loaded.config.use_cache  # as it is while the plan is applied: undo first to save it as it was
    result.undo()
    assert model.config.use_cache
