"""The formula for the scratch memory of convolutions and of their backward.

The workspaces are those that cuDNN's own heuristics name (`planner.workspaces.cudnn`). In addition, PyTorch copies
tensors whose memory format cuDNN does not get, and sums the gradient of a bias itself (Convolution.cpp).

With `torch.backends.cudnn.benchmark = True`, each convolution runs the algorithm that is the fastest on the card. Then
the workspace is the largest one of the algorithms whose times are compared, which is an upper bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from planner.profiles.device import DeviceProfile
from planner.workspaces.cudnn.convolution import Convolution
from planner.workspaces.cudnn.dispatch import BACKWARD_OP, FORWARD_OP, Kernels, is_convolution, kernels_of, placed_of
from planner.workspaces.cudnn.sources import Answer, workspaces
from planner.workspaces.reductions import reduction
from planner.workspaces.registry import Block, CudnnSettings, KernelCall, Search, Trials, takes_scratch_by_version


@takes_scratch_by_version(FORWARD_OP, BACKWARD_OP)
def convolution(call: KernelCall, card: DeviceProfile, torch_version: str) -> Sequence[int | Block]:
    """Returns the scratch blocks of a convolution: copies of tensors, and the workspaces of cuDNN.

    In the backward, the workspace of the input's gradient is freed before the gradient of the weight is allocated. The
    blocks of the sum for the bias come last.

    Source: cudnn/ConvShared.cpp, cudnn/Conv_v8.cpp (`run_conv_plan`); Convolution.cpp, `convolution_backward`.
    """
    placed = placed_of(call, card.compute_capability, torch_version)
    asked = [each.taken for each in placed if isinstance(each.taken, Convolution)]
    if searches(card, call.settings):
        asked = [*asked, *map(_searched, asked)]
    answers = workspaces(asked, card.compute_capability, torch_version)
    blocks: list[int | Block] = []
    for each in placed:
        if isinstance(each.taken, Convolution):
            trials = _trials(each.taken, answers, card, call.settings)
            has_choice = len(trials.sizes_bytes) > 1 or trials.search is not None
            blocks.append(Block(_block_bytes(trials), each.first, each.last, trials if has_choice else None))
        else:
            blocks.append(Block(each.taken, each.first, each.last))
    if "output_mask" in call.arguments and call.arguments["output_mask"][2]:
        layout = call.tensor("grad_output")
        dims = (0, *range(2, len(layout.shape)))
        blocks += reduction(layout, dims, accumulator_bytes=layout.accumulator_bytes, card=card)
    return blocks


def searches(card: DeviceProfile, settings: CudnnSettings) -> bool:
    """True if PyTorch searches for the fastest algorithm of each convolution (`torch.backends.cudnn.benchmark`)."""
    return settings.benchmark if card.cudnn_benchmark is None else card.cudnn_benchmark


def _searched(convolution: Convolution) -> Convolution:
    """Returns the question about all algorithms of a convolution."""
    return Convolution(dataclasses.replace(convolution.kind, benchmark=True), convolution.shape)


def _trials(
    convolution: Convolution, answers: Mapping[Convolution, Answer], card: DeviceProfile, settings: CudnnSettings
) -> Trials:
    sizes, name = answers[convolution].sizes, convolution.text
    if not searches(card, settings):
        return Trials(sizes, name)
    search = Search(
        answers[_searched(convolution)].sizes,
        settings.benchmark_limit,
        card_bytes=card.vram_bytes - card.outside_bytes,
        heuristic_bytes=sizes,
    )
    largest = max(search.compared(max(search.plans_bytes)))
    smaller = sorted({size for size in search.plans_bytes if size < largest}, reverse=True)
    return Trials((largest, *smaller), name, search)


def _block_bytes(trials: Trials) -> int:
    """Returns the size of a workspace. A search takes a block, of 1 byte at least, also if the algorithm needs none."""
    return max(trials.sizes_bytes[0], 1 if trials.search is not None else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The workspaces of a step's convolutions, as far as they are known."""

    answers: tuple[Answer, ...]
    """One for each call of cuDNN."""
    others: int
    """Number of convolutions that run neither on cuDNN nor on kernels whose scratch memory is known."""
    searched: tuple[Answer, ...]
    """One for each call of cuDNN, if PyTorch searches for the fastest algorithms: the workspaces of all of them."""


def known(calls: Iterable[tuple[str, KernelCall | None]], card: DeviceProfile, torch_version: str) -> Known:
    """Returns what is known about the workspaces of convolutions, and asks about all of them at once.

    Args:
        calls: the ops of a step: name and arguments. Other ops than convolutions are left out.
        torch_version: a version as in `torch.__version__`.
    """
    convolutions = [call for name, call in calls if is_convolution(name) and call is not None]
    asked = [
        (each.taken, searches(card, call.settings))
        for call in convolutions
        for each in placed_of(call, card.compute_capability, torch_version)
        if isinstance(each.taken, Convolution)
    ]
    of_searches = [_searched(each) for each, is_searched in asked if is_searched]
    found = workspaces((*(each for each, _ in asked), *of_searches), card.compute_capability, torch_version)
    return Known(
        answers=tuple(found[each] for each, _ in asked),
        others=sum(kernels_of(call, card.compute_capability, torch_version) is Kernels.OTHER for call in convolutions),
        searched=tuple(found[each] for each in of_searches),
    )
