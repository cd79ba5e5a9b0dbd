"""Reserved memory that Ultralytics' AutoBatch prints before it trains YOLO, for steps of 1 to 16 images.

Sources, with the versions that they state:

- github.com/ultralytics/yolov5, pull request 5092 (October 2021): YOLOv5s, A100-SXM4-40GB, torch 1.9.0
- the same, issue 9287 (September 2022): YOLOv5m, 4 classes, RTX 3070
- github.com/ultralytics/ultralytics, issue 1451 (March 2023): YOLOv8n, 1 class, RTX 4090
- the same, issue 4679 (August 2023): YOLOv8s, 10 classes, Tesla T4 of Colab

The figure is `torch.cuda.memory_reserved()` in GB after three forwards and backwards under fp16 autocast, which follow
each other without an update; then the cache is emptied. cudnn.benchmark is off. cudnn.deterministic is on, which is
not rehearsed. The networks here have the printed numbers of parameters.

It is not known which blocks the process holds before. Their printed sum, less the two copies of the network, is
allocated as one block. Where no version of PyTorch is stated, the one of that month is taken. Versions before 2.0 ask
cuDNN by another interface, and versions before 2.8 run a cuDNN that cannot be asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import torch

from benchmarks.published.convolutional.detectors import Detector, Generation
from benchmarks.published.convolutional.rows import GB, GIB, Row
from benchmarks.published.several_cards.rows import Measure
from planner.recording.rehearsal import Program

IMAGES, REPEATS = (1, 2, 4, 8, 16), 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A printed table."""

    name: str
    generation: Generation
    depth: float
    width: float
    classes: int
    pixels: int
    card: str
    torch_version: str
    allocated_gib: float
    """Memory that is allocated before the first image."""
    reserved: tuple[float, ...]
    """GB for each number of images."""
    doubt: str = ""


RUNS = (
    Run(
        name="YOLOv5s",
        generation=5,
        depth=0.33,
        width=0.5,
        classes=80,
        pixels=640,
        card="a100-40gb",
        torch_version="1.9.0",
        allocated_gib=0.0813,
        reserved=(0.296, 0.568, 1.007, 1.797, 3.280),
    ),
    Run(
        name="YOLOv5m",
        generation=5,
        depth=0.67,
        width=0.75,
        classes=4,
        pixels=416,
        card="rtx-3070",
        torch_version="1.12",
        allocated_gib=0.16,
        reserved=(0.371, 0.482, 0.778, 1.277, 2.374),
        doubt="the version of PyTorch is not stated",
    ),
    Run(
        name="YOLOv8n",
        generation=8,
        depth=0.33,
        width=0.25,
        classes=1,
        pixels=480,
        card="rtx-4090",
        torch_version="2.0",
        allocated_gib=0.05,
        reserved=(0.285, 0.445, 0.470, 0.719, 1.197),
        doubt="the version of PyTorch is not stated",
    ),
    Run(
        name="YOLOv8s",
        generation=8,
        depth=0.33,
        width=0.5,
        classes=10,
        pixels=640,
        card="t4",
        torch_version="2.0",
        allocated_gib=0.12,
        reserved=(0.654, 0.757, 1.223, 2.208, 4.154),
        doubt="the version of PyTorch is not stated",
    ),
)


def profiled(run: Run, images: int, device: torch.device) -> None:
    """Runs the network forward and backward three times, as AutoBatch does for a number of images."""
    with device:
        copies = [
            Detector(run.generation, depth=run.depth, width=run.width, classes=run.classes).train() for _ in range(2)
        ]
    network = copies[0]
    held = sum(each.nbytes for copy in copies for each in (*copy.parameters(), *copy.buffers()))
    rest = torch.empty(max(0, round(run.allocated_gib * GIB) - held), dtype=torch.uint8, device=device)
    with torch.autocast(device.type, torch.float16):
        x = torch.zeros(images, 3, run.pixels, run.pixels).to(device).requires_grad_()
        with torch.no_grad(), _evaluating(network):
            network(x)
        for _ in range(REPEATS):
            results = network(x)
            sum(each.sum() for each in results).sum().backward()
    del rest


@contextlib.contextmanager
def _evaluating(network: torch.nn.Module):
    network.eval()
    try:
        yield
    finally:
        network.train()


def _program(run: Run, images: int) -> Program:
    return functools.partial(profiled, run, images)


ROWS = tuple(
    Row(
        setting=f"{run.name}, {images} x {run.pixels}, fp16 autocast, {run.card}",
        source=__name__,
        card=run.card,
        torch_version=run.torch_version,
        measure=Measure.RESERVED,
        published=published,
        unit_bytes=GB,
        digit=0.001,
        program=_program(run, images),
        doubt=run.doubt,
    )
    for run in RUNS
    for images, published in zip(IMAGES, run.reserved, strict=True)
)
