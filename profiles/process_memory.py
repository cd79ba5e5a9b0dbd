"""How much memory of the first card a process holds, context and libraries included, as `nvidia-smi` shows it."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Of one process on the first card."""

    process_bytes: int
    source: str
    """'nvml', 'nvidia-smi', or 'difference': what the whole card uses more than before the process came."""


def card_used_bytes() -> int:
    """What all processes and the driver hold of the first card."""
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    return _smi_mib("--query-gpu=memory.used")[0][0] * MIB


def process_memory(*, used_before_bytes: int, pid: int | None = None) -> ProcessMemory:
    """Of this process, or of `pid`; by difference where the driver does not list it (some containers hide processes).

    Args:
        used_before_bytes: `card_used_bytes()` from before the process used CUDA. No other may come or go since.
    """
    pid = os.getpid() if pid is None else pid
    nvml = _nvml()
    if nvml is not None:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        found = {process.pid: process.usedGpuMemory for process in processes}
        source = "nvml"
    else:
        found = {row[0]: row[1] * MIB for row in _smi_mib("--query-compute-apps=pid,used_memory")}
        source = "nvidia-smi"
    if found.get(pid):
        return ProcessMemory(process_bytes=int(found[pid]), source=source)
    return ProcessMemory(process_bytes=card_used_bytes() - used_before_bytes, source="difference")


def driver_version() -> str:
    """Of the kernel driver."""
    nvml = _nvml()
    if nvml is not None:
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    return _smi("--query-gpu=driver_version").splitlines()[0].strip()


def _nvml():
    """NVML's Python binding, ready to be asked; None where it is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    nvml.nvmlInit()
    return nvml


def _smi(query: str) -> str:
    command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def _smi_mib(query: str) -> list[list[int]]:
    return [[int(cell) for cell in line.split(",")] for line in _smi(query).splitlines() if line.strip()]
