"""Emitted files for several cards: torchrun starts them, and they train as the live objects do."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from planner.rewrite.application import apply_decisions
from planner.workload.call_convention import Calling
from tests.rewrite.emitter.test_emitted_fixtures import FOLDER, RANK_CASES, ROOT
from tests.support.ranks import in_group
from tests.support.training import imported, seeded

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("name", RANK_CASES)
def test_torchrun_starts_the_file_on_two_processes(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = str(FOLDER / f"{name}.py")
    run = subprocess.run(
        [*command, path, "--device", "cpu", "--steps", "2"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    first, second = map(float, re.findall(r"step \d: loss ([0-9.]+)", run.stdout))
    assert second < first


@pytest.mark.parametrize("name", RANK_CASES)
def test_without_torchrun_the_file_says_how_to_start_it(name):
    run = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.startswith("start this file with: torchrun --nproc-per-node 2 ")


@pytest.mark.parametrize("name", RANK_CASES)
def test_the_file_trains_to_the_same_bits_as_the_live_objects(name):
    case = RANK_CASES[name]

    def train(rank: int, *, is_live: bool) -> list[torch.Tensor]:
        model, options = seeded(case.build), {} if case.loss_fn is None else {"loss_fn": case.loss_fn}
        batches = [case.batch_of(2 * step + rank) for step in range(3)]
        if is_live:
            step = apply_decisions(
                case.decisions,
                model,
                optimizer=case.optimizer,
                calling=Calling[case.plan().workload.calling],
                batch_size=case.plan().workload.batch_size,
                max_grad_norm=1.0,
                **options,
            ).step
        else:
            emitted = imported(FOLDER / f"{name}.py")
            model = emitted.rewrite(model, "cpu") if name.startswith("sharded") else emitted.rewrite(model)
            optimizer = emitted.make_optimizer(model)
            if case.loss_fn is not None:
                options["loss_terms"] = emitted.samples_only

            def step(batch):
                return emitted.training_step(model, optimizer, batch, max_grad_norm=1.0, **options)

        torch.manual_seed(rank)
        losses = [step(batch) for batch in batches]
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        found = [value.detach().clone() for value in (*losses, *weights)]
        dist.barrier()
        return found

    trained = [in_group(2, functools.partial(train, is_live=is_live)) for is_live in (True, False)]
    for live, emitted in zip(*trained, strict=True):
        assert len(live) == len(emitted) > 3
        assert all(torch.equal(one, other) for one, other in zip(live, emitted, strict=True))
