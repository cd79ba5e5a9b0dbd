"""Why a run ran out of memory: the moment, its causes, what would have helped, and what differs from the plan.

Every setting that an explanation advises is tried on a simulated card of the same size, from its first request on.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import planner
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.expandable_segments import UNKNOWN_CARD_BYTES
from planner.allocator.options import settings_of
from planner.allocator.out_of_memory import OutOfMemory
from planner.allocator.settings import AllocatorSettings
from planner.cli import main
from planner.plan_types.categories import Category
from planner.plan_types.decisions import Allocator
from planner.plan_types.plan import LiveTensor, RunFacts, RunMoment
from planner.plan_types.sizes import GIB, MIB
from tests.plan_types.test_plan import example
from tests.support.card import EXPANDABLE, NATIVE, Card

pytestmark = pytest.mark.no_torch

TRAIN = ("main", "train.py", 30)
LOADING = [("convert", "lib/torch/nn/modules/module.py", 900), ("_apply", "lib/torch/nn/modules/module.py", 910), TRAIN]
STATE = [("_init_group", "lib/torch/optim/adamw.py", 150), ("step", "lib/torch/optim/adamw.py", 220), TRAIN]
LINEAR = [("linear", "lib/torch/nn/functional.py", 9), ("forward", "net/model.py", 20), TRAIN]
LOGITS = [("forward", "net/model.py", 40), TRAIN]
EVALUATION = [("forward", "net/model.py", 40), ("evaluate", "evaluate.py", 12), ("main", "train.py", 50)]
WEIGHT, TOKEN, LAYERS, PLANNED_TOKENS = 2 * MIB, 16 * 1024, 4, 512
ACTIVATION, LOGITS_BYTES = PLANNED_TOKENS * TOKEN, 2 * PLANNED_TOKENS * TOKEN


class Training:
    """Training of a model with four layers of 2 MiB, whose tensors grow with the number of tokens."""

    def __init__(self, card: Card, *, has_traces: bool = True) -> None:
        self.card, self.has_traces = card, has_traces
        self.weights = [self.ask(WEIGHT, LOADING) for _ in range(LAYERS)]
        self.state: list = []

    def ask(self, size_bytes: int, frames: list):
        self.card.frames = frames if self.has_traces else []
        return self.card.malloc(size_bytes)

    def step(self, tokens: int = PLANNED_TOKENS) -> bool:
        """One step; False if the card ran out of memory in it."""
        alive = [self.ask(tokens * TOKEN, LINEAR) for _ in range(LAYERS)]
        alive += [self.ask(2 * tokens * TOKEN, LOGITS)]
        if None in alive:
            return False
        gradients = []
        for block in reversed(alive):
            gradients.append(self.ask(WEIGHT, []))
            self.card.free(block)
        if not self.state:
            self.state = [self.ask(WEIGHT, STATE) for _ in range(2 * LAYERS)]
        for block in gradients:
            self.card.free(block)
        return True


def plan_of_training(**changes):
    """A plan that promises what a step of `Training` with 512 tokens takes."""
    parts = {
        Category.PARAMETER: LAYERS * WEIGHT,
        Category.OPTIMIZER_STATE: 2 * LAYERS * WEIGHT,
        Category.GRADIENT: WEIGHT,
        Category.ACTIVATION: LAYERS * ACTIVATION,
        Category.LOGITS: LOGITS_BYTES,
    }
    plan = example(**changes)
    peak = dataclasses.replace(
        plan.peak,
        allocated_bytes=sum(parts.values()),
        reserved_bytes=sum(parts.values()) + 40 * MIB,
        breakdown={str(name): size for name, size in parts.items()},
        most={str(name): size * (LAYERS if name == Category.GRADIENT else 1) for name, size in parts.items()},
    )
    tensors = [
        ("activations", "net/model.py:20", ACTIVATION, LAYERS),
        ("logits and loss", "net/model.py:40", LOGITS_BYTES, 1),
    ]
    listed = tuple(
        LiveTensor(
            category=category, name="", module="", source=source, shape=(1,), dtype="float32", size_bytes=size, count=n
        )
        for category, source, size, n in tensors
    )
    workload = dataclasses.replace(plan.workload, batch_size=1, seq_len=PLANNED_TOKENS)
    return dataclasses.replace(plan, peak=peak, tensors=listed, workload=workload)


def explained(card: Card, plan=None, **options):
    return planner.explain(card.snapshot(), plan, **options)


def trial(found, part: str):
    return next(trial for trial in found.trials if part in trial.name)


# ---- pieces ---------------------------------------------------------------------------------------------------------


def fragmented(card: Card, *, empties: bool = False) -> bool:
    """Leaves free pieces of 14 MiB between blocks that stay, and then asks for 240 MiB; False if that fails."""
    blocks = [card.malloc(30 * MIB) for _ in range(10)]
    for block in blocks:
        card.free(block)
    if empties:
        card.empty_cache()
    for _ in range(5):
        card.malloc(16 * MIB)
    return card.malloc(240 * MIB) is not None


def test_free_memory_in_pieces_is_shown_and_expandable_segments_help():
    card = Card(NATIVE, 350 * MIB)
    assert not fragmented(card)
    found = explained(card)
    assert found.is_exact and found.is_surprise
    moment = found.moment
    assert (moment.asked_bytes, moment.allocated_bytes, moment.reserved_bytes) == (240 * MIB, 80 * MIB, 150 * MIB)
    assert (moment.device_free_bytes, moment.limit_bytes) == (200 * MIB, 350 * MIB)
    (pieces,) = moment.free
    assert (pieces.total_bytes, pieces.largest_bytes, pieces.blocks) == (70 * MIB, 14 * MIB, 5)
    assert any("smaller than the limit by 30.0 MiB: memory is lost in pieces" in cause for cause in found.causes)
    expandable, emptied = trial(found, "expandable_segments:True"), trial(found, "empty_cache() before the step")
    assert {expandable, emptied} <= set(found.advice)
    assert fragmented(Card(EXPANDABLE, 350 * MIB - expandable.spare_bytes))
    assert fragmented(Card(NATIVE, 350 * MIB - emptied.spare_bytes), empties=True)
    assert found.more_memory_bytes and fragmented(Card(NATIVE, 350 * MIB + found.more_memory_bytes))
    assert not fragmented(Card(NATIVE, 350 * MIB + found.more_memory_bytes - 3 * MIB))


@pytest.mark.parametrize(
    ("stream", "size", "reason"),
    [
        (7, 60 * MIB, "belongs to stream 7, and the request is on stream 0"),
        (0, MIB, "in the pool for small requests, which serves at most 1 MiB"),
    ],
)
def test_free_memory_of_other_streams_and_of_the_small_pool_is_named(stream, size, reason):
    card = Card(NATIVE, 200 * MIB)
    blocks = [card.malloc(size, stream) for _ in range(120 * MIB // size)]
    for block in blocks[::2] if size == MIB else [blocks[0]]:
        card.free(block)
    if size != MIB:
        card.malloc(20 * MIB, stream)
    assert card.malloc(100 * MIB) is None
    assert reason in [free.reason for free in explained(card).moment.free]


def test_a_limit_of_the_process_is_named_if_the_card_had_enough_free():
    card = Card(NATIVE, 100 * MIB)
    assert card.malloc(120 * MIB) is None
    card.trace[-1]["device_free"] = 300 * MIB
    assert any("set_per_process_memory_fraction" in cause for cause in explained(card).causes)


def test_memory_that_waits_for_a_stream_and_memory_of_private_pools_are_named():
    card = Card(NATIVE, 120 * MIB)
    block = card.malloc(60 * MIB)
    card.trace.append({"action": "free_requested", "addr": block.address, "size": 60 * MIB, "stream": 0})
    assert card.malloc(100 * MIB) is None
    snapshot = card.snapshot()
    snapshot["segments"].append(snapshot["segments"][0] | {"address": 1 << 40, "segment_pool_id": (0, 1)})
    causes = "\n".join(planner.explain(snapshot).causes)
    assert "60.0 MiB were freed by the program, but another stream still uses them" in causes
    assert "60.0 MiB are in private pools" in causes


def test_memory_of_other_processes_is_named_if_the_plan_knows_the_card():
    card = Card(NATIVE, 100 * MIB)
    assert card.malloc(120 * MIB) is None
    plan = dataclasses.replace(plan_of_training(), card_bytes=1124 * MIB)
    assert any("1.00 GiB of the card belong to other processes" in cause for cause in explained(card, plan).causes)


def test_the_device_on_which_a_request_failed_is_explained():
    healthy, full = Card(NATIVE, None), Card(NATIVE, 100 * MIB)
    assert healthy.malloc(MIB) and full.malloc(120 * MIB) is None
    snapshot = healthy.snapshot()
    snapshot["device_traces"].append(full.snapshot()["device_traces"][0])
    found = planner.explain(snapshot)
    assert (found.device, found.moment.failed) == (1, True) and "devices 0, 1 have" in str(found)
    assert not planner.explain(snapshot, device=0).moment.failed


def test_no_setting_is_advised_if_tensors_exceed_the_card():
    card = Card(NATIVE, 200 * MIB)
    for _ in range(3):
        last = card.malloc(80 * MIB)
    assert last is None
    found = explained(card)
    assert not found.advice
    assert any(
        "exceed the limit by 40.0 MiB, so no setting of the allocator is enough" in cause for cause in found.causes
    )


def random_run(card: CachingAllocator, seed: int) -> bool:
    """Three hundred random requests and frees; False if one of them failed."""
    generator, live = random.Random(seed), []
    for _ in range(300):
        if generator.random() < 0.4 and live:
            card.free(live.pop(generator.randrange(len(live))))
        else:
            live.append(card.malloc(generator.randint(1, generator.choice([MIB, 10 * MIB, 60 * MIB]))))
            if live[-1] is None:
                return False
    return True


def runs_again(trace: list[dict], settings: AllocatorSettings, limit_bytes: int) -> bool:
    """True if all requests of a trace fit, also the last one, which failed."""
    allocator, live = CachingAllocator(settings, limit_bytes, card_bytes=UNKNOWN_CARD_BYTES), {}
    try:
        for event in trace:
            if event["action"] in ("alloc", "oom"):
                live[event.get("addr")] = allocator.malloc(event["size"], event["stream"])
            elif event["action"] == "free_completed":
                allocator.free(live.pop(event["addr"]))
    except OutOfMemory:
        return False
    return True


@given(seed=st.integers(0, 10**6), limit_mb=st.integers(150, 400))
@hypothesis_settings(max_examples=25, deadline=None)
def test_every_advised_option_passes_on_a_fresh_card_with_what_is_spared_less(seed, limit_mb):
    card = Card(NATIVE, limit_mb * MIB)
    if random_run(card, seed):
        return
    found = explained(card, capacity=f"{limit_mb}MiB")
    for advice in found.advice:
        option, _, value = advice.name.removeprefix("PYTORCH_ALLOC_CONF=").partition(":")
        if option in ("expandable_segments", "max_split_size_mb"):
            settings = settings_of(f"{option}:{value}")
            assert runs_again(card.trace, settings, limit_mb * MIB - advice.spare_bytes), advice
    assert runs_again(card.trace, NATIVE, limit_mb * MIB + found.more_memory_bytes)


def test_a_replay_with_the_recorded_settings_fails_where_the_record_failed():
    """Also where the order of the addresses of equal segments decides about it."""
    card, generator, live = Card(NATIVE, 400 * MIB, seed=18), random.Random(18), []
    while not live or live[-1] is not None:
        if generator.random() < 0.4 and live:
            card.free(live.pop(generator.randrange(len(live))))
        else:
            live.append(card.malloc(generator.choice([2, 12, 24, 48]) * MIB))
    assert explained(card).trials


@pytest.mark.parametrize(("seed", "part"), [(18, 2), (18, 5), (31, 3)])
def test_a_record_that_starts_in_the_middle_is_replayed_under_other_limits_of_splitting(seed, part):
    card = Card(AllocatorSettings(max_split_size_bytes=64 * MIB), 500 * MIB, seed=seed)
    assert not random_run(card, seed)
    snapshot = card.snapshot(first_event=len(card.trace) // part)
    snapshot["allocator_settings"]["max_split_size"] = 64 * MIB
    found = planner.explain(snapshot)
    assert found.is_exact and trial(found, "max_split_size_mb:") and "starts in the middle" in str(found)


HISTORIES = (
    "Constructor-Sun_memory_snapshot_b5ef67_gpu1",
    "HugePandaCoder_my_snapshot_007209",
    "NiuHuangxiaozi_forward_memory_snapshot_100_baf850",
)


@pytest.mark.parametrize("number", range(len(HISTORIES)))
def test_the_histories_of_real_cards_are_explained(shared_data, number):
    path = shared_data / "allocator_traces" / f"{HISTORIES[number]}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    found = planner.explain(path)
    assert found.is_exact and found.moment.failed == (number == 0)
    if number == 0:  # An attempt to allocate 4.94 GiB in 78.42 GiB, of which 78.29 GiB are in use.
        assert any("no setting of the allocator is enough" in cause for cause in found.causes) and not found.advice
        assert 0 <= found.more_memory_bytes - (found.moment.missing_bytes) <= 200 * MIB
    if number == 1:
        assert found.moment.retries == 1 and trial(found, "expandable_segments").spare_bytes > 2 * GIB
    if number == 2:
        assert trial(found, "expandable_segments").peak_reserved_bytes < found.moment.peak_reserved_bytes


# ---- compared with a plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_traces", [True, False])
def test_a_batch_that_is_longer_than_planned_is_found(has_traces):
    tokens = 922
    card = Card(NATIVE, 120 * MIB)
    training = Training(card, has_traces=has_traces)
    assert training.step() and not training.step(tokens)
    found = explained(card, plan_of_training())
    assert found.exceeds_plan
    text = "\n".join(found.findings)
    if has_traces:
        assert "1.80 times as large as those of the plan" in text and "samples of 922 tokens instead of the 512" in text
        assert trial(found, "as large as planned").passes
    parts = {part.purpose: part.total_bytes for part in found.parts}
    if has_traces:
        assert parts["parameters"] == LAYERS * WEIGHT and parts["optimizer state"] == 2 * LAYERS * WEIGHT
    else:
        assert parts["from before the step, such as parameters"] == 3 * LAYERS * WEIGHT


def test_logits_that_an_evaluation_keeps_are_named_by_their_place():
    card = Card(NATIVE, 170 * MIB)
    training = Training(card)
    assert training.step() and training.step()
    for _ in range(5):
        training.ask(LOGITS_BYTES, EVALUATION)
    assert not training.step()
    found = explained(card, plan_of_training())
    kept = next(part for part in found.parts if part.purpose == "evaluation, generation and saving")
    assert (kept.total_bytes, kept.planned_bytes) == (5 * LOGITS_BYTES, 0)
    assert any("evaluate (evaluate.py:12)" in finding for finding in found.findings)
    assert trial(found, "evaluate.py:12").passes
    moments = tuple(
        RunMoment(name=name, tensor_bytes=size, new_bytes=0)
        for name, size in (("training step", 40 * MIB), ("evaluation", 3 * LAYERS * WEIGHT + 5 * LOGITS_BYTES))
    )
    facts = RunFacts(
        steps=9, shapes=1, lengths=(512, 512), samples=(8, 8), order="",
        predicted_shapes=0, total_bytes=500 * MIB, settled=2,
        retries=0, fits=True, binding="evaluation", moments=moments, changes=(),
    )  # fmt: skip
    found = explained(card, dataclasses.replace(plan_of_training(), run=facts))
    planned = [part.planned_bytes for part in found.parts if part.purpose == "evaluation, generation and saving"]
    assert planned == [5 * LOGITS_BYTES] and not any("no such tensors" in finding for finding in found.findings)


def test_what_each_step_leaves_behind_is_found_although_only_the_first_update_allocates():
    card = Card(NATIVE, 220 * MIB)
    training, steps = Training(card), 0
    while training.step():
        training.ask(8 * MIB, LINEAR)
        steps += 1
    found = explained(card, plan_of_training())
    kept = next(part for part in found.parts if part.purpose == "kept from before the step")
    assert steps > 10 and (kept.total_bytes, kept.planned_bytes) == ((steps - 1) * 8 * MIB, 0)
    assert trial(found, "kept from before the step: forward (model.py:20)").passes


def test_a_run_like_its_plan_is_no_surprise():
    card = Card(NATIVE, None)
    training = Training(card)
    assert training.step() and training.step()
    found = explained(card, plan_of_training())
    assert not found.is_surprise and found.findings[-1] == "no more is allocated than planned"
    training.has_traces = False
    assert training.step(2 * PLANNED_TOKENS)
    without_tensors = dataclasses.replace(plan_of_training(), tensors=())
    assert explained(card, without_tensors).exceeds_plan


def test_a_run_without_the_options_of_the_plan_is_found():
    card = Card(NATIVE, 120 * MIB)
    training = Training(card)
    assert training.step() and not training.step(2000)
    found = explained(card, dataclasses.replace(plan_of_training(), decisions=(Allocator(expandable_segments=True),)))
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True, but the run" in finding for finding in found.findings)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_without_history_says_what_is_in_the_segments():
    card = Card(NATIVE, None)
    card.free(card.malloc(80 * MIB))
    card.malloc(30 * MIB)
    snapshot = card.snapshot()
    snapshot["device_traces"] = [[], []]
    found = planner.explain(snapshot)
    assert found.moment.event is None and not found.trials
    assert (found.moment.allocated_bytes, found.moment.reserved_bytes) == (30 * MIB, 80 * MIB)
    assert found.groups[0].place == "step (train.py:1)"
    card.frames = [("\x1b[2J", "train.py", 1)]
    card.malloc(90 * MIB)
    assert "\x1b" not in str(explained(card)) and "?[2J (train.py:1)" in str(explained(card))
    assert "no events" in str(found)


class Malicious:
    """Unpickling it would create a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_command_prints_the_explanation_or_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    card = Card(NATIVE, 350 * MIB)
    fragmented(card)
    whole = pickle.dumps(card.snapshot())
    (tmp_path / "ok.pickle").write_bytes(whole)
    plan_of_training().save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "ok.pickle"), str(tmp_path / "plan.json")]) == 1
    assert "expandable_segments:True" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "ok.pickle"), "--json"]) == 1
    assert '"is_surprise": true' in capsys.readouterr().out
    victim = tmp_path / "victim"
    for content in (
        whole[: len(whole) // 2],
        pickle.dumps([1, 2]),
        pickle.dumps({"segments": 3, "device_traces": [[]]}),
        pickle.dumps({"segments": [], "device_traces": []}),
        pickle.dumps(Malicious(str(victim))),
        b"",
    ):
        (tmp_path / "bad.pickle").write_bytes(content)
        assert main(["explain", str(tmp_path / "bad.pickle")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("plan: '") and "bad.pickle" in line
    assert not victim.exists()
    good = str(tmp_path / "ok.pickle")
    for wrong in (
        ["explain"],
        ["explain", "a", "b", "c"],
        ["explain", good, "no.json"],
        ["explain", good, "--device", "3"],
        ["explain", good, "--capacity", "100MiB"],  # less than was reserved
    ):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
