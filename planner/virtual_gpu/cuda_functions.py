"""Lets code that calls functions of `torch.cuda` run on the virtual GPU, whether or not PyTorch was built with CUDA.

`torch.cuda.is_available()` is true and there is one card with the properties of the simulated one. Events and
synchronization do nothing. There is one stream: code that makes further streams is refused, because the allocator keeps
the blocks of each stream apart, which a rehearsal does not model.
"""

from __future__ import annotations

import collections
import importlib
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from planner.errors import RehearsalError
from planner.virtual_gpu.source_lines import source_line
from planner.virtual_gpu.streams import Event

_ONE_STREAM = (
    "a rehearsal has one CUDA stream; run this code in the current stream, which torch.cuda.current_stream() returns"
)
_ONE_GRAPH = "a rehearsal records eager steps; plan the step without CUDA graphs"
_ONE_POOL = "a rehearsal has one pool of memory; allocate from PyTorch's own pool"
_NO_FREE_MEMORY = "the free memory of a card depends on other programs; pass a number of bytes to the model instead"
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")


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


class CUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`, which is refused."""

    def __new__(cls, *arguments: object, **options: object) -> CUDAGraph:
        _refuse("captures a CUDA graph", _ONE_GRAPH)


class Device:
    """The context manager `torch.cuda.device(device)`. There is one card."""

    idx = prev_idx = 0

    def __init__(self, device: object = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _InCurrentStream(Device):
    """The context manager `torch.cuda.stream(stream)`."""

    def __init__(self, stream: object) -> None:
        if not isinstance(stream, (CurrentStream, types.NoneType)):
            _refuse("enters a CUDA stream", _ONE_STREAM)


def _nothing(*arguments: object, **options: object) -> None:
    pass


class EmptyCache:
    """Stands in for `torch.cuda.empty_cache`: calls `on_call`. The virtual GPU has no cache."""

    def __init__(self) -> None:
        self.on_call: Callable[[], object] = _nothing

    def __call__(self) -> None:
        self.on_call()


empty_cache = EmptyCache()


def redirect_cuda_functions(device: str, *, capability: tuple[int, int], sm_count: int, memory_bytes: int) -> None:
    """Replaces functions of `torch.cuda` in this process by ones for the virtual GPU.

    Args:
        device: name of the virtual device.
        capability: compute capability of the simulated card.
        sm_count: number of multiprocessors of the simulated card.
        memory_bytes: total memory of the simulated card.
    """
    # Its tables name the functions of torch.cuda, and must be made before several names stand for one function.
    importlib.import_module("torch._dynamo")
    stand_ins = _stand_ins(CurrentStream(device), capability, sm_count, memory_bytes)
    cuda_modules = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
    for name, stand_in in stand_ins.items():
        for module in cuda_modules:
            if hasattr(module, name):
                setattr(module, name, stand_in)
    for name in ("get_memory_info", "memory_stats", "empty_cache", *_RESETS):
        for module in (torch.accelerator, torch.accelerator.memory):
            setattr(module, name, stand_ins[name])
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing)
    tensor: Any = torch.Tensor  # mypy does not allow to patch members of a class
    tensor.is_cuda = property(lambda self: self.device.type in (device, "cuda"))
    tensor.record_stream = _nothing


def _stand_ins(stream: CurrentStream, capability: tuple[int, int], sm_count: int, memory_bytes: int) -> dict[str, Any]:
    """Returns functions and classes that replace those of `torch.cuda` with the same name."""
    properties = types.SimpleNamespace(
        name="virtual GPU",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sm_count,
        total_memory=memory_bytes,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
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
        "is_tf32_supported": lambda: capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": _InCurrentStream,
        "StreamContext": _InCurrentStream,
        "device": Device,
        "device_of": Device,
        "_get_device_index": lambda device=None, optional=False, allow_cpu=False: 0,
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": Stream,
        "get_stream_from_external": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": CUDAGraph,
        "graph_pool_handle": CUDAGraph,
        "make_graphed_callables": CUDAGraph,
        "MemPool": lambda *arguments, **options: _refuse("makes a pool of memory", _ONE_POOL),
        "get_allocator_backend": lambda: "native",
        "get_sync_debug_mode": lambda: 0,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "mem_get_info": lambda device=None: _refuse("asks for the free memory of the card", _NO_FREE_MEMORY),
        "get_memory_info": lambda device=None: _refuse("asks for the free memory of the card", _NO_FREE_MEMORY),
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "initial_seed": torch.initial_seed,
        "empty_cache": empty_cache,
        "memory_snapshot": lambda mempool_id=None: [],
        "memory_summary": lambda device=None, abbreviated=False: "",
    }
    for name in (
        "memory_stats",
        "memory_stats_as_nested_dict",
        "host_memory_stats",
        "host_memory_stats_as_nested_dict",
    ):
        stand_ins[name] = lambda device=None: collections.defaultdict(int)
    for name in (
        *("_lazy_init", "init", "synchronize", "set_device", "set_stream", "ipc_collect"),
        *(*_RESETS, "reset_max_memory_allocated", "reset_max_memory_cached"),
        *("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats", "set_sync_debug_mode"),
        *("set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_per_process_memory_fraction"),
    ):
        stand_ins[name] = _nothing
    return stand_ins


def _refuse(what: str, way_out: str) -> NoReturn:
    raise RehearsalError(f"the step {what} ({source_line() or 'unknown line'}): {way_out}")
