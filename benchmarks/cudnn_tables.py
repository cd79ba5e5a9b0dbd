"""Writes the tables of cuDNN's workspaces in `profiles/cudnn`: for common convolutions, by version and card.

    python -m benchmarks.cudnn_tables --library PATH/libcudnn.so.9 [--library ...] [--capabilities 8.0] [--benchmark]

The convolutions are those of common models, seen in a forward on the meta device, at several batch sizes. Each is asked
in the memory formats and precisions in which people train, as forward and as both gradients. With `--benchmark`, the
tables are those for `torch.backends.cudnn.benchmark = True`: they have the workspaces of all algorithms, which PyTorch
then tries out. No GPU is needed. The libraries come from the wheels nvidia-cudnn-cu12 and nvidia-cudnn-cu13: download
one with `pip download --no-deps`, and unpack it. If a table is there already, only what it lacks is asked.

cuDNN 9.10.2 has no column for compute capability 10.0: asked about such a card without its driver, it ends its process.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import lzma
import pathlib
from collections.abc import Callable, Sequence

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.published import vision
from examples import convnet, gan, unet
from planner.virtual_gpu.values.kernel_calls import kernel_call
from planner.workspaces.cudnn import tables
from planner.workspaces.cudnn.asking import ask_child
from planner.workspaces.cudnn.convolution import OPERATIONS, Convolution, Kind, Shape, Sizes
from planner.workspaces.cudnn.dispatch import FORWARD_OP, shape_of
from planner.workspaces.cudnn.versions import knows

CAPABILITIES = ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
KINDS = [
    Kind(operation, dtype, channels_last, tf32)
    for dtype, channels_last, tf32 in (
        ("float32", False, True),
        ("float32", False, False),
        ("float32", True, True),
        ("float16", False, False),
        ("float16", True, False),
        ("bfloat16", False, False),
        ("bfloat16", True, False),
    )
    for operation in OPERATIONS
]
ALL = (1, 2, 4, 8, 16, 32, 64, 128, 256)
USUAL = (8, 16, 32, 64, 128)
FEW = (1, 2, 4, 8)
Program = Callable[[], object]


class Shapes(TorchDispatchMode):
    """Collects the sizes of all convolutions that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Shape, None] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if str(op) == FORWARD_OP:
            self.found[shape_of(kernel_call(op, args, kwargs or {}, result))] = None
        return result


class ClassicUNet(nn.Module):
    """The U-Net of Ronneberger et al. (arXiv 1505.04597) with padding, in two or three dimensions."""

    def __init__(self, dims: int, channels: int, inputs: int, widest: int) -> None:
        super().__init__()
        convolution, up = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.pool = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2)
        widths = [channels]
        while widths[-1] < widest:
            widths.append(2 * widths[-1])

        def twice(before: int, after: int) -> nn.Module:
            return nn.Sequential(convolution(before, after, 3, padding=1), convolution(after, after, 3, padding=1))

        self.down = nn.ModuleList(map(twice, [inputs, *widths], widths))
        self.up = nn.ModuleList(up(wide, wide // 2, 2, stride=2) for wide in widths[:0:-1])
        self.across = nn.ModuleList(twice(wide, wide // 2) for wide in widths[:0:-1])
        self.last = convolution(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if not number else self.pool(x))
            kept.append(x)
        for up, block, skip in zip(self.up, self.across, kept[-2::-1], strict=True):
            x = block(torch.cat([skip, up(x)], dim=1))
        return self.last(x)


def latent_diffusion() -> None:
    """The layers of the U-Net of Stable Diffusion 1 (Rombach et al., arXiv 2112.10752) at 64 x 64 latents."""
    for pixels, width, others in ((64, 320, (4, 640, 960)), (32, 640, (320, 960, 1280, 1920)), (16, 1280, (640, 1920))):
        images = torch.empty(1, width, pixels, pixels)
        nn.Conv2d(width, width, 3, padding=1)(images)
        nn.Conv2d(width, width, 3, stride=2, padding=1)(images)
        for inputs in others:
            nn.Conv2d(inputs, width, 3, padding=1)(torch.empty(1, inputs, pixels, pixels))
            nn.Conv2d(inputs, width, 1)(torch.empty(1, inputs, pixels, pixels))
    nn.Conv2d(1280, 1280, 3, padding=1)(torch.empty(1, 1280, 8, 8))
    nn.Conv2d(2560, 1280, 3, padding=1)(torch.empty(1, 2560, 8, 8))
    nn.Conv2d(320, 4, 3, padding=1)(torch.empty(1, 320, 64, 64))


def small_images() -> None:
    """The stems of networks for images of 28 or 32 pixels (MNIST, CIFAR), and ResNet-18 and VGG-16 on them."""
    nn.Sequential(nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3))(torch.empty(1, 1, 28, 28))
    nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5))(torch.empty(1, 3, 32, 32))
    nn.Conv2d(3, 64, 3, padding=1)(torch.empty(1, 3, 32, 32))
    vision.vgg16()[:31](torch.empty(1, 3, 32, 32))
    layers = list(vision.resnet((2, 2, 2, 2), bottleneck=False))[4:-3]
    nn.Sequential(*layers)(torch.empty(1, 64, 32, 32))


def image_model(build: Callable[[], nn.Module], pixels: int = 224) -> Program:
    return lambda: build()(torch.empty(1, 3, pixels, pixels))


def of_transformers(config: transformers.PretrainedConfig, pixels: int = 224) -> Program:
    return lambda: transformers.AutoModel.from_config(config)(torch.empty(1, 3, pixels, pixels))


def patches() -> None:
    """The patch embeddings of vision transformers."""
    for width, patch in ((192, 16), (384, 16), (768, 16), (1024, 16), (384, 14), (1024, 14), (768, 32)):
        nn.Conv2d(3, width, patch, stride=patch)(torch.empty(1, 3, 224, 224))


def audio() -> None:
    """The first layers of Whisper of all sizes, and of wav2vec 2.0."""
    for width, mels in ((384, 80), (512, 80), (768, 80), (1024, 80), (1280, 80), (1280, 128)):
        nn.Conv1d(mels, width, 3, padding=1)(torch.empty(1, mels, 3000))
        nn.Conv1d(width, width, 3, stride=2, padding=1)(torch.empty(1, width, 3000))
    sound = torch.empty(1, 1, 160_000)
    for number, (kernel, stride) in enumerate(((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))):
        sound = nn.Conv1d(512 if number else 1, 512, kernel, stride=stride)(sound)
    nn.Conv1d(768, 768, 128, padding=64, groups=16)(torch.empty(1, 768, 499))


def example(build: Callable[..., tuple]) -> Program:
    def run() -> None:
        model, batch, *_ = build(batch_size=1)
        images = batch[:-1] if isinstance(batch, tuple) else (batch,)
        model(*images)

    return run


def adversarial() -> None:
    """The example of a generator and a discriminator."""
    model = gan.build(batch_size=1)["model"]
    model["generator"](torch.empty(1, gan.LATENT))
    model["discriminator"](torch.empty(1, 3, 64, 64))


def recorded() -> None:
    """The convolutions of a public recording of the allocator (JasperSolt/EoR_NN), whose workspaces are known."""
    sizes = ((30, 16, 256), (16, 32, 128), (32, 64, 64))
    for inputs, outputs, pixels in sizes:
        nn.Conv2d(inputs, outputs, 3, padding=1)(torch.empty(1, inputs, pixels, pixels))


PROGRAMS: dict[str, tuple[Program, Sequence[int]]] = {
    "resnet18": (image_model(lambda: vision.resnet((2, 2, 2, 2), bottleneck=False)), ALL),
    "resnet50": (image_model(lambda: vision.resnet((3, 4, 6, 3), bottleneck=True)), ALL),
    "vgg16": (image_model(vision.vgg16), ALL[:-1]),
    "small images": (small_images, (*USUAL, 256, 512)),
    "patches": (patches, ALL),
    "convnext": (of_transformers(transformers.ConvNextConfig()), USUAL),
    "mobilenet": (of_transformers(transformers.MobileNetV2Config()), (32, 64)),
    "u-net": (lambda: ClassicUNet(2, 64, 3, 1024)(torch.empty(1, 3, 256, 256)), (*FEW, 16)),
    "u-net, 3d": (lambda: ClassicUNet(3, 32, 1, 256)(torch.empty(1, 1, 96, 96, 96)), FEW[:2]),
    "latent diffusion": (latent_diffusion, FEW),
    "audio": (audio, (1, 8, 16)),
    "example convnet": (example(convnet.build), USUAL),
    "example unet": (example(unet.build), (4, 8, 16, 32)),
    "example gan": (adversarial, USUAL[1:]),
    "recorded": (recorded, FEW[:1]),
}
"""Programs with one sample that run the convolutions of a model, with the batch sizes for which they are asked."""


def shapes() -> list[Shape]:
    """Returns the sizes of all convolutions of the tables, in order."""
    found: dict[Shape, None] = {}
    for program, batches in PROGRAMS.values():
        with torch.device("meta"), torch.no_grad(), Shapes() as seen:
            program()
        for shape, batch in itertools.product(seen.found, batches):
            found[dataclasses.replace(shape, x=(batch, *shape.x[1:]))] = None
    return sorted(found, key=lambda shape: (shape.w, shape.x[1:], shape))


def answers(library: pathlib.Path, capability: tuple[int, int], wanted: list[Shape], kinds: list[Kind]) -> list[str]:
    """Returns the answers of a library for one capability: a text for each shape."""
    # Kinds with the same configurations come one after another, so that cuDNN is asked for them once.
    together = sorted(kinds, key=lambda kind: (kind.operation, kind.dtype, kind.channels_last))
    questions = [Convolution(kind, shape).text for shape in wanted for kind in together]
    found: list[Sizes] = []
    while len(found) < len(questions):
        answered = ask_child(library, capability, questions[len(found) :], None)
        found += answered.sizes
        if answered.ended:
            print(f"{library}: no answer to {questions[len(found)]} for {capability}: {answered.ended}", flush=True)
            found.append(())
    texts = []
    for place in range(0, len(found), len(kinds)):
        sizes = dict(zip(together, found[place : place + len(kinds)], strict=True))
        texts.append(tables.written([sizes[kind] for kind in kinds], benchmark=kinds[0].benchmark))
    return texts


def columns_of(path: pathlib.Path, kinds: list[str]) -> dict[tuple[int, int], dict[str, str]]:
    """Returns the answers of a table that is there already, by capability and text of the sizes."""
    if not path.exists() or list((table := tables.read(path)).kinds) != kinds:
        return {}
    return {
        capability: {text: line.split(" ")[place] for text, line in table.lines.items()}
        for place, capability in enumerate(table.capabilities)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path, action="append", required=True)
    parser.add_argument("--capabilities", nargs="+", default=[f"{major}.{minor}" for major, minor in CAPABILITIES])
    parser.add_argument("--out", type=pathlib.Path, default=tables.FOLDER)
    parser.add_argument("--benchmark", action="store_true")
    options = parser.parse_args()
    wanted, kinds = shapes(), [dataclasses.replace(kind, benchmark=options.benchmark) for kind in KINDS]
    print(f"{len(wanted)} shapes of convolutions, {len(kinds)} kinds", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for library in options.library:
        version = ask_child(library, (8, 0), [], None).version
        path = options.out / tables.name_of(version, benchmark=options.benchmark)
        columns = columns_of(path, [kind.text for kind in kinds])
        named = [tuple(map(int, text.split("."))) for text in options.capabilities]
        for capability in [*columns, *(each for each in named if each not in columns and knows(version, each))]:
            column = columns.setdefault(capability, {})
            new = [shape for shape in wanted if shape.text not in column]
            column |= dict(zip((shape.text for shape in new), answers(library, capability, new, kinds), strict=True))
            write(path, version, columns, wanted, kinds)
            print(f"{path}: {capability}, {len(new)} new shapes, {path.stat().st_size:,} bytes", flush=True)


def write(
    path: pathlib.Path,
    version: tuple[int, ...],
    columns: dict[tuple[int, int], dict[str, str]],
    wanted: list[Shape],
    kinds: list[Kind],
) -> None:
    """Writes a table with the capabilities that have all shapes."""
    complete = sorted(each for each, column in columns.items() if all(shape.text in column for shape in wanted))
    options = " --benchmark" if kinds[0].benchmark else ""
    header = {
        "cudnn": ".".join(map(str, version)),
        "made": f"python -m benchmarks.cudnn_tables{options}, {datetime.date.today()}, torch {torch.__version__}",
        "capabilities": [f"{major}.{minor}" for major, minor in complete],
        "kinds": [kind.text for kind in kinds],
    }
    lines = (" ".join((shape.text, *(columns[each][shape.text] for each in complete))) for shape in wanted)
    content = "\n".join((json.dumps(header), *lines)) + "\n"
    path.write_bytes(lzma.compress(content.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
