"""Plans for a model that a function of the user's own divides: what is promised, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import planner
from planner import rewrite
from planner.errors import DecisionError, PlannerError, WorkloadError
from planner.plan_types.decision_base import divides_batch
from planner.plan_types.decisions import Shard
from planner.plan_types.techniques import decision_from_json
from planner.rewrite.rules.shard import shard_source
from planner.space.own_sharding import named_mesh, reference_of
from planner.space.sharding import several_cards
from planner.virtual_gpu.forked_process import run_in_child
from tests.ranks.test_rank_plans import batch, llama
from tests.support import own_parallelism as own
from tests.support.training import plan_for, tokens
from tests.support.truth import loop

FILE = "tests/support/own_parallelism.py"
MIB = 1 << 20


def planned(parallelize, *, vram: str | None = None, optimizer=loop, layers: int = 2, **options) -> planner.Plan:
    model = llama(layers)
    return planner.plan(
        model, batch(), vram=vram, gpu="bare", optimizer=optimizer, parallelize=parallelize, fidelity="exact", **options
    )


# ---- what is promised ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_tensor_parallelism_divides_matrices_and_their_state_and_every_card_has_the_whole_batch():
    plan = planned(own.tensor_parallel, cards=4)
    divided = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    elements = {
        name: parameter.numel() // (4 if divided & set(name.split(".")) else 1)
        for name, parameter in llama(2).named_parameters()
    }
    buffers = sum(buffer.nbytes for buffer in llama(2).buffers())
    assert plan.peak.most["parameters"] == pytest.approx(4 * sum(elements.values()) + buffers, abs=4096)
    assert plan.peak.most["optimizer state"] == pytest.approx(8 * sum(elements.values()), abs=4096)
    assert plan.workload.batch_size == 16
    assert plan.decisions == (Shard(way="own", mesh=(4,), dimensions=("tp",), function=f"{FILE}:tensor_parallel"),)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_dimensions_have_gathered_parameters_and_buffers_and_a_part_of_the_batch():
    plan = planned(own.sequence_parallel_and_sharded, optimizer="adamw", cards=8, mesh={"dp": 2, "tp": 4})
    whole = sum(parameter.nbytes for parameter in llama(2).parameters())
    buffers = sum(buffer.nbytes for buffer in llama(2).buffers())
    assert plan.peak.most["parameters"] == pytest.approx(whole / 8 + buffers, rel=0.01)
    assert plan.peak.most["unsharded parameters"] > 0
    assert plan.peak.most["communication buffers"] > 0
    assert plan.workload.batch_size == 8
    assert "dp 2 x tp 4" in plan.decisions[0].describe()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallelize", "vram", "options"),
    [
        (own.tensor_parallel, "42MiB", {"cards": 4}),
        (own.sequence_parallel_and_sharded, "16MiB", {"cards": 8, "mesh": (2, 4), "optimizer": "adamw"}),
    ],
    ids=["TP", "2-D"],
)
def test_the_promise_is_what_the_rehearsal_of_the_divided_and_checkpointed_step_gives(parallelize, vram, options):
    plan = planned(parallelize, vram=vram, layers=4, only="checkpoint", **options)
    assert plan.fits
    assert [decision.kind for decision in plan.decisions] == ["shard", "checkpoint"]
    assert plan.solver.promised_bytes == plan.solver.certified_bytes < plan.baseline.total_bytes


@pytest.mark.slow
@pytest.mark.thorough
def test_a_saved_plan_finds_the_function_again(tmp_path):
    (tmp_path / "net.py").write_text(
        "from tests.ranks.test_rank_plans import batch, llama\n"
        "from tests.support.own_parallelism import sequence_parallel\n"
        "def build():\n    return llama(2), batch(4)\n"
        "def parallelize(model, mesh):\n    sequence_parallel(model, mesh)\n"
    )
    command, path = [sys.executable, "-m", "planner.cli"], str(tmp_path / "plan.json")
    asked = [f"{tmp_path}/net.py:build", "--vram", "1GiB", "--gpu", "bare", "--cards", "2", "--only", "checkpoint"]
    asked += ["--parallelize", f"{tmp_path}/net.py:parallelize", "--json", "--save", path]
    first, again = (
        json.loads(subprocess.run([*command, *options], capture_output=True, text=True, timeout=300).stdout)
        for options in (asked, [path, "--trust-reference", "--json"])
    )
    assert first["fits"] and first["decisions"] == again["decisions"]
    assert first["plan"]["total_bytes"] == again["plan"]["total_bytes"]


def test_a_decision_is_read_back_and_divides_the_batch_along_its_dimensions():
    shard = Shard(way="own", mesh=(2, 3, 4), dimensions=("dp_replicate", "dp_shard", "tp"), function="a.py:b")
    assert decision_from_json(json.loads(json.dumps(shard.to_json()))) == shard
    assert (shard.cards, shard.divides_batch_by) == (24, 6)
    assert [divides_batch(name) for name in ("dp", "dp_shard", "tp")] == [True, True, False]
    with pytest.raises(DecisionError, match="names"):
        Shard(way="own", mesh=(2, 2), dimensions=("tp",))


def test_names_of_dimensions_follow_from_their_number():
    assert named_mesh(8, None) == (("tp",), (8,))
    assert named_mesh(8, (2, 4)) == (("dp", "tp"), (2, 4))
    assert named_mesh(8, (2, 2, 2)) == (("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
    assert named_mesh(8, {"tp": 4, "dp": 2}) == (("tp", "dp"), (4, 2))


def test_a_function_at_the_top_of_a_file_can_be_named():
    assert reference_of(own.tensor_parallel) == f"{FILE}:tensor_parallel"
    assert reference_of(lambda model, mesh: None) == reference_of(torch.nn.Linear) == ""


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "arguments", "message"),
    {
        "another number": (8, {"mesh": (2, 2)}, "a mesh of 2 x 2 has 4 cards, not 8"),
        "no cards": (8, {"mesh": (8, 0)}, "each dimension needs a number of cards"),
        "four dimensions": (16, {"mesh": (2, 2, 2, 2)}, "4 dimensions: give one to three, or names"),
        "a pipeline": (8, {"mesh": {"pp": 8}}, "dimension 'pp' of the mesh is unknown"),
        "another way": (8, {"way": "fsdp"}, "your function divides the model itself"),
        "one card": (1, {}, "parallelize is for two or more cards"),
        "fewest": ("fewest", {}, "give the number of cards"),
        "too many": (65_537, {}, "65537 is not a number of cards: give a whole number from 1 to 65,536"),
    }.values(),
)
def test_a_description_that_contradicts_itself_is_refused(count, arguments, message):
    with pytest.raises(WorkloadError, match=message):
        several_cards(count, parallelize="a.py:b", **arguments)


def test_names_of_a_mesh_need_a_function():
    with pytest.raises(WorkloadError, match="is for a function of yours"):
        several_cards(8, mesh={"dp": 8})


def raises(model, mesh):
    raise ValueError("no such block")


def renames(model, mesh):
    model.inner = torch.nn.Linear(2, 2)


def divides_nothing(model, mesh):
    model.double()


def ends_the_process(model, mesh):
    sys.exit("no card")


def returns_another(model, mesh):
    return torch.nn.Sequential(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelize", "options", "message"),
    {
        "a raised error": (raises, {"cards": 2}, "your function raised ValueError .* no such block"),
        "no division": (divides_nothing, {"cards": 2}, "your function divides nothing: no parameter has changed"),
        "an exit": (ends_the_process, {"cards": 2}, "your function raised SystemExit .* no card"),
        "other parameters": (renames, {"cards": 2}, "renames or replaces parameters, such as 'inner.bias'"),
        "another model": (returns_another, {"cards": 2}, "returned another Sequential"),
        "a list of both kinds": (
            own.tensor_parallel,
            {"cards": 2, "optimizer": "adamw"},
            "AdamW cannot update plain tensors and DTensors together.*'model.embed_tokens.weight' is a plain tensor.*"
            r"foreach=False",
        ),
        "no average": (
            own.without_average,
            {"cards": 4, "mesh": (2, 2)},
            "leaves 'model.embed_tokens.weight' without an average of its gradients over 'dp'",
        ),
        "samples": (own.sharded, {"cards": 32, "mesh": {"dp": 32}}, "16 samples cannot be divided evenly among 32"),
    }.values(),
)
@pytest.mark.thorough_after(3)
def test_a_function_that_cannot_be_trained_with_is_refused_in_one_line(parallelize, options, message):
    with pytest.raises(PlannerError, match=message):
        planned(parallelize, **options)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("technique", ["chunked-loss", "segment-checkpoint", "offload"])
def test_a_technique_that_needs_plain_tensors_is_refused_by_name(technique):
    with pytest.raises(DecisionError, match=f"{technique} is forced, but {technique} cannot be used with parallelize"):
        planned(own.sharded, vram="1GiB", cards=2, mesh={"dp": 2}, force=technique)


def test_a_function_that_cannot_be_imported_is_not_emitted():
    shard = Shard(way="own", mesh=(2,), dimensions=("tp",))
    with pytest.raises(DecisionError, match="cannot be imported by another file: write it with def in a Python file"):
        shard_source(plan_for(llama(1), tokens(2), shard), shard)


def test_a_plan_is_not_applied_without_the_function():
    shard = Shard(way="own", mesh=(2,), dimensions=("tp",), function="a.py:b")
    plan = plan_for(llama(1), tokens(2), shard)

    def apply() -> None:
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        rewrite.apply(plan, llama(1))

    with pytest.raises(
        DecisionError, match=r"a function that divides the model among cards \(a.py:b\): pass it as par"
    ):
        run_in_child(apply)


@pytest.mark.slow
def test_no_gradient_scaler_where_cards_would_skip_other_steps():
    """PyTorch reduces the flag of an overflow over the mesh of the first gradient, which may not have all cards."""
    options = {"parallelize": own.tensor_parallel, "cards": 2, "gpu": "t4", "optimizer": loop}
    found = planner.plan(llama(1), batch(), vram="4GiB", **options)
    assert found.fits and not any(decision.needs_gradient_scaler for decision in found.decisions)
    assert any(note.startswith("no autocast: the gradient scaler") for note in found.notes)
    with pytest.raises(DecisionError, match="gradient scaler"):
        planner.plan(llama(1), batch(), vram="4GiB", force=["mixed-precision"], **options)
