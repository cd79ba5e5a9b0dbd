"""The profile of a card: its memory, its fixed costs and its rates.

Each card has a TOML file in `devices/`; the name of the file is the name of the card. To add a card, add a file.
A comment states the source of each number: a vendor datasheet, a public log, a model, or an assumption.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.files import reading
from planner.profiles.links import Links

MIB = 1 << 20
GIB = 1 << 30

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp64")
"""Keys of `DeviceProfile.flops_per_s`. A profile must state a rate for each of them."""

AUTOCAST_DTYPES = ("bf16", "fp16")
"""The dtypes that `DeviceProfile.native_dtypes` may list, in order of preference: bf16 needs no loss scaling."""

SEGMENT_ADDRESSES: Mapping[str, tuple[bool, ...]] = {
    "ascending": (False,),
    "descending": (True,),
    "unknown": (False, True),
}
"""Allowed values of `DeviceProfile.segment_addresses`. Each has the orders of addresses that are simulated: True for
descending, False for ascending.
"""


class ProfileError(Exception):
    """The card is unknown, or its profile file is not well formed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The properties of a card that planning needs, as PyTorch on Linux sees them.

    Rates are peaks, which only large dense kernels reach. So rely only on ratios of the times that follow from them.
    """

    name: str
    """Name that users give with --gpu, such as 'rtx-2060'."""
    title: str
    """Product name, such as 'GeForce RTX 2060 6 GB'."""
    source: str
    """Source of the numbers: 'datasheet', perhaps with remarks, or 'calibrated' with the date and versions."""
    cuda_names: tuple[str, ...] = ()
    """Shell-style patterns of `torch.cuda.get_device_name()`, without 'NVIDIA ' in front; see `finding.matching`."""
    compute_capability: tuple[int, int]
    sm_count: int
    """Number of streaming multiprocessors."""
    max_threads_per_sm: int
    vram_bytes: int
    """Memory in bytes: `torch.cuda.get_device_properties().total_memory`. It differs by some MiB between drivers."""
    context_bytes: int
    """Size of the CUDA context after a training step, with the loaded kernels. It is outside the caching allocator."""
    context_source: str
    """Source of `context_bytes`: how it was measured, or the formula that it was computed with."""
    memory_bandwidth_bytes_per_s: int
    flops_per_s: Mapping[str, int] = dataclasses.field(hash=False)
    """Floating-point operations per second for each of `DTYPES`.

    'fp32' is the rate of a plain fp32 matmul, and 'tf32' that of convolutions in fp32; both are PyTorch's defaults.
    'fp16' and 'bf16' are rates of dense matmuls that accumulate in fp32. If the card emulates a dtype, the rate is that
    of the emulation.
    """
    native_dtypes: tuple[str, ...]
    """Members of `AUTOCAST_DTYPES` with which training on this card is faster than in fp32, in order of preference."""
    launch_ns: int
    """Minimum time in ns between the launches of two kernels: the host's time for one operator in eager mode."""
    host_link_bytes_per_s: int
    """Rate in bytes per second of copies between pinned host memory and the card, in one direction."""
    segment_addresses: str = "unknown"
    """Direction in which the driver places new segments of memory: a key of `SEGMENT_ADDRESSES`.

    The direction influences fragmentation, because the caching allocator takes the free block with the lowest address
    among free blocks of equal size.
    """
    allocator: bool = True
    """True if the caching allocator is simulated; False if only the bytes of tensors are counted (card 'bare')."""
    alloc_conf: str = ""
    """Options of the caching allocator that the user has set for the process on the card, in the notation of
    PYTORCH_ALLOC_CONF. No profile file has them; empty for PyTorch's defaults."""
    cudnn_benchmark: bool | None = None
    """The setting `torch.backends.cudnn.benchmark` with which the user trains; None for that of the process that
    rehearses the step. No profile file has it."""
    links: Links | None = None
    """The links to other cards; None if the card trains alone. Profile files do not have them (`links.with_links`)."""

    def __post_init__(self) -> None:
        """Raises `ProfileError` if a field has a wrong value."""
        if unknown := [dtype for dtype in self.native_dtypes if dtype not in AUTOCAST_DTYPES]:
            raise ProfileError(
                f"{self.name}: native_dtypes names '{unknown[0]}': choose from {', '.join(AUTOCAST_DTYPES)}"
            )
        if "bf16" in self.native_dtypes and self.compute_capability < (8, 0):
            capability = ".".join(map(str, self.compute_capability))
            raise ProfileError(
                f"{self.name}: native_dtypes names 'bf16' at compute capability {capability}: "
                "bf16 is native only from 8.0 on, leave it out"
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
                f"{self.name}: flops_per_s {problem} key '{wrong_key}': give a rate for exactly {', '.join(DTYPES)}"
            )

    @property
    def nccl_bytes(self) -> int:
        """Memory in bytes that NCCL takes of the card in each process; 0 if the card trains alone."""
        return self.links.nccl_bytes if self.links is not None and self.allocator else 0

    @property
    def outside_bytes(self) -> int:
        """Memory in bytes of each process outside of the caching allocator: the CUDA context, and NCCL's buffers."""
        return self.context_bytes + self.nccl_bytes

    def cublas_workspace_bytes(self, torch_version: str) -> int:
        """Returns the bytes that one cuBLAS handle allocates from the caching allocator at its first matmul.

        There is one handle for each host thread and stream. So eager training has two handles: one of the main thread
        and one of the thread in which autograd runs the backward. The result is 0 for a card without a caching
        allocator. From torch 2.15 on, the workspace is freed after each call unless TORCH_CUBLAS_WORKSPACE_CACHE=1 is
        set.

        Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp, in the releases 2.4 to 2.15.

        Args:
            torch_version: a version as in `torch.__version__`. Versions before 2.4 are treated as 2.4.

        Raises:
            ProfileError: the version cannot be read.
        """
        if not self.allocator:
            return 0
        since = _CUBLAS_LARGE_SINCE.get(self.compute_capability[0])
        release = _release(torch_version)
        return _CUBLAS_LARGE_BYTES if since is not None and max(release, (2, 4)) >= since else _CUBLAS_SMALL_BYTES


_CUBLAS_SMALL_BYTES = (2 * 4096 + 8 * 16) * 1024
"""The small workspace: the default configuration of cuBLAS, ':4096:2:16:8' (sizes in KiB and their numbers)."""
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_LARGE_SINCE: Mapping[int, tuple[int, int]] = {9: (2, 4), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
"""By major compute capability: the first torch release, from 2.4 on, that allocates the large workspace."""


def read(path: Path) -> DeviceProfile:
    """Reads a profile from a TOML file. The name of the profile is the name of the file without '.toml'.

    Raises:
        ProfileError: the file cannot be read, or a key is unknown, missing or has a wrong value. The message names the
            file and the key.
    """
    try:
        table = reading.parsed_toml(reading.text(path))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"profile file {path} cannot be read: {why}") from error
    if unknown := sorted(set(table) - set(_READERS)):
        raise ProfileError(f"{path}: key '{unknown[0]}' is unknown: a profile has the keys {', '.join(_READERS)}")
    if missing := [key for key in _READERS if key not in table]:
        raise ProfileError(
            f"{path}: key '{missing[0]}' is missing: a profile must have all of the keys {', '.join(_READERS)}"
        )
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
    """Returns (major, minor) of a torch version."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ProfileError(
            f"torch version '{torch_version}' cannot be read: give a version like torch.__version__, such as '2.13.0'"
        )
    return int(match[1]), int(match[2])


# Each of the following functions checks a value of the TOML file and returns it in the type of the field. For a wrong
# value it raises a TypeError with the second half of a message such as "key 'title' is 3: give a non-empty string".


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError("give a non-empty string")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("give a list of strings")
    return tuple(value)


def _positive(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise TypeError("it must be a whole number above 0")
    return value


def _capability(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
        raise TypeError("a compute capability is a list of two whole numbers, such as [8, 6]")
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
"""All keys of a profile file, each with the function that checks and converts its value."""
