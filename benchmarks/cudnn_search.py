"""Compares the memory of training steps without and with `torch.backends.cudnn.benchmark = True`, on an A100 in fp32.

    python -m benchmarks.cudnn_search [NAME ...]

With this setting, PyTorch tries the algorithms of each convolution in the first step and then runs the fastest one,
which cannot be known without the card. The benchmark shows what the planner says: a step without the setting; a step
after the first one, if every convolution runs the algorithm with the largest workspace; the first step on a card of
which nothing else takes memory; and the smallest total with which the step runs. All numbers are predictions.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cudnn_tables import ClassicUNet
from benchmarks.planning import console_with_versions
from benchmarks.published import vision
from planner import profiles
from planner.estimate.add_workspaces import convolution_notes, with_known_algorithms, without_searches
from planner.estimate.footprint import measure
from planner.estimate.smallest_total import smallest_total_bytes
from planner.pipeline import record_step
from planner.plan_types.sizes import MIB
from planner.recording.step_graph import StepGraph
from planner.workload.workload import workload

CARD = dataclasses.replace(profiles.load("a100-40gb"), cudnn_benchmark=True)
CLASSES = 1000


def resnet18() -> nn.Module:
    return vision.resnet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> nn.Module:
    return vision.resnet((3, 4, 6, 3), bottleneck=True)


def u_net() -> nn.Module:
    return ClassicUNet(2, 64, 3, 1024)


NETS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-18, 8": (resnet18, 8, 224),
    "ResNet-18, 32": (resnet18, 32, 224),
    "ResNet-50, 32": (resnet50, 32, 224),
    "VGG-16, 32": (vision.vgg16, 32, 224),
    "U-Net, 8": (u_net, 8, 256),
}
"""For each name: the network, the number of images, and their height and width in pixels."""


def loss_of(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def recorded(name: str) -> StepGraph:
    """Returns the recording of two training steps with SGD."""
    build, samples, pixels = NETS[name]
    with torch.device("meta"):
        net = build()
        images = torch.empty(samples, 3, pixels, pixels)
        shape = (samples, *net(images).shape[2:])
        labels = torch.zeros(shape, dtype=torch.long)
    return record_step(workload(net, (images, labels), loss_fn=loss_of, optimizer="sgd"), CARD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NETS)} (default: all)")
    names = parser.parse_args().names or NETS
    console = console_with_versions()
    sources: dict[str, None] = {}
    console.print(
        "MiB allocated / in total\n\n| network, images | without | after the first step | first step | least |"
    )
    console.print("|---|---:|---:|---:|---:|")
    for name in names:
        graph = recorded(name)
        cells = [name]
        for each in (without_searches(graph), with_known_algorithms(graph), graph):
            footprint = measure(each, CARD, vram_bytes=None).footprint
            cells.append(f"{footprint.allocated_bytes / MIB:,.0f} / {footprint.total_bytes / MIB:,.0f}")
        cells.append(f"{smallest_total_bytes(graph, CARD) / MIB:,.0f}")
        console.print(f"| {' | '.join(cells)} |")
        sources |= dict.fromkeys(convolution_notes(graph, CARD, torch.__version__))
    for note in sources:
        console.print(f"- {note}")


if __name__ == "__main__":
    main()
