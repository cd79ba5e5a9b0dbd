"""Process memory of trainings that others measured, predicted to the MiB without a GPU (`benchmarks.nvidia_smi`)."""

from __future__ import annotations

import os
import pathlib
import random

import pytest
import torch

from benchmarks.nvidia_smi import CARD, Run, fitted_mib, model_of, program_of, read, reserved_mib

pytestmark = pytest.mark.slow

CONSTANT_MIB = 1429
"""Context and libraries on their hosts: the most frequent difference on 20 rows."""


def table() -> list[Run]:
    folder = os.environ.get("PLANNER_SHARED_DATA")
    path = pathlib.Path(folder or ".") / "gpumemnet_mlp2.csv"
    if not folder or not path.is_file():
        pytest.skip("PLANNER_SHARED_DATA does not name a folder with gpumemnet_mlp2.csv")
    return read(path)


@pytest.mark.thorough
def test_most_of_a_sample_is_exact_and_all_of_it_is_near():
    runs = random.Random(20).sample(table(), 10)
    misses = [CONSTANT_MIB + reserved_mib(run) - run.measured_mib for run in runs]
    assert sum(miss == 0 for miss in misses) >= 8, misses
    assert all(abs(miss) <= 0.02 * run.measured_mib for miss, run in zip(misses, runs, strict=True)), misses


def test_the_described_nets_are_built():
    run = Run(
        name="", inputs=64, outputs=10, depth=2, shape="bottleneck", batch=32, activation="relu", rate=0.1,
        dropout=True, norm=True, measured_mib=0,
    )  # fmt: skip
    linear = [layer for layer in model_of(run) if isinstance(layer, torch.nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(64, 32), (32, 16), (16, 10), (10, 10)]
    assert CARD == "a100-40gb" and callable(program_of(run)) and reserved_mib(run) > 16


def test_the_constant_is_the_most_frequent_difference():
    assert fitted_mib([3, 5, 5, 9]) == 5
    assert fitted_mib([9, 9, 3, 3]) == 3
