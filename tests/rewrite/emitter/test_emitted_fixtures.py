"""The emitted file of each plan is a fixture, so that changes show in a diff; each is run against the live objects.

`pytest tests/rewrite/emitter/test_emitted_fixtures.py --rewrite-fixtures` writes them. The numbers in their
headers are invented, not predicted.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from planner.plan_types.decisions import (
    Accumulation,
    Allocator,
    ChunkedLoss,
    Decision,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    Shard,
    ShardedPrecision,
    StepInBackward,
)
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.plan_types.techniques import KINDS
from planner.rewrite import source
from planner.rewrite.rules import offload
from tests.fixtures.models import flat, mean_square
from tests.support.training import (
    Convolutional,
    assert_same_training,
    cross_entropy,
    images,
    imported,
    plan_for,
    roberta,
    seeded,
    tokens,
)

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "tests/fixtures/emitted"
LAYERS = ("roberta.encoder.layer.0", "roberta.encoder.layer.1")


@dataclasses.dataclass(frozen=True)
class Case:
    """The model, the batches and the plan of one fixture."""

    build: Callable[[], torch.nn.Module]
    batch_of: Callable[[int], object]
    """Returns a batch for a seed."""
    decisions: tuple[Decision, ...]
    reference: str | None
    loss_fn: Callable | None = None
    optimizer: str = "adamw"

    def plan(self) -> Plan:
        return plan_for(
            seeded(self.build), self.batch_of(0), *self.decisions, reference=self.reference, loss_fn=self.loss_fn,
            optimizer=self.optimizer, versions={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
            notes=(),
        )  # fmt: skip


def of_roberta(*decisions: Decision, **changes) -> Case:
    return Case(roberta, lambda seed: tokens(seed=seed), decisions, "tests/fixtures/roberta", **changes)


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def of_flat(*decisions: Decision) -> Case:
    return Case(lambda: flat()[0], vectors, decisions, "tests.fixtures.models:flat", loss_fn=mean_square)


CASES = {
    "as_it_is": of_roberta(),
    "allocator": of_roberta(Allocator(expandable_segments=True), OptimizerKernel(kernel="fused")),
    "accumulation": of_roberta(Accumulation(micro_batch_size=4, micro_batches=2)),
    "accumulation_of_a_function": of_flat(Accumulation(micro_batch_size=3, micro_batches=3)),
    "checkpoint": of_roberta(Checkpoint(modules=LAYERS)),
    "chunked_loss": of_roberta(ChunkedLoss(module="lm_head.decoder", chunks=3)),
    "eight_bit_state": of_roberta(Optimizer()),
    "freeze": of_roberta(Freeze(modules=("roberta.embeddings", LAYERS[0]))),
    "kept_products": of_roberta(Checkpoint(modules=LAYERS, kept=((0, 1, 2), ()))),
    "live_model": Case(
        Convolutional, lambda seed: images(seed=seed), (Precision(dtype="bf16"), Checkpoint(modules=("first",))), None,
        loss_fn=cross_entropy, optimizer="sgd-momentum",
    ),
    "loop_over_parameters": of_roberta(OptimizerKernel(kernel="for-loop"), optimizer="rmsprop"),
    "mixed_precision": of_roberta(Precision(dtype="fp16")),
    "offload": of_roberta(
        Checkpoint(modules=LAYERS[:1]), Offload(modules=LAYERS, inputs_of=LAYERS[:1], from_bytes=1024)
    ),
    "replay": of_flat(Replay(modules=("",), stretches=((0, 10),), kept=((4,),), stops=((6,),))),
    "step_in_backward": of_roberta(OptimizerKernel(kernel="fused"), StepInBackward()),
    "together": of_roberta(
        Precision(dtype="fp16"),
        Optimizer(),
        ChunkedLoss(module="lm_head.decoder", chunks=2),
        Accumulation(micro_batch_size=2, micro_batches=3),
        Checkpoint(modules=LAYERS, kept=((0, 1, 2), (0, 1, 2))),
    ),
}  # fmt: skip
RANK_CASES = {
    "sharded": of_roberta(
        ShardedPrecision(),
        Shard(way="fsdp", mesh=(2,), units=LAYERS, kept=LAYERS[1:]),
        Accumulation(micro_batch_size=2, micro_batches=3),
        Checkpoint(modules=LAYERS[:1]),
    ),
    "sharded_by_accelerate": of_roberta(
        ShardedPrecision(reduce_dtype="bf16", without_autocast=True),
        Shard(
            way="fsdp", mesh=(2,), units=LAYERS, tail=("lm_head.dense", "lm_head.layer_norm"), prepared_by="accelerate",
            classes=("RobertaLayer",),
        ),
    ),
    "sharded_on_host": of_flat(Shard(way="fsdp", mesh=(2,), offload=True)),
    "sharded_and_reduced_once": of_roberta(
        Shard(way="fsdp", mesh=(2,), units=LAYERS, reduces_once=True),
        Accumulation(micro_batch_size=2, micro_batches=3),
    ),
    "copies_that_are_reduced_once": of_roberta(
        Shard(way="ddp", mesh=(2,), reduces_once=True), Accumulation(micro_batch_size=2, micro_batches=3)
    ),
    "copies_with_divided_state": of_roberta(Shard(way="zero1", mesh=(2,))),
}  # fmt: skip
"""Files that torchrun starts. tests/ranks/test_rank_emitted.py runs them."""
each_case = pytest.mark.parametrize("name", CASES)


def test_every_decision_is_in_a_fixture():
    found = {decision.kind for case in (CASES | RANK_CASES).values() for decision in case.decisions}
    assert found == set(KINDS)


def test_every_fixture_has_its_plan_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(CASES | RANK_CASES)


@pytest.mark.parametrize("name", CASES | RANK_CASES)
def test_a_plan_is_emitted_as_this_text(name, monkeypatch, request):
    monkeypatch.chdir(ROOT)
    path = FOLDER / f"{name}.py"
    text = source((CASES | RANK_CASES)[name].plan(), file_name=path.name)
    if request.config.getoption("--rewrite-fixtures"):
        path.write_text(text)
    before = path.read_text()
    difference = difflib.unified_diff(before.splitlines(), text.splitlines(), str(path), "emitted", lineterm="")
    assert before == text, "\n".join([*difference, "write it with --rewrite-fixtures, and read what changed"])


@each_case
def test_the_text_trains_to_the_same_bits_as_the_live_objects(name, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # a file may set it: it is restored after the test
    case, emitted = CASES[name], imported(FOLDER / f"{name}.py")
    if name == "offload":  # on a processor all lies in the host's memory already
        for module in (emitted, offload):
            monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    model = seeded(case.build)
    options = {} if case.loss_fn is None else {"loss_fn": case.loss_fn}
    if "max_grad_norm" in emitted.training_step.__code__.co_varnames:
        options["max_grad_norm"] = 1.0
    batches = [case.batch_of(seed) for seed in range(3)]
    assert_same_training(case.plan(), emitted, model, copy.deepcopy(model), batches, **options)


def test_the_texts_pass_the_linter_and_the_formatter():
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    for command in (["check"], ["format", "--check", "--diff"]):
        run = subprocess.run(
            [str(ruff), *command, "--no-cache", str(FOLDER)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stdout + run.stderr
