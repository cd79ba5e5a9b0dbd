"""The flag `--check` of emitted files: it accepts every plan, and finds faults that are planted in the text."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from planner.plan_types.decisions import Accumulation, Checkpoint, Precision
from planner.rewrite import emit
from planner.rewrite.portable import plain_comparison
from tests.rewrite.emitter.test_emitted_fixtures import CASES, FOLDER, ROOT, each_case
from tests.support.training import Convolutional, cross_entropy, images, imported, plan_for, seeded

FAULTS = {
    "a batch's gradient is divided by the number of micro-batches twice": (
        "accumulation", "loss = weighted(loss, weight)", "loss = weighted(loss, weight) / len(list(parts))",
    ),
    "micro-batches have the weight of their samples": (
        "accumulation", "loss_terms(part, stop - start) / terms", "(stop - start) / samples",
    ),
    "labels are shifted": ("accumulation", "LABELS_SHIFTED = False", "LABELS_SHIFTED = True"),
    "the last micro-batch is left out": (
        "accumulation", "range(0, samples, micro_batch_size)", "range(0, samples - micro_batch_size, micro_batch_size)",
    ),
    "backward runs with dropout drawn again": (
        "checkpoint", "preserve_rng_state=True", "preserve_rng_state=False",
    ),
    "one chunk of the logits is left out": (
        "chunked_loss", "CHUNKS = 3", "CHUNKS = 3\ntorch.Tensor.split = lambda *_: 1 / 0",
    ),
    "a parameter is not trained": ("as_it_is", "if parameter.requires_grad]", "if parameter.dim() > 1]"),
    "gradients are cleared before the update": (
        "as_it_is", "    optimizer.step()\n    if", "    optimizer.zero_grad()\n    optimizer.step()\n    if",
    ),
    "gradients are not unscaled": ("mixed_precision", "scaler.step(optimizer)", "optimizer.step()"),
    "8-bit state of another optimizer": ("eight_bit_state", "optim.AdamW8bit", "optim.RMSprop8bit"),
}  # fmt: skip
