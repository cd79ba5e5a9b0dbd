"""The profile of a card: its memory, its fixed costs and its rates.

Each card is one TOML file in `devices/`, named after its slug. To add a card, add a file (`finding`). Every number in
it has its source in a comment: a vendor datasheet, a public log, a model, or an assumption.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp64")
"""Names of the rates in `DeviceProfile.flops_per_s`. A profile states all of them."""

AUTOCAST_DTYPES = ("bf16", "fp16")
"""The dtypes that can be native, the preferred one first: bf16 needs no loss scaling."""

SEGMENT_ADDRESSES: Mapping[str, tuple[bool, ...]] = {
    "ascending": (False,),
    "descending": (True,),
    "unknown": (False, True),
}
"""Values of `DeviceProfile.segment_addresses`, each with the orders to simulate. True means descending addresses."""


class ProfileError(Exception):
    """Raised for an unknown card, or for a profile file that is not well formed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A card as PyTorch on Linux sees it.

    Rates are peaks that a dense kernel can reach. Base decisions on ratios of them only.
    """

    name: str
    """Slug that users give with --gpu, such as 'rtx-2060'."""
    title: str
    """Product name, such as 'GeForce RTX 2060 6 GB'."""
    source: str
    """'datasheet', or 'calibrated ...' with date and versions."""
    cuda_names: tuple[str, ...] = ()
    """Patterns for `torch.cuda.get_device_name()` without 'NVIDIA ' in front; see `matching`."""
    compute_capability: tuple[int, int]
    sm_count: int
    """Number of streaming multiprocessors."""
    max_threads_per_sm: int
    vram_bytes: int
    """`torch.cuda.get_device_properties().total_memory` on Linux. It differs by some MiB between drivers."""
    context_bytes: int
    """Size of the CUDA context after a training step, outside the caching allocator, with lazily loaded kernels."""
    context_source: str
    """Source of `context_bytes`: how it was measured, or the model that it was computed with."""
    memory_bandwidth_bytes_per_s: int
    flops_per_s: Mapping[str, int] = dataclasses.field(hash=False)
    """Floating-point operations per second for each of `DTYPES`.

    'fp32' is the rate of a plain fp32 matmul, which is PyTorch's default; 'tf32' counts only if the user allows it.
    'fp16' and 'bf16' are rates of dense matmuls that accumulate in fp32. The rate of an emulated dtype is that of the
    emulation.
    """
    native_dtypes: tuple[str, ...]
    """Members of `AUTOCAST_DTYPES` that make training on this card faster, the preferred one first."""
    launch_ns: int
    """Minimum time between two kernels of eager PyTorch, which is the host's time for one operator."""
    host_link_bytes_per_s: int
    """Rate of copies between pinned host memory and the card in one direction."""
    segment_addresses: str = "unknown"
    """Direction in which the driver places new segments: one of `SEGMENT_ADDRESSES`.

    Among free blocks of equal size the caching allocator takes the one at the lowest address, so fragmentation depends
    on this.
    """
    allocator: bool = True
    """True if tensors come from a caching allocator; False if only their bytes are counted (`bare`)."""

    def __post_init__(self) -> None:
        """Checks the fields, and raises `ProfileError` for the first that is wrong."""
        if unknown := [dtype for dtype in self.native_dtypes if dtype not in AUTOCAST_DTYPES]:
            raise ProfileError(
                f"{self.name}: native_dtypes names '{unknown[0]}': choose from {', '.join(AUTOCAST_DTYPES)}"
            )
        if "bf16" in self.native_dtypes and self.compute_capability < (8, 0):
            capability = ".".join(map(str, self.compute_capability))
            raise ProfileError(
                f"{self.name}: native_dtypes names 'bf16' at compute capability {capability}: "
                "bf16 is native from 8.0, leave it out"
            )
        if self.segment_addresses not in SEGMENT_ADDRESSES:
            raise ProfileError(
                f"{self.name}: segment_addresses is '{self.segment_addresses}': "
                f"choose from {', '.join(SEGMENT_ADDRESSES)}"
            )
        if set(self.flops_per_s) != set(DTYPES):
            wrong_key = min(set(self.flops_per_s) ^ set(DTYPES))
            problem = "lacks the" if wrong_key in DTYPES else "has an unknown"
            raise ProfileError(
                f"{self.name}: flops_per_s {problem} key '{wrong_key}': state exactly {', '.join(DTYPES)}"
            )

    def cublas_workspace_bytes(self, torch_version: str) -> int:
        """Returns the bytes that one cuBLAS handle allocates from the caching allocator at its first matmul.

        There is one handle for each host thread and stream, so eager training has two: the main thread's and that of
        autograd's device thread. The result is 0 for a card without a caching allocator. From torch 2.15 on the
        workspace is freed after each call unless TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps it.

        Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp, in the releases 2.4 to 2.15.

        Args:
            torch_version: A version like `torch.__version__`. Versions before 2.4 are treated as 2.4.

        Raises:
            ProfileError: the version cannot be read.
        """
        if not self.allocator:
            return 0
        since = _CUBLAS_LARGE_SINCE.get(self.compute_capability[0])
        release = _release(torch_version)
        return _CUBLAS_LARGE_BYTES if since is not None and max(release, (2, 4)) >= since else _CUBLAS_SMALL_BYTES


_CUBLAS_SMALL_BYTES = (2 * 4096 + 8 * 16) * 1024
"""The default of cuBLAS, ':4096:2:16:8' in KiB."""
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_LARGE_SINCE: Mapping[int, tuple[int, int]] = {9: (2, 4), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
"""First torch release (2.4 or later) that chooses the large workspace, by the major compute capability."""


def read(path: Path) -> DeviceProfile:
    """Reads a profile from a TOML file. The profile has the name of the file.

    Raises `ProfileError` with the file and the key if a key is unknown, missing or of the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"profile file {path} cannot be read: {error}") from error
    if unknown := sorted(set(table) - set(_READERS)):
        raise ProfileError(f"{path}: key '{unknown[0]}' is unknown: the keys are {', '.join(_READERS)}")
    if missing := [key for key in _READERS if key not in table]:
        raise ProfileError(f"{path}: key '{missing[0]}' is missing: a profile states all of {', '.join(_READERS)}")
    fields: dict[str, Any] = {}
    for key, reader in _READERS.items():
        try:
            fields[key] = reader(table[key])
        except TypeError as error:
            raise ProfileError(f"{path}: key '{key}' is {table[key]!r}: {error}") from None
    try:
        return DeviceProfile(name=path.stem, **fields)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _release(torch_version: str) -> tuple[int, int]:
    """Returns the major and minor version of a torch version."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ProfileError(
            f"torch version '{torch_version}' cannot be read: give a version like torch.__version__, such as '2.13.0'"
        )
    return int(match[1]), int(match[2])


# Each of the following functions returns a value of the TOML file in the type of the field. It raises a TypeError that
# says which value to give, as the end of "key 'title' is 3: give a text that is not empty".


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError("give a text that is not empty")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("give a list of texts")
    return tuple(value)


def _positive(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise TypeError("give a whole number above 0")
    return value


def _capability(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
        raise TypeError("give two whole numbers, such as [8, 6]")
    return value[0], value[1]


def _rates(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(rate) is int and rate > 0 for rate in value.values()):
        raise TypeError(f"give a table of whole numbers above 0 for {', '.join(DTYPES)}")
    return dict(value)


_READERS: Mapping[str, Callable[[object], object]] = {
    "title": _text,
    "source": _text,
    "cuda_names": _texts,
    "compute_capability": _capability,
    "sm_count": _positive,
    "max_threads_per_sm": _positive,
    "vram_bytes": _positive,
    "context_bytes": _positive,
    "context_source": _text,
    "memory_bandwidth_bytes_per_s": _positive,
    "native_dtypes": _texts,
    "launch_ns": _positive,
    "host_link_bytes_per_s": _positive,
    "segment_addresses": _text,
    "flops_per_s": _rates,
}
"""All keys of a profile file, with the function that reads the value."""
