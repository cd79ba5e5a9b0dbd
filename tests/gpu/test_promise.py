"""The GPU lane: what was promised without a card, held against what the card does. Skips where there is none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import planner
from planner import rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def test_allocated_memory_of_a_rewritten_step_is_what_was_promised():
    """Planned in a process that has not used CUDA yet, which the fork needs; measured in this one."""
    width, depth, samples = 2048, 12, 8192
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 16))
    batch = (torch.randn(samples, width), torch.randn(samples, 16))

    def loss_fn(output, batch):
        return torch.nn.functional.mse_loss(output, batch[-1])

    whole = planner.plan(model, batch, vram=None, loss_fn=loss_fn)
    plan = planner.plan(
        model, batch, vram=f"{int(0.7 * whole.baseline.total_bytes)}B", loss_fn=loss_fn, fidelity="exact"
    )
    assert plan.fits
    model.cuda()
    batch = tuple(tensor.cuda() for tensor in batch)
    rewritten = rewrite.apply(plan, model, loss_fn=loss_fn)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        rewritten.step(batch)
    measured = torch.cuda.max_memory_allocated()
    assert measured <= 1.01 * plan.peak.allocated_bytes
    assert measured >= 0.95 * plan.peak.allocated_bytes


def test_a_trainer_takes_what_was_promised(tmp_path):
    """As above, by transformers' Trainer, whose callback measures. Planned in a process of its own, for the fork."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    config = transformers.RobertaConfig(num_hidden_layers=4, max_position_embeddings=130)
    model = transformers.RobertaForMaskedLM(config)
    tokens = torch.randint(3, config.vocab_size, (32, 128))
    config.architectures = ["RobertaForMaskedLM"]
    config.save_pretrained(tmp_path)
    options = "--vram 6GiB --batch-size 32 --seq-len 128 --forbid step-in-backward --force accumulation".split()
    command = [sys.executable, "-m", "planner.cli", str(tmp_path), *options, "--save", str(tmp_path / "plan.json")]
    subprocess.run(command, check=True, timeout=300)
    plan = planner.Plan.load(tmp_path / "plan.json")
    rewritten = rewrite.apply_for_trainer(plan, model)
    arguments = rewrite.training_arguments(plan, output_dir=str(tmp_path), max_steps=3, report_to="none")
    callback = rewrite.trainer_callback(rewritten)
    transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    ).train()
    assert callback.promise.kept is not None
    assert 0.95 <= callback.promise.allocated_bytes / plan.peak.allocated_bytes <= 1.01


def test_the_command_verifies_its_plan_under_a_cap(tmp_path):
    """RoBERTa in less than it takes as it is: exit code 0 says that the promise is kept and that it trains alike."""
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(num_hidden_layers=4, max_position_embeddings=130)
    config.architectures = ["RobertaForMaskedLM"]
    config.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "planner.cli", str(tmp_path), "--vram", "3GiB", "--batch-size", "32"]
    command += ["--seq-len", "128", "--fidelity", "exact", "--verify", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    found = json.loads(ended.stdout)["verification"]
    assert ended.returncode == 0, found
    assert found["kept"] and found["parity"]["passed"] and not found["out_of_memory"]
    assert found["planned"]["total_bytes"] <= 3 << 30
