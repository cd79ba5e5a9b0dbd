"""Compares the promise and the certificate of plans for convolutional networks, with the workspaces of cuDNN.

    python -m benchmarks.convolution_promises [NAME ...]

The networks come from transformers, with random weights, and from `benchmarks.cudnn_tables`. Each is planned with SGD
for the fraction of its baseline's total that is listed, and may only recompute. Promise and certificate are sums of the
tensors and workspaces at the peak, and should be equal to the byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
import transformers
from torch import nn

import planner
from benchmarks.cudnn_tables import ClassicUNet
from planner.plan_types.plan import Plan
from planner.plan_types.sizes import MIB

CARD = "a100-40gb"
TECHNIQUES = ("checkpoint",)
SAMPLES, PIXELS, CLASSES = 32, 96, 10
FRACTIONS = (0.85,)
SECONDS = 120.0
"""Time limit of one plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Net:
    """A network, and the function that makes a number for each class from its output (for each pixel, if `dense`)."""

    build: Callable[[], nn.Module]
    dense: bool = False
    samples: int = SAMPLES


class Logits(nn.Module):
    """A network that returns its logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = self.net(images)
        return output if isinstance(output, torch.Tensor) else output.logits


def classifier(config: transformers.PretrainedConfig) -> Callable[[], nn.Module]:
    config.num_labels = CLASSES
    return lambda: transformers.AutoModelForImageClassification.from_config(config)


def segmenter() -> nn.Module:
    config = transformers.SegformerConfig(num_labels=CLASSES)
    return transformers.AutoModelForSemanticSegmentation.from_config(config)


NETS = {
    "ResNet-50": Net(classifier(transformers.ResNetConfig())),
    "ConvNeXt-T": Net(classifier(transformers.ConvNextConfig())),
    "RegNet-Y": Net(classifier(transformers.RegNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512]))),
    "MobileNetV2": Net(classifier(transformers.MobileNetV2Config())),
    "EfficientNet-B0": Net(
        classifier(transformers.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280))
    ),
    "SegFormer-B0": Net(segmenter, dense=True),
    "U-Net": Net(lambda: ClassicUNet(2, 32, 3, 256), dense=True, samples=8),
}


def loss_fn(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the cross entropy. Labels of pixels have the size of the output."""
    return nn.functional.cross_entropy(output, batch[1])


def plans(net: Net) -> Iterator[tuple[float, Plan, float]]:
    """Yields for each fraction of the baseline's total: the fraction, the plan, and the seconds that it took."""
    model = Logits(net.build())
    images = torch.rand(net.samples, 3, PIXELS, PIXELS)
    with torch.no_grad():
        shape = model.eval()(images[:2]).shape
    model.train()
    batch = images, torch.randint(shape[1], (net.samples, *shape[2:]))
    whole = planner.plan(model, batch, vram=None, gpu=CARD, loss_fn=loss_fn, optimizer="sgd").baseline.total_bytes
    for fraction in FRACTIONS:
        began = time.perf_counter()
        plan = planner.plan(
            model,
            batch,
            vram=int(fraction * whole),
            gpu=CARD,
            loss_fn=loss_fn,
            optimizer="sgd",
            only=TECHNIQUES,
            time_limit=SECONDS,
            fidelity="exact",
        )
        yield fraction, plan, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NETS)}; default: all")
    print("| network | of the baseline | fits | slower | promised | certified | difference | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in parser.parse_args().names or NETS:
        for fraction, plan, seconds in plans(NETS[name]):
            promised, certified = plan.solver.promised_bytes, plan.solver.certified_bytes
            cells = (
                name,
                f"{fraction:.0%}",
                "yes" if plan.fits else "no",
                "yes" if any("run a slower algorithm" in note for note in plan.notes) else "no",
                f"{promised / MIB:,.1f} MiB",
                f"{certified / MIB:,.1f} MiB",
                f"{promised - certified:,} bytes",
                f"{seconds:.0f}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
