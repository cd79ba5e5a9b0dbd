"""Plan files: what is written is read back, and what cannot be read says why and what to do."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import DecisionError, PlanFileError
from planner.plan_types.categories import Category
from planner.plan_types.decisions import (
    Accumulation,
    Allocator,
    ChunkedLoss,
    Freeze,
    Optimizer,
    OptimizerKernel,
    Precision,
    Shard,
    ShardedPrecision,
    StepInBackward,
)
from planner.plan_types.plan import (
    SCHEMA_VERSION,
    Footprint,
    LiveTensor,
    ModelFacts,
    NextStep,
    OwnLoss,
    Plan,
    Relaxation,
    RunChange,
    RunFacts,
    RunMoment,
    RunSource,
    Shortfall,
    SolverFacts,
    WorkloadFacts,
)
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.plan_types.techniques import KINDS, decision_from_json

pytestmark = pytest.mark.no_torch

NAMES = st.lists(st.text("abc.01", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)
BYTES = st.integers(0, 2**50)
CATEGORIES = st.sampled_from([str(category) for category in Category])
DECISIONS = st.tuples(
    NAMES.map(lambda names: Freeze(modules=names)),
    st.sampled_from(["bf16", "fp16"]).map(lambda dtype: Precision(dtype=dtype)),
    st.just(Optimizer()),
    st.builds(Accumulation, micro_batch_size=st.integers(1, 999), micro_batches=st.integers(2, 99)),
    NAMES.map(lambda names: Checkpoint(modules=names)),
).flatmap(lambda all_kinds: st.lists(st.sampled_from(all_kinds), unique=True, max_size=5).map(tuple))
FOOTPRINTS = st.builds(
    Footprint,
    allocated_bytes=BYTES,
    reserved_bytes=BYTES,
    total_bytes=BYTES,
    phase=st.sampled_from(["forward", "backward", "recompute", "optimizer"]),
    module=st.text(max_size=8),
    op=st.text(max_size=8),
    breakdown=st.dictionaries(CATEGORIES, BYTES, max_size=4),
    most=st.dictionaries(CATEGORIES, BYTES, max_size=4),
    step_ns=st.integers(0, 10**14),
    flops=st.integers(0, 10**18),
)
SHORTFALLS = st.builds(
    Shortfall,
    missing_bytes=BYTES,
    binding=CATEGORIES,
    binding_bytes=BYTES,
    next_step=st.none()
    | st.builds(NextStep, relax=st.text(max_size=8), decisions=DECISIONS, total_bytes=BYTES, slowdown=st.floats(1, 9)),
)
PLANS = st.builds(
    Plan,
    model=st.builds(
        ModelFacts, reference=st.none() | st.text(), name=st.text(), parameters=BYTES, fingerprint=st.text(max_size=64)
    ),
    workload=st.builds(
        WorkloadFacts,
        batch_size=st.integers(1, 999),
        seq_len=st.none() | st.integers(1, 999),
        batch=st.lists(
            st.tuples(st.text(max_size=5), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.just("int64")),
            max_size=3,
        ).map(tuple),
        calling=st.just("KEYWORDS"),
        has_loss_fn=st.booleans(),
        optimizer=st.just("adamw"),
    ),
    card=st.text(),
    card_source=st.text(),
    vram_bytes=st.none() | BYTES,
    fidelity=st.sampled_from(["exact", "rounded", "partial"]),
    forced=NAMES,
    forbidden=NAMES,
    baseline=FOOTPRINTS,
    peak=FOOTPRINTS,
    decisions=DECISIONS,
    fits=st.booleans(),
    certified=st.booleans(),
    solver=st.builds(
        SolverFacts,
        status=st.just("optimal"),
        gap=st.floats(0, 1),
        promised_bytes=BYTES,
        certified_bytes=BYTES,
    ),
    shortfall=st.none() | SHORTFALLS,
    notes=NAMES,
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    tensors=st.lists(
        st.builds(
            LiveTensor,
            category=CATEGORIES,
            name=st.text(max_size=8),
            module=st.text(max_size=8),
            source=st.text(max_size=8),
            shape=st.lists(BYTES, max_size=3).map(tuple),
            dtype=st.just("float32"),
            size_bytes=BYTES,
            count=BYTES,
        ),
        max_size=2,
    ).map(tuple),
    card_bytes=st.none() | BYTES,
    margin_bytes=BYTES,
    seconds=st.none() | st.floats(0, 999),
)


def example(*decisions, **changes) -> Plan:
    footprint = Footprint(
        allocated_bytes=1, reserved_bytes=2, total_bytes=3, phase="forward", module="", op="aten.mm",
        breakdown={"optimizer state": 3}, most={"optimizer state": 4}, step_ns=1_000, flops=7,
    )  # fmt: skip
    plan = Plan(
        model=ModelFacts(reference=None, name="Net", parameters=1, fingerprint="0" * 64),
        workload=WorkloadFacts(
            batch_size=2, seq_len=None, batch=(("0", (2, 3), "float32"),), calling="SINGLE", has_loss_fn=True,
            optimizer="sgd",
        ),
        card="bare", card_source="definition", vram_bytes=None, fidelity="exact", forced=(), forbidden=(),
        baseline=footprint, peak=dataclasses.replace(footprint, step_ns=1_500), decisions=decisions, fits=True,
        certified=False, shortfall=None, notes=(), versions={}, seconds=0.5,
        solver=SolverFacts(status="not needed", gap=0.0, seconds=0.1, promised_bytes=1, certified_bytes=1),
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)


@given(PLANS)
def test_a_plan_is_read_back_as_it_was_written(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(DECISIONS)
def test_decisions_are_read_back_as_they_were_written(decisions):
    assert tuple(decision_from_json(json.loads(json.dumps(d.to_json()))) for d in decisions) == decisions
    assert all("\n" not in decision.describe() for decision in decisions)


def full_example() -> Plan:
    """A plan with every kind of decision and every optional field."""
    one_of_each = (
        Freeze(modules=("a",)), Precision(dtype="fp16"), Optimizer(), OptimizerKernel(kernel="fused"),
        ChunkedLoss(module="head", chunks=3), Accumulation(micro_batch_size=2, micro_batches=4), StepInBackward(),
        Allocator(expandable_segments=True, max_split_size_mb=64),
        ShardedPrecision(reduce_dtype="bf16"),
        Shard(way="fsdp", mesh=(2, 4), units=("b", "c"), kept=("c",), offload=True),
        Checkpoint(modules=("b", "c"), kept=((), (0, 2))),
        Replay(modules=("d",), stretches=((1, 9),), kept=((3,),), stops=((4, 6),)),
        Offload(modules=("e", "f"), inputs_of=("f",), from_bytes=4096),
    )  # fmt: skip
    assert {type(decision) for decision in one_of_each} == set(KINDS.values())
    step = NextStep(relax="allow offload", decisions=one_of_each, total_bytes=5, slowdown=1.5)
    tried = tuple(
        Relaxation(relax=text, opens=opens, why=why, fidelity=fidelity, next_step=next_step)
        for text, opens, why, fidelity, next_step in (
            ("allow offload", True, "", "exact", step), ("allow freeze", False, "too large", None, None),
        )
    )  # fmt: skip
    shortfall = Shortfall(
        missing_bytes=1, binding="logits and loss", binding_bytes=2, next_step=step, relaxations=tried
    )
    tensor = LiveTensor(
        category="gradients",
        name="a.*",
        module="",
        source="a.py:3",
        shape=(2, 3),
        dtype="float32",
        size_bytes=512,
        count=2,
    )
    plan = example(
        *one_of_each,
        shortfall=shortfall,
        max_slowdown=1.25,
        vram_bytes=7,
        card_bytes=6,
        margin_bytes=1,
        tensors=(tensor,),
        alloc_conf="max_split_size_mb:32",
        cudnn_benchmark=True,
        link="nvlink-4",
        cards_per_node=4,
        run=_run_example(),
    )
    own_loss = OwnLoss(shifted=True, ignored=0, divides=True)
    return dataclasses.replace(
        plan, workload=dataclasses.replace(plan.workload, gradients_alive=True, own_loss=own_loss, seq_len=3)
    )


def _run_example() -> RunFacts:
    source = RunSource(
        lengths=((16, 3), (40, 1)), multiple=8, eval_batch_size=2, eval_samples=4, between=("save", "average")
    )
    return RunFacts(
        steps=9,
        shapes=2,
        lengths=(16, 40),
        samples=(2, 2),
        order="random",
        predicted_shapes=0,
        total_bytes=7,
        settled=3,
        retries=0,
        fits=True,
        binding="training step",
        moments=(RunMoment(name="training step", tensor_bytes=4, new_bytes=5),),
        changes=(RunChange(change="other batches", total_bytes=6, relative_time=0.5),),
        source=source,
    )


def test_a_plan_of_an_older_version_has_neither_options_nor_the_description_of_its_run():
    data = json.loads(json.dumps(full_example().to_json()))
    del data["alloc_conf"], data["cudnn_benchmark"], data["link"], data["cards_per_node"], data["run"]["source"]
    read = Plan.from_json(data)
    assert read.alloc_conf == "" and not read.cudnn_benchmark and read.run.source is None
    assert read.link is None and read.cards_per_node is None


def test_every_kind_of_decision_and_every_optional_field_is_read_back():
    plan = full_example()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    plan = example(Precision(dtype="bf16"), Checkpoint(modules=("a", "b")))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_the_file_says_what_scripts_look_for():
    data = example(Checkpoint(modules=("a",))).to_json()
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["plan"]["at"] == {"phase": "forward", "module": "", "op": "aten.mm"}
    assert data["baseline"]["step_seconds"] == 1e-6
    assert data["slowdown"] == 1.5
    assert data["decisions"] == [{"kind": "checkpoint", "modules": ["a"], "kept": []}]


def test_a_file_holds_no_times_and_no_key_with_a_blank():
    first, second = (example(seconds=seconds).to_json() for seconds in (0.5, 0.7))
    assert first == second and "seconds" not in {*first, *first["solver"]}
    assert first["plan"]["breakdown"] == {"optimizer_state": 3}
    assert not [key for key in keys(first) if " " in key]


def keys(data: object) -> list[str]:
    """The keys of all objects in JSON data."""
    if isinstance(data, dict):
        return [*data, *(key for value in data.values() for key in keys(value))]
    return [key for value in data for key in keys(value)] if isinstance(data, list) else []


def test_a_file_of_schema_version_1_is_still_read():
    shortfall = Shortfall(missing_bytes=1, binding="CUDA context", binding_bytes=2, next_step=None)
    data = example(vram_bytes=5, shortfall=shortfall).to_json() | {"schema_version": 1, "seconds": 0.5}
    for name in ("tensors", "card_bytes", "margin_bytes"):
        del data[name]
    data["solver"]["seconds"] = 0.1
    data["shortfall"]["binding"] = "CUDA context"
    for name in ("baseline", "plan"):
        del data[name]["most"]
        data[name]["breakdown"] = {"optimizer state": 3}
    plan = Plan.from_json(data)
    assert plan.peak.breakdown == {"optimizer state": 3} and not plan.peak.most
    assert plan.shortfall == shortfall
    assert (plan.vram_bytes, plan.usable_bytes, plan.room_bytes) == (5, 5, 2)


def test_the_margin_is_taken_from_the_card_and_not_from_a_smaller_budget():
    small, large = (example(vram_bytes=vram, card_bytes=100, margin_bytes=3) for vram in (90, 200))
    assert (small.usable_bytes, small.limit_bytes, small.room_bytes) == (90, 90, 87)
    assert (large.usable_bytes, large.limit_bytes, large.room_bytes) == (97, 100, 97)
    assert example().usable_bytes is None and example().room_bytes is None


def test_a_decision_is_found_by_its_type():
    checkpoint = Checkpoint(modules=("a",))
    plan = example(Optimizer(), checkpoint)
    assert plan.decision(Checkpoint) is checkpoint
    assert plan.decision(Freeze) is None


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, None, "1"])
def test_another_schema_version_is_refused(version):
    data = example().to_json() | {"schema_version": version}
    with pytest.raises(PlanFileError, match=f"schema_version {version!r}, .* planner reads 1 and {SCHEMA_VERSION}"):
        Plan.from_json(data)


@pytest.mark.parametrize("data", [[], "text", 3, None, {"model_type": "llama"}])
def test_json_that_is_not_a_plan_is_refused(data):
    with pytest.raises(PlanFileError, match="not a saved plan"):
        Plan.from_json(data)


ABSENT_IN_OLDER_FILES = ("run", "alloc_conf", "cudnn_benchmark", "link", "cards_per_node")


@pytest.mark.parametrize(
    "field",
    [
        *(
            f.name
            for f in dataclasses.fields(Plan)
            if f.name not in ("peak", "seconds", "recalled", *ABSENT_IN_OLDER_FILES)
        ),
        "plan",
    ],
)
def test_a_missing_field_is_named(field):
    data = example().to_json()
    del data[field]
    with pytest.raises(PlanFileError, match=f"missing or wrong field.*{field}"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vram_bytes",), "6GiB"),
        (("vram_bytes",), -1),
        (("vram_bytes",), 1.5),
        (("vram_bytes",), True),
        (("model", "reference"), 5),
        (("card",), None),
        (("fidelity",), 1),
        (("workload", "optimizer"), {"name": "adamw"}),
        (("workload", "batch"), 5),
        (("workload", "batch"), [["x", [2]]]),
        (("model",), "Net"),
        (("model",), {"name": "Net"}),
        (("solver",), {}),
        (("plan", "at"), {"phase": "forward"}),
        (("baseline", "step_seconds"), "soon"),
        (("baseline", "breakdown"), [1]),
        (("decisions",), 5),
        (("decisions",), [5]),
        (("shortfall",), "much"),
        (("forced",), None),
        (("plan", "total_bytes"), "much"),
        (("baseline", "most"), {"activations": "much"}),
        (("versions",), None),
        (("versions",), {"torch": 2.13}),
        (("notes",), [1]),
        (("notes",), "one note"),
        (("model", "arguments"), "--width"),
        (("workload", "not_by_sample"), "mask"),
        (("solver", "gap"), "small"),
        (("fits",), 1),
        (("vram_bytes",), 10**400),
        (("workload", "batch_size"), -1),
        (("workload", "batch_size"), 0),
        (("workload", "batch_size"), 2.5),
        (("workload", "batch_size"), True),
        (("workload", "batch_size"), 10**30),
        (("workload", "batch_size"), 2**31),
        (("decisions",), [{"kind": "chunked-loss", "module": "lm_head", "chunks": 10**6}]),
        (("decisions",), [{"kind": "accumulation", "micro_batch_size": 2, "micro_batches": 2**40}]),
        (("cards_per_node",), 2**40),
        (("workload", "seq_len"), -3),
        (("workload", "batch"), [["x", [-2], "float32"]]),
        (("workload", "calling"), "__class__"),
        (("baseline", "step_seconds"), math.inf),
        (("plan", "step_seconds"), math.nan),
        (("plan", "total_bytes"), -5),
        (("solver", "gap"), math.nan),
        (("forbidden",), [["a"]]),
        (("model", "name"), 5),
    ],
    ids=str,
)
def test_values_of_another_kind_are_refused_on_one_line(path, value):
    data = place = example().to_json()
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(PlanFileError, match=r"plan has a missing or wrong field .*: make the plan again") as caught:
        Plan.from_json(json.loads(json.dumps(data)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multiple", 0),
        ("eval_batch_size", 0),
        ("lengths", [[16, 2**31 - 1]]),  # would be a list of as many numbers
        ("lengths", [[16, 2_000_000]] * 10),
        ("lengths", [[0, 2]]),
        ("lengths", [[16]]),
        ("lengths", [16]),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_simulated_is_refused(field, value):
    data = json.loads(json.dumps(full_example().to_json()))
    data["run"]["source"][field] = value
    with pytest.raises(PlanFileError, match="plan has a missing or wrong field"):
        Plan.from_json(data)


@pytest.mark.parametrize("sizes", [(0, 2), (4, 1), (2.0, 2), (2, 2.5), ("4", 2), (True, 2)])
def test_micro_batches_are_whole_and_at_least_two(sizes):
    with pytest.raises(DecisionError, match="needs at least 2 micro-batches of at least 1 sample"):
        Accumulation(micro_batch_size=sizes[0], micro_batches=sizes[1])


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"kind": "prune"}, f"'prune' is unknown: choose from {', '.join(KINDS)}"),
        ({}, "kind None is unknown"),
        ({"kind": "freeze", "layers": []}, "'freeze' has no field 'layers': its fields are modules"),
        ({"kind": "precision", "dtype": "fp8"}, "'fp8' is unknown: choose bf16 or fp16"),
        ({"kind": "checkpoint", "modules": []}, "checkpoint names no modules"),
        ({"kind": "accumulation", "micro_batch_size": 4, "micro_batches": 1}, "at least 2 micro-batches"),
        ({"kind": "optimizer", "name": "lion8bit"}, "the only supported name is adamw8bit"),
    ],
)
def test_unknown_decisions_are_refused_by_name(decision, message):
    data = example().to_json() | {"decisions": [decision]}
    with pytest.raises(DecisionError, match=message):
        Plan.from_json(data)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("text.json", "bytes.json"):
        with pytest.raises(PlanFileError, match=f"{name}' is not JSON .*: give a file made by --save"):
            Plan.load(tmp_path / name)
    with pytest.raises(PlanFileError, match=r"gone.json' cannot be read: No such file"):
        Plan.load(tmp_path / "gone.json")


def test_a_failed_write_leaves_the_old_file_whole_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    example().save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)  # when everything is written
    with pytest.raises(PlanFileError, match=r"plan.json' cannot be written: No space left"):
        example(Optimizer()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(PlanFileError, match="cannot be written: No such file"):
        example().save(tmp_path / "gone" / "plan.json")


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    for depth in (100, 100_000):
        (tmp_path / "deep.json").write_text("[" * depth + "]" * depth)
        with pytest.raises(PlanFileError, match="nested more than 60 levels deep"):
            Plan.load(tmp_path / "deep.json")


def test_plan_files_need_no_torch():
    code = "import sys, planner.plan_types.plan, planner.plan_types.decisions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
