"""The formula for the scratch memory of convolutions and of their backward.

The workspaces are those that cuDNN's own heuristics name (`planner.workspaces.cudnn`). In addition, PyTorch copies
tensors whose memory format cuDNN does not get, and sums the gradient of a bias itself (Convolution.cpp).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from planner.profiles.device import DeviceProfile
from planner.workspaces.cudnn.convolution import Convolution
from planner.workspaces.cudnn.dispatch import BACKWARD_OP, FORWARD_OP, Kernels, is_convolution, kernels_of, placed_of
from planner.workspaces.cudnn.sources import Answer, workspaces
from planner.workspaces.reductions import reduction
from planner.workspaces.registry import Block, KernelCall, Trials, takes_scratch_by_version


@takes_scratch_by_version(FORWARD_OP, BACKWARD_OP)
def convolution(call: KernelCall, card: DeviceProfile, torch_version: str) -> Sequence[int | Block]:
    """Returns the scratch blocks of a convolution: copies of tensors, and the workspaces of cuDNN.

    In the backward, the workspace of the input's gradient is freed before the gradient of the weight is allocated. The
    blocks of the sum for the bias come last.

    Source: cudnn/ConvShared.cpp, cudnn/Conv_v8.cpp (`run_conv_plan`); Convolution.cpp, `convolution_backward`.
    """
    placed = placed_of(call)
    asked = [each.taken for each in placed if isinstance(each.taken, Convolution)]
    answers = workspaces(asked, card.compute_capability, torch_version)
    blocks: list[int | Block] = []
    for each in placed:
        if isinstance(each.taken, Convolution):
            sizes = answers[each.taken].sizes
            trials = Trials(sizes, each.taken.text) if len(sizes) > 1 else None
            blocks.append(Block(sizes[0], each.first, each.last, trials))
        else:
            blocks.append(Block(each.taken, each.first, each.last))
    if "output_mask" in call.arguments and call.arguments["output_mask"][2]:
        layout = call.tensor("grad_output")
        dims = (0, *range(2, len(layout.shape)))
        blocks += reduction(layout, dims, accumulator_bytes=layout.accumulator_bytes, card=card)
    return blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The workspaces of a step's convolutions, as far as they are known."""

    answers: tuple[Answer, ...]
    """One for each call of cuDNN."""
    others: int
    """Number of convolutions that run neither on cuDNN nor on kernels without scratch memory."""
    benchmark: bool
    """True if cuDNN chooses algorithms by their time."""


def known(calls: Iterable[tuple[str, KernelCall | None]], card: DeviceProfile, torch_version: str) -> Known:
    """Returns what is known about the workspaces of convolutions, and asks about all of them at once.

    Args:
        calls: the ops of a step: name and arguments. Other ops than convolutions are left out.
        torch_version: a version as in `torch.__version__`.
    """
    convolutions = [call for name, call in calls if is_convolution(name) and call is not None]
    asked = [each.taken for call in convolutions for each in placed_of(call) if isinstance(each.taken, Convolution)]
    found = workspaces(asked, card.compute_capability, torch_version)
    return Known(
        answers=tuple(found[each] for each in asked),
        others=sum(kernels_of(call) is Kernels.OTHER for call in convolutions),
        benchmark=any(call.settings.benchmark for call in convolutions),
    )
