"""A model that a function of the user's own divides trains to the weights of one process (gloo, in fp64)."""

from __future__ import annotations

import pytest
import torch

from planner.plan_types.decisions import Accumulation, OptimizerKernel, Shard
from planner.plan_types.recompute_decisions import Checkpoint
from tests.ranks.test_rank_parity import (
    LLAMA,
    MODELS,
    SAMPLES,
    Training,
    assert_trains_as_one_card,
    gradient_descent,
    summed,
)
from tests.support import own_parallelism as own
from tests.support.truth import with_loss

pytestmark = pytest.mark.slow


def training(build, parallelize, *decisions, **options) -> Training:
    """A training on a mesh, whose dimensions are the options with numbers."""
    mesh = {name: size for name, size in options.items() if name.startswith(("dp", "tp"))}
    shard = Shard(way="own", mesh=tuple(mesh.values()), dimensions=tuple(mesh))
    return Training(
        build=build,
        cards=shard.cards,
        shard=lambda model, cards: shard,
        decisions=lambda model: decisions,
        parallelize=parallelize,
        **{name: value for name, value in options.items() if name not in mesh},
    )


LAYERS = tuple(f"model.layers.{number}" for number in range(3))
TWO = Accumulation(micro_batch_size=2, micro_batches=2)
TRAININGS = {
    "TP": training(LLAMA, own.tensor_parallel, tp=2),
    "TP x FSDP2, clipped": training(LLAMA, own.tensor_parallel_and_sharded, dp=2, tp=2, max_grad_norm=0.01),
    "TP, clipped": training(LLAMA, own.tensor_parallel, tp=2, max_grad_norm=0.01),
    "TP, checkpointed": training(LLAMA, own.tensor_parallel, Checkpoint(modules=LAYERS), tp=2),
    "TP, accumulated": training(LLAMA, own.tensor_parallel, Accumulation(micro_batch_size=3, micro_batches=3), tp=2),
    "TP of an encoder": training(MODELS["bert, tied"], own.tensor_parallel_encoder, tp=2),
    "sequence parallel": training(LLAMA, own.sequence_parallel, tp=2),
    "sequence parallel x FSDP2": training(LLAMA, own.sequence_parallel_and_sharded, dp=2, tp=2),
    "sequence parallel x FSDP2, checkpointed and accumulated": training(
        LLAMA, own.sequence_parallel_and_sharded, Checkpoint(modules=LAYERS), TWO, dp=2, tp=2
    ),
    "a pair of layers x FSDP2": training(MODELS["wide"], own.pair, dp=2, tp=2),
    "FSDP2 alone": training(LLAMA, own.sharded, dp=2),
    "copies": training(LLAMA, own.copied, Checkpoint(modules=LAYERS), dp=2),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thorough_after(1)
def test_cards_that_a_function_divides_a_model_among_train_as_one_card(name):
    assert_trains_as_one_card(TRAININGS[name])


@pytest.mark.thorough
def test_a_sum_is_added_up_over_the_parts_of_the_batch_and_not_over_cards_with_the_same_samples():
    def build():
        model, values, _ = with_loss(lambda: torch.nn.Sequential(*MODELS["wide"]()[0]), SAMPLES, 24)()
        return model, values, summed

    parts = training(build, own.pair, dp=2, tp=2, loss_weight=lambda batch: 1, optimizer=gradient_descent)
    assert_trains_as_one_card(parts)


@pytest.mark.thorough
def test_another_kernel_of_the_optimizer_trains_as_one_card():
    fused = OptimizerKernel(kernel="fused")
    assert_trains_as_one_card(training(LLAMA, own.sequence_parallel_and_sharded, fused, dp=2, tp=2))
