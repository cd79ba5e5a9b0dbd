"""Lets code that calls functions of `torch.cuda` run on the virtual GPU, whether or not PyTorch was built with CUDA.

`torch.cuda.is_available()` is true and there is one card with the properties of the simulated one. Events and
synchronization do nothing. There is one stream: code that makes further streams is refused, because the allocator keeps
the blocks of each stream apart, which a rehearsal does not model.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from planner.errors import RehearsalError
from planner.virtual_gpu.source_lines import source_line

_ONE_STREAM = (
    "a rehearsal has one CUDA stream; run this code in the current stream, which torch.cuda.current_stream() returns"
)
_ONE_GRAPH = "a rehearsal records eager steps; plan the step without CUDA graphs"
_NO_FREE_MEMORY = "the free memory of a card depends on other programs; pass a number of bytes to the model instead"


class Stream:
    """Stands in for `torch.cuda.Stream`, and refuses to make a further stream."""

    def __new__(cls, *arguments: object, **options: object) -> Stream:
        _refuse("makes a CUDA stream", _ONE_STREAM)


class CurrentStream(Stream):
    """The stream in which everything runs. Nothing ever waits."""

    cuda_stream = stream_id = device_index = 0

    def __new__(cls, device: str) -> CurrentStream:
        return object.__new__(cls)

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def _nothing(self, *arguments: object) -> None:
        """Stands in for methods that wait for work that is already done."""

    synchronize = wait_stream = wait_event = _nothing


class Event:
    """An event, which has always happened. The time between two events is 0."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def _nothing(self, *arguments: object) -> None:
        """Stands in for methods that wait or record."""

    record = wait = synchronize = _nothing


class CUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`, which is refused."""

    def __new__(cls, *arguments: object, **options: object) -> CUDAGraph:
        _refuse("captures a CUDA graph", _ONE_GRAPH)


class _InCurrentStream:
    """The context manager `torch.cuda.stream(stream)`."""

    def __init__(self, stream: object) -> None:
        if not isinstance(stream, (CurrentStream, types.NoneType)):
            _refuse("enters a CUDA stream", _ONE_STREAM)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def redirect_cuda_functions(device: str, *, capability: tuple[int, int], sm_count: int, memory_bytes: int) -> None:
    """Replaces functions of `torch.cuda` in this process by ones for the virtual GPU.

    Args:
        device: name of the virtual device.
        capability: compute capability of the simulated card.
        sm_count: number of multiprocessors of the simulated card.
        memory_bytes: total memory of the simulated card.
    """
    stream = CurrentStream(device)
    properties = types.SimpleNamespace(
        name="virtual GPU",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sm_count,
        total_memory=memory_bytes,
    )
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: capability,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": _InCurrentStream,
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "mem_get_info": lambda device=None: _refuse("asks for the free memory of the card", _NO_FREE_MEMORY),
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "memory_stats": lambda device=None: {},
    }
    for name in (
        *("_lazy_init", "init", "synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"),
        *("set_rng_state", "manual_seed", "manual_seed_all", "set_per_process_memory_fraction"),
    ):
        stand_ins[name] = _new_stand_in()
    for name, stand_in in stand_ins.items():
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
            if hasattr(module, name):
                setattr(module, name, stand_in)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _new_stand_in())
    tensor: Any = torch.Tensor  # mypy does not allow to patch members of a class
    tensor.is_cuda = property(lambda self: self.device.type in (device, "cuda"))
    tensor.record_stream = _new_stand_in()


def _new_stand_in() -> Callable[..., None]:
    """Returns a new function that does nothing. torch.compile has a rule for each function object, not each name."""

    def nothing(*arguments: object, **options: object) -> None:
        pass

    return nothing


def _refuse(what: str, way_out: str) -> NoReturn:
    raise RehearsalError(f"the step {what} ({source_line() or 'unknown line'}): {way_out}")
