"""Measures the memory of a process on the first card, as `nvidia-smi` shows it: with CUDA context and libraries."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
from typing import Any

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Memory of one process on the first card."""

    process_bytes: int
    source: str
    """How it was measured: 'nvml', 'nvidia-smi' or 'difference'. The difference is the memory in use on the card now,
    minus the memory that was in use before this process used the card."""


def card_used_bytes() -> int:
    """Returns the bytes in use on the first card: by all processes and the driver together."""
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    return _smi_mib("--query-gpu=memory.used")[0][0] * MIB


def process_memory(*, used_before_bytes: int, pid: int | None = None) -> ProcessMemory:
    """Returns the memory that a process holds on the first card.

    If the driver does not list the process, as in containers that hide processes, the memory is measured by difference:
    what is in use on the card now, minus `used_before_bytes`.

    Args:
        used_before_bytes: result of `card_used_bytes()` before the process used CUDA. A measurement by difference is
            right only if no other process has started or ended on the card since then.
        pid: the process; None for this process.
    """
    pid = os.getpid() if pid is None else pid
    nvml = _nvml()
    if nvml is not None:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        bytes_by_pid = {process.pid: process.usedGpuMemory for process in processes}
        source = "nvml"
    else:
        bytes_by_pid = {row[0]: row[1] * MIB for row in _smi_mib("--query-compute-apps=pid,used_memory")}
        source = "nvidia-smi"
    if bytes_by_pid.get(pid):
        return ProcessMemory(process_bytes=int(bytes_by_pid[pid]), source=source)
    return ProcessMemory(process_bytes=card_used_bytes() - used_before_bytes, source="difference")


def driver_version() -> str:
    """Returns the version of the kernel driver."""
    nvml = _nvml()
    if nvml is not None:
        version: str | bytes = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    return _smi("--query-gpu=driver_version").splitlines()[0].strip()


def _nvml() -> Any:
    """Returns the initialized Python binding of NVML (`pynvml`); None if it is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    nvml.nvmlInit()
    return nvml


def _smi(query: str) -> str:
    """Returns the output of `nvidia-smi` for a query about the first card, as CSV lines without header and units."""
    command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def _smi_mib(query: str) -> list[list[int]]:
    """Returns the output of `nvidia-smi` as rows of numbers. Sizes are in MiB."""
    return [[int(cell) for cell in line.split(",")] for line in _smi(query).splitlines() if line.strip()]
