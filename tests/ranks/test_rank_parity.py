"""Several processes that train together by gloo reach the weights of one process that trains with the whole batch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from planner.errors import DecisionError
from planner.plan_types.decisions import Accumulation, ChunkedLoss, Decision, OptimizerKernel, Shard
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite.application import Rewritten, apply_decisions
from planner.space.sharding import repeated_blocks
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.call_convention import Calling
from planner.workload.workload import resized
from tests.support.ranks import in_group
from tests.support.truth import LANGUAGE, TEXT_TO_TEXT, hugging_face, mean_square, tied, with_loss

pytestmark = pytest.mark.slow

SAMPLES, STEPS = 8, 3
DEEP = {**LANGUAGE, "num_hidden_layers": 3}


class Blocks(torch.nn.Module):
    """Blocks with layer normalization and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 24), torch.nn.GELU()) for _ in range(3)
        )
        self.out = torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Half(Blocks):
    """The same, with a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


def convolutions() -> torch.nn.Module:
    blocks = [
        torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
        for _ in range(2)
    ]
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Sequential(*blocks), torch.nn.Flatten(), torch.nn.Linear(2048, 8)
    )


def with_ignored_labels(build: Callable) -> Callable:
    """The same model and batch. The samples have different numbers of labels that count."""

    def built():
        model, batch, loss_fn = build()
        for sample, row in enumerate(batch["labels"]):
            row[: len(row) * sample // (SAMPLES + 1)] = -100
        return model, batch, loss_fn

    return built


def half_ignored() -> tuple[torch.nn.Module, dict[str, torch.Tensor], Callable | None]:
    """A Llama and a batch in whose first half all labels are ignored: the first of two ranks has none that counts."""
    model, batch, loss_fn = LLAMA()
    batch["labels"][: SAMPLES // 2] = -100
    return model, batch, loss_fn


def counted(batch: dict[str, torch.Tensor]) -> int:
    """The number of labels that count, as a Python integer."""
    return int(batch["labels"][..., 1:].ne(-100).sum())


def language(kind: str, head: str, **settings: object) -> Callable:
    return with_ignored_labels(hugging_face(kind, head, batch_size=SAMPLES, **settings))


LLAMA = language("llama", "LlamaForCausalLM", **DEEP, num_key_value_heads=2)
MODELS = {
    "llama": LLAMA,
    "bert, tied": language("bert", "BertForMaskedLM", **LANGUAGE, hidden_dropout_prob=0,
                           attention_probs_dropout_prob=0),
    "gpt2": language("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=60, resid_pdrop=0,
                     embd_pdrop=0, attn_pdrop=0),
    "qwen3": language("qwen3", "Qwen3ForCausalLM", **LANGUAGE, num_key_value_heads=2, head_dim=8),
    "mixtral": language("mixtral", "MixtralForCausalLM", **LANGUAGE, num_key_value_heads=2, num_local_experts=2,
                        experts_implementation="eager"),
    "t5": language("t5", "T5ForConditionalGeneration", **TEXT_TO_TEXT, decoder_start_token_id=0, dropout_rate=0),
    "gemma": language("gemma", "GemmaForCausalLM", **LANGUAGE, num_key_value_heads=2, head_dim=8),
    "roberta": language("roberta", "RobertaForMaskedLM", **LANGUAGE, hidden_dropout_prob=0,
                        attention_probs_dropout_prob=0),
    "blocks": with_loss(Blocks, SAMPLES, 24),
    "frozen block": with_loss(Half, SAMPLES, 24),
    "convolutions": with_loss(convolutions, SAMPLES, 3, 16, 16),
    "wide": with_loss(lambda: torch.nn.Sequential(torch.nn.Linear(24, 70), torch.nn.Tanh(), torch.nn.Linear(70, 8)),
                      SAMPLES, 24),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training on several cards that is compared with one on a single card."""

    build: Callable
    cards: int = 2
    decisions: Callable[[torch.nn.Module], tuple[Decision, ...]] = lambda model: ()
    """Decisions besides the sharding."""
    shard: Callable[[torch.nn.Module, int], Shard]
    parallelize: Callable | None = None
    """The user's own function that divides the model; None if the planner does it."""
    max_grad_norm: float | None = None
    loss_weight: Callable | None = None
    optimizer: Callable = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)


def fsdp(model: torch.nn.Module, cards: int) -> Shard:
    return Shard(way="fsdp", mesh=(cards,), units=repeated_blocks(model))


def kept(model: torch.nn.Module, cards: int) -> Shard:
    return dataclasses.replace(fsdp(model, cards), kept=repeated_blocks(model)[:1])


def hybrid(model: torch.nn.Module, cards: int) -> Shard:
    return dataclasses.replace(fsdp(model, cards), mesh=(2, cards // 2))


def offloaded(model: torch.nn.Module, cards: int) -> Shard:
    return dataclasses.replace(fsdp(model, cards), offload=True)


def copies(way: str) -> Callable[[torch.nn.Module, int], Shard]:
    return lambda model, cards: Shard(way=way, mesh=(cards,))


def once(shard: Callable[[torch.nn.Module, int], Shard]) -> Callable[[torch.nn.Module, int], Shard]:
    return lambda model, cards: dataclasses.replace(shard(model, cards), reduces_once=True)


TWO = Accumulation(micro_batch_size=1, micro_batches=2)
UNEVEN = Accumulation(micro_batch_size=3, micro_batches=2)
SPLIT = Accumulation(micro_batch_size=1, micro_batches=4)
TRAININGS = {
    **{f"{name}, FSDP2": Training(build=build, shard=fsdp) for name, build in MODELS.items()},
    "three uneven shards": Training(build=with_loss(Blocks, 6, 24), shard=fsdp, cards=3),
    "kept": Training(build=LLAMA, shard=kept),
    "hybrid": Training(build=LLAMA, shard=hybrid, cards=4),
    "fewer experts than cards": Training(build=MODELS["mixtral"], shard=fsdp, cards=4),
    "offloaded": Training(build=LLAMA, shard=offloaded),
    "clipped": Training(build=LLAMA, shard=fsdp, max_grad_norm=0.01),
    "accumulated": Training(build=LLAMA, shard=fsdp, decisions=lambda model: (SPLIT,)),
    "accumulated and clipped": Training(
        build=LLAMA, shard=kept, decisions=lambda model: (SPLIT,), max_grad_norm=0.01
    ),
    "reduced once": Training(build=LLAMA, shard=once(fsdp), decisions=lambda model: (SPLIT,)),
    "reduced once, kept and clipped": Training(
        build=LLAMA, shard=once(kept), decisions=lambda model: (SPLIT,), max_grad_norm=0.01
    ),
    "reduced once, hybrid": Training(build=LLAMA, shard=once(hybrid), cards=4, decisions=lambda model: (TWO,)),
    "reduced once, offloaded": Training(build=LLAMA, shard=once(offloaded), decisions=lambda model: (UNEVEN,)),
    "reduced once, DDP": Training(build=LLAMA, shard=once(copies("ddp")), decisions=lambda model: (UNEVEN,)),
    "reduced once, ZeRO-1": Training(build=tied, shard=once(copies("zero1")), decisions=lambda model: (TWO,)),
    "checkpointed": Training(
        build=LLAMA, shard=fsdp, decisions=lambda model: (Checkpoint(modules=repeated_blocks(model)),)
    ),
    "fused optimizer": Training(
        build=LLAMA, shard=fsdp, decisions=lambda model: (OptimizerKernel(kernel="fused"),)
    ),
    "DDP": Training(build=LLAMA, shard=copies("ddp")),
    "DDP, accumulated": Training(build=LLAMA, shard=copies("ddp"), decisions=lambda model: (SPLIT,)),
    "a rank without labels, FSDP2": Training(build=half_ignored, shard=fsdp, decisions=lambda model: (SPLIT,)),
    "a rank without labels, DDP": Training(build=half_ignored, shard=copies("ddp"), decisions=lambda model: (UNEVEN,)),
    "a rank without labels, whole batch": Training(build=half_ignored, shard=copies("ddp")),
    "a rank without labels, whose number is an integer": Training(
        build=half_ignored, shard=copies("ddp"), decisions=lambda model: (SPLIT,), loss_weight=counted
    ),
    "ZeRO-1": Training(build=LLAMA, shard=copies("zero1")),
    "ZeRO-1, tied": Training(build=tied, shard=copies("zero1")),
}  # fmt: skip


def applied(
    training: Training, model: torch.nn.Module, samples: int, loss_fn, batch, *decisions: Decision
) -> Rewritten:
    return apply_decisions(
        decisions,
        model,
        optimizer=lambda parameters: training.optimizer(parameters),
        calling=Calling.of(batch, loss_fn),
        batch_size=samples,
        loss_fn=loss_fn,
        max_grad_norm=training.max_grad_norm,
        loss_weight=training.loss_weight,
        parallelize=training.parallelize if decisions else None,
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the whole weights. All ranks have to call this."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }


def built(training: Training):
    model, batch, loss_fn = training.build()
    doubled = {
        name: value.double() if value.is_floating_point() else value for name, value in batch.items()
    } if isinstance(batch, dict) else batch if isinstance(batch, torch.Tensor) else tuple(
        value.double() for value in batch
    )  # fmt: skip
    return model.double().train(), doubled, loss_fn


def samples_of(batch: object) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch if torch.is_tensor(batch) else batch[0])


def compute_losses_in_double() -> None:
    """Keeps transformers from rounding logits to fp32 before the loss. To be called in a child process."""
    to_float = torch.Tensor.float
    torch.Tensor.float = lambda self, **options: (
        self if self.dtype is torch.float64 else to_float(self, **options)
    )  # fmt: skip


def rank_of(training: Training, rank: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    compute_losses_in_double()
    model, batch, loss_fn = built(training)
    shard = training.shard(model, training.cards)
    samples, alike = samples_of(batch) // shard.divides_batch_by, training.cards // shard.divides_batch_by
    part = _rows(batch, rank // alike * samples, samples)
    decisions = (shard, *training.decisions(model))
    rewritten = applied(training, model, samples, loss_fn, part, *decisions)
    losses = [rewritten.step(part).double() for _ in range(STEPS)]
    for loss in losses:
        dist.all_reduce(loss)
    found = weights(rewritten.module), [float(loss) / training.cards for loss in losses]
    dist.barrier()
    return found


def _rows(batch: object, start: int, count: int) -> object:
    if isinstance(batch, dict):
        return {name: value[start : start + count] for name, value in batch.items()}
    return batch[start : start + count] if torch.is_tensor(batch) else tuple(v[start : start + count] for v in batch)


def alone(training: Training) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.set_num_threads(1)
    compute_losses_in_double()
    model, batch, loss_fn = built(training)
    rewritten = applied(training, model, samples_of(batch), loss_fn, batch)
    losses = [float(rewritten.step(batch)) for _ in range(STEPS)]
    return weights(rewritten.module), losses


def together(training: Training) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    return in_group(training.cards, lambda rank: rank_of(training, rank))


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thorough_after(3)
def test_several_cards_train_as_one_does(name):
    assert_trains_as_one_card(TRAININGS[name])


def assert_trains_as_one_card(training: Training) -> None:
    (expected, losses), ranks = run_in_child(lambda: alone(training)), together(training)
    before = {key: value.clone() for key, value in built(training)[0].state_dict().items()}
    assert any(not torch.equal(before[key], value) for key, value in expected.items() if value.is_floating_point())
    for found, found_losses in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert is_close(found[key], value), key


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The norm of the difference is at most 1e-12 of the norm of what is expected.

    At most 1e-12 of 1 if that is smaller: the gradient of a bias of keys in attention is zero up to rounding.
    """
    norm = torch.linalg.vector_norm
    return bool(norm((found - expected).double()) <= 1e-12 * norm(expected.double()).clamp(min=1))


@pytest.mark.thorough
@pytest.mark.parametrize("shard", [once(fsdp), once(kept), once(copies("ddp"))], ids=["FSDP2", "kept", "DDP"])
def test_gradients_that_are_reduced_once_are_those_of_one_process(shard, monkeypatch):
    """One step of gradient descent with a rate of 1 subtracts the gradient from the weights."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 1)
    training = Training(
        build=LLAMA,
        shard=shard,
        decisions=lambda model: (UNEVEN,),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    (expected, _), ranks = run_in_child(lambda: alone(training)), together(training)
    before = built(training)[0].state_dict()
    assert all((before[key] - value).abs().max() > 1e-6 for key, value in expected.items())  # all have a gradient
    for found, _ in ranks:
        assert all(torch.allclose(found[key], value, rtol=0, atol=1e-12) for key, value in expected.items())


def test_a_loss_in_chunks_is_that_of_one_card_up_to_the_rounding_of_its_logits():
    """Logits in chunks are rounded to fp32 before the loss, as transformers does with all logits."""
    chunks = (ChunkedLoss(module="lm_head", chunks=2),)
    training = Training(build=LLAMA, shard=fsdp, decisions=lambda model: chunks)
    (expected, losses), ranks = run_in_child(lambda: alone(training)), together(training)
    for found, found_losses in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert all(torch.allclose(found[key], value, rtol=1e-3, atol=1e-4) for key, value in expected.items())


def gradient_descent(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def summed(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return (output - batch[-1]).square().sum()


def test_a_loss_that_is_a_sum_is_added_up_if_its_weight_says_so():
    def build():
        model, values, _ = with_loss(Blocks, SAMPLES, 24)()
        return model, values, summed

    training = Training(build=build, shard=fsdp, loss_weight=lambda batch: 1, optimizer=gradient_descent)
    (expected, losses), ranks = run_in_child(lambda: alone(training)), together(training)
    for found, found_losses in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert all(is_close(found[key], value) for key, value in expected.items())


def test_another_number_of_processes_is_refused():
    model, batch, _ = built(Training(build=LLAMA, shard=fsdp))
    training = Training(build=LLAMA, shard=fsdp)
    with pytest.raises(DecisionError, match="the plan is for 2 cards, but the number of processes is 1: start them"):
        applied(training, model, 4, None, batch, fsdp(model, 2))


def test_the_batch_of_a_card_is_a_part_of_the_whole():
    _, batch, _ = with_loss(Blocks, SAMPLES, 24)()
    part = resized(batch, 2, device=None, present=SAMPLES)
    assert torch.equal(part[0], batch[0][:2])
    assert mean_square(part[1], part) == 0
