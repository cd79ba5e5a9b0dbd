"""A step in backward trains the same, and its gradients never exist all together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from planner.errors import DecisionError, RehearsalError, WorkloadError
from planner.plan_types.decisions import Accumulation, Decision, Fidelity, Freeze, Optimizer, Precision, StepInBackward
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.step_graph import Category, Phase
from planner.workload.workload import workload
from tests.support.training import (
    Convolutional,
    Perceptron,
    cross_entropy,
    gpt2,
    images,
    rewritten,
    roberta,
    seeded,
    tokens,
    vectors,
)
from tests.support.workloads import BARE, certifying_graph, plain, units, what_if

pytestmark = pytest.mark.slow

IN_BACKWARD = (StepInBackward(),)


class Detached(nn.Module):
    """Reads the last layer's weights a second time without a gradient, optionally in a separate block."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.block = Scaled(self.last, saved=saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


class Scaled(nn.Module):
    def __init__(self, last: nn.Linear, *, saved: bool) -> None:
        super().__init__()
        self.others, self.saved = [last], saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.others[0].weight.detach()
        return torch.sin(x * weight.sum(0) if self.saved else x * weight.norm())


class Reentrant(nn.Module):
    """One layer in two reentrant checkpoints, each of which runs a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


def optimizers():
    def two_groups(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[::2], "weight_decay": 0.5}, {"params": parameters[1::2], "lr": 3e-3}]
        return torch.optim.AdamW(groups, lr=1e-2)

    return {
        "adamw": "adamw",
        "momentum": "sgd-momentum",
        "adagrad": "adagrad",
        "two groups": two_groups,
        "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "adafactor": torch.optim.Adafactor,
    }


def steps(model, batches, *decisions: Decision, **options) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict]:
    result = rewritten(model, *decisions, batch=batches[0], **options)
    torch.manual_seed(1)
    losses = [result.step(batch) for batch in batches]
    assert all(parameter.grad is None for parameter in model.parameters())
    return losses, model.state_dict(), result.optimizer.state_dict()


def assert_same_training(model, batches, *decisions: Decision, beside: tuple[Decision, ...] = (), **options) -> None:
    """Check that losses, weights and optimizer state have the same bits."""
    losses, weights, state = steps(copy.deepcopy(model), batches, *beside, **options)
    other_losses, other_weights, other_state = steps(copy.deepcopy(model), batches, *beside, *decisions, **options)
    torch.testing.assert_close(other_losses, losses, rtol=0, atol=0)
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=0)
    torch.testing.assert_close(other_state, state, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", optimizers().values(), ids=optimizers())
def test_training_is_the_same_to_the_bit(optimizer):
    batches = [vectors(seed=seed) for seed in range(3)]
    options = {"loss_fn": cross_entropy, "optimizer": optimizer}
    assert_same_training(seeded(Perceptron), batches, StepInBackward(), **options)


@pytest.mark.parametrize("build", [gpt2, roberta], ids=["gpt2", "roberta"])
def test_tied_weights_are_updated_once(build):
    model = seeded(build, use_cache=False)
    assert_same_training(model, [tokens(seed=seed) for seed in range(3)], StepInBackward(), optimizer="adamw")


@pytest.mark.parametrize(
    "beside",
    [
        (Checkpoint(modules=("first", "twice")),),
        (Freeze(modules=("first",)),),
        (Precision(dtype="bf16"), Checkpoint(modules=("twice",))),
    ],
    ids=["checkpoint", "freeze", "bf16 and checkpoint"],
)
def test_together_with_other_decisions(beside):
    batches = [images(seed=seed) for seed in range(3)]
    options = {"loss_fn": cross_entropy, "optimizer": "adamw"}
    assert_same_training(seeded(Convolutional), batches, StepInBackward(), beside=beside, **options)


def test_with_state_in_8_bits():
    """Weights that are large enough for 8-bit state, and an embedding that keeps 32-bit state by its position."""
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 128), nn.Flatten(), nn.Linear(4 * 128, 3))
    torch.manual_seed(0)
    batches = [(torch.randint(300, (8, 4)), torch.randint(3, (8,))) for _ in range(3)]
    options = {"loss_fn": cross_entropy, "optimizer": "adamw"}
    assert_same_training(model, batches, StepInBackward(), beside=(Optimizer(),), **options)
    result = rewritten(model, Optimizer(), StepInBackward(), batch=batches[0], **options)
    result.step(batches[0])
    dtypes = [result.optimizer.state[parameter]["state1"].dtype for parameter in model.parameters()]
    assert dtypes == [torch.float32, torch.uint8, torch.float32, torch.float32, torch.float32]


def test_a_schedule_drives_the_same_optimizer():
    def trained(*decisions: Decision) -> dict[str, torch.Tensor]:
        result = rewritten(seeded(Perceptron), *decisions, batch=vectors(), loss_fn=cross_entropy, optimizer="adamw")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(result.optimizer, T_max=4)
        for seed in range(4):
            result.step(vectors(seed=seed))
            schedule.step()
        return result.module.state_dict()

    torch.manual_seed(1)
    expected = trained()
    torch.manual_seed(1)
    torch.testing.assert_close(trained(StepInBackward()), expected, rtol=0, atol=0)


def test_no_hook_and_no_narrowed_group_stays_behind():
    model = seeded(Perceptron)
    result = rewritten(model, StepInBackward(), batch=vectors(), loss_fn=cross_entropy, optimizer="adamw")
    everything = list(result.optimizer.param_groups[0]["params"])
    result.step(vectors())
    failing = model.layers[0][0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.step(vectors())
    failing.remove()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in everything)
    assert [id(p) for p in result.optimizer.param_groups[0]["params"]] == [id(p) for p in everything]
    result.undo()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in everything)


class Custom(torch.optim.SGD):
    """An optimizer of unknown kind: its step may look at all gradients."""


def test_what_looks_at_all_gradients_is_refused():
    batch, options = vectors(), {"loss_fn": cross_entropy}
    for decisions, changed, why in (
        ((Accumulation(micro_batch_size=4, micro_batches=2),), {}, "accumulation sums gradients"),
        ((Precision(dtype="fp16"),), {}, "gradient scaler"),
        ((), {"max_grad_norm": 1.0}, "cannot be clipped"),
        ((), {"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS"),
        ((), {"optimizer": lambda p: Custom(p, lr=0.1)}, "Custom"),
    ):
        model = seeded(Perceptron)
        with pytest.raises(DecisionError, match=why):
            rewritten(model, *decisions, StepInBackward(), batch=batch, **{**options, **changed})


def test_a_second_gradient_of_one_parameter_is_refused():
    model, batch = seeded(Reentrant), vectors()
    with pytest.raises(RuntimeError, match="second gradient"):
        rewritten(model, StepInBackward(), batch=batch, loss_fn=cross_entropy).step(batch)
    with pytest.raises((WorkloadError, RehearsalError), match=r"second gradient|after its update"):
        certifying_graph(workload(model, batch, loss_fn=cross_entropy), IN_BACKWARD, BARE)


def test_a_weight_that_is_read_after_its_update_is_refused():
    """Autograd notices a write to a saved tensor itself; a write to an input of a recompute only the recorder sees."""
    batch = vectors()
    work = workload(seeded(Detached, saved=True), batch, loss_fn=cross_entropy)
    certifying_graph(work, IN_BACKWARD, BARE)
    recomputed = (*IN_BACKWARD, Checkpoint(modules=("block",)))
    for saved in (True, False):
        work = workload(seeded(Detached, saved=saved), batch, loss_fn=cross_entropy)
        with pytest.raises(RehearsalError, match=r"'last.weight' is read by .* after its update"):
            certifying_graph(work, recomputed, BARE)


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)), nn.Linear(64, 3))


def work_of(samples: int, optimizer: str = "adamw"):
    batch = torch.zeros(samples, 64), torch.zeros(samples, dtype=torch.long)
    return workload(deep(), batch, loss_fn=cross_entropy, optimizer=optimizer)


def gradients_alive(graph) -> int:
    kept = [storage for storage in graph.storages if storage.category is Category.GRADIENT]
    ticks = {tick for storage in kept for life in storage.lives for tick in life}
    return max(sum(s.size_bytes for s in kept if any(a <= t < b for a, b in s.lives)) for t in ticks)


def test_gradients_are_alive_one_by_one():
    work = work_of(4)
    whole = sum(p.numel() * p.itemsize for p in work.model.parameters())
    assert gradients_alive(certifying_graph(work, (), BARE)) == whole
    graph = certifying_graph(work, IN_BACKWARD, BARE)
    assert gradients_alive(graph) <= 64 * 64 * 4 + 64 * 4
    assert {op.phase for op in graph.ops if "addcdiv" in op.name} == {Phase.OPTIMIZER}


@pytest.mark.parametrize("samples", [4, 512])
@pytest.mark.thorough_after(1)
def test_the_promise_holds(samples):
    """The memory curve of the search is that of the rewritten step, with and without recompute."""
    work = work_of(samples)
    found, compiled = units(what_if(work, IN_BACKWARD))
    blocks = [number for number, unit in enumerate(found.units) if unit.module.isdigit()]
    for chosen in ((), (blocks[0],), tuple(blocks[1::2])):
        decisions = (*IN_BACKWARD, *found.decisions(chosen))
        assert compiled.peak(chosen) == plain(work, decisions).live_bytes().max(), decisions


@pytest.mark.thorough
def test_it_is_chosen_where_gradients_are_what_is_too_much():
    model, batch = deep(), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))
    options = {"loss_fn": cross_entropy, "gpu": "bare", "fidelity": "exact", "optimizer": "sgd"}
    whole = planner.plan(model, batch, vram=None, **options)
    assert planner.plan(model, batch, vram=whole.peak.total_bytes, **options).decisions == ()
    budget = int(0.7 * whole.peak.total_bytes)
    found = planner.plan(model, batch, vram=budget, **options)
    assert found.fits and found.decisions == IN_BACKWARD
    assert found.solver.promised_bytes == found.solver.certified_bytes <= budget
    without = planner.plan(model, batch, vram=budget, forbid=["step-in-backward"], **options)
    assert not without.fits
    assert without.shortfall.next_step.relax == "allow step-in-backward"


@pytest.mark.thorough
def test_it_is_not_offered_where_it_cannot_be(monkeypatch):
    model, batch = deep(), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))
    options = {"loss_fn": cross_entropy, "gpu": "bare", "vram": 1 << 30}
    with pytest.raises(DecisionError, match="Custom may look at the gradients"):
        planner.plan(model, batch, optimizer=Custom(model.parameters(), lr=0.1), force="step-in-backward", **options)
    with pytest.raises(DecisionError, match="two forced techniques cannot be combined"):
        planner.plan(model, batch, force=["step-in-backward", "accumulation"], **options)
    options["forbid"] = ["optimizer", "optimizer-kernel"]
    forced = planner.plan(model, batch, force=["step-in-backward"], **{**options, "gpu": "rtx-2060"})
    assert forced.decisions == IN_BACKWARD, "fp16 and its scaler are left out"
    with pytest.raises(DecisionError, match="two forced techniques cannot be combined"):
        planner.plan(model, batch, force=["step-in-backward", "precision"], **{**options, "gpu": "rtx-2060"})


@pytest.mark.thorough
def test_what_is_pruned_before_it_is_recorded_would_not_have_been_chosen(monkeypatch):
    from planner.choose.candidates import Candidate
    from planner.pipeline import plan_workload
    from planner.plan_types.constraints import Constraints

    pruned = 0
    may_fit = Candidate.may_fit_with

    def counting(self, *arguments, **options) -> bool:
        nonlocal pruned
        answer = may_fit(self, *arguments, **options)
        pruned += not answer
        return answer

    for samples, shares in ((4, (0.6,)), (512, (0.6, 0.9))):
        work = work_of(samples)
        constraints = Constraints(fidelity=Fidelity.EXACT, forced=(), forbidden=("accumulation",))
        whole = plan_workload(work, BARE, vram_bytes=None, constraints=constraints).peak.total_bytes
        for share in shares:
            budget = int(share * whole)
            monkeypatch.setattr(Candidate, "may_fit_with", counting)
            quick = plan_workload(work, BARE, vram_bytes=budget, constraints=constraints)
            monkeypatch.setattr(Candidate, "may_fit_with", lambda self, *arguments, **options: True)
            thorough = plan_workload(work, BARE, vram_bytes=budget, constraints=constraints)
            assert (quick.fits, quick.decisions) == (thorough.fits, thorough.decisions), (samples, share)
    assert pruned


def test_hooks_on_the_optimizer_speak_against_it():
    """Step hooks would run once per parameter: a hook that clips by the global norm would clip by that of one."""
    model, batch = deep(), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    options = {"loss_fn": cross_entropy, "gpu": "bare", "vram": 1 << 30, "optimizer": optimizer}
    for force, why in (("step-in-backward", "with step hooks may look"), ("optimizer", "step hooks")):
        with pytest.raises(DecisionError, match=why):
            planner.plan(model, batch, force=force, **options)
    for decision in IN_BACKWARD[0], Optimizer():
        with pytest.raises(DecisionError, match="step hooks"):
            rewritten(model, decision, batch=batch, loss_fn=cross_entropy, optimizer=optimizer)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_gradient_from_before_is_refused(eight_bit):
    model = seeded(Perceptron)
    decisions = (*((Optimizer(),) if eight_bit else ()), StepInBackward())
    result = rewritten(model, *decisions, batch=vectors(), loss_fn=cross_entropy, optimizer="adamw")
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(RuntimeError, match="already has a gradient before the step"):
        result.step(vectors())
    result.optimizer.zero_grad()
    result.step(vectors())


def test_a_weight_that_is_not_trained_may_be_read_again():
    """A parameter outside of the optimizer gets a gradient; one in the optimizer is updated before it is read."""
    model, batch = seeded(Detached, saved=True), vectors()
    model.block = nn.Sequential(model.block, nn.Linear(16, 16))
    held = torch.optim.SGD([*model.first.parameters(), *model.block.parameters()], lr=0.1)
    work = workload(model, batch, loss_fn=cross_entropy, optimizer=held)
    certifying_graph(work, (*IN_BACKWARD, Checkpoint(modules=("block.0",))), BARE)


def test_a_file_is_not_written_of_what_cannot_be_done_together():
    from planner.rewrite import source
    from tests.support.training import plan_for

    split = Accumulation(micro_batch_size=4, micro_batches=2)
    for decisions in ((split, StepInBackward()), (Precision(dtype="fp16"), StepInBackward()), (split, split)):
        with pytest.raises(DecisionError, match="keep one"):
            source(plan_for(seeded(Perceptron), vectors(), *decisions))


class ReadAgain(nn.Module):
    """A language model that cannot step in backward, with or without a chunked loss."""

    def __init__(self, words: int = 4096, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
        self.last, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * self.last.weight.data[0]
        return self.head(torch.tanh(self.last(self.blocks(x))))


def by_word(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


@pytest.mark.thorough
def test_where_it_is_refused_everything_else_is_still_tried():
    tokens = torch.zeros(1, 256, dtype=torch.long)
    options = {"loss_fn": by_word, "gpu": "bare", "fidelity": "exact"}
    whole = planner.plan(ReadAgain(), (tokens, tokens), vram=None, **options).peak.total_bytes
    for share in (0.75, 0.3):
        found = planner.plan(ReadAgain(), (tokens, tokens), vram=int(share * whole), **options)
        without = planner.plan(
            ReadAgain(), (tokens, tokens), vram=int(share * whole), forbid=["step-in-backward"], **options
        )
        assert (found.fits, found.decisions) == (without.fits, without.decisions)
        assert not any("optimizer step in backward" in note for note in without.notes), (
            "of what is not allowed nothing is reported"
        )
    assert any("optimizer step in backward" in note for note in found.notes)
