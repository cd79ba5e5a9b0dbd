"""A model that a function of the user's own divides trains to the weights of one process (gloo, in fp64)."""

from __future__ import annotations

import pytest
import torch

from planner.plan_types.decisions import Accumulation, OptimizerKernel, Shard
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import emit
from tests.ranks.test_rank_emitted_main import assert_same_bits, run_main
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
from tests.support.training import imported, plan_for
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


FILE = """\
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Pair(torch.nn.Sequential):
    pass

def build():
    torch.manual_seed(3)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
    return Pair(*layers), (torch.randn(4, 16), torch.randn(4, 16)), loss_fn

def loss_fn(output, batch):
    return (output - batch[1]).pow(2).mean()

def parallelize(model, mesh):
    assert isinstance(model, Pair)  # the class of the model that the file has built
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
"""


@pytest.mark.thorough
def test_an_emitted_file_calls_the_function_and_resumes(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    model, batch, loss_fn = imported(tmp_path / "net.py").build()
    where = f"{tmp_path / 'net.py'}:parallelize"
    shard = Shard(way="own", mesh=(2, 2), dimensions=("dp", "tp"), function=where)
    decisions = shard, Checkpoint(modules=("1",))
    plan = plan_for(model, batch, *decisions, loss_fn=loss_fn, reference=f"{tmp_path / 'net.py'}:build")
    path, clipped = tmp_path / "train.py", ("--max-grad-norm", 0.5)
    emit(plan, path)
    whole = run_main(path, 4, "--steps", 4, "--checkpoint", tmp_path / "whole", *clipped)
    first = run_main(path, 4, "--steps", 2, "--checkpoint", tmp_path / "first", *clipped)
    then = run_main(path, 4, "--steps", 2, "--resume", tmp_path / "first", "--checkpoint", tmp_path / "then", *clipped)
    assert whole[0] == first[0] + then[0] and whole[0].count("\n") == 4 and whole[1] == ""
    assert_same_bits(tmp_path / "then", tmp_path / "whole")


@pytest.mark.thorough
def test_another_kernel_of_the_optimizer_trains_as_one_card():
    fused = OptimizerKernel(kernel="fused")
    assert_trains_as_one_card(training(LLAMA, own.sequence_parallel_and_sharded, fused, dp=2, tp=2))
