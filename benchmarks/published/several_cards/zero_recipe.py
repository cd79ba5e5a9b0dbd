"""PyTorch's recipe for `ZeroRedundancyOptimizer`: 20 linear layers under DistributedDataParallel, on two cards.

Source: github.com/pytorch/tutorials, `recipes_source/zero_redundancy_optimizer.rst`, with its printed output. It prints
`torch.cuda.max_memory_allocated() // 1e6` of rank 0 at four places; each is a row. The recipe is of February 2021
(torch 1.8), whose Adam had no for-each kernel, so the for-loop kernel is taken.

Not known: the card. The workspaces of cuBLAS are not counted: in that version, cuBLAS allocated them itself.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from benchmarks.published.several_cards.rows import MB, Measure, Row

WIDTH, LAYERS, SAMPLES = 2000, 20, 20
PUBLISHED = {
    "model": (335, 335),
    "DistributedDataParallel": (656, 656),
    "backward": (992, 992),
    "step": (1697, 1361),
}
"""Published peaks in MB by the last action before them, without and with ZeroRedundancyOptimizer."""


def train(device: torch.device, *, is_divided: bool, until: str) -> None:
    """Runs the recipe on rank 0 until one of the places where it prints."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))
    if until == "model":
        return
    replica = DistributedDataParallel(model)
    if until == "DistributedDataParallel":
        return
    options = {"lr": 0.01, "foreach": False}
    optimizer = (
        ZeroRedundancyOptimizer(replica.parameters(), optimizer_class=torch.optim.Adam, **options)
        if is_divided
        else torch.optim.Adam(replica.parameters(), **options)
    )
    outputs = replica(torch.randn(SAMPLES, WIDTH).to(device))
    labels = torch.randn(SAMPLES, WIDTH).to(device)
    nn.MSELoss()(outputs, labels).backward()
    if until == "step":
        optimizer.step()


ROWS = tuple(
    Row(
        setting=f"20 linear layers, {'ZeRO-1' if is_divided else 'DDP'}, after {until}",
        cards=2,
        card="v100-16gb",
        measure=Measure.ALLOCATED,
        published=PUBLISHED[until][is_divided],
        unit_bytes=MB,
        program=functools.partial(train, is_divided=is_divided, until=until),
        has_workspaces=False,
    )
    for is_divided in (False, True)
    for until in PUBLISHED
    if is_divided is False or until == "step"
)
"""The first three figures are the same with both optimizers, and are rehearsed once."""
