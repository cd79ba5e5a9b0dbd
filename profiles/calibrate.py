"""Measures this machine's card and writes its profile as a TOML file like those in `devices/`.

    python -m planner.profiles.calibrate [--out FILE.toml] [--json FILE.json]

Run it while nothing else uses the card, in a process that has not used CUDA. It takes about half a minute. It measures:

- the size of the CUDA context after a first kernel, a matrix product, a convolution and a training step;
- the workspace that the first matrix product leaves in the allocator;
- the memory bandwidth of the card, and the rate of matrix products in each dtype;
- the time that the host takes to launch an operator;
- the rate of copies from and to pinned host memory;
- the direction in which the driver places new segments of memory.

If a rate cannot be measured, this is reported, and the rate is taken from the existing profile of this card or of the
most similar card. Without `--out` the profile is written to the folder where planning looks first for profiles
(`profiles.own_folder`).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from planner.errors import MeasurementError, PlannerError, first_line, plain_line
from planner.files.writing import write_atomically
from planner.profiles.device import DTYPES, MIB
from planner.profiles.finding import CardFacts, like, matching, own_folder
from planner.profiles.process_memory import card_used_bytes, driver_version, process_memory

CONTEXT_STAGES = ("first kernel", "matrix product", "convolution", "training step")
"""Operations after each of which the CUDA context is measured. Each operation may load more kernels."""
WIDTHS = {"fp32": 8192, "tf32": 8192, "fp16": 8192, "bf16": 8192, "fp64": 4096}
"""Number of rows and columns of the square matrices whose product is timed, by dtype."""
REPEATS = 5
"""Number of times that each rate is measured."""
HOST_COPIES = {"copies to the card": False, "copies to the host": True}
"""The two copies that are timed, by name: True for the copy from the card to the host."""
SEGMENTS = 24
"""Number of segments that are allocated to see in which direction the driver places them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(CardFacts):
    """Facts of the card (`cuda_name` without 'NVIDIA ' in front), and versions of the software that measured it."""

    driver: str
    torch_version: str
    cuda_version: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration: everything that was measured."""

    facts: Facts
    context_bytes: dict[str, int]
    """Memory of the process outside the caching allocator, after each of `CONTEXT_STAGES`."""
    memory_source: str
    """How the memory of the process was measured: 'nvml', 'nvidia-smi' or 'difference'; see `process_memory`."""
    memory_bandwidth_bytes_per_s: int
    flops_per_s: dict[str, int]
    launch_ns: int
    host_link_bytes_per_s: int
    segment_addresses: str
    """Direction in which the driver places new segments: a key of `planner.profiles.device.SEGMENT_ADDRESSES`."""
    workspace_bytes: int
    """Bytes that stay allocated while no tensor exists: the workspace that cuBLAS keeps after a matrix product."""
    allocator: str
    """Backend and settings of the caching allocator."""
    date: str
    """Day of the measurement, as YYYY-MM-DD."""
    not_measured: dict[str, str] = dataclasses.field(default_factory=dict)
    """For each quantity that could not be measured: the reason. Its value is taken from an existing profile."""


class Card(Protocol):
    """The measurements that `calibrate` makes on a card. Tests supply a card that returns fixed numbers."""

    def begin(self) -> None:
        """Starts CUDA in this process."""

    def facts(self) -> Facts:
        """Returns the facts of the card and the versions of the software."""

    def after_stage(self, stage: str) -> tuple[int, str]:
        """Runs the operation `stage`, one of `CONTEXT_STAGES`.

        Returns:
            Bytes that the process then holds outside the caching allocator, and how they were measured
            (`Calibration.memory_source`).
        """

    def copy_seconds(self, size_bytes: int) -> float:
        """Returns the time in seconds to copy `size_bytes` within the memory of the card."""

    def product_seconds(self, dtype: str, width: int) -> float:
        """Returns the time in seconds to multiply two matrices with `width` rows and columns."""

    def small_ops_seconds(self, count: int) -> float:
        """Returns the time in seconds to run `count` ops on a tensor with one element."""

    def host_copy_seconds(self, size_bytes: int, *, back: bool) -> float:
        """Returns the time in seconds to copy from pinned host memory to the card, or with `back` to the host."""

    def workspace_bytes(self) -> int:
        """Returns the allocated bytes while no tensor exists."""

    def allocator(self) -> str:
        """Returns the backend and the settings of the caching allocator as a text."""

    def new_segments(self, count: int, size_bytes: int) -> list[int]:
        """Allocates `count` tensors, each in a new segment, and returns their addresses in order of allocation."""


def calibrate(card: Card) -> Calibration:
    """Measures all quantities of a card. A rate is the fastest of `REPEATS` runs, so that it is a peak rate."""
    card.begin()
    # The context comes first: later measurements load more kernels than a training step needs.
    contexts = [card.after_stage(stage) for stage in CONTEXT_STAGES]
    facts, copied_bytes, sent_bytes, ops = card.facts(), 1 << 30, 256 * MIB, 2000
    known = matching(facts.cuda_name) or like(facts)
    missing: dict[str, str] = {}

    def rate(name: str, amount: float, seconds: Callable[[], float], otherwise: int) -> int:
        try:
            return round(amount / min(seconds() for _ in range(REPEATS)))
        except RuntimeError as error:  # The card has no memory for it, or PyTorch no kernel.
            missing[name] = str(error).splitlines()[0]
            return otherwise

    to_card, to_host = (
        rate(
            name, sent_bytes, functools.partial(card.host_copy_seconds, sent_bytes, back=back),
            known.host_link_bytes_per_s,
        )
        for name, back in HOST_COPIES.items()
    )  # fmt: skip
    return Calibration(
        facts=facts,
        context_bytes={stage: size for stage, (size, _) in zip(CONTEXT_STAGES, contexts, strict=True)},
        memory_source=contexts[-1][1],
        memory_bandwidth_bytes_per_s=rate(
            "bandwidth", 2 * copied_bytes, lambda: card.copy_seconds(copied_bytes), known.memory_bandwidth_bytes_per_s
        ),
        flops_per_s={
            dtype: rate(
                f"products in {dtype}", 2 * width**3, functools.partial(card.product_seconds, dtype, width),
                known.flops_per_s[dtype],
            )
            for dtype, width in WIDTHS.items()
        },
        launch_ns=round(statistics.median(card.small_ops_seconds(ops) for _ in range(REPEATS)) / ops * 1e9),
        host_link_bytes_per_s=round(2 / (1 / to_card + 1 / to_host)),  # The harmonic mean: a copy goes out and back.
        segment_addresses=_order(card.new_segments(SEGMENTS, 20 * MIB)),
        workspace_bytes=card.workspace_bytes(),
        allocator=card.allocator(),
        date=datetime.date.today().isoformat(),
        not_measured=missing,
    )  # fmt: skip


def _order(addresses: list[int]) -> str:
    """Returns the direction in which most addresses follow each other: 'ascending', 'descending' or 'unknown'.

    Not all addresses need to follow it, since the driver may place some segments in gaps.
    """
    above = sum(later > earlier for earlier, later in itertools.pairwise(addresses))
    if above >= 0.8 * (len(addresses) - 1):
        return "ascending"
    return "descending" if above <= 0.2 * (len(addresses) - 1) else "unknown"


class CudaCard:
    """The first CUDA card of this machine."""

    def begin(self) -> None:
        import torch

        try:
            self._torch, self._used_before_bytes = torch, card_used_bytes()
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch.cuda.init has no annotations
        except Exception as error:  # NVML, nvidia-smi and torch have errors of their own
            raise MeasurementError(
                f"the first CUDA card of this machine cannot be measured ({first_line(error)}): run this where "
                "`nvidia-smi` shows the card, with a CUDA build of torch"
            ) from error

    def facts(self) -> Facts:
        torch = self._torch
        properties = torch.cuda.get_device_properties(0)
        return Facts(
            cuda_name=torch.cuda.get_device_name(0).removeprefix("NVIDIA "),
            compute_capability=(properties.major, properties.minor),
            sm_count=properties.multi_processor_count,
            max_threads_per_sm=properties.max_threads_per_multi_processor,
            vram_bytes=properties.total_memory,
            driver=driver_version(),
            torch_version=torch.__version__,
            cuda_version=str(torch.version.cuda),
        )

    def after_stage(self, stage: str) -> tuple[int, str]:
        torch = self._torch
        match stage:
            case "first kernel":
                torch.zeros(1, device="cuda").add_(1)
            case "matrix product":
                torch.randn(256, 256, device="cuda") @ torch.randn(256, 256, device="cuda")
            case "convolution":
                torch.nn.Conv2d(8, 8, 3).cuda()(torch.randn(2, 8, 32, 32, device="cuda"))
            case "training step":
                _training_step(torch)
        torch.cuda.synchronize()
        memory = process_memory(used_before_bytes=self._used_before_bytes)
        return memory.process_bytes - torch.cuda.memory_reserved(), memory.source

    def copy_seconds(self, size_bytes: int) -> float:
        source = self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cuda")
        target = self._torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def product_seconds(self, dtype: str, width: int) -> float:
        torch = self._torch
        kind = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
        left, right = (torch.randn(width, width, device="cuda").to(kind) for _ in range(2))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        try:
            return self._seconds(lambda: left @ right)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def small_ops_seconds(self, count: int) -> float:
        number = self._torch.zeros(1, device="cuda")

        def add_repeatedly() -> None:
            for _ in range(count):
                number.add_(1)

        return self._seconds(add_repeatedly)

    def host_copy_seconds(self, size_bytes: int, *, back: bool) -> float:
        source = self._torch.empty(size_bytes, dtype=self._torch.uint8, pin_memory=True)
        target = self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cuda")
        source, target = (target, source) if back else (source, target)
        return self._seconds(lambda: target.copy_(source, non_blocking=True))

    def workspace_bytes(self) -> int:
        gc.collect()
        return self._torch.cuda.memory_allocated()

    def allocator(self) -> str:
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "no settings"
        return f"{self._torch.cuda.get_allocator_backend()}, {settings}"

    def new_segments(self, count: int, size_bytes: int) -> list[int]:
        self._torch.cuda.empty_cache()
        segments = [self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cuda") for _ in range(count)]
        return [segment.data_ptr() for segment in segments]

    def _seconds(self, function: Callable[[], object]) -> float:
        """Returns the time in seconds of a second call of the function, because the first call loads kernels."""
        function()
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        self._torch.cuda.synchronize()
        return time.perf_counter() - began


def _training_step(torch: ModuleType) -> None:
    """Trains a small network of common layers for two steps, so that the kernels of these layers are loaded."""
    nn = torch.nn
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten(), nn.Dropout(0.1))
    model = nn.Sequential(*layers, nn.Linear(16 * 256, 64), nn.LayerNorm(64), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.randn(4, 3, 16, 16, device="cuda"))
            loss = nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def as_toml(calibration: Calibration, title: str) -> str:
    """Returns the TOML text of the profile, with the source of each number as a comment."""
    facts = calibration.facts
    how = f"{calibration.date}, torch {facts.torch_version}, CUDA {facts.cuda_version}, driver {facts.driver}"
    contexts = ", ".join(f"{size // MIB} MiB after a {stage}" for stage, size in calibration.context_bytes.items())
    context = calibration.context_bytes[CONTEXT_STAGES[-1]]
    native = [dtype for dtype in ("bf16", "fp16") if _is_native(calibration, dtype)]
    lines = [
        f"title = {json.dumps(title)}",
        f"source = {json.dumps(f'calibrated {how}')}",
        f"cuda_names = {json.dumps([facts.cuda_name])}",
        f"compute_capability = {json.dumps(list(facts.compute_capability))}  # the driver",
        f"sm_count = {facts.sm_count}  # the driver",
        f"max_threads_per_sm = {facts.max_threads_per_sm}  # the driver",
        f"vram_bytes = {facts.vram_bytes:_}  # the driver",
        f"context_bytes = {context:_}  # measured as context_source says",
        f"context_source = {json.dumps(f'measured by {calibration.memory_source}: {contexts}')}",
        f"memory_bandwidth_bytes_per_s = {calibration.memory_bandwidth_bytes_per_s:_}"
        f"  # {_by(calibration, ['bandwidth'], 'copy of 1 GiB, both ways')}",
        f"native_dtypes = {json.dumps(native)}  # measured: products at least 1.2 times as fast as in fp32",
        f"launch_ns = {calibration.launch_ns:_}  # measured: in-place additions to one number",
        f"host_link_bytes_per_s = {calibration.host_link_bytes_per_s:_}"
        f"  # {_by(calibration, [*HOST_COPIES], '256 MiB of pinned memory, there and back')}",
        f'segment_addresses = "{calibration.segment_addresses}"  # measured: {SEGMENTS} new segments of 20 MiB',
        f"# a cuBLAS handle keeps {calibration.workspace_bytes:_} bytes; allocator: {calibration.allocator}",
        "",
        "[flops_per_s]",
        *(
            f"{dtype} = {calibration.flops_per_s[dtype]:_}"
            f"  # {_by(calibration, [f'products in {dtype}'], 'product of square matrices')}"
            for dtype in DTYPES
        ),
    ]
    return "\n".join(lines) + "\n"


def _by(calibration: Calibration, names: list[str], how: str) -> str:
    """Returns the comment on the source of a number in the profile.

    Args:
        names: the measured quantities that the number is computed from, by their names in `not_measured`.
        how: how they are measured.
    """
    missing = [f"{name}: {calibration.not_measured[name]}" for name in names if name in calibration.not_measured]
    return f"not measured ({'; '.join(missing)}): as the datasheet says" if missing else f"measured: {how}"


def _is_native(calibration: Calibration, dtype: str) -> bool:
    """True if the card does not emulate the dtype, and multiplies matrices in it clearly faster than in fp32."""
    emulated = dtype == "bf16" and calibration.facts.compute_capability < (8, 0)
    return not emulated and calibration.flops_per_s[dtype] > 1.2 * calibration.flops_per_s["fp32"]


def title_of(facts: Facts) -> str:
    """Returns the title in the existing profile of this card; if there is none, the name that the driver reports."""
    known = matching(facts.cuda_name)
    return facts.cuda_name if known is None else known.title


def main(card: Card | None = None, arguments: list[str] | None = None) -> None:
    """Runs the command: measures the card, and writes and prints its profile.

    Args:
        card: the card to measure; None for the first CUDA card of this machine.
        arguments: command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="file for the profile; its name becomes the card's name")
    parser.add_argument("--json", type=pathlib.Path, help="file to write all measured quantities to, as a JSON object")
    options = parser.parse_args(arguments)
    calibration = calibrate(card or CudaCard())
    name = re.sub(r"[^a-z0-9]+", "-", calibration.facts.cuda_name.casefold()).strip("-")
    out = options.out or own_folder() / f"{name}.toml"
    profile = as_toml(calibration, title_of(calibration.facts))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, profile)
    if options.json is not None:
        write_atomically(options.json, json.dumps(dataclasses.asdict(calibration)) + "\n")
    print(profile, end="")
    print(f"written to {out}", file=sys.stderr)
    for quantity, reason in calibration.not_measured.items():
        print(f"not measured: {quantity} ({reason})", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except (PlannerError, OSError) as failure:
        sys.exit(f"calibrate: {plain_line(str(failure))}")
