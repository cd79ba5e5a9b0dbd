"""Compares the process memory of image classifiers that others read from nvidia-smi with predictions.

Measured on an A100-SXM4-40GB in fp32 at 224 x 224 pixels, by GPUMemNet (github.com/itu-rad/GPUMemNet): timm's models in
one table, VGG-16 and ResNet-50 with Adam in another. Not known are the optimizer of the timm table (SGD
with momentum fits), the versions, and other use of the card. So one constant, context and libraries, is fitted for all
rows on the vision transformers, which have a single convolution each. The convolutional networks then show how well the
workspaces of cuDNN are predicted.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from benchmarks.published.rehearsing import graph_of
from planner import profiles
from planner.estimate.add_workspaces import with_workspaces
from planner.estimate.allocation_stream import allocation_stream
from planner.estimate.footprint import replayed
from planner.recording.step_graph import StepGraph, Storage
from planner.workspaces.cudnn.dispatch import is_convolution

MIB = 1 << 20
CARD, TORCH_VERSION = "a100-40gb", "2.5.0"
PIXELS, CLASSES, STEPS = 224, 1000, 3


class Block(nn.Module):
    """A block of timm's vision transformer: one projection for queries, keys and values, fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(attended.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """timm's vit_*_patch16_224: 12 blocks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (PIXELS // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, *, dilation: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Returns a convolution that keeps the size of the image (before the stride), and batch norm."""
    padding = dilation * (size // 2)
    layer = nn.Conv2d(inputs, outputs, size, stride, padding, dilation, groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


Wrap = Callable[[nn.Module], nn.Module]


def unchanged(module: nn.Module) -> nn.Module:
    return module


class Residual(nn.Module):
    """A basic block, or a bottleneck (He et al., Deep Residual Learning, 2015; stride on the 3 x 3 convolution).

    Args:
        dilation: dilation of the convolution with the stride.
        wrap: replaces the first convolution.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, *, bottleneck: bool, dilation: int = 1, wrap: Wrap = unchanged
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        relu = nn.ReLU(inplace=True)
        layers = [*convolution(inputs, width, 1), relu] if bottleneck else []
        layers += convolution(width if bottleneck else inputs, width, 3, stride, dilation=dilation)
        layers += [relu, *convolution(width, outputs, 1 if bottleneck else 3)]
        layers[0] = wrap(layers[0])
        self.body, self.relu = nn.Sequential(*layers), relu
        self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...], *, bottleneck: bool) -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for number in range(depth):
            width = 64 << stage
            layers.append(Residual(channels, width, 2 if stage and not number else 1, bottleneck=bottleneck))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 49, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A model and the MiB that nvidia-smi showed, by batch size."""

    build: Callable[[], nn.Module]
    measured_mib: dict[int, int]
    adam: bool = False


BATCHES = (8, 16, 32, 64, 128)
ROWS = {
    "vit_tiny": Published(
        build=lambda: VisionTransformer(192, 3),
        measured_mib=dict(zip(BATCHES, (2039, 2335, 2901, 3911, 5959), strict=True)),
    ),
    "vit_small": Published(
        build=lambda: VisionTransformer(384, 6),
        measured_mib=dict(zip(BATCHES, (2421, 2979, 3993, 5979, 9719), strict=True)),
    ),
    "vit_base": Published(
        build=lambda: VisionTransformer(768, 12),
        measured_mib=dict(zip(BATCHES, (3491, 4523, 6459, 10_197, 17_601), strict=True)),
    ),
    "resnet18": Published(
        build=lambda: resnet((2, 2, 2, 2), bottleneck=False),
        measured_mib=dict(zip(BATCHES, (2153, 2503, 3291, 4525, 7269), strict=True)),
    ),
    "resnet50": Published(
        build=lambda: resnet((3, 4, 6, 3), bottleneck=True),
        measured_mib=dict(zip(BATCHES, (2875, 3733, 5229, 8465, 15_169), strict=True)),
    ),
    "resnet152": Published(
        build=lambda: resnet((3, 8, 36, 3), bottleneck=True),
        measured_mib=dict(zip(BATCHES, (3945, 5623, 8621, 14_847, 27_121), strict=True)),
    ),
    "resnet50, Adam": Published(
        build=lambda: resnet((3, 4, 6, 3), bottleneck=True),
        measured_mib={32: 5262, 64: 8536, 128: 15_120},
        adam=True,
    ),
    "vgg16, Adam": Published(build=vgg16, measured_mib={32: 8222, 64: 13_642, 128: 24_408}, adam=True),
}
FITTED_ON = ("vit_tiny", "vit_small", "vit_base")


COLUMNS = {"without": None, "cuDNN 9.10.2": TORCH_VERSION, "cuDNN 9.19.0": "2.11.0", "cuDNN 9.20.0": "2.13.0"}
"""The release of PyTorch whose cuDNN convolves, by column. In the first one convolutions take no scratch memory.

9.10.2 is the version that the planner takes for the release of the runs: the nearest one that it knows. The others show
how much the version matters.
"""
PREDICTED = "cuDNN 9.10.2"


def rehearsed(row: Published, batch: int) -> StepGraph:
    """Returns the recording of a few steps that begin on an empty card."""

    def program(device: torch.device) -> None:
        with device:
            model = row.build()
        optimizer = (
            torch.optim.Adam(model.parameters())
            if row.adam
            else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        for _ in range(STEPS):
            images = torch.rand(batch, 3, PIXELS, PIXELS).to(device)
            labels = torch.zeros(batch, dtype=torch.int64).to(device)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return graph_of(program, CARD)


def reserved_mib(graph: StepGraph, convolving: str | None) -> int:
    """Returns the peak of the memory reserved by the caching allocator, in MiB.

    Args:
        convolving: release of PyTorch whose cuDNN convolves; None if convolutions take no scratch memory.
    """
    card = profiles.load(CARD)

    def storages(torch_version: str, *, of_convolutions: bool) -> list[Storage]:
        return [
            storage
            for storage in with_workspaces(graph, card, torch_version).storages[len(graph.storages) :]
            if (storage.op is not None and is_convolution(graph.ops[storage.op].name)) is of_convolutions
        ]

    added = storages(TORCH_VERSION, of_convolutions=False)
    if convolving is not None:
        added += storages(convolving, of_convolutions=True)
    ids, sizes, _ = allocation_stream(dataclasses.replace(graph, storages=[*graph.storages, *added]))
    return replayed((ids, sizes), card, None).peak_reserved_bytes // MIB


def constant_of(reserved: dict[tuple[str, int], int]) -> int:
    """Returns the constant in MiB that fits the vision transformers: the most frequent one, else the median."""
    fitting = [ROWS[name].measured_mib[batch] - mib for (name, batch), mib in reserved.items() if name in FITTED_ON]
    constant = collections.Counter(fitting).most_common(1)[0][0]
    return constant if fitting.count(constant) > 1 else sorted(fitting)[len(fitting) // 2]


def tables() -> tuple[Table, Table]:
    """Returns the errors of all rows by column, and for each column a summary of the convolutional networks."""
    cases = [(name, batch) for name, row in ROWS.items() for batch in row.measured_mib]
    reserved: dict[str, dict[tuple[str, int], int]] = {column: {} for column in COLUMNS}
    for name, batch in track(cases, console=Console(stderr=True)):
        graph = rehearsed(ROWS[name], batch)
        for column, convolving in COLUMNS.items():
            reserved[column][name, batch] = reserved_mib(graph, convolving)
    constants = {column: constant_of(found) for column, found in reserved.items()}
    errors = {
        column: {
            (name, batch): (mib + constants[column]) / ROWS[name].measured_mib[batch] - 1
            for (name, batch), mib in found.items()
        }
        for column, found in reserved.items()
    }
    result = Table(title="process memory in MiB; predicted: rehearsed + a constant fitted on the vision transformers")
    for column in ("model", "batch", "published", "predicted", *COLUMNS):
        result.add_column(column, justify="left" if column == "model" else "right")
    for name, batch in cases:
        predicted = reserved[PREDICTED][name, batch] + constants[PREDICTED]
        numbers = (f"{number:,}" for number in (ROWS[name].measured_mib[batch], predicted))
        result.add_row(name, str(batch), *numbers, *(f"{found[name, batch]:+.2%}" for found in errors.values()))
    summary = Table(title="absolute errors of the convolutional networks")
    for column in ("", "constant", "median", "mean", "worst"):
        summary.add_column(column, justify="left" if not column else "right")
    for column, found in errors.items():
        sizes = [abs(error) for (name, _), error in found.items() if name not in FITTED_ON]
        of_all = (statistics.median(sizes), statistics.mean(sizes), max(sizes))
        summary.add_row(column, f"{constants[column]:,}", *(f"{number:.2%}" for number in of_all))
    return result, summary
