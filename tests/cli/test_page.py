"""The page of `--report`: its data is the recording's, to the byte, and it draws in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from importlib import resources
from itertools import accumulate

import numpy as np
import pytest
import torch

from planner import pipeline
from planner.cli.page import page as page_module
from planner.cli.page.outputs import write_snapshots
from planner.cli.page.page import page, page_data
from planner.cli.page.recorded import PlanRecordings, Recorded, rehearse_stages
from planner.cli.page.timeline import STACK, recording_data
from planner.estimate.footprint import measure
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.decisions import Accumulation
from planner.plan_types.plan import Plan
from planner.plan_types.recompute_decisions import Checkpoint
from planner.plan_types.sizes import MIB
from planner.recording.step_graph import Category
from planner.snapshot import load, replay_history
from planner.workload.workload import workload
from tests.support.workloads import BARE, CARD, certifying_graph, layers_of_similar_widths

SAMPLES, WIDTH = 512, 256
DECISIONS = (
    Accumulation(micro_batch_size=SAMPLES // 4, micro_batches=4),
    Checkpoint(modules=("0",)),
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome, which is not installed")


def mean_square(output, batch):
    return torch.nn.functional.mse_loss(output, batch[-1])


def small_work():
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 8))
    return workload(model, (torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, 8)), loss_fn=mean_square)


def recorded(work, card, decisions=()) -> Recorded:
    graph = pipeline.record_step(work, card, decisions)
    return Recorded(graph, card, measure(graph, card, vram_bytes=None, decisions=decisions).footprint, decisions)


@pytest.fixture(scope="module")
def plan_and_recordings():
    """A plan with decisions of a test's choice, and its recordings."""
    work = small_work()
    constraints = parse_constraints(fidelity="exact", force=(), forbid=(), only=None, max_slowdown=None)
    plan = pipeline.plan_workload(work, CARD, vram_bytes=None, constraints=constraints)
    recordings = PlanRecordings(
        workload=work, card=CARD, baseline=recorded(work, CARD), planned=recorded(work, CARD, DECISIONS)
    )
    peak = recordings.planned.footprint
    plan = dataclasses.replace(plan, vram_bytes=1 << 30, peak=peak, decisions=DECISIONS)
    return plan, recordings


def bytes_by_category(data: dict) -> dict[str, np.ndarray]:
    """Adds up the data of a recording as the page does: for each category the bytes in each moment."""
    unit, moments, storages = data["unit_bytes"], data["moments"], data["storages"]
    count = len(moments["tick"])
    births = list(accumulate(storages["birth"]))
    found = {str(category): np.zeros(count, dtype=np.int64) for category in STACK}
    for size, category, birth, life in zip(
        storages["size"], storages["category"], births, storages["life"], strict=True
    ):
        found[STACK[category]][birth : birth + life] += size * unit
    live = sum(found.values())
    for category, size in data["outside_bytes"].items():
        found[category] += size
    found[Category.SLACK] = np.array(list(accumulate(moments["reserved"]))) * unit - live
    return found


def bytes_of_recording(recording: Recorded, ticks: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the same from the recording, one category at a time."""
    graph, unit = recording.graph, 512 if recording.card.allocator else 1
    found = {}
    for category in STACK:
        storages = [storage for storage in graph.storages if storage.category is category]
        found[str(category)] = dataclasses.replace(graph, storages=storages).live_bytes(granularity_bytes=unit)[ticks]
    found[Category.CONTEXT] = np.full(len(ticks), recording.card.context_bytes)
    found[Category.NCCL] = np.full(len(ticks), recording.card.nccl_bytes)
    found[Category.SLACK] = (recording.reserved_bytes - graph.live_bytes(granularity_bytes=unit))[ticks]
    return found


def assert_equal_bytes(data: dict, recording: Recorded) -> None:
    ticks = np.array(list(accumulate(data["moments"]["tick"])))
    shown, expected = bytes_by_category(data), bytes_of_recording(recording, ticks)
    for category in STACK:
        assert shown[category].tolist() == expected[category].tolist(), category


@pytest.mark.parametrize("name", ["baseline", "planned"])
def test_the_pages_bytes_are_those_of_the_recording_in_every_moment(plan_and_recordings, name):
    recording = getattr(plan_and_recordings[1], name)
    data = json.loads(json.dumps(recording_data(recording)))
    assert_equal_bytes(data, recording)
    ticks = set(accumulate(data["moments"]["tick"]))
    live = recording.graph.live_bytes()
    assert {tick for tick in range(1, len(live)) if live[tick] != live[tick - 1]} <= ticks
    assert data["steps"][-1][1] == len(ticks)


@pytest.mark.parametrize("name", ["baseline", "planned"])
def test_the_marked_peak_is_the_breakdown_that_the_plan_reports(plan_and_recordings, name):
    recording = getattr(plan_and_recordings[1], name)
    data, footprint = recording_data(recording), recording.footprint
    shown = bytes_by_category(data)
    at_peak = {category: int(values[data["moments"]["peak"]]) for category, values in shown.items()}
    at_peak.pop(Category.SLACK)
    breakdown = {category: size for category, size in footprint.breakdown.items() if category != Category.SLACK}
    assert {category: size for category, size in at_peak.items() if size} == breakdown
    assert sum(shown.values()).max() == footprint.total_bytes


def test_every_category_has_a_place_in_the_charts_and_colors():
    assert sorted(STACK) == sorted(Category)
    style = (resources.files("planner.cli.page") / "assets/page.css").read_text()
    for category in Category:
        assert style.count(f"--{category.lower().replace(' ', '-')}: #") == 2  # light and dark


@pytest.mark.slow
@pytest.mark.thorough
def test_a_saved_plan_for_several_cards_has_the_page_of_one_of_them(tmp_path):
    path, page_path = tmp_path / "plan.json", tmp_path / "page.html"
    asked = ["tests/fixtures/roberta", "--vram", "4GiB", "--gpu", "h100", "--batch-size", "4", "--seq-len", "16"]
    only = ["--cards", "2", "--sharding", "fsdp", "--only", "accumulation", "--save", str(path)]
    for arguments in ([*asked, *only], [str(path), "--report", str(page_path)]):
        subprocess.run([sys.executable, "-m", "planner.cli", *arguments], check=True, capture_output=True, timeout=300)
    plan, text = Plan.load(path), page_path.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    recording = data["recordings"]["plan"]
    shown = bytes_by_category(recording)
    at_peak = {category: int(values[recording["moments"]["peak"]]) for category, values in shown.items()}
    assert at_peak[Category.NCCL] == plan.peak.breakdown[Category.NCCL] > 0
    assert at_peak[Category.UNSHARDED] == plan.peak.breakdown[Category.UNSHARDED] > 0
    assert sum(shown.values()).max() == plan.peak.total_bytes
    assert "The charts show one of 2 cards" in text


def test_fewer_moments_keep_the_peaks_and_stay_exact(plan_and_recordings):
    recording = plan_and_recordings[1].planned
    whole, few = recording_data(recording), recording_data(recording, most_moments=20)
    assert len(few["moments"]["tick"]) < 30 < len(whole["moments"]["tick"])
    assert_equal_bytes(few, recording)
    for category in (None, Category.SLACK):
        of = [bytes_by_category(data) for data in (whole, few)]
        totals = [sum(found.values()) - (found[category] if category else 0) for found in of]
        assert totals[0].max() == totals[1].max()
    peaks = [list(accumulate(data["moments"]["tick"]))[data["moments"]["peak"]] for data in (whole, few)]
    assert peaks[0] == peaks[1]


def test_fewer_moments_keep_the_largest_of_each_group(plan_and_recordings):
    recording, most = plan_and_recordings[1].baseline, 20
    whole, few = (recording_data(recording, most_moments=count) for count in (10**6, most))
    ticks = np.array(list(accumulate(whole["moments"]["tick"])))
    kept = set(accumulate(few["moments"]["tick"]))
    live = recording.graph.live_bytes(granularity_bytes=512)
    for group in np.array_split(ticks, most):
        assert max(live[tick] for tick in group if tick in kept) == live[group].max()


def test_tensors_have_their_module_line_shape_and_dtype(plan_and_recordings):
    data = recording_data(plan_and_recordings[1].baseline)
    strings, storages, ops = data["strings"], data["storages"], data["ops"]
    rows = [
        (
            strings[storages["name"][row]],
            strings[storages["shape"][row]],
            strings[storages["dtype"][row]],
            "" if op < 0 else strings[ops["module"][op]],
            "" if op < 0 else strings[ops["source"][op]],
        )
        for row, op in enumerate(storages["op"])
    ]
    assert ("0.0.weight", f"{WIDTH} x {WIDTH}", "float32", "", "") in rows
    assert ("0.0.weight (exp_avg)", f"{WIDTH} x {WIDTH}", "float32", "", "") in rows
    assert ("", f"{SAMPLES} x {WIDTH}", "float32", "1.1", "") in rows
    loss = [row for row in rows if row[1] == "scalar" and row[4]]
    assert loss and all(row[4].startswith("tests/cli/test_page.py:") for row in loss)


def test_micro_batches_say_for_which_they_stand(plan_and_recordings):
    _, recordings = plan_and_recordings
    assert recording_data(recordings.baseline)["micro_batches"] == [[1, 1]]
    assert recording_data(recordings.planned)["micro_batches"] == [[1, 1], [2, 4]]


def test_a_card_without_an_allocator_has_no_slack():
    recording = recorded(small_work(), BARE)
    data = recording_data(recording)
    assert data["unit_bytes"] == 1
    assert_equal_bytes(data, recording)
    assert not bytes_by_category(data)[Category.SLACK].any()


def test_each_stage_adds_a_technique_and_the_last_is_the_plan(plan_and_recordings):
    plan, recordings = plan_and_recordings
    stages = rehearse_stages(plan, recordings)
    assert [stage.kinds for stage in stages] == [("accumulation",), ("checkpoint",)]
    alone = recorded(recordings.workload, CARD, DECISIONS[:1]).footprint
    assert (stages[0].total_bytes, stages[0].step_ns) == (alone.total_bytes, alone.step_ns)
    assert (stages[1].total_bytes, stages[1].step_ns) == (plan.peak.total_bytes, plan.peak.step_ns)


def test_a_technique_that_cannot_be_rehearsed_alone_is_one_stage_with_the_next(plan_and_recordings, monkeypatch):
    from planner.cli.page import recorded as module
    from planner.errors import WorkloadError

    def refuse(*_):
        raise WorkloadError("not alone")

    monkeypatch.setattr(module.pipeline, "record_step", refuse)
    stages = rehearse_stages(*plan_and_recordings)
    assert [stage.kinds for stage in stages] == [("accumulation", "checkpoint")]


def test_snapshots_of_baseline_and_plan_replay_to_the_plans_peaks(plan_and_recordings, tmp_path):
    _, recordings = plan_and_recordings
    paths = [*write_snapshots(recordings, tmp_path / "step.pickle")]
    assert [path.name for path in paths] == ["step.pickle", "step.baseline.pickle"]
    for path, recording in zip(paths, (recordings.planned, recordings.baseline), strict=True):
        result = replay_history(load(path))
        assert result.is_equal
        assert result.simulated.peak_reserved_bytes == recording.footprint.reserved_bytes
        assert result.simulated.peak_allocated_bytes == recording.footprint.allocated_bytes


@pytest.fixture(scope="module")
def html(plan_and_recordings) -> str:
    plan, recordings = plan_and_recordings
    return page(plan, recordings, rehearse_stages(plan, recordings), "import torch  # a < b\n")


def test_the_page_loads_nothing_and_holds_the_data_once(html, plan_and_recordings):
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=", html)
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(block[1]) == json.loads(json.dumps(page_data(*plan_and_recordings)))
    assert "MIT License" in html or "Permission is hereby granted" in html
    for name in page_module._SCRIPTS:
        assert page_module._asset(name) in html


def test_title_and_tables_need_no_script(html, plan_and_recordings):
    plan, _ = plan_and_recordings
    assert "<h1" in html and f"<title>{plan.model.name}: Fits in 1.00 GiB: peak" in html
    for text in ("accumulation", "checkpoint", "4 micro-batches of 128", "Memory at the peak", "a &lt; b"):
        assert text in html


def test_a_chart_whose_peak_is_not_the_plans_says_so(html, plan_and_recordings):
    plan, recordings = plan_and_recordings
    baseline = recordings.baseline
    larger = dataclasses.replace(baseline.footprint, reserved_bytes=1 << 30, total_bytes=2 << 30)
    smaller = dataclasses.replace(baseline.footprint, reserved_bytes=512, total_bytes=512)
    for footprint in (larger, smaller):  # in the smaller one the recording does not run
        other = dataclasses.replace(recordings, baseline=dataclasses.replace(baseline, footprint=footprint))
        assert "the chart of the baseline peaks at" in page(plan, other, (), "")
    assert "peaks at" not in html.partition("<footer>")[2].partition("</footer>")[0]


PROBE = """
<script>
const errors = [];
window.onerror = (message) => errors.push(message);
console.error = (...parts) => errors.push(parts.join(" "));
</script>
"""
REPORT = """
<script>
setTimeout(() => frameElement.width = NEW_WIDTH, 200);  // as when a phone is turned
setTimeout(() => {
  const over = document.querySelector("#chart-plan .u-over").getBoundingClientRect();
  const at = (type) => document.querySelector("#chart-plan .u-over").dispatchEvent(new MouseEvent(type, {
    clientX: over.left + over.width / 4, clientY: over.top + over.height / 2, bubbles: true, detail: 1 }));
  const shown = () => Object.fromEntries(Object.entries(cells).map(([key, cell]) => [key, Number(cell.dataset.bytes)]));
  const report = { peak: shown(), width: document.documentElement.scrollWidth, inner: innerWidth };
  report.background = getComputedStyle(document.body).backgroundColor;
  at("mouseenter");
  at("mousemove");
  setTimeout(() => {
    report.hovered = shown();
    report.moment = Number(document.querySelector("#where-plan").dataset.moment);
    report.rows = document.querySelectorAll("#tensors tbody tr").length;
    report.areas = document.querySelectorAll("#treemap .cell").length;
    report.errors = errors;
    parent.postMessage(JSON.stringify(report), "*");
  }, 200);
}, 800);
</script>
"""


def in_browser(html: str, folder, *, width: int, dark: bool) -> dict:
    """Opens the page in a frame, changes its width, moves the pointer over a chart, and returns what the page shows."""
    report = REPORT.replace("NEW_WIDTH", str(width))
    probed = html.replace("<head>", f"<head>{PROBE}", 1).replace("</body>", f"{report}</body>", 1)
    (folder / "frame.html").write_text(
        f'<!doctype html><meta name="color-scheme" content="light dark"><body><iframe width="1000" height="800" '
        f'srcdoc="{escape(probed)}"></iframe><pre id="answer"></pre><script>onmessage = (event) => '
        "document.getElementById('answer').textContent = event.data;</script>"
    )
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"),
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=6000", "--dump-dom"),
        *(["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]),
        (folder / "frame.html").as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', run.stdout, re.DOTALL)
    assert answer and answer[1], run.stderr[-2000:]
    return json.loads(unescape(answer[1]))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_a_browser_draws_the_page_without_errors_and_shows_the_recordings_bytes(
    html, plan_and_recordings, tmp_path, width, dark
):
    _, recordings = plan_and_recordings
    report = in_browser(html, tmp_path, width=width, dark=dark)
    assert report["errors"] == []
    assert report["width"] <= report["inner"] == width  # nothing to scroll sideways
    assert report["background"] == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
    assert report["rows"] >= 6 and report["areas"] >= 4
    data = recording_data(recordings.planned)
    for shown, moment in ((report["peak"], data["moments"]["peak"]), (report["hovered"], report["moment"])):
        expected = {category: int(values[moment]) for category, values in bytes_by_category(data).items()}
        of_plan = {key.removeprefix("plan/"): size for key, size in shown.items() if key.startswith("plan/")}
        assert of_plan.pop("total") == sum(expected.values())
        assert of_plan == {category: size for category, size in expected.items() if category in of_plan}
        assert all(category in of_plan for category, size in expected.items() if size)
    assert report["moment"] != data["moments"]["peak"]


@pytest.mark.slow
def test_a_chart_of_two_steps_may_peak_below_later_steps():
    graph = certifying_graph(layers_of_similar_widths(), (), CARD)
    footprint = measure(graph, CARD, vram_bytes=None).footprint
    recorded = Recorded(graph, CARD, footprint, ())
    assert recorded.total_bytes == footprint.total_bytes - 24 * MIB and recorded.is_as_planned
    larger = dataclasses.replace(footprint, total_bytes=footprint.total_bytes + MIB)
    assert not dataclasses.replace(recorded, footprint=larger).is_as_planned
