"""Questions other than the plan for a budget: only these techniques, how slow, how large a batch, which card."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable

import pytest
import torch

import planner
from planner import profiles
from planner.cli import main
from planner.errors import DecisionError, TimeLimitError
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.plan import Plan
from planner.plan_types.techniques import KINDS
from planner.progress import Progress, Watch
from planner.questions.batch_needs import BatchNeeds
from planner.questions.largest_batch import _largest_batch, largest_batch
from planner.questions.smallest_card import smallest_card
from planner.search.largest_within import largest_within
from planner.workload import cards
from planner.workload.loading import load_workload
from planner.workload.workload import Workload, workload
from tests.support.workloads import BARE

pytestmark = pytest.mark.slow

MODEL = """
import torch

def build(batch_size=2048):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))
    return model, (torch.zeros(batch_size, 64), torch.zeros(batch_size, 4)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])

def normed(batch_size=32):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    return model, (torch.zeros(batch_size, 64), torch.zeros(batch_size, 4)), loss

class InThrees(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, 3, 64)).flatten(0, 1)

def in_threes(batch_size=6):
    return InThrees(64, 4), (torch.zeros(batch_size, 64), torch.zeros(batch_size, 4)), loss

def huge():
    return torch.nn.Linear(200_000, 200_000, bias=False), (torch.zeros(1, 200_000), torch.zeros(1, 200_000)), loss
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cards, "_present_card", lambda: None)
    return tmp_path


def run(*arguments: str, capsys) -> tuple[int, dict]:
    code = main(["net.py:build", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def planned(**options):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model, batch = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4)), (torch.zeros(2048, 64), torch.zeros(2048, 4))

    def loss(output, batch):
        return torch.nn.functional.mse_loss(output, batch[-1])

    return planner.plan(model, batch, loss_fn=loss, gpu="bare", **options)


# ---- only these --------------------------------------------------------------------------------------------------


def test_only_forbids_everything_else(folder, capsys):
    code, data = run("--gpu", "bare", "--vram", "4MiB", "--only", "checkpoint,accumulation", capsys=capsys)
    assert code == 0
    assert {decision["kind"] for decision in data["decisions"]} <= {"checkpoint", "accumulation"}
    assert set(data["forbidden"]) == set(KINDS) - {"checkpoint", "accumulation", "shard"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "checkpoint", "forbid": "checkpoint"}, "'checkpoint' is forbidden, but 'only' allows it"),
        ({"only": "checkpoint", "force": "accumulation"}, "'accumulation' is forced, but 'only' does not name it"),
        ({"only": ["magic"]}, "'magic' is unknown"),
        ({"max_slowdown": -1.0}, "maximum slowdown -1.0 is not a number above 0"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(DecisionError, match=message):
        planned(vram="1GiB", **options)


# ---- how slow ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_limit_of_the_slowdown_is_kept_or_said_to_be_impossible_with_the_numbers(folder, capsys):
    whole = planned(vram=None).baseline.total_bytes
    vram = int(0.6 * whole)
    free = planned(vram=vram, fidelity="exact")
    assert free.fits and free.slowdown > 1.02
    kept = planned(vram=vram, fidelity="exact", max_slowdown=free.slowdown + 0.01)
    assert kept.fits and kept.slowdown <= free.slowdown + 0.01
    arguments = ("--gpu", "bare", "--vram", str(vram), "--fidelity", "exact", "--max-slowdown", "1.01")
    code, data = run(*arguments, capsys=capsys)
    assert code == 1
    assert data["slowdown"] > 1.01 == data["max_slowdown"]
    assert data["plan"]["total_bytes"] <= vram
    assert data["shortfall"]["missing_bytes"] == 0
    assert Plan.from_json(data).to_json() | {"seconds": data["seconds"]} == data
    main(["net.py:build", *arguments])
    assert "and at most 1.01 x is allowed" in " ".join(capsys.readouterr().out.split())


# ---- how large a batch -------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_largest_batch_fits_and_one_sample_more_does_not(folder, capsys):
    arguments = ("--gpu", "bare", "--vram", "1MiB", "--fidelity", "exact")
    code, data = run(*arguments, "--largest-batch", capsys=capsys)
    samples = data["workload"]["batch_size"]
    note = data["notes"][0]
    assert code == 0 and data["fits"]
    assert note.startswith(f"largest batch without accumulation: {samples:,} samples fit")
    above = int(note.split("no plan was found for ")[1].replace(",", ""))
    assert samples < above <= samples + 1 + samples // 64
    alone = ("--forbid", "accumulation")
    assert run(*arguments, *alone, "--batch-size", str(samples), capsys=capsys)[0] == 0
    assert run(*arguments, *alone, "--batch-size", str(above), capsys=capsys)[0] == 1


@pytest.mark.thorough
def test_where_no_sample_fits_the_shortfall_of_a_single_one_is_reported(folder, capsys):
    code, data = run("--gpu", "bare", "--vram", "300KiB", "--fidelity", "exact", "--largest-batch", capsys=capsys)
    assert (code, data["workload"]["batch_size"]) == (1, 1)
    assert data["shortfall"]["missing_bytes"] > 0


@pytest.mark.parametrize("sample_bytes", [1, 7, 1000])
@pytest.mark.parametrize("limit_bytes", [0, 500, 501, 12_345, 99_999])
def test_the_largest_number_within_a_limit_is_found_in_few_questions(sample_bytes, limit_bytes):
    asked = []

    def needed(number: int) -> int:
        asked.append(number)
        return 500 + sample_bytes * number + number // 9  # nearly affine

    low, high = largest_within(needed, limit_bytes=limit_bytes, first=[64], most=1 << 12)
    assert high - low <= max(1, low // 64)
    assert low == 0 or needed(low) <= limit_bytes
    assert high == (1 << 12) + 1 or needed(high) > limit_bytes
    assert len(asked) <= 14 and len(set(asked)) >= len(asked) - 2


def test_below_64_samples_not_one_more_would_fit_however_the_bytes_grow():
    for largest in range(64):
        for needed in (lambda number: number**2, lambda number: number**3, lambda number: -(-number // 5)):
            low, high = largest_within(needed, limit_bytes=needed(largest), first=[16], most=1 << 10)
            assert high == low + 1 and needed(low) <= needed(largest) < needed(high)


@pytest.mark.parametrize("limit_bytes", [10_000, 10_239, 20_480, 50_000])
def test_steps_of_an_allocator_do_not_send_the_question_to_the_largest_number(limit_bytes):
    asked = []

    def needed(number: int) -> int:
        asked.append(number)
        return 10_240 * -(-number // 40)  # whole segments

    low, high = largest_within(needed, limit_bytes=limit_bytes, first=[64], most=1 << 20)
    assert (low, high) == (40 * (limit_bytes // 10_240), 40 * (limit_bytes // 10_240) + 1) or high - low <= low // 64
    assert max(asked) <= 4 * max(high, 64)


class PlansFitAbove:
    """As soon as a plan fits, the known decisions need 9.95 bytes for each sample instead of 10.

    A batch with a plan needs 6700 bytes.
    """

    usable_bytes = 6705

    def __init__(self) -> None:
        self.rehearsed: set[int] = set()
        self.fitting: set[int] = set()

    def total_bytes(self, samples: int) -> int:
        self.rehearsed.add(samples)
        return 6700 if samples in self.fitting else samples * (995 if self.fitting else 1000) // 100

    def begin(self, samples: int) -> int:
        self.total_bytes(samples)
        return 1

    def plan(self, samples: int) -> str | None:
        if samples <= 700:
            self.fitting.add(samples)
            return "a plan"
        return None

    def sizes_that_fit(self) -> list[int]:
        return [samples for samples in self.rehearsed if self.total_bytes(samples) <= self.usable_bytes]


def test_the_search_goes_on_from_the_largest_batch_for_which_a_plan_was_found():
    needs = PlansFitAbove()
    samples, too_many = _largest_batch(needs)
    assert samples == max(needs.fitting) <= 700 < too_many <= samples + 1 + samples // 64
    assert len(needs.fitting) < 5


def test_numbers_that_all_need_the_same_are_not_searched_one_by_one():
    asked = []

    def needed(number: int) -> int:
        asked.append(number)
        if number == 64:  # so that the line through this point and any other one is steep
            return 999
        return 900 if number <= 6246 else 2000

    low, high = largest_within(needed, limit_bytes=1000, first=[64], most=1 << 20)
    assert low <= 6246 < high <= low + low // 64
    assert len(asked) < 32


def test_a_single_number_that_needs_more_than_others_does_not_hide_them():
    needs = {1: 10, **dict.fromkeys(range(2, 90), 5), **dict.fromkeys(range(90, 100), 10)}
    low, high = largest_within(needs.__getitem__, limit_bytes=7, first=[64], most=99)
    assert (low, high) == (89, 90)


def squares(output, batch):
    return output.square().mean()


def searched(function: str, interrupt: Callable[[BatchNeeds, Watch], object], watch: Watch, monkeypatch) -> Plan:
    """Returns the plan for the largest batch. Before the first call of a method of `BatchNeeds`, calls `interrupt`."""
    method, calls = getattr(BatchNeeds, function), itertools.count()

    def interrupted(needs, samples):
        if next(calls) == 0:
            interrupt(needs, watch)
        return method(needs, samples)

    def build(samples: int) -> Workload:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
        return workload(model, torch.zeros(samples, 64), loss_fn=squares)

    monkeypatch.setattr(BatchNeeds, function, interrupted)
    constraints = parse_constraints(fidelity="exact", force=(), forbid=())
    return largest_batch(build, BARE, vram_bytes=1 << 20, constraints=constraints, watch=watch)


def test_if_the_time_is_up_the_largest_batch_that_is_known_to_fit_is_certified(monkeypatch):
    fitting, stages = [], []

    def interrupt(needs: BatchNeeds, watch: Watch) -> None:
        fitting.extend(needs.sizes_that_fit())
        watch.end()

    plan = searched("plan", interrupt, Watch(report=lambda progress: stages.append(progress.stage)), monkeypatch)
    assert stages[:2] == ["searching for the largest batch", "searching for the largest batch: loading the model"]
    assert f"at least {max(fitting):,} samples fit: rehearsing the step" in stages
    assert stages[-1] == f"certifying a plan for {max(fitting):,} samples: rehearsing the step"
    assert plan.fits and plan.workload.batch_size == max(fitting) > 64
    assert plan.notes[0].startswith("planning ended by Ctrl-C after ")
    assert plan.notes[0].endswith(f" s: {max(fitting):,} samples fit, and a larger batch may fit, too")
    assert plan.solver.status == "time limit" and plan.solver.promised_bytes == plan.solver.certified_bytes


def test_if_the_time_is_up_before_a_batch_is_known_to_fit_there_is_no_plan(monkeypatch):
    with pytest.raises(TimeLimitError, match=r"planning ended by Ctrl-C after .* before any plan was certified"):
        searched("_search", lambda _, watch: watch.end(), Watch(), monkeypatch)


def test_time_is_left_to_certify_the_largest_batch_until_it_has_a_plan(monkeypatch):
    found = []

    def interrupt(needs: BatchNeeds, watch: Watch) -> None:
        needs._rehearsal_seconds = 100.0
        found.append((needs, watch.left_seconds))

    plan = searched("plan", interrupt, Watch(seconds=1000), monkeypatch)
    ((needs, left_seconds),) = found
    assert 0 < left_seconds < 1000 - 3 * 100
    assert needs.seconds_to_certify == 0 and plan.notes[0].startswith("largest batch without accumulation: ")


@pytest.mark.thorough
def test_a_model_that_refuses_a_single_sample_begins_at_two(folder, capsys):
    arguments = ("--gpu", "bare", "--vram", "200KiB", "--fidelity", "exact")
    assert main(["net.py:normed", *arguments, "--largest-batch", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["workload"]["batch_size"]
    above = samples + 1 + samples // 64
    assert main(["net.py:normed", *arguments, "--batch-size", str(above), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["baseline"]["total_bytes"] > 200 << 10
    assert main(["net.py:normed", "--gpu", "bare", "--vram", "30KiB", "--largest-batch", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["workload"]["batch_size"] == 2


@pytest.mark.thorough
def test_a_card_that_is_smaller_than_the_budget_limits_the_batch(folder, capsys, monkeypatch):
    card = dataclasses.replace(profiles.load("rtx-2060"), vram_bytes=200 << 20)
    monkeypatch.setattr(profiles, "load", lambda name: card)
    code, data = run("--gpu", "rtx-2060", "--vram", "1GiB", "--fidelity", "exact", "--largest-batch", capsys=capsys)
    assert code == 0 and data["fits"]
    assert data["plan"]["total_bytes"] <= 200 << 20


def test_a_model_that_refuses_a_batch_size_is_refused_with_this_size(folder, capsys):
    assert main(["net.py:in_threes", "--gpu", "bare", "--vram", "1MiB", "--largest-batch", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "the largest batch cannot be found, because the step fails with 64 samples: " in message
    assert "plan for each of them with --batch-size" in message


@pytest.mark.parametrize("name", ["accumulation", "freeze"])
def test_what_the_largest_batch_is_asked_without_cannot_be_forced(folder, capsys, name):
    arguments = ("--vram", "1MiB", "--fidelity", "partial", "--force", name, "--largest-batch")
    code, data = run("--gpu", "bare", *arguments, capsys=capsys)
    assert code == 2
    assert f"the search for the largest batch does not use {name}" in data["error"]["message"]


@pytest.mark.thorough
def test_frozen_prefixes_make_no_batch_fit_that_is_said_to_be_the_largest(folder, capsys):
    arguments = ("--gpu", "bare", "--vram", "150KiB", "--fidelity", "partial")
    code, data = run(*arguments, "--largest-batch", capsys=capsys)
    assert (code, data["fits"], data["workload"]["batch_size"]) == (1, False, 1)
    assert {one["relax"]: one["opens"] for one in data["shortfall"]["relaxations"]}["allow freeze"]


# ---- which card --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_smallest_card_is_one_of_the_known_cards_with_the_least_memory(folder, capsys):
    code, data = run("--batch-size", "64", "--smallest-card", capsys=capsys)
    known = {name: profiles.load(name).vram_bytes for name in profiles.known()}
    assert code == 0 and data["fits"]
    assert known[data["card"]] == min(known.values()) == data["vram_bytes"]
    assert data["notes"][0].startswith("smallest card: ")


def test_if_the_time_is_up_before_a_card_is_found_the_message_says_how_many_were_tried():
    with torch.device("meta"):
        model, batch = torch.nn.Linear(200_000, 40_000, bias=False), torch.zeros(1, 200_000)
    stages: list[str] = []

    def report(progress: Progress) -> None:
        stages.append(progress.stage)
        if progress.stage.endswith(": rehearsing the step"):
            watch.end()

    watch, constraints = Watch(report=report), parse_constraints(fidelity="exact", force=(), forbid=())
    smaller = sum(profiles.load(name).vram_bytes < 4 * 200_000 * 40_000 for name in profiles.known())
    with pytest.raises(TimeLimitError) as caught:
        smallest_card(workload(model, batch, loss_fn=squares), constraints, watch)
    assert str(caught.value).startswith("planning ended by Ctrl-C after ")
    assert f"; no plan fits the {smaller} cards tried before it; let it run longer, or name a" in str(caught.value)
    assert re.fullmatch(rf"card {smaller + 1} of \d\d, .*: rehearsing the step", stages[-1])


@pytest.mark.thorough
def test_where_no_card_will_do_the_largest_one_says_what_is_missing(folder, capsys):
    code = main(["net.py:huge", "--fidelity", "exact", "--smallest-card", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == 1
    assert data["vram_bytes"] == max(profiles.load(name).vram_bytes for name in profiles.known())
    assert data["shortfall"]["missing_bytes"] > 0
    assert data["notes"][0].startswith("none of ")


# ---- what would open a budget ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_each_thing_that_is_not_allowed_is_said_to_open_the_budget_or_not(folder, capsys):
    forbidden = ("--forbid", "accumulation,checkpoint,chunked-loss")
    code, data = run("--gpu", "bare", "--vram", "4MiB", "--fidelity", "exact", *forbidden, capsys=capsys)
    relaxations = {one["relax"]: one for one in data["shortfall"]["relaxations"]}
    assert code == 1
    tried = ["allow chunked-loss", "allow accumulation", "allow checkpoint", "--fidelity rounded"]
    assert list(relaxations) == [*tried, "--batch-size 1024"]
    assert (relaxations["allow chunked-loss"]["opens"], relaxations["allow chunked-loss"]["next_step"]) == (False, None)
    assert (
        relaxations["allow chunked-loss"]["why"]
        == "the technique cannot be used for this model, batch, optimizer or card"
    )
    opened = [one["next_step"] for label, one in relaxations.items() if one["opens"] and label in tried]
    assert opened and all(step["total_bytes"] <= 4 << 20 for step in opened)
    assert data["shortfall"]["next_step"] == min(opened, key=lambda step: step["slowdown"])
    assert Plan.from_json(data).to_json() | {"seconds": data["seconds"]} == data


@pytest.mark.thorough
def test_what_is_said_to_open_the_budget_does(folder, capsys):
    arguments = ("--gpu", "bare", "--vram", "4MiB", "--fidelity", "exact")
    names = ("accumulation", "checkpoint")
    data = run(*arguments, "--forbid", ",".join(names), capsys=capsys)[1]
    relaxations = {one["relax"]: one["opens"] for one in data["shortfall"]["relaxations"]}
    for allowed, other in itertools.permutations(names):
        code, plan = run(*arguments, "--forbid", other, capsys=capsys)
        assert plan["fits"] == relaxations[f"allow {allowed}"] == (code == 0)


def test_a_saved_plan_refuses_questions(folder, capsys):
    run("--gpu", "bare", "--vram", "1GiB", "--save", "p.json", capsys=capsys)
    for question in ("--tradeoff", "--smallest-card", "--only=checkpoint"):
        assert main(["p.json", "--trust-reference", question]) == 2
        assert "cannot be combined with a saved plan" in capsys.readouterr().err


def test_a_model_that_ignores_the_batch_size_is_given_other_batches(folder):
    assert load_workload("net.py:huge", batch_size=3, seq_len=None, optimizer="adamw").batch_size == 3


# ---- advice where nothing fits ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_shorter_sequence_a_smaller_batch_and_a_larger_card_are_offered_where_a_plan_was_found(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    words = [str(tmp_path), "--gpu", "rtx-2060", "--only", "optimizer-kernel", "--batch-size", "8", "--json"]
    assert main([*words, "--seq-len", "1024"]) == 0
    whole = json.loads(capsys.readouterr().out)["baseline"]["total_bytes"]
    assert main([*words, "--seq-len", "512"]) == 0
    half = json.loads(capsys.readouterr().out)["baseline"]["total_bytes"]
    assert main([*words, "--seq-len", "1024", "--vram", f"{(whole + half) // 2}B"]) == 1
    data = json.loads(capsys.readouterr().out)
    rows = {row["relax"]: row for row in data["shortfall"]["relaxations"]}
    for label in ("--seq-len 512", "--batch-size 4"):
        assert rows[label]["opens"] and rows[label]["next_step"]["total_bytes"] <= data["vram_bytes"]
    assert "--seq-len 256" not in rows  # the first that fits is enough
    assert any(label.startswith("another card: --gpu ") for label in rows)
