"""Networks of MMSegmentation's model zoo: FCN, PSPNet, DeepLabV3 and DeepLabV3+ on dilated ResNets, and U-Net.

Source: github.com/open-mmlab/mmsegmentation, the tables in configs/{fcn,pspnet,deeplabv3,deeplabv3plus,unet}/README.md
(column "Mem (GB)", June to December 2020) with the configurations that they name. docs/model_zoo.md says: maximum of
`torch.cuda.max_memory_allocated()` over 4 cards with cudnn.benchmark off, V100 32 GB, PyTorch 1.5, cuDNN 7.6.3, whose
heuristics cannot be asked. All train in fp32 with SGD and DistributedDataParallel, with 2 images of Cityscapes on each
card, or 4 of the other data.

The maintainers say that GB are 1,024 MiB (issues 1184 and 1215). U-Net's figures have three digits after the point, and
are assumed to be thousands of the log's MiB; their unit is not stated. With cudnn.benchmark on, the log of PSPNet's row
of 6.1 has 18,773 MiB (issue 1215). Validations are not rehearsed, and each card has its own batch norm in place of the
synchronized one. These rows are left out: figures below 5 GB with one digit, other data, ResNet-101 with the plain
stem, and fp16, which was not autocast in 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.published.convolutional.heads import Atrous, Head, Plain, Pyramid, Segmenter, UNet, dilated_resnet
from benchmarks.published.convolutional.rows import GIB, MIB, Row, Training
from benchmarks.published.several_cards.rows import Measure

SETTINGS = {
    "Cityscapes": (2, 512, 1024, 19),
    "Cityscapes, 769": (2, 769, 769, 19),
    "ADE20K": (4, 512, 512, 150),
}
"""Images on a card, height, width, classes. Images of 769 pixels are resized with aligned corners."""
HEADS: dict[str, Callable[..., Head]] = {
    "FCN": lambda classes, aligns: Plain(3, 2048, 512, classes, depth=2, concatenates=True),
    "PSPNet": lambda classes, aligns: Pyramid(3, 2048, 512, classes, aligns=aligns),
    "DeepLabV3": lambda classes, aligns: Atrous(3, 2048, 512, classes, aligns=aligns),
    "DeepLabV3+": lambda classes, aligns: Atrous(3, 2048, 512, classes, shallow=256, aligns=aligns),
}
RESNETS: dict[tuple[str, str], tuple[float, ...]] = {
    ("FCN", "Cityscapes"): (5.7, 9.2, 5.6),
    ("FCN", "Cityscapes, 769"): (6.5, 10.4, 6.3),
    ("FCN", "ADE20K"): (8.5, 12.0),
    ("PSPNet", "Cityscapes"): (6.1, 9.6, 6.0),
    ("PSPNet", "Cityscapes, 769"): (6.9, 10.9, 6.8),
    ("PSPNet", "ADE20K"): (8.5, 12.0),
    ("DeepLabV3", "Cityscapes"): (6.1, 9.6, 6.0),
    ("DeepLabV3", "Cityscapes, 769"): (6.9, 10.9, 6.8),
    ("DeepLabV3", "ADE20K"): (8.9, 12.4),
    ("DeepLabV3+", "Cityscapes"): (7.5, 11.0, 7.4),
    ("DeepLabV3+", "Cityscapes, 769"): (8.5, 12.5, 8.4),
    ("DeepLabV3+", "ADE20K"): (10.6, 14.1),
}
"""Figures in GiB by head and data: ResNet-50 and ResNet-101 with a deep stem, and ResNet-50 with the plain one."""
NETWORKS = ((50, True), (101, True), (50, False))
UNETS = {
    "FCN": (0.680, 0.968, 2.525),
    "PSPNet": (0.599, 0.982, 2.588),
    "DeepLabV3": (0.596, 0.999, 2.604),
}
"""Figures in thousands of MiB by head, for 4 images of 64, 128 and 256 pixels."""
UNET_HEADS: dict[str, Callable[[], Head]] = {
    "FCN": lambda: Plain(4, 64, 64, 2),
    "PSPNet": lambda: Pyramid(4, 64, 16, 2),
    "DeepLabV3": lambda: Atrous(4, 64, 16, 2),
}


def on_resnet(head: str, depth: int, *, deep_stem: bool, classes: int, aligns: bool) -> nn.Module:
    auxiliary = Plain(2, 1024, 256, classes)
    network = dilated_resnet(depth, deep_stem=deep_stem)
    return Segmenter(network, HEADS[head](classes, aligns), auxiliary, aligns=aligns)


def on_unet(head: str) -> nn.Module:
    return Segmenter(UNet(), UNET_HEADS[head](), Plain(3, 128, 64, 2))


def _batch(samples: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(samples, 3, height, width), torch.zeros(samples, height, width, dtype=torch.long)


def _row(
    setting: str,
    published: float,
    build: Callable[[], nn.Module],
    size: tuple[int, ...],
    *,
    digit: float = 0.1,
    unit_bytes: int = GIB,
    doubt: str = "",
) -> Row:
    return Row(
        setting=setting,
        source=__name__,
        card="v100-32gb",
        cards=4,
        torch_version="1.5",
        measure=Measure.ALLOCATED,
        published=published,
        unit_bytes=unit_bytes,
        digit=digit,
        program=Training(build=build, batch=functools.partial(_batch, *size), clips=False),
        doubt=doubt,
    )


ROWS = (
    *(
        _row(
            f"{head} R-{depth}{'' if deep_stem else 'b'}, {data}",
            published,
            functools.partial(
                on_resnet, head, depth, deep_stem=deep_stem, classes=SETTINGS[data][3], aligns=data.endswith("769")
            ),
            SETTINGS[data][:3],
        )
        for (head, data), figures in RESNETS.items()
        for (depth, deep_stem), published in zip(NETWORKS, figures, strict=False)
    ),
    *(
        _row(
            f"U-Net with {head}, 4 x {size}",
            published,
            functools.partial(on_unet, head),
            (4, size, size),
            digit=0.001,
            unit_bytes=1000 * MIB,
            doubt="the unit is not stated",
        )
        for head, figures in UNETS.items()
        for size, published in zip((64, 128, 256), figures, strict=True)
    ),
)
