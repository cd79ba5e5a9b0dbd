"""Lightning's guides to FSDP: a Transformer with 1 B parameters on two cards, in fp32.

Source: github.com/Lightning-AI/pytorch-lightning, `docs/source-pytorch/advanced/model_parallel/fsdp.rst` (with the
`Trainer`) and `docs/source-fabric/advanced/model_parallel/fsdp.rst` (the same model in a loop of Fabric), which show
their code: batches of 1 x 35 tokens, Adam, encoder and decoder layers as units of FSDP. "Numbers were produced with
A100 40GB GPUs, Lightning 2.1 and PyTorch 2.1"; they are peaks that `torch.cuda.memory_summary` shows, in MiB.

Not the same as in the source: FSDP2 instead of FSDP1, and torch 2.13. Not known: whether the figures are allocated or
reserved memory (allocated is taken). Fabric's figures are those of the `Trainer` and 0.5 or 1.0 times the parameters
more where the peak is in the optimizer, although both pages name the same versions. Adam's for-each kernel had two
temporaries of the parameters' size until torch 2.0, and has one since 2.1, which fits these figures.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.several_cards.rows import MIB, Measure, Row

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, TOKENS, DROPOUT, STEPS = 33_278, 1024, 64, 4096, 32, 35, 0.2, 3
Way = Literal["DDP", "SHARD_GRAD_OP", "FULL_SHARD"]
PUBLISHED: dict[Way, tuple[int, int]] = {
    "DDP": (23_125, 26_953),
    "SHARD_GRAD_OP": (11_772, 11_815),
    "FULL_SHARD": (9_627, 11_578),
}
"""Strategy -> peak in MiB with the `Trainer`, and with Fabric."""


class Transformer(nn.Module):
    """Tokens and targets [samples, tokens] -> log-probabilities [samples x tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, DROPOUT, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = torch.full((TOKENS, TOKENS), -math.inf, device=inputs.device).triu(1)
        source, target = (self.dropout(self.embedding(ids) * math.sqrt(WIDTH)) for ids in (inputs, targets))
        output = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return F.log_softmax(self.decoder(output), dim=-1).view(-1, VOCABULARY)


def prepared(way: Way, device: torch.device) -> nn.Module:
    """Returns the model on the device, as the strategy divides it."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "DDP":
        with device:
            return DistributedDataParallel(Transformer())
    with torch.device("meta"):
        model = Transformer()
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            fully_shard(module, reshard_after_forward=way == "FULL_SHARD")
    fully_shard(model)
    return model.to_empty(device=device)


def train(device: torch.device, *, way: Way) -> None:
    """Takes some steps of the first rank."""
    model = prepared(way, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs, targets = (torch.zeros(1, TOKENS, dtype=torch.long).to(device) for _ in range(2))
        loss = F.nll_loss(model(inputs, targets), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


_PROGRAMS = {way: functools.partial(train, way=way) for way in PUBLISHED}

ROWS = tuple(
    Row(
        setting=f"Transformer 1 B, {loop}, {way}",
        cards=2,
        card="a100-40gb",
        measure=Measure.ALLOCATED,
        published=PUBLISHED[way][number],
        unit_bytes=MIB,
        program=_PROGRAMS[way],
    )
    for way in PUBLISHED
    for number, loop in enumerate(("Trainer", "Fabric"))
)
