"""Measure the card at hand and write its profile, in the form of the files in `devices/`.

    python -m planner.profiles.calibrate [--out FILE.toml] [--json FILE.json]

Run it alone on the card, in a process that has not used CUDA. It takes about 20 seconds. What is measured: the CUDA
context after a first kernel, a matrix product, a convolution and a training step; what the first product leaves in the
allocator; bandwidth of a copy; matrix products in each dtype; the host's time for an operator; copies from pinned host
memory and to it. What cannot be measured is told, and taken from the profile that is known of this card or of one like
it. Without `--out` the profile goes where planning looks first (`profiles.own_folder`).
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
from typing import Protocol

from planner.profiles.device import DTYPES, MIB
from planner.profiles.finding import CardFacts, like, matching, own_folder
from planner.profiles.process_memory import card_used_bytes, driver_version, process_memory

CONTEXT_STAGES = ("first kernel", "matrix product", "convolution", "training step")
WIDTHS = {"fp32": 8192, "tf32": 8192, "fp16": 8192, "bf16": 8192, "fp64": 4096}
"""Of the square matrices whose product is timed."""
REPEATS = 5
SEGMENTS = 24
"""New segments whose addresses are looked at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(CardFacts):
    """Of the card, its name without 'NVIDIA ' in front, and with what it was measured."""

    driver: str
    torch_version: str
    cuda_version: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured."""

    facts: Facts
    context_bytes: dict[str, int]
    """The process's memory outside the allocator, after each of `CONTEXT_STAGES`."""
    memory_source: str
    """Who told the process's memory: 'nvml', 'nvidia-smi', 'difference'."""
    memory_bandwidth_bytes_per_s: int
    flops_per_s: dict[str, int]
    launch_ns: int
    host_link_bytes_per_s: int
    segment_addresses: str
    """One of `planner.profiles.device.SEGMENT_ADDRESSES`."""
    workspace_bytes: int
    """What the first matrix product leaves allocated: the workspace of its cuBLAS handle."""
    allocator: str
    """Backend and settings of the caching allocator."""
    date: str
    not_measured: dict[str, str] = dataclasses.field(default_factory=dict)
    """By field: why not. Its number is of a profile that was known."""


class Card(Protocol):
    """What is asked of a card; a test puts one with made-up numbers in its place."""

    def begin(self) -> None:
        """Start CUDA in this process."""

    def facts(self) -> Facts:
        """Of the card and the software."""

    def after_stage(self, stage: str) -> tuple[int, str]:
        """Do what `stage` names, then: bytes of the process outside the allocator, and who said so."""

    def copy_seconds(self, size_bytes: int) -> float:
        """Copy a tensor of that size on the card."""

    def product_seconds(self, dtype: str, width: int) -> float:
        """Multiply two square matrices."""

    def small_ops_seconds(self, count: int) -> float:
        """Run as many ops on one number each."""

    def host_copy_seconds(self, size_bytes: int, *, back: bool) -> float:
        """Copy from pinned host memory to the card, or back."""

    def workspace_bytes(self) -> int:
        """What is allocated though no tensor is alive."""

    def allocator(self) -> str:
        """Backend and settings."""

    def new_segments(self, count: int, size_bytes: int) -> list[int]:
        """Addresses of tensors that each take a segment of their own, in the order in which they are made."""


def calibrate(card: Card) -> Calibration:
    """Measure all of it. Rates are the fastest of several runs: what a dense kernel can reach."""
    card.begin()
    contexts = [card.after_stage(stage) for stage in CONTEXT_STAGES]
    facts, copied, sent, ops = card.facts(), 1 << 30, 256 * MIB, 2000
    known = matching(facts.cuda_name) or like(facts)
    missing: dict[str, str] = {}

    def rate(name: str, amount: float, seconds: Callable[[], float], otherwise: int) -> int:
        try:
            return round(amount / min(seconds() for _ in range(REPEATS)))
        except RuntimeError as why:  # no memory for it, or no kernel
            missing[name] = str(why).splitlines()[0]
            return otherwise

    there, back = (
        rate(name, sent, functools.partial(card.host_copy_seconds, sent, back=back), known.host_link_bytes_per_s)
        for name, back in (("copies to the card", False), ("copies to the host", True))
    )
    return Calibration(
        facts=facts,
        context_bytes={stage: size for stage, (size, _) in zip(CONTEXT_STAGES, contexts, strict=True)},
        memory_source=contexts[-1][1],
        memory_bandwidth_bytes_per_s=rate(
            "bandwidth", 2 * copied, lambda: card.copy_seconds(copied), known.memory_bandwidth_bytes_per_s
        ),
        flops_per_s={
            dtype: rate(
                f"products in {dtype}", 2 * width**3, functools.partial(card.product_seconds, dtype, width),
                known.flops_per_s[dtype],
            )
            for dtype, width in WIDTHS.items()
        },
        launch_ns=round(statistics.median(card.small_ops_seconds(ops) for _ in range(REPEATS)) / ops * 1e9),
        host_link_bytes_per_s=round(2 / (1 / there + 1 / back)),
        segment_addresses=_order(card.new_segments(SEGMENTS, 20 * MIB)),
        workspace_bytes=card.workspace_bytes(),
        allocator=card.allocator(),
        date=datetime.date.today().isoformat(),
        not_measured=missing,
    )  # fmt: skip


def _order(addresses: list[int]) -> str:
    """Which way most new segments lie from the one before: a few fill gaps that were left."""
    above = sum(later > earlier for earlier, later in itertools.pairwise(addresses))
    if above >= 0.8 * (len(addresses) - 1):
        return "ascending"
    return "descending" if above <= 0.2 * (len(addresses) - 1) else "unknown"


class CudaCard:
    """The first CUDA card."""

    def begin(self) -> None:
        import torch

        self._torch, self._used_before_bytes = torch, card_used_bytes()
        torch.cuda.init()

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
        found = process_memory(used_before_bytes=self._used_before_bytes)
        return found.process_bytes - torch.cuda.memory_reserved(), found.source

    def copy_seconds(self, size_bytes: int) -> float:
        source = self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cuda")
        target = self._torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def product_seconds(self, dtype: str, width: int) -> float:
        torch = self._torch
        kind = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
        one, other = (torch.randn(width, width, device="cuda").to(kind) for _ in range(2))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        try:
            return self._seconds(lambda: one @ other)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def small_ops_seconds(self, count: int) -> float:
        number = self._torch.zeros(1, device="cuda")

        def all_of_them() -> None:
            for _ in range(count):
                number.add_(1)

        return self._seconds(all_of_them)

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
        """Of the second call: the first one loads kernels."""
        function()
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        self._torch.cuda.synchronize()
        return time.perf_counter() - began


def _training_step(torch) -> None:
    """One step of a small net with the common layers."""
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


def as_toml(found: Calibration, title: str) -> str:
    """A profile file: every number with its source, as `planner.profiles.device.read` takes it."""
    facts = found.facts
    how = f"{found.date}, torch {facts.torch_version}, CUDA {facts.cuda_version}, driver {facts.driver}"
    contexts = ", ".join(f"{size // MIB} MiB after a {stage}" for stage, size in found.context_bytes.items())
    context = found.context_bytes[CONTEXT_STAGES[-1]]
    native = [dtype for dtype in ("bf16", "fp16") if _is_native(found, dtype)]
    lines = [
        f"title = {json.dumps(title)}",
        f"source = {json.dumps(f'calibrated {how}')}",
        f"cuda_names = {json.dumps([facts.cuda_name])}",
        f"compute_capability = {json.dumps(list(facts.compute_capability))}  # the driver",
        f"sm_count = {facts.sm_count}  # the driver",
        f"max_threads_per_sm = {facts.max_threads_per_sm}  # the driver",
        f"vram_bytes = {facts.vram_bytes:_}  # the driver",
        f"context_bytes = {context:_}  # measured as context_source says",
        f"context_source = {json.dumps(f'measured by {found.memory_source}: {contexts}')}",
        f"memory_bandwidth_bytes_per_s = {found.memory_bandwidth_bytes_per_s:_}"
        f"  # {_by(found, ['bandwidth'], 'copy of 1 GiB, both ways')}",
        f"native_dtypes = {json.dumps(native)}  # measured: products at least 1.2 times as fast as in fp32",
        f"launch_ns = {found.launch_ns:_}  # measured: in-place additions to one number",
        f"host_link_bytes_per_s = {found.host_link_bytes_per_s:_}"
        f"  # {_by(found, ['copies to the card', 'copies to the host'], '256 MiB of pinned memory, there and back')}",
        f'segment_addresses = "{found.segment_addresses}"  # measured: {SEGMENTS} new segments of 20 MiB',
        f"# a cuBLAS handle keeps {found.workspace_bytes:_} bytes; allocator: {found.allocator}",
        "",
        "[flops_per_s]",
        *(
            f"{dtype} = {found.flops_per_s[dtype]:_}"
            f"  # {_by(found, [f'products in {dtype}'], 'product of square matrices')}"
            for dtype in DTYPES
        ),
    ]
    return "\n".join(lines) + "\n"


def _by(found: Calibration, names: list[str], how: str) -> str:
    """Where a number comes from."""
    missing = [f"{name}: {found.not_measured[name]}" for name in names if name in found.not_measured]
    return f"not measured ({'; '.join(missing)}): as the datasheet says" if missing else f"measured: {how}"


def _is_native(found: Calibration, dtype: str) -> bool:
    """Whether training in it is faster; bf16 before 8.0 is emulated, however fast."""
    emulated = dtype == "bf16" and found.facts.compute_capability < (8, 0)
    return not emulated and found.flops_per_s[dtype] > 1.2 * found.flops_per_s["fp32"]


def title_of(facts: Facts) -> str:
    """As the known profile of this card is called, else the driver's name of it."""
    known = matching(facts.cuda_name)
    return facts.cuda_name if known is None else known.title


def main(card: Card | None = None, arguments: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="the profile, named after the card")
    parser.add_argument("--json", type=pathlib.Path, help="everything measured, as one JSON object")
    options = parser.parse_args(arguments)
    found = calibrate(card or CudaCard())
    name = re.sub(r"[^a-z0-9]+", "-", found.facts.cuda_name.casefold()).strip("-")
    out = options.out or own_folder() / f"{name}.toml"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_toml(found, title_of(found.facts)))
    if options.json is not None:
        options.json.write_text(json.dumps(dataclasses.asdict(found)) + "\n")
    print(out.read_text(), end="")
    print(f"written to {out}", file=sys.stderr)
    for name, why in found.not_measured.items():
        print(f"not measured: {name} ({why})", file=sys.stderr)


if __name__ == "__main__":
    main()
