"""Recordings may lack layers only if nothing tells the layers apart, and a wrong one is found by its certificate."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

import planner
from planner.choose import planning_session
from planner.choose import recordings as recordings_module
from planner.choose.recordings import Recordings
from planner.derive.same_step import is_same_step
from planner.derive.shortening import runs_to_shorten
from planner.plan_types.decisions import Accumulation, Optimizer, Precision, StepInBackward
from planner.plan_types.plan import Plan
from planner.recording.step_graph import Category
from planner.space.micro_batches import MicroBatching
from planner.workload.workload import workload
from tests.support import lengthening
from tests.support.lengthening import (
    LAYERS,
    assert_equal,
    layers,
    of_step,
    recorded,
    recordings_of,
    shortened,
    shortening,
    with_all_layers,
)
from tests.support.stack import Stack, stack
from tests.support.workloads import transformer

SPLIT = Accumulation(micro_batch_size=2, micro_batches=2)


@pytest.mark.thorough
def test_the_recording_of_the_baseline_shows_layers_that_differ():
    """Every sixth layer of Gemma 3 attends to all tokens, and the others to a window."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "num_hidden_layers": LAYERS,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    work = transformer("gemma3_text", "Gemma3ForCausalLM", batch_size=2, seq_len=16, **settings)
    assert runs_to_shorten(work)
    assert not shortening(work).is_right()


@pytest.mark.parametrize(
    "config",
    [(), (Optimizer(),), (Precision(dtype="bf16"),), (Precision(dtype="fp16"),)],
    ids=["the user's optimizer", "8-bit optimizer", "bf16", "fp16"],
)
def test_the_search_gets_the_update_of_all_layers(config):
    work = layers("one after the other")
    known = shortening(work)
    longer, full = recorded(work, known, config), recorded(work, None, config)
    assert known.runs
    (ops, _), (all_ops, _) = of_step(longer), of_step(full)
    assert [op.name for op in ops] == [op.name for op in all_ops]
    ticks, all_ticks = ([op.tick for op in each] for each in (ops, all_ops))
    assert (longer.live_bytes()[ticks] == full.live_bytes()[all_ticks]).all()
    for category in Category:
        assert longer.bytes_of(category) == full.bytes_of(category)


@pytest.mark.parametrize("way", ["one more output is part of the loss", "a tensor has a row for each layer"])
def test_layers_whose_position_or_number_matters_are_all_recorded(way):
    work = layers(way)
    assert with_all_layers(shortened(work), work) is not None  # two layers are alike, but one more is different
    assert_equal(recorded(work, shortening(work)), recorded(work))


DIFFERENCES = [
    "it counts its calls",
    "more ops in its first call",
    "a forward hook",
    "another kernel for equal shapes",
    "it reads another tensor of the model",
    "the gradient of its output is kept",
    "its output is doubled by the model",
    "its output is part of the loss",
    "its weight is part of the loss",
]


@pytest.mark.parametrize("way", [*DIFFERENCES, "rows for layers from the tenth on"])
def test_what_tells_one_layer_from_the_others_is_seen_in_the_baseline(way):
    work = stack(way)
    assert runs_to_shorten(work)
    assert not shortening(work).is_right()


@pytest.mark.parametrize("way", ["it counts its calls", "the gradient of its output is kept"])
def test_a_last_layer_that_differs_is_seen_in_the_baseline(way):
    """Another layer stands for the last one in a shortened recording."""
    assert not shortening(stack(way, differs=17)).is_right()


@pytest.mark.parametrize("way", ["nothing", "all outputs are doubled by the model"])
def test_layers_between_which_the_same_ops_run_are_lengthened(way):
    work = stack(way)
    known = shortening(work)
    assert is_same_step(recorded(work, known), recorded(work))
    assert known.runs


def test_layers_whose_parameters_are_used_elsewhere_or_have_hooks_are_all_recorded():
    plain, tied, hooked, accumulated = (stack("nothing") for _ in range(4))
    assert runs_to_shorten(plain)
    tied.model.head = torch.nn.Linear(16, 16, device="meta")
    tied.model.head.weight = tied.model.layers[9].linear.weight
    hooked.model.layers[9].linear.weight.register_hook(lambda gradient: gradient * 2)
    accumulated.model.layers[9].linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not any(map(runs_to_shorten, (tied, hooked, accumulated)))


def test_recordings_with_an_optimizer_of_the_user_are_lengthened():
    """The object has its parameters in groups: biases have no weight decay, and the last layers their own rate."""
    model = Stack("nothing")
    weights = [layer.linear.weight for layer in model.layers]
    groups = [
        {"params": weights[:10]},
        {"params": [layer.linear.bias for layer in model.layers], "weight_decay": 0.0},
        {"params": weights[10:], "lr": 1e-4},
    ]
    work = workload(model, torch.zeros(16, 16), optimizer=torch.optim.AdamW(groups))
    known = shortening(work)
    longer, full = recorded(work, known), recorded(work)
    assert known.runs
    assert is_same_step(longer, full)
    assert longer.bytes_of(Category.OPTIMIZER_STATE) == full.bytes_of(Category.OPTIMIZER_STATE)


def test_a_recording_that_cannot_be_lengthened_does_not_keep_others_from_it():
    """When the forward ends, the outputs of the layers are freed from last to first, and casts from first to last."""
    work, bf16 = stack("all outputs are kept"), (Precision(dtype="bf16"),)
    known, lengthened = shortening(work), with_all_layers(shortened(work, bf16), work)
    assert lengthened is None
    recordings, whole = recordings_of(work, known), MicroBatching(micro_batches=1, size=work.batch_size)
    assert is_same_step(recordings.of(bf16, whole)(), recorded(work, None, bf16))
    assert known.runs


def test_the_update_is_kept_if_it_cannot_be_replaced_in_the_recording_of_all_layers():
    work, bf16 = stack("all outputs are kept"), (Precision(dtype="bf16"),)
    recordings, whole = recordings_of(work, shortening(work)), MicroBatching(micro_batches=1, size=work.batch_size)
    start = recordings._start

    def without_update_tick(decisions, sizes, runs):
        child = start(decisions, sizes, runs)
        full = mock.Mock(wraps=child)
        full.result.side_effect = lambda: dataclasses.replace(child.result(), update_tick=None)
        return child if runs else full

    recordings._start = without_update_tick
    longer, full = recordings.of(bf16, whole)(), recorded(work, None, bf16)
    assert longer == dataclasses.replace(full, update_tick=None)


@pytest.mark.parametrize("config", [(), (Optimizer(),)], ids=["the user's optimizer", "8 bits"])
def test_recordings_are_extrapolated_before_they_are_lengthened(config, monkeypatch):
    work, split = stack("nothing"), MicroBatching(micro_batches=2, size=4)
    lengthened = mock.Mock(wraps=recordings_module.with_all_layers)
    monkeypatch.setattr(recordings_module, "with_all_layers", lengthened)
    recording = recordings_of(work, shortening(work)).of(config, split)
    assert is_same_step(recording(), recordings_of(work).of(config, split)())
    assert recording().micro_batch_sizes == (4, 4)
    assert sum(bool(runs) for (_, runs), _ in lengthened.call_args_list) == 1


def test_extrapolated_recordings_that_cannot_be_lengthened_are_made_with_all_layers():
    work, split = stack("all outputs are kept"), MicroBatching(micro_batches=2, size=4)
    known, config = shortening(work), (Precision(dtype="bf16"),)
    longer, full = (recordings_of(work, which).of(config, split)() for which in (known, None))
    assert is_same_step(longer, full)
    assert known.runs


@pytest.mark.parametrize("update", [(), (StepInBackward(),)], ids=["after the backward", "inside of it"])
def test_lengthened_recordings_are_dropped_if_another_precision_shows_a_difference(update):
    work, bf16 = stack("no autocast"), (Precision(dtype="bf16"), *update)
    known = shortening(work)
    recordings, whole = recordings_of(work, known), MicroBatching(micro_batches=1, size=work.batch_size)
    copy = recordings.finished_by(lambda graph: graph)
    recording, full = copy.of(bf16, whole), recorded(work, None, bf16)
    wrong = recording()
    assert known.runs and not is_same_step(wrong, full)
    recordings.of((), whole)
    assert not recordings.drop_if_wrong(())
    assert recordings.drop_if_wrong((*bf16, Optimizer(), SPLIT) if not update else bf16)
    assert is_same_step(copy.of(bf16, whole)(), full)
    assert not recordings.drop_if_wrong(bf16)
    assert recording() == wrong  # it must not change: its user may hold indices of its ops and storages


@pytest.mark.thorough
def test_a_plan_is_as_good_as_with_recordings_of_all_layers_if_another_precision_shows_a_difference(monkeypatch):
    def found(*, lengthened: bool) -> Plan:
        monkeypatch.setattr(planning_session, "runs_to_shorten", runs_to_shorten if lengthened else lambda work: ())
        only, forced = ("mixed-precision", "checkpoint"), "mixed-precision"
        return planner.plan(
            Stack("no autocast"), torch.zeros(16384, 16), gpu="rtx-3060", vram="150MiB", only=only, force=forced
        )

    dropped = []
    drop = Recordings.drop_if_wrong
    monkeypatch.setattr(Recordings, "drop_if_wrong", lambda *of: dropped.append(drop(*of)) or dropped[-1])
    plan, other = found(lengthened=True), found(lengthened=False)
    assert dropped[0]
    assert plan.decisions == other.decisions
    assert plan.solver.promised_bytes == plan.solver.certified_bytes == other.solver.certified_bytes


@pytest.mark.parametrize("update", [(), (Optimizer(),)], ids=["the user's optimizer", "8-bit optimizer"])
def test_recordings_with_updates_inside_of_the_backward_are_lengthened(monkeypatch, update):
    work, config = layers("one after the other"), (*update, StepInBackward())
    full, runs = recorded(work, None, config), []
    start = lengthening.start_rehearsal
    monkeypatch.setattr(lengthening, "start_rehearsal", lambda *a, **kw: runs.append(kw["runs"]) or start(*a, **kw))
    longer = recorded(work, shortening(work), config)
    assert runs == [runs_to_shorten(work)]
    assert_equal(longer, full)
    assert longer.bytes_of(Category.OPTIMIZER_STATE) == full.bytes_of(Category.OPTIMIZER_STATE)


def test_recordings_with_updates_inside_of_the_backward_are_compared_op_by_op():
    work, config = stack("another kernel for equal shapes"), (StepInBackward(),)
    longer, full = with_all_layers(shortened(work, config), work), recorded(work, None, config)
    assert not is_same_step(longer, full)


@pytest.mark.parametrize(
    ("option", "values", "is_shortened"),
    [
        ("lr", (0.1, 0.2), True),
        ("weight_decay", (0.1, 0.2), True),
        ("weight_decay", (0.1, 0.0), False),
        ("foreach", (True, False), False),
        ("betas", ((0.9, 0.99), (0.8, 0.99)), True),
    ],
)
def test_layers_that_the_optimizer_updates_by_other_ops_are_all_recorded(option, values, is_shortened):
    work = layers("one after the other")
    halves = (work.model.layers[: LAYERS // 2], work.model.layers[LAYERS // 2 :])
    groups = [{"params": [*half.parameters()], option: value} for half, value in zip(halves, values, strict=True)]
    assert bool(runs_to_shorten(dataclasses.replace(work, optimizer=torch.optim.AdamW(groups)))) == is_shortened


def test_copies_of_recordings_share_what_is_known_about_shortened_runs():
    work = layers("one after the other")
    recordings = recordings_of(work, shortening(work))
    whole = MicroBatching(micro_batches=1, size=work.batch_size)
    recordings.prefetch((), [whole])
    other = recordings.finished_by(lambda graph: graph)
    assert len(other.of((), whole)().ops) == len(recordings.of((), whole)().ops)
    recordings.close()


class OwnOptimizer(torch.optim.SGD):
    """An optimizer of the user's own."""


@pytest.mark.parametrize(
    ("kind", "option", "values", "are_alike"),
    [
        (OwnOptimizer, "scale", (np.ones(3), np.ones(3)), False),
        (OwnOptimizer, "scale", (np.ones(3),) * 2, True),  # the same object
        (OwnOptimizer, "aux", ({"a": [torch.ones(3)]}, {"a": [torch.zeros(2)]}), True),
        (OwnOptimizer, "aux", ({"a": 0}, {"a": 1}), False),
        (OwnOptimizer, "name", ("first", "second"), False),
        (torch.optim.SGD, "name", ("first", "second"), True),
        (torch.optim.SGD, "momentum", (0.5, 0.9), True),
        (torch.optim.SGD, "momentum", (0.0, 0.9), False),
    ],
)
def test_layers_are_updated_alike_if_their_options_run_the_same_ops(kind, option, values, are_alike):
    model = Stack("nothing")
    halves = [[*model.layers[:9].parameters()], [*model.layers[9:].parameters()]]
    groups = [{"params": half, option: value} for half, value in zip(halves, values, strict=True)]
    work = workload(model, torch.zeros(16, 16), optimizer=kind(groups, lr=0.1))
    assert bool(runs_to_shorten(work)) == are_alike
