"""What a planner has to know about a card: its memory, its fixed costs and its rates.

A card is one TOML file in `devices/`, named after its slug; adding a card is adding a file. Every number there
carries its source as a comment beside it: a vendor datasheet, a public log, a model, or an assumption.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp64")
"""The names of rates in `DeviceProfile.flops_per_s`; a profile states all of them."""

AUTOCAST_DTYPES = ("bf16", "fp16")
"""The dtypes that can be native, the preferred one first: bf16 needs no loss scaling."""

SEGMENT_ADDRESSES: Mapping[str, tuple[bool, ...]] = {
    "ascending": (False,),
    "descending": (True,),
    "unknown": (False, True),
}
"""Values of `DeviceProfile.segment_addresses`, with the answers to "is each below the one before?" that they leave."""

_DEVICES = Path(__file__).parent / "devices"


class ProfileError(Exception):
    """A card that is not known, or a profile file that is not well formed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One card, as PyTorch on Linux sees it.

    Rates are peaks that a dense kernel can reach; only their ratios should decide anything.
    """

    name: str
    """The slug users give, such as 'rtx-2060'."""
    title: str
    """The name people know, such as 'GeForce RTX 2060 6 GB'."""
    source: str
    """'datasheet', or 'calibrated ...' with when and how."""
    cuda_names: tuple[str, ...] = ()
    """Patterns of `torch.cuda.get_device_name()`, without 'NVIDIA ' in front; see `matching`."""
    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    vram_bytes: int
    """`torch.cuda.get_device_properties().total_memory` on Linux; differs by some MiB with the driver."""
    context_bytes: int
    """The CUDA context after a training step, outside the caching allocator, with kernels loaded lazily."""
    context_source: str
    """Where `context_bytes` comes from: measured (and on what) or modelled."""
    memory_bandwidth_bytes_per_s: int
    flops_per_s: Mapping[str, int] = dataclasses.field(hash=False)
    """Floating-point operations per second, a key for each of `DTYPES`.

    'fp32' is a plain fp32 matmul, which is PyTorch's default; 'tf32' only counts where the user allows it. 'fp16'
    and 'bf16' are dense and accumulate in fp32. A dtype that the card emulates has the rate of the emulation.
    """
    native_dtypes: tuple[str, ...]
    """Those of `AUTOCAST_DTYPES` that make training on this card faster, the preferred one first."""
    launch_ns: int
    """Least time between two kernels of eager PyTorch: the host's work for one operator."""
    host_link_bytes_per_s: int
    """Copies between pinned host memory and the card, one direction."""
    segment_addresses: str = "unknown"
    """Where the driver places a new segment, above or below the one before: one of `SEGMENT_ADDRESSES`.

    Among free blocks of one size the caching allocator takes the lowest, so fragments depend on it.
    """
    allocator: bool = True
    """Whether tensors come from a caching allocator; False where bytes are only counted (`bare`)."""

    def __post_init__(self) -> None:
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
            odd = min(set(self.flops_per_s) ^ set(DTYPES))
            verb = "misses" if odd in DTYPES else "has an unknown"
            raise ProfileError(f"{self.name}: flops_per_s {verb} key '{odd}': state exactly {', '.join(DTYPES)}")

    def cublas_workspace_bytes(self, torch_version: str) -> int:
        """Bytes that one cuBLAS handle takes from the caching allocator at its first matmul.

        There is one handle a host thread and stream, so eager training holds two of these: the main thread's and
        that of autograd's device thread. `torch_version` reads like `torch.__version__`; versions before 2.4 are
        answered as 2.4. 0 where the card has no caching allocator. From torch 2.15 on the workspace is given back
        after each call unless TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps it.

        Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp, in the releases 2.4 to 2.15.
        Raises `ProfileError` for a version that cannot be read.
        """
        if not self.allocator:
            return 0
        since = _CUBLAS_LARGE_SINCE.get(self.compute_capability[0])
        release = _release(torch_version)
        return _CUBLAS_LARGE_BYTES if since is not None and max(release, (2, 4)) >= since else _CUBLAS_SMALL_BYTES


_CUBLAS_SMALL_BYTES = (2 * 4096 + 8 * 16) * 1024
"""cuBLAS's own default, ':4096:2:16:8' in KiB."""
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_LARGE_SINCE: Mapping[int, tuple[int, int]] = {9: (2, 4), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
"""By compute capability major: the first torch release that chooses the large workspace (of those answered here)."""


def known() -> tuple[str, ...]:
    """The names of all cards with a file in `devices/`, sorted. `load` also takes 'bare'."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.toml")))


def load(name: str) -> DeviceProfile:
    """The profile of a card by its name, of 'bare', or of a profile file by its path (ending in '.toml').

    Raises `ProfileError` for an unknown name (with near ones) and for a file that is not well formed.
    """
    if name.endswith(".toml"):
        return read(Path(name))
    if name == "bare":
        return bare()
    if name in known():
        return read(_DEVICES / f"{name}.toml")
    choices = (*known(), "bare")
    slug = re.sub(r"[\s_]+", "-", name.strip().casefold())
    containing = [choice for choice in choices if slug in choice]
    near = containing[:3] or difflib.get_close_matches(slug, choices, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? Known are" if near else "known are"
    raise ProfileError(
        f"card '{name}' is unknown: {hint} {', '.join(choices)}; "
        "or give the path of a .toml file like them, or no card at all for a generic one of the budget's size"
    )


def read(path: Path) -> DeviceProfile:
    """The profile in one TOML file; its name is the file's.

    Raises `ProfileError`, naming the file and the key, for a key that is unknown, missing or of the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"profile file {path} cannot be read: {error}") from error
    if unknown := sorted(set(table) - set(_READERS)):
        raise ProfileError(f"{path}: key '{unknown[0]}' is unknown: known are {', '.join(_READERS)}")
    if missing := [key for key in _READERS if key not in table]:
        raise ProfileError(f"{path}: key '{missing[0]}' is missing: a profile states all of {', '.join(_READERS)}")
    fields = {}
    for key, reader in _READERS.items():
        try:
            fields[key] = reader(table[key])
        except TypeError as error:
            raise ProfileError(f"{path}: key '{key}' is {table[key]!r}: give {error}") from None
    try:
        return DeviceProfile(name=path.stem, **fields)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def matching(cuda_device_name: str) -> DeviceProfile | None:
    """The profile of a live card by `torch.cuda.get_device_name()`, or None when no file claims that name.

    'NVIDIA ' in front and letter case do not matter. Names do not tell memory sizes apart (there is an RTX 2060
    with 12 GB), so a caller that holds the card should put its `total_memory` in place of `vram_bytes`.
    """
    name = cuda_device_name.strip().casefold().removeprefix("nvidia ")
    for profile in _all():
        if any(fnmatch.fnmatchcase(name, pattern.casefold()) for pattern in profile.cuda_names):
            return profile
    return None


@functools.cache
def _all() -> tuple[DeviceProfile, ...]:
    return tuple(load(name) for name in known())


def modelled_context_bytes(sm_count: int) -> int:
    """The CUDA context with lazily loaded kernels: 13 MiB + 3.41 MiB a multiprocessor, within about 25 %.

    Source: least squares over public out-of-memory messages of torch 2.1 and later (the process's memory less what
    PyTorch had reserved), from a T4 with 40 multiprocessors to an RTX 5090 with 170; residuals -120 to +71 MiB.
    """
    return 13 * MIB + sm_count * 341 * MIB // 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Anchor:
    """A real Ampere card that the generic one passes through."""

    vram_bytes: int
    sm_count: int
    memory_bandwidth_bytes_per_s: int
    fp32_flops_per_s: int


_ANCHORS = (
    # RTX 3050 Laptop, RTX 3060 Laptop, RTX 3060 Ti, RTX 3090: NVIDIA's datasheets.
    _Anchor(vram_bytes=4 * GIB, sm_count=16, memory_bandwidth_bytes_per_s=192 * 10**9, fp32_flops_per_s=7_100 * 10**9),
    _Anchor(vram_bytes=6 * GIB, sm_count=30, memory_bandwidth_bytes_per_s=336 * 10**9, fp32_flops_per_s=10_900 * 10**9),
    _Anchor(vram_bytes=8 * GIB, sm_count=38, memory_bandwidth_bytes_per_s=448 * 10**9, fp32_flops_per_s=16_200 * 10**9),
    _Anchor(
        vram_bytes=24 * GIB, sm_count=82, memory_bandwidth_bytes_per_s=936 * 10**9, fp32_flops_per_s=35_600 * 10**9
    ),
)


def generic(vram_bytes: int) -> DeviceProfile:
    """An Ampere-class card (compute capability 8.6) with `vram_bytes` of memory, for when no card is named.

    Multiprocessors, bandwidth and rates are interpolated between real GeForce cards of 4 to 24 GiB and stay at the
    nearest one outside: no chip of this capability has more than 84 multiprocessors, however much memory it has.
    The context is modelled. Raises `ProfileError` for a size that is not positive.
    """
    if vram_bytes <= 0:
        raise ProfileError(f"a card of {vram_bytes} bytes cannot be: give a positive number of bytes")
    sm_count, bandwidth, fp32 = (
        _interpolated(vram_bytes, field) for field in ("sm_count", "memory_bandwidth_bytes_per_s", "fp32_flops_per_s")
    )
    return DeviceProfile(
        name="generic",
        title=f"generic Ampere-class card of {vram_bytes / GIB:.3g} GiB",
        source="datasheet, interpolated between GeForce RTX 30 cards",
        compute_capability=(8, 6),
        sm_count=sm_count,
        max_threads_per_sm=1536,
        vram_bytes=vram_bytes,
        context_bytes=modelled_context_bytes(sm_count),
        context_source="modelled: 13 MiB + 3.41 MiB x multiprocessors",
        memory_bandwidth_bytes_per_s=bandwidth,
        # GeForce Ampere: tensor cores with fp32 sums run at twice fp32 in half precision and at 1x in TF32.
        flops_per_s={"fp32": fp32, "tf32": fp32, "fp16": 2 * fp32, "bf16": 2 * fp32, "fp64": fp32 // 64},
        native_dtypes=("bf16", "fp16"),
        launch_ns=6_000,
        host_link_bytes_per_s=25_200_000_000,
    )


def _interpolated(vram_bytes: int, field: str) -> int:
    """Linear between neighbouring anchors, constant outside them, rounded down."""
    size = min(max(vram_bytes, _ANCHORS[0].vram_bytes), _ANCHORS[-1].vram_bytes)
    low, high = next(pair for pair in itertools.pairwise(_ANCHORS) if size <= pair[1].vram_bytes)
    start, end = getattr(low, field), getattr(high, field)
    return start + (end - start) * (size - low.vram_bytes) // (high.vram_bytes - low.vram_bytes)


def bare() -> DeviceProfile:
    """A card that only counts bytes: no context, no workspaces, no allocator; total = reserved = allocated.

    Its rates are those of the generic card of 24 GiB. Its memory is 1 TiB, so that a budget is its only limit.
    """
    return dataclasses.replace(
        generic(24 * GIB),
        name="bare",
        title="bare card, counted bytes only",
        vram_bytes=1 << 40,
        context_bytes=0,
        context_source="none by definition",
        allocator=False,
    )


def _release(torch_version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ProfileError(f"torch version '{torch_version}' cannot be read: give it like torch.__version__, '2.13.0'")
    return int(match[1]), int(match[2])


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError("a text that is not empty")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("a list of texts")
    return tuple(value)


def _positive(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise TypeError("a whole number above 0")
    return value


def _capability(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
        raise TypeError("two whole numbers such as [8, 6]")
    return value[0], value[1]


def _rates(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(rate) is int and rate > 0 for rate in value.values()):
        raise TypeError(f"a table of whole numbers above 0 for {', '.join(DTYPES)}")
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
"""Every key of a profile file and what reads its value."""
