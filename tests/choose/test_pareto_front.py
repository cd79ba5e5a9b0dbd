"""The trade-off: certified plans from the fastest to the smallest, none of them both larger and slower than another."""

from __future__ import annotations

import itertools
import json
import math
import time
import xml.etree.ElementTree as xml

import pytest
import torch

import planner
from planner.choose import fitting
from planner.choose.chooser import Chooser
from planner.cli import main
from planner.cli.tradeoff_svg import front_svg
from planner.errors import DecisionError, TimeLimitError
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import MIB
from planner.progress import TimeIsUp
from planner.rewrite import certify
from planner.virtual_gpu.forked_process import Child
from planner.workload import cards

pytestmark = pytest.mark.slow

MODEL = """
import torch

def build(batch_size=2048):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4))
    return model, (torch.zeros(batch_size, 64), torch.zeros(batch_size, 4)), loss

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])
"""
SVG = "{http://www.w3.org/2000/svg}"


def deep() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 4)), (torch.zeros(2048, 64), torch.zeros(2048, 4))


EXACT = {"fidelity": "exact", "forbid": "optimizer-kernel"}
"""With a fused optimizer no plan is the step as it is, which is slower."""


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


def late(session, space, constraints):
    raise TimeIsUp


def traded(**options):
    return planner.tradeoff(*deep(), loss_fn=mean_square, gpu="bare", **{**EXACT, **options})


@pytest.fixture(scope="module")
def exact():
    return traded(seconds=300)  # the default may be too short on a loaded machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cards, "_present_card", lambda: None)
    return tmp_path


# ---- the front ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_less_memory_never_comes_with_a_faster_plan(exact):
    assert exact.complete and len(exact.points) >= 5
    for larger, smaller in itertools.pairwise(exact.points):
        assert smaller.peak.total_bytes < larger.peak.total_bytes
        assert smaller.peak.step_ns > larger.peak.step_ns


@pytest.mark.thorough
def test_it_goes_from_the_step_as_it_is_to_the_smallest_plan(exact):
    assert exact.points[0].decisions == ()
    assert exact.points[0].peak.total_bytes == exact.baseline.total_bytes
    smallest = planner.plan(*deep(), vram=1, loss_fn=mean_square, gpu="bare", **EXACT)
    assert exact.points[-1].peak.total_bytes == smallest.peak.total_bytes


@pytest.mark.thorough
def test_every_point_is_a_plan_that_keeps_its_promise_when_it_is_rehearsed_again(exact):
    model, batch = deep()
    for plan in exact.points[1::3]:
        again = certify(plan, model, batch, loss_fn=mean_square)
        assert plan.certified and plan.fits and again.fits
        assert again.footprint == plan.peak


@pytest.mark.thorough
def test_no_point_is_slower_than_the_plan_for_its_total(exact):
    for point in exact.points[1::3]:
        plan = planner.plan(*deep(), vram=point.peak.total_bytes, loss_fn=mean_square, gpu="bare", **EXACT)
        assert plan.fits
        assert point.peak.step_ns <= 1.05 * plan.peak.step_ns  # a tie


@pytest.mark.thorough
def test_the_point_at_a_budget_is_the_plan_for_it(exact):
    vram = int(0.55 * exact.baseline.total_bytes)
    marked = traded(vram=vram).chosen
    plan = planner.plan(*deep(), vram=vram, loss_fn=mean_square, gpu="bare", **EXACT)
    assert marked.peak.total_bytes <= vram
    assert marked.peak.step_ns <= plan.peak.step_ns


def test_points_keep_to_the_rules():
    found = traded(only="checkpoint", max_slowdown=1.1)
    assert len(found.points) >= 3
    assert {decision.kind for plan in found.points for decision in plan.decisions} == {"checkpoint"}
    assert all(plan.slowdown <= 1.1 for plan in found.points)


def test_with_little_time_certified_plans_are_there_and_the_rest_is_said_to_be_missing(exact):
    began = time.monotonic()
    found = traded(seconds=2)
    assert time.monotonic() - began < 4
    assert found.points and all(plan.certified for plan in found.points)
    assert found.complete or len(found.points) <= len(exact.points)
    assert found.points[0].peak == exact.points[0].peak


@pytest.mark.parametrize("name", ["choice_with_smallest_promise", "smallest"])
def test_small_plans_are_found_before_the_search_for_the_smallest_one(exact, folder, monkeypatch, capsys, name):
    monkeypatch.setattr(fitting, name, late)
    found = traded()
    assert not found.complete
    assert found.points[-1].peak.total_bytes < 0.7 * exact.baseline.total_bytes
    assert len(found.points) >= 4
    _, text, _ = run("--tradeoff", capsys=capsys)
    assert "The smallest plan that was found in time takes" in " ".join(text.split())


def test_a_search_looks_only_for_plans_that_are_faster_than_a_smaller_one(monkeypatch):
    limits, fastest = [], Chooser.fastest

    def noting(self, budget, *, below_ns=math.inf):
        found = fastest(self, budget, below_ns=below_ns)
        limits.append((budget, below_ns, found))
        return found

    monkeypatch.setattr(Chooser, "fastest", noting)
    monkeypatch.setattr(fitting, "smallest", late)  # it makes searches of its own
    traded()
    assert sum(found is not None for _, _, found in limits) > 4
    for number, (budget, below_ns, _) in enumerate(limits):
        smaller = [choice.step_ns for _, _, choice in limits[:number] if choice and choice.peak_bytes <= budget]
        assert below_ns <= min(smaller, default=math.inf)
    assert any(below_ns < math.inf for _, below_ns, _ in limits)


def test_with_no_time_it_says_that_nothing_was_certified():
    with pytest.raises(TimeLimitError, match=r"planning ended after the time limit of 0.001 s before any plan"):
        traded(seconds=1e-3)


@pytest.mark.thorough
def test_a_real_allocator_is_counted_and_a_named_card_marks_what_it_has():
    found = planner.tradeoff(*deep(), loss_fn=mean_square, gpu="rtx-3060-12gb", **EXACT, vram="1GiB")
    assert found.points[0].decisions == ()
    assert found.chosen is found.points[0]
    totals = [plan.peak.total_bytes for plan in found.points]
    assert totals == sorted(set(totals), reverse=True)


def test_freezing_cannot_be_forced_and_this_is_said_before_a_rehearsal(monkeypatch):
    monkeypatch.setattr(Child, "__init__", lambda *_, **__: pytest.fail("a rehearsal is started"))
    with pytest.raises(DecisionError, match="do not force freeze"):
        traded(fidelity="partial", force="freeze")


def test_a_name_with_quotes_and_brackets_is_drawn_as_it_is():
    model, batch = deep()
    model.__class__ = type('A<b>&"c"', (torch.nn.Sequential,), {})
    found = planner.tradeoff(model, batch, loss_fn=mean_square, gpu="bare", fidelity="exact", seconds=3)
    root = xml.fromstring(front_svg(found))
    assert root.get("aria-label").startswith('A<b>&"c", batch 2048')
    assert "<b>A&lt;b&gt;&amp;&quot;c&quot; " in found.as_it_is._repr_html_()


@pytest.mark.thorough
def test_the_smallest_point_is_no_slower_than_the_plan_for_its_total():
    """Without recompute the smallest promise has the most micro-batches; the allocator gives fewer as many segments."""
    options = {"loss_fn": mean_square, "gpu": "rtx-3060-12gb", "fidelity": "exact", "only": "accumulation"}
    smallest = planner.tradeoff(*deep(), **options).points[-1]
    plan = planner.plan(*deep(), vram=smallest.peak.total_bytes, **options)
    assert smallest.peak.step_ns <= 1.05 * plan.peak.step_ns


# ---- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    code = main(["net.py:build", "--gpu", "bare", "--fidelity", "exact", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.thorough
def test_the_command_prints_a_row_a_plan_and_draws_it(folder, capsys):
    code, text, _ = run("--tradeoff", "--vram", "2MiB", "--svg", "front.svg", capsys=capsys)
    assert code == 0
    for words in ("Memory against step time", "baseline", "fits:", "the fastest plan inside 2.0 MiB"):
        assert words in " ".join(text.split())
    root = xml.parse(folder / "front.svg").getroot()
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"baseline", "budget 2.0 MiB", "predicted step time (ms)"} <= set(words)
    assert "total memory of the process (MiB)" in words
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


@pytest.mark.thorough
def test_json_holds_plans_that_can_be_loaded_and_which_of_them_fits(folder, capsys):
    code, out, _ = run("--tradeoff", "--vram", "2MiB", "--json", capsys=capsys)
    data = json.loads(out)
    plans = [Plan.from_json(point) for point in data["points"]]
    assert code == 0 and data["fits"]
    assert plans[data["chosen"]].peak.total_bytes <= 2 * MIB < plans[data["chosen"] - 1].peak.total_bytes
    assert data["baseline"]["total_bytes"] == plans[0].baseline.total_bytes


@pytest.mark.thorough
def test_a_budget_below_the_smallest_plan_exits_with_one(folder, capsys):
    code, text, _ = run("--tradeoff", "--vram", "100KiB", capsys=capsys)
    assert code == 1
    assert "the budget is 100.0 KiB" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--tradeoff", "--emit", "step.py"), "--emit cannot be combined with --tradeoff"),
        (("--svg", "front.svg"), "--svg works only with --tradeoff"),
        (("--seconds", "3"), "--seconds works only with --tradeoff"),
        (("--tradeoff", "--seconds", "0"), "'0' is not a number above 0"),
        (("--tradeoff", "--smallest-card"), "not allowed with"),
        (("--tradeoff", "--svg", "net.py"), "'net.py' exists and is not a picture"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, capsys, arguments, reported):
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert reported in err
