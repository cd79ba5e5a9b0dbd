"""The notes of a plan on the workspaces of its convolutions."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from planner.workspaces.cudnn.asking import Version
from planner.workspaces.cudnn.fallback import CLOSE
from planner.workspaces.cudnn.sources import Answer, Source

_REMEDY = "to ask cuDNN itself, which needs no GPU, install the extra 'cudnn' of torch-planner"


def notes(
    answers: Sequence[Answer],
    *,
    torch_version: str,
    others: int,
    searched: Sequence[Answer],
    silent: Sequence[str],
) -> Iterator[str]:
    """Yields notes on the workspaces of a plan's convolutions; none if it has no convolution.

    Args:
        answers: one for each call of cuDNN.
        torch_version: the release of PyTorch that the plan is for.
        others: number of convolutions whose scratch memory is not known, because they do not run on cuDNN.
        searched: with `torch.backends.cudnn.benchmark = True`, an answer about all algorithms for each call of cuDNN.
        silent: the reasons why libraries of this machine did not answer.
    """
    kinds = collections.Counter((each.source, each.version, each.is_exact) for each in answers)
    release = ".".join(torch_version.split(".")[:2])
    for (source, version, is_exact), count in sorted(kinds.items(), key=lambda pair: -pair[1]):
        calls = f"{count:,} of {len(answers):,} workspaces of convolutions"
        if source is Source.FORMULA:
            remedy = "" if any(kind[0] is Source.LIBRARY for kind in kinds) else f"; {_REMEDY}"
            yield (
                f"{calls} are estimated by a formula: at least half of such estimates are wrong by at most {CLOSE:.0%} "
                f"of the bytes of the convolution's tensors, and the others by up to all of these bytes, or in a few "
                f"cases more{remedy}"
            )
        elif source is Source.SCALED:
            yield f"{calls} are estimates, {source.value} for cuDNN {_text(version)}; {_REMEDY}"
        elif is_exact:
            yield f"{calls} are those of cuDNN {_text(version)}, which torch {release} runs ({source.value})"
        else:
            yield (
                f"{calls} are estimates: cuDNN {_text(version)} takes them ({source.value}), and torch {release} "
                "may use another version on this card"
            )
    if others:
        yield f"some convolutions do not run on cuDNN ({others:,} ops), and their workspaces are not counted"
    if searched:
        yield from _search_notes(searched)
    if answers:
        yield from (f"cuDNN could not be asked: {reason}" for reason in silent)


def _search_notes(searched: Sequence[Answer]) -> Iterator[str]:
    """Yields notes on the algorithms among which PyTorch searches for the fastest one."""
    yield (
        "torch.backends.cudnn.benchmark is on: each convolution runs the algorithm that is the fastest on the card, "
        "which cannot be known without it. The largest workspace of the algorithms that PyTorch compares is counted, "
        "so the allocated bytes are an upper bound"
    )
    count = sum(each.source is Source.FORMULA for each in searched)
    if count:
        yield (
            f"the upper bound is not known for {count:,} of {len(searched):,} workspaces: an estimate without the "
            f"search is counted for them, and the step may take more; {_REMEDY}"
        )
    count = sum(each.source is not Source.FORMULA and not each.is_exact for each in searched)
    if count:
        yield f"the upper bound is an estimate for {count:,} of {len(searched):,} workspaces; {_REMEDY}"


def _text(version: Version | None) -> str:
    return ".".join(map(str, version or ()))
