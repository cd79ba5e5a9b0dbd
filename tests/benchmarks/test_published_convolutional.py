"""The networks of the published rows are those of their sources, and the summary counts predictions that are low."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.published.convolutional import video
from benchmarks.published.convolutional.__main__ import ROWS, error, key, summary, table
from benchmarks.published.convolutional.autobatch import RUNS
from benchmarks.published.convolutional.clips import C3d, ClipClassifier, FrameClassifier
from benchmarks.published.convolutional.detectors import Detector
from benchmarks.published.convolutional.rows import Predicted


def parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in build().parameters())


@pytest.mark.parametrize(
    ("run", "printed"),
    list(zip(RUNS, (7_235_389, 20_883_441, 3_011_043, 11_139_470), strict=True)),
    ids=lambda run: str(run)[:20],
)
def test_detectors_have_as_many_parameters_as_their_tables_print(run, printed):
    assert (
        parameters(lambda: Detector(run.generation, depth=run.depth, width=run.width, classes=run.classes)) == printed
    )


@pytest.mark.parametrize(
    ("build", "millions"),
    [
        (lambda: FrameClassifier(50, 400, 3), 24.33),
        (lambda: FrameClassifier(101, 400, 8), 43.32),
        (lambda: FrameClassifier(None, 400, 8, shifts=True), 2.74),
        (lambda: ClipClassifier(video.slow_only(), 400), 32.45),
        (lambda: ClipClassifier(video.i3d(), 400), 28.0),
        (lambda: ClipClassifier(video.r2plus1d(), 400), 63.8),
        (lambda: ClipClassifier(video.slow_fast_4(), 400), 34.5),
        (lambda: ClipClassifier(video.slow_fast_8(), 400), 34.6),
        (lambda: ClipClassifier(video.csn(), 400), 29.7),
        (lambda: C3d(101), 78.4),
    ],
)
def test_video_classifiers_have_as_many_parameters_as_the_model_zoo_states(build, millions):
    assert parameters(build) / 1e6 == pytest.approx(millions, abs=0.05)


def test_every_row_has_a_name_of_its_own():
    assert len({key(row) for row in ROWS}) == len(ROWS) >= 60


def test_the_summary_has_both_signs_and_counts_what_is_low():
    row = next(row for row in ROWS if not row.doubt)
    published = row.published * row.unit_bytes
    found = [
        (row, Predicted(without_bytes=round(published * share), total_bytes=round(published)))
        for share in (0.97, 0.99, 1.1)
    ]
    assert error(row, found[0][1].without_bytes) == pytest.approx(-0.03, abs=1e-6)
    tensors, with_workspaces = (line.split("|") for line in list(summary(found))[-2:])
    assert [cell.strip() for cell in tensors[4:8]] == ["3.00%", "-3.00%", "+10.00%", "1"]
    assert [cell.strip() for cell in with_workspaces[4:8]] == ["0.00%", "+0.00%", "+0.00%", "0"]
    assert len(list(table(found))) == 5
