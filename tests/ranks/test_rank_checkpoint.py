"""Checkpoints that one number of processes saves and another one loads: the training goes on as if uninterrupted."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch
import torch.distributed as dist

from planner.rewrite.portable.rank_states import load_checkpoint, save_checkpoint
from planner.virtual_gpu.forked_process import run_in_child
from tests.ranks.test_rank_parity import (
    LLAMA,
    SAMPLES,
    Training,
    _rows,
    applied,
    built,
    compute_losses_in_double,
    copies,
    fsdp,
    hybrid,
    offloaded,
    weights,
)
from tests.support.ranks import in_group
from tests.support.truth import with_loss

pytestmark = pytest.mark.slow

BEFORE, AFTER = 2, 3
"""Number of steps before and after the interruption."""


def slower_and_slower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that computes each learning rate from the one before, which only the optimizer holds."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def uneven() -> torch.nn.Module:
    """Parameters that four processes cannot divide evenly, and one that is not trained."""
    model = torch.nn.Sequential(torch.nn.Linear(24, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 8))
    model[2].weight.requires_grad_(False)
    return model


@dataclasses.dataclass(frozen=True)
class Found:
    """Losses, weights and learning rates of a process after its training steps."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    learning_rates: list[float]


def trained(
    training: Training,
    rank: int = 0,
    *,
    steps: int,
    resume: pathlib.Path | None = None,
    save: pathlib.Path | None = None,
) -> Found:
    """Takes steps in one process of a training, and returns what it has then.

    resume: folder of a checkpoint to start from. save: folder of a checkpoint that is saved after `BEFORE` steps.
    """
    model, batch, loss_fn = built(training)
    part = _rows(batch, rank * SAMPLES // training.cards, SAMPLES // training.cards)
    shard = (training.shard(model, training.cards),) if dist.is_initialized() else ()
    rewritten = applied(training, model, SAMPLES // training.cards, loss_fn, part, *shard)
    optimizer, scheduler = rewritten.optimizer, slower_and_slower(rewritten.optimizer)
    if resume is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        assert load_checkpoint(resume, model, optimizer, scheduler=scheduler) == BEFORE
    losses = []
    for step in range(1, steps + 1):
        losses.append(rewritten.step(part).double())
        scheduler.step()
        if save is not None and step == BEFORE:
            save_checkpoint(save, model, optimizer, step, scheduler=scheduler)
    if dist.is_initialized():
        for loss in losses:
            dist.all_reduce(loss)
    means = [float(loss) / training.cards for loss in losses]
    found = Found(means, weights(model), [group["lr"] for group in optimizer.param_groups])
    if dist.is_initialized():
        dist.barrier()
    return found


def together(training: Training, **options) -> list[Found]:
    """Returns what each process of a training has after its steps."""

    def of_rank(rank: int) -> Found:
        compute_losses_in_double()
        return trained(training, rank, **options)

    return in_group(training.cards, of_rank)


def uninterrupted(training: Training) -> Found:
    """Returns what one process has that trains with the whole batch, and is not interrupted."""

    def alone() -> Found:
        torch.set_num_threads(1)
        compute_losses_in_double()
        return trained(dataclasses.replace(training, cards=1), steps=BEFORE + AFTER)

    return run_in_child(alone)


def assert_continues(found: Found, expected: Found) -> None:
    """The sums of other numbers of processes have another order, so that results differ by rounding."""
    assert found.losses == pytest.approx(expected.losses[-AFTER:], rel=1e-12)
    assert found.learning_rates == expected.learning_rates
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        assert torch.linalg.vector_norm(found.weights[key] - value) <= 1e-12 * torch.linalg.vector_norm(value), key


UNEVEN = with_loss(uneven, SAMPLES, 24)
WAYS = {"FSDP2": fsdp, "offloaded": offloaded, "DDP": copies("ddp"), "ZeRO-1": copies("zero1")}


@pytest.mark.parametrize(
    "way", ["FSDP2", "ZeRO-1", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("offloaded", "DDP"))]
)
def test_two_processes_continue_with_the_same_bits(way, tmp_path):
    training = Training(build=UNEVEN, shard=WAYS[way], max_grad_norm=0.01)
    whole = together(training, steps=BEFORE + AFTER, save=tmp_path)
    continued = together(training, steps=AFTER, resume=tmp_path)
    for found, expected in zip(continued, whole, strict=True):
        assert found.losses == expected.losses[BEFORE:]
        assert found.learning_rates == expected.learning_rates
        assert all(torch.equal(found.weights[key], value) for key, value in expected.weights.items())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (fsdp, fsdp),
        (hybrid, fsdp),
        (fsdp, hybrid),
        (copies("ddp"), copies("ddp")),
        (copies("zero1"), copies("zero1")),
        (copies("zero1"), fsdp),
    ],
    ids=["FSDP2", "HSDP, then FSDP2", "FSDP2, then HSDP", "DDP", "ZeRO-1", "ZeRO-1, then FSDP2"],
)
def test_a_training_that_four_processes_saved_goes_on_in_two_and_in_one(before, after, tmp_path):
    training = Training(build=LLAMA, shard=before, cards=4, max_grad_norm=0.01)
    together(training, steps=BEFORE, save=tmp_path)
    expected = uninterrupted(training)
    for cards in (2, 1) if after is not hybrid else (2,):
        for found in together(dataclasses.replace(training, shard=after, cards=cards), steps=AFTER, resume=tmp_path):
            assert_continues(found, expected)


@pytest.mark.thorough
def test_one_process_without_a_process_group_continues_what_two_saved(tmp_path):
    training = Training(build=UNEVEN, shard=fsdp)
    together(training, steps=BEFORE, save=tmp_path)

    def alone() -> Found:
        torch.set_num_threads(1)
        return trained(dataclasses.replace(training, cards=1), steps=AFTER, resume=tmp_path)

    assert_continues(run_in_child(alone), uninterrupted(training))
