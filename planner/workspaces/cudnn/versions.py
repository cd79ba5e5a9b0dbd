"""Which version of cuDNN a release of PyTorch runs.

The versions are those that the wheels of torch on the Python Package Index require. cuDNN 9.11 and newer do not know
cards before compute capability 7.5, so that PyTorch's builds for these cards (CUDA 12.6) have stayed with 9.10.
"""

from __future__ import annotations

import dataclasses
import re

Version = tuple[int, int, int]

PINNED: dict[tuple[int, int], Version] = {
    (2, 8): (9, 10, 2),
    (2, 9): (9, 10, 2),
    (2, 10): (9, 10, 2),
    (2, 11): (9, 19, 0),
    (2, 12): (9, 20, 0),
    (2, 13): (9, 20, 0),
}
"""The version of cuDNN by release of PyTorch. Releases before 2.8 require versions that cannot be asked."""
_LAST_FOR_OLD_CARDS: Version = (9, 10, 2)
_FIRST_OF_NEW_CARDS = (7, 5)


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The version of cuDNN with which a release of PyTorch trains on a card."""

    version: Version
    is_pinned: bool
    """True if the release requires this version. False if it is only the nearest version that is known."""


def release(torch_version: str) -> tuple[int, int]:
    """Returns the release of PyTorch, such as (2, 13), of a version as in `torch.__version__`.

    Raises:
        ValueError: the version cannot be read.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ValueError(f"torch version '{torch_version}' cannot be read: give a version such as '2.13.0'")
    return int(match[1]), int(match[2])


def expected(torch_version: str, capability: tuple[int, int]) -> Expected:
    """Returns the version of cuDNN for a version as in `torch.__version__` and a compute capability.

    Raises:
        ValueError: the version cannot be read.
    """
    planned = release(torch_version)
    nearest = min(max(planned, min(PINNED)), max(PINNED))
    version = PINNED[nearest]
    return Expected(version if knows(version, capability) else _LAST_FOR_OLD_CARDS, planned in PINNED)


def knows(version: Version, capability: tuple[int, int]) -> bool:
    """True if this version of cuDNN has algorithms for cards of this compute capability."""
    return capability >= _FIRST_OF_NEW_CARDS or version <= _LAST_FOR_OLD_CARDS


def is_of_cuda_build(torch_version: str) -> bool:
    """True if the version is that of a CUDA build ('2.13.0+cu130'), which runs the installed cuDNN."""
    return "+cu" in torch_version
