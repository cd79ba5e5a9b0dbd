"""Arguments of wrong types are refused in one line, before anything is rehearsed."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.arguments import _EXPECTED
from planner.cli import main
from planner.errors import ArgumentError, PlannerError
from planner.virtual_gpu.forked_process import Child

JUNK = (
    *(None, 5, -1, 0, 2.5, math.nan, math.inf, True, False, "", "x", b"x", [], (), {}, ["a"], [5], {"a": 5}, {5: 5}),
    *([None], 10**30, object(), torch.ones(1), 10**400, -(10**5000), {"net.py:1": 10**400}, [True, 2], (0, 2)),
    *("9" * 5000, "max_split_size_mb:" + "9" * 5000, "x" * 10**6, ["x" * 10**6], "\x1b[2J\n", {"\x1b[2J\n": 1}),
)
ARGUMENTS = sorted(inspect.signature(planner.plan).parameters.keys() - {"model", "batch"})
OF_CARDS = ("mesh", "parallelize", "sharding", "offload_shards", "cards_per_node", "link")


class RehearsedError(Exception):
    """A process was started, so that the argument was accepted."""


def refuse(*_, **__):
    raise RehearsedError


def total(output, batch):
    return output.sum()


async def asynchronous(*values):
    return None


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_is_taken_or_refused_in_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(Child, "__init__", refuse)
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    refused = 0
    for value in JUNK:
        options = {"vram": "1GiB", "gpu": "bare", "loss_fn": total, **({"cards": 2} if name in OF_CARDS else {})}
        try:
            planner.plan(model, batch, **{**options, name: value})
        except RehearsedError:
            continue
        except PlannerError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 1000
            refused += 1
    assert refused > len(JUNK) / 2
    capsys.readouterr()


NUMBERS = {
    "vram": (np.int64(2**30), 2**30),
    "max_slowdown": (np.float32(1.5), 1.5),
    "margin": (np.int64(2**20), 2**20),
    "values": ({"net.py:1": np.int8(3), "net.py:2": np.float64(0.5)}, {"net.py:1": 3, "net.py:2": 0.5}),
    "eval_batch_size": (np.uint8(8), 8),
    "cards": (np.int64(2), 2),
    "mesh": ((np.int64(2), np.int32(2)), (2, 2)),
    "cards_per_node": (np.int64(4), 4),
    "time_limit": (Fraction(60), 60.0),
}
"""By name of an argument, numbers of a library, and those of Python that are equal."""


def asked(monkeypatch, **options) -> dict:
    """Fields of the question that the arguments of `planner.plan` make, by name."""
    found = {}

    def note(question, *, time_limit, progress):
        found.update(pickled=pickle.dumps(dataclasses.replace(question, work=None)), time_limit=repr(time_limit))
        found["values"] = repr(question.work.values)

    monkeypatch.setattr("planner.ask.ask", note)
    defaults = {"vram": "1GiB", "gpu": "bare", "loss_fn": total}
    planner.plan(nn.Linear(4, 4), torch.ones(8, 4), **{**defaults, **options})
    return found


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_library_are_taken_as_numbers_of_python(name, monkeypatch):
    more = {"cards": 4} if name in OF_CARDS else {}
    given, plain = (asked(monkeypatch, **{**more, name: value}) for value in NUMBERS[name])
    assert given == plain


@pytest.mark.parametrize(
    "name, value",
    [
        *(
            ("eval_batch_size", value)
            for value in (0, -1, 2**31, 2**62, 2**63, True, np.True_, 8.0, np.float64(8), "8")
        ),
        *(("cards_per_node", value) for value in (0, -1, 2**21, 2**62, True, 2.0, np.float32(2), "2")),
        *(("cards", value) for value in (0, -1, 2**17, 2**62, True, 2.0, "2")),
        *(("mesh", value) for value in ((0, 4), (-2, -2), (2**21, 2), (2, 2.0), (True, 4), (), (1, 2, 3))),
        *(("max_slowdown", value) for value in (0, -1, math.nan, math.inf, True, "2", Fraction(10**400))),
        *(("margin", value) for value in (-1, 2**62, 2**63, True, 1.5, "101%", "-1%", "9999999999TiB")),
        *(("vram", value) for value in (0, -1, 2**63, True, 1.5, np.float64(2**30), "9999999999TiB", "nan%", "1e400")),
        *(("time_limit", value) for value in (0, -1, math.nan, math.inf, True, np.True_, "0s", "1e9h")),
        *(("values", {"net.py:1": value}) for value in (math.nan, math.inf, True, "1", Fraction(10**400))),
    ],
)
def test_a_number_out_of_range_is_refused_before_a_rehearsal(name, value, monkeypatch):
    monkeypatch.setattr(Child, "__init__", refuse)
    options = {"vram": "1GiB", "gpu": "bare", "loss_fn": total, **({"cards": 4} if name in OF_CARDS else {})}
    with pytest.raises(PlannerError):
        planner.plan(nn.Linear(4, 4), torch.ones(8, 4), **{**options, name: value})


def test_every_argument_but_model_batch_budget_and_time_has_a_type():
    assert set(ARGUMENTS) - _EXPECTED.keys() == {"vram", "time_limit"}
    for function in (planner.tradeoff, planner.record):
        assert inspect.signature(function).parameters.keys() <= {*ARGUMENTS, "model", "batch", "seconds"}


def test_the_message_names_the_argument_its_value_and_what_to_give():
    with pytest.raises(ArgumentError, match=r"gpu is 5 \(int\): give the name of a card, such as 'rtx-2060'"):
        planner.plan(nn.Linear(4, 4), torch.ones(2, 4), vram="1GiB", gpu=5)
    with pytest.raises(TypeError, match=r"only is 5 \(int\): give names of techniques"):
        planner.tradeoff(nn.Linear(4, 4), torch.ones(2, 4), only=5)


class Asynchronous(nn.Linear):
    async def forward(self, vectors):
        return super().forward(vectors)


@pytest.mark.parametrize(
    "model, options, message",
    [
        (nn.Linear(4, 4), {"loss_fn": asynchronous}, "loss_fn is a coroutine function"),
        (nn.Linear(4, 4), {"step": asynchronous}, "step is a coroutine function"),
        (Asynchronous(4, 4), {"loss_fn": total}, "the model's forward is a coroutine function"),
        (nn.Sequential(Asynchronous(4, 4)), {"loss_fn": total}, "the forward of module '0' is a coroutine function"),
        (nn.Linear(4, 4), {"loss_fn": lambda *_: asynchronous()}, "the loss function returned coroutine"),
    ],
)
def test_coroutines_are_refused_and_nobody_is_warned(model, options, message, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PlannerError, match=message):
            planner.plan(model, torch.ones(2, 4), vram=None, gpu="bare", **options)
        gc.collect()
    assert "never awaited" not in capfd.readouterr().err


def test_the_command_refuses_a_coroutine_and_nobody_is_warned(tmp_path, capfd):
    path = tmp_path / "net.py"
    path.write_text("async def build():\n    pass\n")
    assert main([f"{path}:build"]) == 2
    error = capfd.readouterr().err
    assert f"'{path}:build' is a coroutine function" in error.replace("\n", " ") and "awaited" not in error
