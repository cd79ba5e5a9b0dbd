"""Video classifiers of MMAction2's model zoo: 3D convolutions, and convolutions of single images.

Source: github.com/open-mmlab/mmaction2, release 0.24.1, the tables in configs/recognition/*/README.md (column
gpu_mem(M), 2020 to 2022) with the configurations that they name. The figures are `torch.cuda.max_memory_allocated()`
in MiB, as the runner's log hook writes them. All train in fp32 on 8 to 48 cards with SGD, DistributedDataParallel and
limited gradients, and without cudnn.benchmark.

The card and the versions of a row are not known. The zoo's own benchmark (docs/benchmark.md) ran on V100 32 GB with
PyTorch 1.4 and cuDNN 7.6.3, whose heuristics cannot be asked. The layers are those of the code on the day of a figure:
SlowFast sliced its clips until September 2020. The validations between the epochs are not rehearsed, and each card has
its own batch norm in place of the synchronized one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.published.convolutional.clips import (
    C3d,
    ClipClassifier,
    FrameClassifier,
    ResNet3d,
    SlowFast,
    split3d,
)
from benchmarks.published.convolutional.rows import MIB, Row, Training
from benchmarks.published.several_cards.rows import Measure

PIXELS = 224
_I3D_BLOCKS = ((1, 1, 1), (1, 0, 1, 0), (1, 0, 1, 0, 1, 0), (0, 1, 0))

slow_only = functools.partial(ResNet3d, 50, stem=(1, 7, 7), inflated=(0, 0, 1, 1))
i3d = functools.partial(ResNet3d, 50, stem=(5, 7, 7), stem_frames=2, pools=(2, 2), inflated=_I3D_BLOCKS)
r2plus1d = functools.partial(
    ResNet3d, 34, stem=(3, 7, 7), inflated=(1, 1, 1, 1), frame_strides=(1, 2, 2, 2), convolution=split3d
)
csn = functools.partial(
    ResNet3d, 152, stem=(3, 7, 7), inflated=(1, 1, 1, 1), frame_strides=(1, 2, 2, 2), separated=True
)
slow_fast_4 = functools.partial(SlowFast, 50, 50, every=8, fusion=5)
slow_fast_8 = functools.partial(SlowFast, 50, 50, every=4, fusion=7)


def _batch(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)


def _row(setting: str, published: int, build: Callable[[], nn.Module], shape: tuple[int, ...], doubt: str = "") -> Row:
    return Row(
        setting=setting,
        source=__name__,
        card="v100-32gb",
        cards=8,
        torch_version="1.4",
        measure=Measure.ALLOCATED,
        published=published,
        unit_bytes=MIB,
        digit=1,
        program=Training(build=build, batch=functools.partial(_batch, shape)),
        doubt=doubt,
    )


def frames(
    name: str,
    published: int,
    samples: int,
    images: int,
    classes: int,
    *,
    depth: int | None = 50,
    channels: int = 3,
    doubt: str = "",
    **options: bool,
) -> Row:
    """Returns a row of a network that sees single images: TSN or TSM."""
    build = functools.partial(FrameClassifier, depth, classes, images, channels=channels, **options)
    shape = (samples, images, channels, PIXELS, PIXELS)
    return _row(f"{name}, {samples} x {images} images", published, build, shape, doubt)


def clips(
    name: str,
    published: int,
    samples: int,
    length: int,
    classes: int,
    network: Callable[[], nn.Module],
    *,
    pixels: int = PIXELS,
    channels: int = 3,
    freezes_statistics: bool = False,
    doubt: str = "",
) -> Row:
    """Returns a row of a network that sees clips."""

    def build() -> nn.Module:
        return ClipClassifier(network(), classes, freezes_statistics=freezes_statistics)

    shape = (samples, channels, length, pixels, pixels)
    return _row(f"{name}, {samples} x {length} x {pixels}", published, build, shape, doubt)


ROWS = (
    frames("TSN R-50, UCF-101", 8332, 32, 3, 101),
    frames("TSN R-50, Kinetics-400", 8344, 32, 3, 400),
    frames("TSN R-50, Kinetics-400, flow", 8471, 32, 3, 400, channels=10),
    frames("TSN R-50, Kinetics-400, flow", 8473, 12, 8, 400, channels=10),
    frames("TSN R-50, Kinetics-400", 21_558, 32, 8, 400),
    frames("TSN R-50, HMDB-51", 21_535, 32, 8, 51),
    frames("TSN R-50, Diving-48", 5699, 8, 8, 48),
    frames("TSN R-50, Diving-48", 5705, 4, 16, 48),
    frames("TSN R-50, Something v1, frozen statistics", 10_978, 16, 8, 174, freezes_statistics=True),
    frames("TSN R-50, Something v1, frozen statistics", 5691, 4, 16, 174, freezes_statistics=True),
    frames("TSN R-50, Something v2", 10_966, 16, 8, 174),
    frames("TSN R-50, Moments", 8339, 16, 6, 339),
    frames("TSN R-50, ActivityNet", 5692, 8, 8, 200),
    frames("TSN R-50, ActivityNet, flow", 5780, 8, 8, 200, channels=10),
    frames("TSN R-101, Multi-Moments", 10_467, 16, 5, 313, depth=101),
    frames("TSM R-50, Kinetics-400", 7079, 8, 8, 400, shifts=True),
    frames("TSM R-50, Something v1", 7077, 8, 8, 174, shifts=True),
    frames("TSM R-50, Diving-48", 7070, 8, 8, 48, shifts=True),
    frames("TSM R-50, Diving-48", 7070, 4, 16, 48, shifts=True),
    frames("TSM R-50, Kinetics-400", 10_404, 6, 16, 400, shifts=True),
    frames("TSM R-50, Something v1", 10_390, 6, 16, 174, shifts=True),
    frames("TSM R-50, HMDB-51", 10_388, 12, 8, 51, shifts=True),
    frames("TSM R-101, Something v1", 9800, 8, 8, 174, depth=101, shifts=True),
    frames("TSM MobileNetV2, Kinetics-400", 3385, 8, 8, 400, depth=None, shifts=True),
    clips("SlowOnly R-50, Kinetics-400", 3168, 8, 4, 400, slow_only),
    clips("SlowOnly R-50, Kinetics-400", 8472, 24, 4, 400, slow_only),
    clips("SlowOnly R-50, Kinetics-400", 5820, 8, 8, 400, slow_only),
    clips("SlowOnly R-50, HMDB-51", 5812, 8, 8, 51, slow_only),
    clips("SlowOnly R-50, Kinetics-400, flow", 8450, 24, 4, 400, functools.partial(slow_only, channels=2), channels=2),
    clips(
        *("SlowOnly R-50, Something v1", 7759, 8, 8, 174, functools.partial(slow_only, pools=())),
        pixels=112,
        doubt="12 samples a card fit the figure, and the committed configuration has 8",
    ),
    clips("I3D R-50, Kinetics-400", 5170, 8, 32, 400, i3d),
    _row("C3D, UCF-101, 30 x 16 x 112", 6053, functools.partial(C3d, 101), (30, 3, 16, 112, 112)),
    clips("R(2+1)D R-34, Kinetics-400", 5019, 8, 8, 400, r2plus1d),
    clips("R(2+1)D R-34, Kinetics-400", 12_975, 6, 32, 400, r2plus1d),
    clips("SlowFast R-50, 4 x 16, Kinetics-400", 6203, 8, 32, 400, functools.partial(slow_fast_4, slices=True)),
    clips("SlowFast R-50, 8 x 8, Kinetics-400", 9062, 8, 32, 400, functools.partial(slow_fast_8, slices=True)),
    clips("SlowFast R-50, 16 x 8, Something v1", 9293, 4, 64, 174, slow_fast_8),
    clips("ir-CSN R-152, Kinetics-400, frozen statistics", 8516, 3, 32, 400, csn, freezes_statistics=True),
    clips("ir-CSN R-152, Kinetics-400", 8517, 3, 32, 400, csn),
)
