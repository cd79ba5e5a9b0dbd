"""8-bit optimizer state, compared with a plain loop that creates bitsandbytes' optimizer itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import tempfile
import unittest.mock as mock
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.parity.case import SAMPLES, Case
from benchmarks.parity.elsewhere.sample import Job, outcome_of
from benchmarks.parity.judge import Outcome, emitted_file, never
from benchmarks.parity.models.plain import LENGTH, WORDS, cross_entropy, of_tokens, sentences
from benchmarks.parity.plain import PlainLoop, Trained, Training
from benchmarks.parity.techniques import Technique, offer
from planner import rewrite
from planner.plan_types.decisions import Optimizer
from planner.rewrite.optimizers import OPTIMIZERS
from planner.rewrite.rules import offload

SKIPPED: list[str] = []
"""The reason why nothing is trained, if bitsandbytes is not installed."""
WIDTH = 96
"""Width of the layers. bitsandbytes keeps 32-bit state for weights with fewer than 4096 elements."""
HYPERPARAMETERS = OPTIMIZERS["adamw"].hyperparameters
WITHOUT = ("fused kernel", "for-loop kernel", "step in backward")
"""Techniques that cannot be combined with 8-bit state."""


class Words(nn.Module):
    """A language model, whose embedding has 32-bit state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def features(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randint(LENGTH, (SAMPLES,))


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, LENGTH)
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **HYPERPARAMETERS, **options)


CASES = tuple(
    Case(name=f"8-bit state: {name}", build=build, batch=batch, loss=loss, optimizer=adamw, dtype=torch.float32,
         rounding=2e-2, **fields)
    for name, build, batch, loss, fields in (
        ("words", Words, sentences, of_tokens, {}),
        ("words, clipping", Words, sentences, of_tokens, {"clip": 0.5}),
        ("perceptron", perceptron, features, cross_entropy, {}),
    )
)  # fmt: skip
"""More rounding is allowed than elsewhere, because a small difference may change a quantized value by a whole step."""


@dataclasses.dataclass(frozen=True)
class EightBitJob(Job):
    """A job of one of these cases."""

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.name == self.name)


def outcomes() -> Iterator[Outcome]:
    """Yields the outcomes of 8-bit state alone and with each technique that it can be combined with."""
    if importlib.util.find_spec("bitsandbytes") is None:
        SKIPPED.append("8-bit state: bitsandbytes is not installed")
        return
    alone = Technique("8-bit state", (Optimizer(),))
    for case in CASES:
        offered = offer(case)
        others = [technique for technique in offered.techniques if technique.name not in WITHOUT]
        combined = (
            dataclasses.replace(other, name=f"8-bit state + {other.name}", decisions=(*other.decisions, Optimizer()))
            for other in others
        )
        for technique in (alone, *combined):
            job = EightBitJob(case.name, offered, technique)
            for way in ("8-bit, live", "8-bit, emitted"):
                yield _outcome(job, way)


def _outcome(job: EightBitJob, way: str) -> Outcome:
    case, technique = job.case, job.technique

    def train() -> Trained:
        training = Training(case, torch.float32)
        plan = job.offer.plan_with(technique, training.model)
        if way == "8-bit, emitted":
            return _emitted(plan, training, case)
        with mock.patch.object(offload, "is_on_host", never):
            result = rewrite.apply(
                plan, training.model, case.optimizer(training.model), loss_fn=training.loss_fn, max_grad_norm=case.clip
            )
            training.run(result.step, training.batches)
        return training.trained(result.optimizer)

    def truth() -> Trained:
        loop = PlainLoop(
            dataclasses.replace(case, optimizer=_by_hand), torch.float32, autocast=technique.autocast, size=None,
            clips=True,
        )  # fmt: skip
        loop.training.run(loop.step, loop.training.batches)
        return loop.training.trained(loop.optimizer)

    return outcome_of(job, way, train, truth)


def _emitted(plan: Any, training: Training, case: Case) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        file, _ = emitted_file(plan, folder)
        model = file.rewrite(training.model)
        optimizer = file.make_optimizer(model)
        accepted = inspect.signature(file.training_step).parameters
        options: dict[str, Any] = {"loss_fn": training.loss_fn, "max_grad_norm": case.clip}
        if "scaler" in accepted:
            options["scaler"] = torch.amp.GradScaler("cpu")
        if "loss_terms" in accepted:
            options["loss_terms"] = file.samples_only
        training.run(lambda batch: file.training_step(model, optimizer, batch, **options), training.batches)
    return training.trained(optimizer)


def _by_hand(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Create the 8-bit optimizer as bitsandbytes' documentation does, with 32-bit state for embeddings."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it identifies parameters by their addresses, which earlier models may have used
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    return bitsandbytes.optim.AdamW8bit(model.parameters(), **HYPERPARAMETERS)
