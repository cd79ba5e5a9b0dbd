"""Nothing that comes from a plan, a path or a name becomes code in an emitted file.

The test plants texts that try to break out of literals, docstrings and comments, parses the emitted file, and looks for
them outside of literals.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cli.training_lines import training_lines
from planner.errors import PlannerError
from planner.plan_types.adapter import Adapter
from planner.plan_types.decisions import Accumulation, ChunkedLoss, Freeze, Shard
from planner.plan_types.plan import Plan
from planner.plan_types.plan_parts import TrainingProgram
from planner.plan_types.recompute_decisions import Checkpoint, Offload
from planner.rewrite import emit, source
from planner.rewrite.emitted_code import literal
from planner.rewrite.emitter import quoted
from tests.support.training import plan_for, roberta, roberta_config, seeded, tokens

pytestmark = pytest.mark.slow

MARK = "PWNED_7"
CALL = f"{MARK}()"
PIECES = (
    CALL, '"', "'", '"""', "'''", "\\", "\n", "\r", ")", "(", "]", "}", "{", ",", ";", "#", ":", " ", "    ", "\t", "=",
    "\0", "\x0c", "\x1b[2J", "\x85", "\u2028", "\udc80", "\\N{", "\\x", "\\u12", "x", "os", ".", ".py", "/", "..",
    f'"); {CALL}; ("', f'"""\n{CALL}\n"""', f"'''\n{CALL}\n'''", f"float32, device={CALL}", f"x if {CALL} else x",
)  # fmt: skip
payloads = st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: "".join([*pieces, CALL])) | st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=4), st.lists(st.sampled_from(PIECES), max_size=4)
).map(lambda parts: "".join([*parts[0], CALL, *parts[1]]))
texts = st.text() | payloads
plain_data = st.recursive(
    texts | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(texts, inner),
    max_leaves=8,
)
LAYER = "roberta.encoder.layer.0"


def of_model(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, model=dataclasses.replace(plan.model, **changes))


def of_workload(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, **changes))


def of_peak(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, peak=dataclasses.replace(plan.peak, **changes))


def with_decision(plan: Plan, decision: Any) -> Plan:
    return dataclasses.replace(plan, decisions=(decision,))


ADAPTED = {"adapter": Adapter(rank=4, targets=("query",)), "architecture": "RobertaForMaskedLM"}
PLANTED: dict[str, Callable[[Plan, str], Plan]] = {
    "reference of the hub": lambda plan, text: of_model(plan, reference=text),
    "reference, file": lambda plan, text: of_model(plan, reference=f"{text}.py:build"),
    "reference, module": lambda plan, text: of_model(plan, reference=f"{text}:build"),
    "reference, function": lambda plan, text: of_model(plan, reference=f"m.py:{text}"),
    "reference, function of a module": lambda plan, text: of_model(plan, reference=f"m:{text}"),
    "own step": lambda plan, text: of_workload(of_model(plan, reference=f"{text}.py:f"), calling="STEP"),
    "class": lambda plan, text: of_model(plan, name=text, reference="some/model"),
    "class without a reference": lambda plan, text: of_model(plan, name=text, reference=None),
    "dtype": lambda plan, text: of_model(plan, dtype=text, reference="some/model"),
    "arguments": lambda plan, text: of_model(plan, arguments=(text, "--x"), reference="m.py:build"),
    "adapter's folder": lambda plan, text: of_model(
        plan, reference="some/model", **{**ADAPTED, "adapter": Adapter(rank=4, folder=text)}
    ),
    "adapter's layers": lambda plan, text: of_model(
        plan, reference="some/model", **{**ADAPTED, "adapter": Adapter(rank=4, targets=(text,), is_quantized=True)}
    ),
    "class under adapters": lambda plan, text: of_model(
        plan, reference="some/model", **{**ADAPTED, "architecture": text}
    ),
    "optimizer": lambda plan, text: of_workload(plan, optimizer=text),
    "optimizer of torch": lambda plan, text: of_workload(plan, optimizer=f"torch.optim.{text}"),
    "optimizers of an own step": lambda plan, text: of_workload(
        of_model(plan, reference="m.py:f"), calling="STEP", optimizer=f"{text}: adamw"
    ),
    "path of a tensor": lambda plan, text: of_workload(
        of_model(plan, reference="some/model"), batch=(("input_ids", (2, 8), "int64"), (text, (2, 8), "int64"))
    ),
    "dtype of a tensor": lambda plan, text: of_workload(
        of_model(plan, reference="some/model"), batch=(("input_ids", (2, 8), text),)
    ),
    "dtype like a float": lambda plan, text: of_workload(
        of_model(plan, reference="some/model"), batch=(("input_ids", (2, 8), f"float32{text}"),)
    ),
    "tensors of all samples": lambda plan, text: with_decision(
        of_workload(plan, not_by_sample=(text,)), Accumulation(micro_batch_size=1, micro_batches=2)
    ),
    "modules": lambda plan, text: with_decision(plan, Checkpoint(modules=(LAYER, text))),
    "modules with products": lambda plan, text: with_decision(plan, Checkpoint(modules=(text,), kept=((0, 1),))),
    "modules on the host": lambda plan, text: with_decision(plan, Offload(modules=(text,), inputs_of=(), from_bytes=1)),
    "frozen modules": lambda plan, text: with_decision(plan, Freeze(modules=(text,))),
    "head": lambda plan, text: with_decision(plan, ChunkedLoss(module=text, chunks=2)),
    "units": lambda plan, text: with_decision(plan, Shard(way="fsdp", mesh=(2,), units=(text,))),
    "own division": lambda plan, text: with_decision(
        plan, Shard(way="own", mesh=(2,), dimensions=("dp",), function=f"{text}.py:f")
    ),
    "own division, function": lambda plan, text: with_decision(
        plan, Shard(way="own", mesh=(2,), dimensions=("dp",), function=f"m.py:{text}")
    ),
    "dimensions": lambda plan, text: with_decision(
        plan, Shard(way="own", mesh=(2,), dimensions=(text,), function="m.py:f")
    ),
    "allocator": lambda plan, text: dataclasses.replace(plan, alloc_conf=text),
    "card": lambda plan, text: dataclasses.replace(plan, card=text),
    "notes": lambda plan, text: dataclasses.replace(plan, notes=(text,)),
    "versions": lambda plan, text: dataclasses.replace(plan, versions={text: text}),
    "fidelity": lambda plan, text: dataclasses.replace(plan, fidelity=text, forced=(text,), forbidden=(text,)),
    "peak": lambda plan, text: of_peak(plan, phase=text, module=text, op=text),
    "link": lambda plan, text: dataclasses.replace(
        plan, link=text, decisions=(Shard(way="ddp", mesh=(2,)),)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(seeded(roberta), tokens())


def outside_of_literals(text: str) -> list[str]:
    """The fields of a syntax tree that are names of any kind and contain the mark."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for field, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            if not isinstance(node, ast.Constant) and any(isinstance(each, str) and MARK in each for each in values):
                found.append(f"{type(node).__name__}.{field} = {value!r}")
    return found


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=payloads)
@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_text_is_refused_or_stays_a_literal(place, plan, text):
    try:
        emitted = source(PLANTED[place](plan, text))
    except PlannerError as error:
        assert "\n" not in str(error) or "\n" in text
        return
    assert outside_of_literals(emitted) == []
    emitted.encode()


@pytest.mark.parametrize("place", PLANTED)
def test_a_harmless_text_is_taken(place, plan):
    harmless = {
        "dtype": "float32",
        "dtype of a tensor": "torch.int64",
        "dtype like a float": "",
        "optimizer of torch": "SGD",
    }
    assert outside_of_literals(source(PLANTED[place](plan, harmless.get(place, "name")))) == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=payloads)
def test_a_config_of_the_model_stays_a_literal(plan, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    for config in ({text: [text, {"a": text}]}, {"vocab_size": text}, {"vocab_size": {text: 1}}):
        path.write_text(json.dumps({**roberta_config(), **config}))
        try:
            emitted = source(of_model(plan, reference=str(path)))
        except PlannerError:
            assert "vocab_size" in config
            continue
        assert outside_of_literals(emitted) == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=payloads)
def test_the_name_of_the_emitted_file_stays_text(plan, text, tmp_path_factory):
    for reference in (None, "m.py:build"):
        assert outside_of_literals(source(of_model(plan, reference=reference), file_name=f"{text}.py")) == []


@pytest.mark.parametrize("folder", [r"a\x", r"back\N{slash", 'tri"""ple', f'"""\n{CALL}\n"""', "line\nfeed", "\x1b[2J"])
def test_a_file_in_a_folder_of_any_name_can_be_emitted_and_read(folder, plan, tmp_path):
    (tmp_path / folder).mkdir()
    emit(of_model(plan, reference=f"{tmp_path / folder}/m.py:build"), tmp_path / folder / "train.py")
    assert outside_of_literals((tmp_path / folder / "train.py").read_text()) == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=payloads)
@pytest.mark.parametrize(
    "place", ["reference of the hub", "reference, file", "class", "dtype", "optimizer", "allocator"]
)
def test_lines_to_paste_keep_a_planted_text_in_literals(place, plan, text):
    for loop in ("loop", "trainer", "lightning", "accelerate"):
        try:
            lines = training_lines(PLANTED[place](plan, text), loop, None)
        except PlannerError:
            continue
        assert outside_of_literals(lines) == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=payloads)
def test_a_config_of_a_program_has_no_further_keys(plan, text):
    program = TrainingProgram(name="axolotl", gradient_checkpointing=False)

    def keys(text: str) -> set[str]:
        changed = of_model(plan, program=program, architecture=text, reference=text)
        return set(yaml.safe_load(training_lines(of_workload(changed, seq_len=8), "axolotl", None)))

    assert keys(text) == keys("name")


@settings(max_examples=200, deadline=None)
@given(value=plain_data)
def test_a_literal_is_what_it_was(value):
    text = literal(value)
    text.encode()
    assert ast.literal_eval(text) == value


def test_only_plain_data_has_a_literal():
    with pytest.raises(TypeError, match="no literal for a value of type object"):
        literal([object()])


@settings(max_examples=200, deadline=None)
@given(text=payloads | st.text())
def test_a_docstring_is_one_string(text):
    (statement,) = ast.parse(f"def f():\n    {quoted.docstring(text)}\n").body[0].body
    assert isinstance(statement.value, ast.Constant)
    assert "\n" not in quoted.remark(text)
