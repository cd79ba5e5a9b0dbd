"""Makes damaged and odd input from seeds, and runs it. A kind and a number always give the same input."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import json
import math
import pathlib
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch

from planner.cli import main
from planner.cli.report import render
from planner.errors import PlanFileError, PlannerError, SnapshotError
from planner.plan_types.plan import Plan
from planner.rewrite import source
from planner.snapshot import load
from tests.plan_types.test_plan import example, full_example
from tests.rewrite.test_damaged_state import assert_same, trained
from tests.snapshot.test_hostile_files import snapshot
from tests.support.training import vectors

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2.5, -0.0, math.nan, math.inf, 10**30, -(10**30)),
    *("", "x", "1", "a\nb", "\x1b[2J", "é\udc80", "../../etc/passwd", "os:getcwd", "x" * 5000),
    *('"); PWNED_7(); ("', '"""\nPWNED_7()\n"""'),
    *([], {}, [[]], [None], {"a": {}}, {"kind": "checkpoint"}, ["a", 1], [[1, 2], [3]]),
)


def damaged(data: Any, rng: random.Random) -> Any:
    """Returns a copy of nested data with one to three changes: another value, a missing one, an additional one."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        place, key = _place(data, rng)
        if place is None:
            return copy.deepcopy(rng.choice(JUNK))
        change = rng.random()
        if change < 0.2:
            del place[key]
        elif change < 0.3:
            other, at = _place(data, rng)
            place[key] = copy.deepcopy(other[at]) if other is not None else None
        elif change < 0.4 and isinstance(place, dict):
            place[str(rng.choice(JUNK))[:30]] = copy.deepcopy(rng.choice(JUNK))
        else:
            place[key] = copy.deepcopy(rng.choice(JUNK))
    return data


def _place(data: Any, rng: random.Random) -> tuple[Any, Any]:
    """Returns a container in the data, and one of its keys; (None, None) if there is no container with a key."""
    places = _all_places(data)
    return rng.choice(places) if places else (None, None)


def _all_places(data: Any) -> list[tuple[Any, Any]]:
    """Returns (container, key) for every value in nested data."""
    places = []
    waiting = [data]
    while waiting:
        value = waiting.pop()
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        places += [(value, key) for key in keys]
        waiting += [value[key] for key in keys]
    return places


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns the content with a changed, a missing or a repeated part."""
    at, size = rng.randrange(len(content)), rng.randint(1, 40)
    middle = rng.choice([b"", bytes(rng.randrange(256) for _ in range(size)), content[at : at + size] * 2])
    return content[:at] + middle + content[at + size :]


def in_ascii(data: Any) -> bytes:
    return json.dumps(data).encode()


# ---- kinds of cases: each returns nothing, and raises an error if something is wrong ---------------------------------


def plan_file(rng: random.Random, folder: pathlib.Path) -> None:
    """A plan file is refused with a line, or can be shown, saved, and emitted without code of its own."""
    data = json.loads(json.dumps(rng.choice([example, full_example])().to_json()))
    content = in_ascii(damaged(data, rng)) if rng.random() < 0.8 else damaged_bytes(in_ascii(data), rng)
    _use_plan_file(folder, content)


ALIKE: dict[type, tuple[Any, ...]] = {
    int: (-1, 0, 10**6, 2**31, 2**62, 10**30, 2.5),
    float: (math.nan, math.inf, -math.inf, -1.0, 1e308),
    str: (
        *('"); PWNED_7(); ("', '"""\nPWNED_7()\n"""', "'''\nPWNED_7()\n'''", "\\", "\\N{slash", "\0", "\udc80"),
        *("Net(PWNED_7())", "int64, device=PWNED_7()", "os:PWNED_7()#", "a.PWNED_7().b", "a\nPWNED_7()", "class"),
        *("{PWNED_7()}", "__class__"),
    ),
    bool: (0, 1, "true"),
}
"""Values of the right type, or nearly so, that a field of a plan must not have or that must stay data."""


def plan_value(rng: random.Random, folder: pathlib.Path) -> None:
    """A plan file in which one value has the right type and a hostile value: as for `plan_file`."""
    data = json.loads(json.dumps(rng.choice([example, full_example])().to_json()))
    if rng.random() < 0.5:  # of a config, whose class is written into the emitted file
        (folder / "config.json").write_text(json.dumps(CONFIG))
        data["model"] |= {"name": "GPT2LMHeadModel", "reference": str(folder / "config.json")}
        data["workload"] |= {"batch_size": 4, "seq_len": 8, "calling": "KEYWORDS"}
    leaves = [(place, key) for place, key in _all_places(data) if type(place[key]) in ALIKE]
    place, key = rng.choice(leaves)
    place[key] = rng.choice(ALIKE[type(place[key])])
    _use_plan_file(folder, in_ascii(data))


def _use_plan_file(folder: pathlib.Path, content: bytes) -> None:
    path = folder / "plan.json"
    path.write_bytes(content)
    try:
        plan = Plan.load(path)
    except PlannerError as error:
        assert "\n" not in str(error), str(error)
        return
    timed = dataclasses.replace(plan, seconds=1.0, solver=dataclasses.replace(plan.solver, seconds=0.1))
    assert plan.summary() and render(timed) is not None
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == dataclasses.replace(
        plan, seconds=None
    )
    try:
        text = source(plan)
    except PlannerError:
        return
    names = [node for node in ast.walk(ast.parse(text)) if not isinstance(node, ast.Constant)]
    assert not any("PWNED_7" in str(value) for node in names for value in vars(node).values() if isinstance(value, str))


def snapshot_file(rng: random.Random, folder: pathlib.Path) -> None:
    """A record of the allocator is refused with a line, or read."""
    data = snapshot({"user_metadata": "step"}, {"frames": [{"name": "f", "filename": "a.py", "line": 1}]})
    data = damaged(data, rng) if rng.random() < 0.8 else data
    content = pickle.dumps(data) if rng.random() < 0.6 else in_ascii(data)
    path = folder / "snapshot"
    path.write_bytes(content if rng.random() < 0.7 else damaged_bytes(content, rng))
    try:
        load(path)
    except SnapshotError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, str(error)


@functools.cache
def _trained() -> Any:
    return trained(2)


@functools.cache
def _whole() -> dict[str, Any]:
    return copy.deepcopy(_trained().step.state_dict())


def state(rng: random.Random, folder: pathlib.Path) -> None:
    """A state is refused with a line and changes nothing, or training goes on from it."""
    whole, result = _whole(), _trained()
    result.step.load_state_dict(copy.deepcopy(whole))
    changed = damaged(whole, rng)
    if rng.random() < 0.3:
        entry = copy.deepcopy(whole)["optimizer"]["state"][0]
        tensor = rng.choice([torch.zeros(3), torch.tensor(math.nan), torch.ones(2).long()])
        changed = copy.deepcopy(whole)
        changed["optimizer"]["state"][rng.choice([0, 3])] = {**entry, rng.choice(["step", "exp_avg"]): tensor}
    try:
        result.step.load_state_dict(changed)
    except PlanFileError as error:
        assert "\n" not in str(error), str(error)
        assert_same(whole, result.step.state_dict())
    else:
        result.step(vectors(6))


MODELS = """
import torch
def build(batch_size=2, seq_len=8):
    return torch.nn.Linear(4, 4), torch.ones(batch_size, 4), lambda output, batch: output.sum()
def wrong(): raise ValueError("wrong")
def leaves(): raise SystemExit(0)
def number(): return 5
def raises(): raise type("Own", (BaseException,), {})("later")
def leaves_at_once(): __import__("os")._exit(0)
def says(): raise ValueError("\\x1b[2J" + "x" * 10**5)
async def asynchronous(): return 5
"""
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 16,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
REFERENCES = (
    *("net.py:build", "net.py:wrong", "net.py:leaves", "net.py:number", "net.py:no", "no.py:f", "net.py", "net.py:"),
    *("os:getcwd", "int", "a\nb:c", ":", "config.json", "no.json", "a/b/c", "/dev/zero", ".", "", "x" * 300),
)
QUICK_REFERENCES = (
    *(
        "net.py:leaves",
        "net.py:raises",
        "net.py:leaves_at_once",
        "net.py:\x1b[2J",
        "\x1b[2J.json",
        "net.py:asynchronous",
    ),
    "net.py:says",
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "--vram": ("1MiB", "1GiB", "6GB", "80%", "x", "-1GiB", "0", "1e400GiB", "9" * 400, ""),
    "--margin": ("1%", "10MiB", "x", "200%", "-5"),
    "--batch-size": ("1", "3", "0", "-2", "x", "9" * 40, "2147483648"),
    "--seq-len": ("4", "16", "999", "0", "x"),
    "--optimizer": ("adamw", "sgd", "x", "", "os.system"),
    "--gpu": ("bare", "rtx-2060", "generic", "x", "rtx-2060\n", "/dev/zero", "no.toml", "x" * 400, "\x1b[2J"),
    "--fidelity": ("exact", "x", ""),
    "--force": ("checkpoint", "x", "", "mixed-precision,x"),
    "--forbid": ("checkpoint", "x", ""),
    "--only": ("checkpoint", "", "x"),
    "--max-slowdown": ("2", "0", "nan", "x"),
    "--lengths": ("/dev/zero", "lengths.txt", "no.txt", "."),
    "--input-shapes": ("/dev/full", "shapes.json", "no.json"),
    "--save": ("out.json", "/dev/full", ".", "no/out.json", "x" * 300, "net.py"),
    "--emit": ("out.py", "/dev/zero", "net.py", "out.yaml", "out.json", "x" * 300),
    "--svg": ("out.svg", "net.py"),
    "--value": ("x", "a=1", "net.py:3=1"),
    "--by-sample": ("x", "", "0"),
    "--dtype": ("float32", "float99", ""),
    "--lora": ("4", "x", "0", "."),
    "--time-limit": ("5s", "x", "-1", "0"),
    "--cards": ("2", "0", "x", "fewest"),
    "--alloc-conf": ("expandable_segments:True", "x", "max_split_size_mb:x"),
    "--for": ("loop", "trainer", "x", "axolotl"),
}
FLAGS = (
    *("--verify", "--tradeoff", "--largest-batch", "--smallest-card", "--trust-reference", "--accumulating-loop"),
    "--x",
)


def command_line(rng: random.Random, folder: pathlib.Path) -> None:
    """A command line is answered, or refused with a line. Most have at least one fault, since plans take their time."""
    (folder / "net.py").write_text(MODELS)
    (folder / "lengths.txt").write_text(rng.choice(["8\n4\n", "x", "8 999999999999", "[1, [2]]", "-1"]))
    (folder / "shapes.json").write_text(rng.choice(["[2, 4]", "[-1]", "{", '{"x": [1, "a"]}', "[" * 999]))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = rng.choice(REFERENCES)
    words = [model]
    for name in rng.sample(sorted(OPTIONS), rng.randint(1, 4)):
        words += [name, rng.choice(OPTIONS[name])]
    words += [flag for flag in FLAGS if rng.random() < 0.05]
    run_command(words)


def one_fault(rng: random.Random, folder: pathlib.Path) -> None:
    """A command line with a single odd option, or only an odd model, so that nothing else hides it."""
    (folder / "net.py").write_text(MODELS)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if rng.random() < 0.5:
        run_command([rng.choice((*QUICK_REFERENCES, *REFERENCES)), "--gpu", "bare"])
        return
    name = rng.choice(sorted(OPTIONS))
    run_command(["net.py:build", "--time-limit", "20s", name, rng.choice(OPTIONS[name])])


def config_file(rng: random.Random, folder: pathlib.Path) -> None:
    """A transformers config is planned, or refused with a line."""
    path = folder / "config.json"
    data = damaged(CONFIG, rng)
    path.write_bytes(in_ascii(data) if rng.random() < 0.9 else damaged_bytes(in_ascii(data), rng))
    run_command([str(path), "--batch-size", "1", "--seq-len", "4"])


def run_command(words: list[str]) -> None:
    """Runs the command in this process. `conftest` has replaced its streams by files."""
    try:
        code = main([*words, "-q"])
    except SystemExit as end:
        code = int(end.code or 0)
        assert code == 2, words
    assert code in (0, 1, 2, 3), words


KINDS: dict[str, tuple[Callable[[random.Random, pathlib.Path], None], float]] = {
    "plan": (plan_file, 0.24),
    "value": (plan_value, 0.2),
    "snapshot": (snapshot_file, 0.2),
    "state": (state, 0.2),
    "command": (command_line, 0.1),
    "option": (one_fault, 0.03),
    "config": (config_file, 0.03),
}
"""The kinds of cases, and the part of all cases that each has."""
