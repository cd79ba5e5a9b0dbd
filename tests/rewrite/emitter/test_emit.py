"""Emitted files run without this package, are readable, and train to the same bits as the live objects."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch

from planner.cli.options import parser
from planner.errors import PlanFileError
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    Shard,
    StepInBackward,
)
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint
from planner.rewrite import emit, source
from planner.rewrite.emitter.header import header
from planner.workload.call_convention import Calling
from tests.support.training import (
    Convolutional,
    Perceptron,
    assert_same_training,
    cross_entropy,
    gpt2,
    images,
    imported,
    plan_for,
    roberta,
    roberta_config,
    seeded,
    tokens,
    vectors,
)

pytestmark = pytest.mark.slow

LAYERS = ("roberta.encoder.layer.0", "roberta.encoder.layer.1")
ACCUMULATION = Accumulation(micro_batch_size=4, micro_batches=2)
PLANS = {
    "plain": (),
    "checkpoint": (Checkpoint(modules=LAYERS),),
    "checkpoint that keeps products": (Checkpoint(modules=LAYERS, kept=((0, 1, 2), (0, 1, 2, 3))),),
    "accumulation": (ACCUMULATION,),
    "bf16": (Precision(dtype="bf16"), Checkpoint(modules=LAYERS[:1])),
    "fp16": (Precision(dtype="fp16"), ACCUMULATION),
    "chunked loss": (ChunkedLoss(module="lm_head.decoder", chunks=3), Checkpoint(modules=LAYERS[:1])),
    "step in backward": (Precision(dtype="bf16"), StepInBackward(), Checkpoint(modules=LAYERS)),
    "step in backward, 8 bits": (Optimizer(), StepInBackward()),
    "fused": (Precision(dtype="fp16"), OptimizerKernel(kernel="fused"), ACCUMULATION),
    "fused in backward": (OptimizerKernel(kernel="fused"), StepInBackward(), Checkpoint(modules=LAYERS)),
    "loop": (OptimizerKernel(kernel="for-loop"),),
    "freeze": (Freeze(modules=("roberta.embeddings", *LAYERS[:1])), Checkpoint(modules=LAYERS[1:])),
    "everything": (
        Freeze(modules=("roberta.embeddings.position_embeddings",)),
        Precision(dtype="fp16"),
        Optimizer(),
        ChunkedLoss(module="lm_head.decoder", chunks=2),
        ACCUMULATION,
        Checkpoint(modules=LAYERS),
    ),
}
each_plan = pytest.mark.parametrize("decisions", PLANS.values(), ids=PLANS)


def emitted_roberta(tmp_path: pathlib.Path, *decisions, **changes) -> tuple:
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    architecture = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
    config.write_text(json.dumps({**architecture, **roberta_config()}))
    plan = plan_for(seeded(roberta), tokens(), *decisions, reference=str(config.parent), **changes)
    path = tmp_path / "train_step.py"
    emit(plan, path)
    return plan, path


@each_plan
@pytest.mark.thorough_after(3)
def test_a_file_trains_to_the_same_bits_as_the_live_objects(tmp_path, decisions):
    plan, path = emitted_roberta(tmp_path, *decisions)
    emitted = imported(path)
    torch.manual_seed(0)
    model, other = seeded(roberta), emitted.build()
    other.load_state_dict(model.state_dict())
    batches = [tokens(seed=seed) for seed in range(5)]
    clipped = {} if StepInBackward() in decisions else {"max_grad_norm": 1.0}
    assert_same_training(plan, emitted, model, other, batches, **clipped)


def test_a_skipped_step_leaves_no_state_that_a_fused_kernel_never_wrote(tmp_path):
    """The first step overflows. torch's fused SGD would then start from a momentum that was never written."""
    decisions = (Precision(dtype="fp16"), OptimizerKernel(kernel="fused"))
    _, path = emitted_roberta(tmp_path, *decisions, optimizer="sgd-momentum")
    emitted, model = imported(path), seeded(roberta)
    optimizer = emitted.make_optimizer(emitted.rewrite(model))
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    emitted.training_step(model, optimizer, tokens(), scaler=scaler)
    assert scaler.get_scale() < 2.0**120
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_loss_weight_in_the_file_would_be_seen(tmp_path):
    plan, path = emitted_roberta(tmp_path, ACCUMULATION)
    emitted = imported(path)
    emitted.LABELS_SHIFTED = True
    with pytest.raises(AssertionError):
        assert_same_training(plan, emitted, seeded(roberta), seeded(roberta), [tokens()] * 3)


class Own(torch.nn.Module):
    """Base class of user-defined models, which are not classes of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)


class OwnCausal(Own):
    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), [labels[:, 1:].flatten()])}


class OwnPadding(Own):
    """Labels of 0 are padding."""

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)}


class OwnCount(Own):
    """The batch says by how many labels the sum of its losses is divided."""

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch}


@pytest.mark.parametrize(
    ("build", "padding", "shifted", "ignored", "divides"),
    [(OwnCausal, -100, True, -100, False), (OwnPadding, 0, False, 0, False), (OwnCount, -100, False, -100, True)],
    ids=["shifted", "padding is 0", "divided by a count"],
)
def test_how_the_loss_of_a_model_of_ones_own_counts_is_in_the_emitted_file(
    tmp_path, build, padding, shifted, ignored, divides
):
    torch.manual_seed(0)
    model, other = build(), build()
    batch = {"input_ids": torch.randint(50, (8, 6)), "labels": torch.randint(1, 50, (8, 6))}
    batch["labels"][:3, 2:] = padding
    if divides:
        batch["num_items_in_batch"] = (batch["labels"] != padding).sum()
    plan = plan_for(model, batch, Accumulation(micro_batch_size=3, micro_batches=3))
    emit(Plan.from_json(json.loads(json.dumps(plan.to_json()))), tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    found = emitted.LABELS_SHIFTED, emitted.IGNORED_LABEL, emitted.LOSS_DIVIDES
    assert found == (shifted, ignored, divides)
    other.load_state_dict(model.state_dict())
    assert_same_training(plan, emitted, model, other, [batch] * 3)


@pytest.mark.parametrize("decisions", [PLANS["plain"], PLANS["everything"]], ids=["plain", "everything"])
@pytest.mark.thorough
def test_a_file_runs_alone_and_elsewhere(tmp_path, decisions):
    _, path = emitted_roberta(tmp_path, *decisions)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = ran(path, "--steps", "2", cwd=elsewhere)
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == ["step 1", "step 2"]
    assert "planner" not in path.read_text().split('"""', 2)[2]
    assert "rewrite." not in path.read_text()


def ran(path: pathlib.Path, *arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-I", str(path), *arguments],
        cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run


@each_plan
def test_a_file_passes_the_linter_and_the_formatter(tmp_path, decisions):
    assert_well_formed(emitted_roberta(tmp_path, *decisions)[1])


def test_a_step_with_many_arguments_and_an_optimizer_that_takes_sparse_gradients_is_formatted_too(tmp_path):
    plan = plan_for(
        Perceptron(), vectors(6), Precision(dtype="fp16"), ACCUMULATION, loss_fn=cross_entropy, optimizer="sgd"
    )
    emit(plan, tmp_path / "step.py")
    assert_well_formed(tmp_path / "step.py")


def assert_well_formed(path: pathlib.Path) -> None:
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    rules = "E,F,I,B,UP,SIM,C4"
    for command in (["check", "--select", rules], ["format", "--check", "--diff"]):
        options = ["--isolated", "--line-length", "120", "--target-version", "py311"]
        run = subprocess.run([str(ruff), *command, *options, str(path)], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_8_bit_optimizer_of_a_file_is_set_up_as_the_live_one(tmp_path):
    model = seeded(roberta, hidden_size=64, vocab_size=80)
    plan = plan_for(model, tokens(), Optimizer())
    emit(plan, tmp_path / "step.py")
    other = seeded(roberta, hidden_size=64, vocab_size=80)
    emitted = imported(tmp_path / "step.py")
    assert_same_training(plan, emitted, model, other, [tokens(seed=seed) for seed in range(3)])


def test_a_file_with_8_bit_state_and_a_step_in_backward_keeps_embeddings_by_their_position(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(300, 64), torch.nn.Flatten(), torch.nn.Linear(4 * 64, 30))
    batch = (torch.randint(300, (8, 4)), torch.randint(30, (8,)))
    plan = plan_for(model, batch, Optimizer(), StepInBackward(), loss_fn=cross_entropy)
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    optimizer = emitted.make_optimizer(emitted.rewrite(model))
    emitted.training_step(model, optimizer, batch, loss_fn=cross_entropy)
    dtypes = [optimizer.state[parameter]["state1"].dtype for parameter in model.parameters()]
    assert dtypes == [torch.float32, torch.uint8, torch.float32]


def test_a_file_holds_only_what_its_plan_decides(tmp_path):
    _, path = emitted_roberta(tmp_path)
    text = path.read_text()
    for word in ("checkpoint", "autocast", "GradScaler", "micro", "bitsandbytes", "FROZEN", "loss_of"):
        assert word not in text.split('"""', 2)[2]


def test_the_header_tells_the_plan_the_prediction_and_the_command(tmp_path):
    _, path = emitted_roberta(tmp_path, *PLANS["everything"])
    header = path.read_text().split('"""')[1]
    assert "RobertaForMaskedLM" in header
    assert "within 6,144 MiB" in header
    assert "- gradient accumulation: 2 micro-batches of 4" in header
    assert "--vram 6GiB --batch-size 6 --optimizer adamw --dtype float32 --gpu rtx-2060" in " ".join(
        header.replace("\\", "").split()
    )
    assert "CUDA context                     420.0           420.0" in header
    assert "baseline   with the plan" in header
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("decision", "cards", "facts"),
    [
        (Shard(way="zero1", mesh=(2,)), 2, {"link": "pcie"}),
        (Shard(way="fsdp", mesh=(2, 4), offload=True), 8, {"link": "nvlink-4", "cards_per_node": 4}),
    ],
    ids=["copies", "shards"],
)
def test_the_header_of_a_file_for_several_cards_has_the_command_that_plans_for_them(decision, cards, facts):
    batch = tokens()
    plan = plan_for(seeded(roberta), batch, decision, reference="tests/fixtures/roberta", **facts)
    (command,) = re.findall(r"^    plan .*?(?<!\\)$", header(plan, "step.py"), re.DOTALL | re.MULTILINE)
    options = parser().parse_args(shlex.split(command.replace("\\\n", " "))[1:])
    assert (options.cards, options.sharding, options.link) == (cards, decision.way, facts["link"])
    assert options.batch_size == cards * len(batch["input_ids"])
    assert (options.mesh or (cards,), options.offload_shards) == (decision.mesh, decision.offload)
    assert options.cards_per_node == facts.get("cards_per_node")
    call = header(dataclasses.replace(plan, model=dataclasses.replace(plan.model, reference=None)), "step.py")
    assert f"cards={cards}, sharding='{decision.way}'" in " ".join(call.split())


def test_the_header_for_a_dividing_function_of_the_users_own_has_it_and_its_mesh():
    batch = tokens()
    own = Shard(way="own", mesh=(2, 4), dimensions=("dp", "tp"), function="tests/support/own_parallelism.py:tensor")
    plan = plan_for(seeded(roberta), batch, own, reference="tests/fixtures/roberta")
    text = header(plan, "step.py")
    (command,) = re.findall(r"^    plan .*?(?<!\\)$", text, re.DOTALL | re.MULTILINE)
    options = parser().parse_args(shlex.split(command.replace("\\\n", " "))[1:])
    assert (options.cards, options.parallelize, options.sharding) == (8, own.function, None)
    assert options.batch_size == 2 * len(batch["input_ids"])
    assert "--mesh dp=2,tp=4" in text and "samples for each 4 of 8 cards" in text
    call = header(dataclasses.replace(plan, model=dataclasses.replace(plan.model, reference=None)), "step.py")
    assert "cards=8, parallelize=parallelize, mesh={'dp': 2, 'tp': 4}" in " ".join(call.split())


@pytest.mark.parametrize(
    ("cards", "per_node", "command"),
    [
        (8, None, "torchrun --nproc-per-node 8"),
        (16, None, "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"),
        (16, 16, "torchrun --nproc-per-node 16"),
        (20, None, "torchrun --nnodes 4 --nproc-per-node 5 --rdzv-backend c10d --rdzv-endpoint HOST:29500"),
        (4, 2, "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"),
    ],
)
def test_a_file_names_the_command_that_starts_it_on_each_machine(cards, per_node, command):
    plan = plan_for(seeded(roberta), tokens(), Shard(way="ddp", mesh=(cards,)), reference="tests/fixtures/roberta")
    plan = dataclasses.replace(plan, cards_per_node=per_node)
    assert f'raise SystemExit("start this file with: {command} " + __file__)' in source(plan)


def test_a_causal_model_is_counted_without_its_first_labels(tmp_path):
    model = seeded(gpt2)
    config = tmp_path / "config.json"
    model.config.to_json_file(config)
    decisions = (ACCUMULATION, Checkpoint(modules=("transformer.h.1",)))
    plan = plan_for(model, tokens(), *decisions, reference=str(config))
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    assert emitted.LABELS_SHIFTED is True
    assert_same_training(plan, emitted, model, seeded(gpt2), [tokens(seed=seed) for seed in range(3)])


FACTORY = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 5)
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x, y):
        return ((self.norm(self.body(x)).sum(1) - y) ** 2).mean()


def make(batch_size):
    assert batch_size == 6
    return Net(), (torch.randn(6, 5), torch.randn(6))


def make_with_loss():
    return torch.nn.Linear(5, 3), (torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)), loss


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])
"""


@pytest.mark.parametrize("form", ["{folder}/nets.py:{name}", "nets:{name}"])
@pytest.mark.parametrize("name", ["make", "make_with_loss"])
@pytest.mark.thorough_after(1)
def test_a_model_from_a_callable_is_made_by_the_same_callable(tmp_path, monkeypatch, form, name):
    (tmp_path / "nets.py").write_text(FACTORY)
    factory = imported(tmp_path / "nets.py")
    torch.manual_seed(0)
    model, batch, *rest = getattr(factory, name)(**({"batch_size": 6} if name == "make" else {}))
    loss_fn = rest[0] if rest else None
    decisions = (ACCUMULATION, *(() if rest else (Checkpoint(modules=("body", "norm")),)))
    reference = form.format(folder=tmp_path, name=name)
    plan = plan_for(model, batch, *decisions, loss_fn=loss_fn, reference=reference)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    made = emitted.build()
    other = made[0] if loss_fn else made
    other.load_state_dict(model.state_dict())
    options = {"loss_fn": loss_fn} if loss_fn else {}
    assert_same_training(plan, emitted, model, other, [batch] * 3, **options)
    if form.startswith("{folder}"):
        assert "step 1: loss" in ran(tmp_path / "step.py", "--steps", "1", cwd=tmp_path).stdout


@pytest.mark.parametrize("name", ["types", "torch", "step", "my-nets"])
def test_a_model_file_may_have_the_name_of_another_module_and_import_its_neighbours(tmp_path, monkeypatch, name):
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / "neighbour_of_nets.py").write_text("OUT = 3\n")
    text = "import neighbour_of_nets\n" + FACTORY.replace("Linear(5, 3)", "Linear(5, neighbour_of_nets.OUT)")
    (folder / f"{name}.py").write_text(text)
    batch = (torch.randn(6, 5), torch.zeros(6, dtype=torch.int64))
    reference = f"{folder / name}.py:make_with_loss"
    emit(plan_for(torch.nn.Linear(5, 3), batch, loss_fn=cross_entropy, reference=reference), tmp_path / "step.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "neighbour_of_nets", raising=False)
    before = sys.modules.get(name)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (folder, tmp_path / "step.py"):
        path.rename(moved / path.name)  # the file and the model can be moved together
    model, loss_fn = imported(moved / "step.py").build()
    assert loss_fn(model(batch[0]), batch).shape == ()
    assert sys.modules.get(name) is before


def test_a_live_model_is_rewritten_by_importing_the_file(tmp_path):
    model = seeded(Convolutional)
    decisions = (Checkpoint(modules=("twice", "first")), Precision(dtype="bf16"))
    plan = plan_for(model, images(), *decisions, loss_fn=cross_entropy, optimizer="sgd-momentum")
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    assert not hasattr(emitted, "build")
    batches = [images(seed=seed) for seed in range(3)]
    assert_same_training(plan, emitted, model, seeded(Convolutional), batches, loss_fn=cross_entropy)
    with pytest.raises(SystemExit, match="from step import check, make_optimizer, rewrite, training_step"):
        emitted.main()


def test_a_live_model_with_its_own_loss_trains_from_the_file(tmp_path):
    model = seeded(roberta)
    plan = plan_for(model, tokens(), Checkpoint(modules=LAYERS))
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    assert_same_training(plan, emitted, model, seeded(roberta), [tokens(seed=seed) for seed in range(3)])


class Lookup(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(9, 3, sparse=True)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, numbers):
        return self.head(self.rows(numbers))


def test_sparse_gradients_are_clipped_by_the_file_as_well(tmp_path):
    model = seeded(Lookup)
    batches = [(torch.tensor([seed, 1, 1, 5]), torch.tensor([0, 1, 2, seed])) for seed in range(3)]
    emit(plan_for(model, batches[0], loss_fn=cross_entropy, optimizer="sgd"), tmp_path / "step.py")
    options = {"loss_fn": cross_entropy, "max_grad_norm": 0.1}
    assert_same_training(
        plan_for(model, batches[0], loss_fn=cross_entropy, optimizer="sgd"),
        imported(tmp_path / "step.py"), model, seeded(Lookup), batches, **options,
    )  # fmt: skip


def test_an_optimizer_without_a_name_is_left_to_the_user(tmp_path):
    _, path = emitted_roberta(tmp_path, optimizer="mine.Lion")
    with pytest.raises(NotImplementedError, match=r"mine\.Lion"):
        imported(path).make_optimizer(seeded(roberta))


def test_batches_of_every_calling_have_the_planned_shapes(tmp_path):
    nested = (
        ("image", (2, 3), "torch.float32"),
        ("text.ids", (2, 4), "int64"),
        ("text.parts.0", (2,), "bool"),
        ("text.parts.1", (2,), "bfloat16"),
    )
    plan, _ = emitted_roberta(tmp_path)
    for calling, batch in ((Calling.KEYWORDS, nested), (Calling.SINGLE, (("", (2, 3), "float16"),))):
        changed = plan.from_json({**plan.to_json(), "workload": {**plan.to_json()["workload"], "batch": batch}})
        path = tmp_path / f"{calling.name}.py"
        emit(changed, path)
        made = imported(path).synthetic_batch("cpu")
        if calling is Calling.SINGLE:
            assert (made.shape, made.dtype) == ((2, 3), torch.float16)
        else:
            assert made["text"]["parts"][1].dtype == torch.bfloat16
            assert made["text"]["ids"].shape == (2, 4)


def test_a_configuration_that_is_gone_is_named(tmp_path):
    plan = plan_for(seeded(roberta), tokens(), reference=str(tmp_path / "gone.json"))
    with pytest.raises(PlanFileError, match=r"the plan was made from '.*gone\.json', which cannot be read"):
        source(plan)


def test_a_model_of_the_hub_is_loaded_by_its_name():
    text = source(plan_for(seeded(roberta), tokens(), reference="FacebookAI/roberta-base"))
    assert 'transformers.RobertaForMaskedLM.from_pretrained("FacebookAI/roberta-base", dtype=torch.float32)' in text


def test_quotes_and_backslashes_in_notes_do_not_end_the_header():
    plan = plan_for(seeded(roberta), tokens(), notes=('a """ quote', "a \\N backslash", "long " * 60))
    compile(source(plan), "emitted", "exec")


def test_a_module_name_that_is_not_utf8_is_saved_and_emitted(tmp_path):
    """Half of a surrogate pair stands for a byte of a file name that is not UTF-8."""
    model, batch, name = Perceptron(), vectors(8), "layer\udc80"
    model.add_module(name, torch.nn.Linear(3, 3))
    model.register_forward_hook(lambda module, inputs, output: module.get_submodule(name)(output))
    plan = plan_for(model, batch, Checkpoint(modules=(name,)), loss_fn=cross_entropy)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    assert_same_training(plan, emitted, model, copy.deepcopy(model), [batch], loss_fn=cross_entropy)


def test_a_step_that_fails_leaves_no_gradients_to_the_next(tmp_path):
    calls = itertools.count()

    def failing(output, batch):
        if next(calls) == 1:
            raise KeyError("second micro-batch")
        return cross_entropy(output, batch)

    model, batch = seeded(Perceptron), vectors(8)
    plan = plan_for(model, batch, Accumulation(micro_batch_size=4, micro_batches=2), loss_fn=cross_entropy)
    emit(plan, tmp_path / "step.py")
    emitted = imported(tmp_path / "step.py")
    optimizer = emitted.make_optimizer(emitted.rewrite(model))
    with pytest.raises(KeyError):
        emitted.training_step(model, optimizer, batch, loss_fn=failing, loss_terms=emitted.samples_only)
    assert all(parameter.grad is None for parameter in model.parameters())
