"""A virtual GPU: PyTorch runs on it eagerly, but computes nothing and stores nothing.

torch's device type PrivateUse1 becomes a Python backend named `vgpu`, and `FakeTensorMode` computes shapes and dtypes.
Behavior of CUDA that other devices do not have is registered here: autocast with its cache (`autocast`), the choice of
the attention kernel (`sdpa`), and ops that have one kernel on CUDA and are composite on other devices.

`install` changes a process until it ends (PrivateUse1 becomes torch's accelerator), so it is called only in a child
process: see `planner.virtual_gpu.forked_process`.

Source: torch/utils/backend_registration.py (`_setup_privateuseone_for_python_backend`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from planner.profiles.device import DeviceProfile
from planner.virtual_gpu import inference_mode, quantized_weights, streams
from planner.virtual_gpu.autocast import Autocast
from planner.virtual_gpu.cuda_functions import redirect_cuda_functions
from planner.virtual_gpu.fake_tensor_cache import FakeTensorCache
from planner.virtual_gpu.sdpa import AttentionCall, choose_backend, run_backend

NAME = "vgpu"
"""Name of the virtual device, as in `torch.device(NAME)`."""

ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward")
"""Ops that are one kernel on CUDA, and are decomposed into other ops on a device without a kernel for them."""


class VirtualGpuMode(FakeTensorMode):
    """The `FakeTensorMode` of the virtual device.

    It differs from its base class in five points:

    - It does not initialize the device, which would fail when a model calls `torch.tensor(...)`.
    - It raises `UnsupportedOperatorException` for an op without a fake kernel. The base class would run the real kernel
      on zeros, but the virtual device has no real kernels.
    - It has its own cache of results (`fake_tensor_cache`). The cache of the base class is slower, and the storages
      that it creates are as large as their tensors, although a kernel may have allocated more.
    - It is not copied with a tensor: views of a tensor with another mode would have a storage of their own.
    - It makes tensors for CUDA on the virtual GPU, because models and training steps name CUDA in their code.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.cache_enabled = False
        self._results = FakeTensorCache(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualGpuMode:
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, because the recorder, which is the outer mode, already keeps dynamo from compiling."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")) and is_installed():
            kwargs = {**kwargs, "device": torch.device(NAME)}
        return self._results(func, args, kwargs, lambda: self.dispatch(func, types, args, kwargs))

    @property
    def avoid_device_init(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The device that a rehearsal stands for, with the properties that decide which kernels PyTorch chooses."""

    compute_capability: tuple[int, int] | None
    """Compute capability of the simulated card; None if the rehearsal stands for a step on the CPU."""
    sm_count: int = 0
    """Number of multiprocessors of the simulated card."""
    memory_bytes: int = 0
    """Total memory of the simulated card in bytes."""
    cards: int = 1
    """Number of processes that train together, each on a card of its own."""
    rank: int = 0
    """Number of the process whose step is rehearsed, counted from 0."""

    @classmethod
    def of(cls, card: DeviceProfile | None, *, cards: int = 1, rank: int = 0) -> Target:
        """Returns the target for one of several cards, or for a process on the CPU if `card` is None."""
        if card is None:
            return cls(compute_capability=None, cards=cards, rank=rank)
        return cls(
            compute_capability=card.compute_capability,
            sm_count=card.sm_count,
            memory_bytes=card.vram_bytes,
            cards=cards,
            rank=rank,
        )

    @property
    def device(self) -> str:
        """Name of the torch device of the fake tensors: the virtual GPU or the CPU."""
        return "cpu" if self.compute_capability is None else NAME

    @property
    def autograd_key(self) -> str:
        """Dispatch key under which kernels of composite ops are registered for that device."""
        return "AutogradCPU" if self.compute_capability is None else "AutogradPrivateUse1"


class _DeviceModule:
    """The module `torch.vgpu`. It has the functions that PyTorch calls in the module of an accelerator."""

    Stream, Event = streams.Stream, streams.Event
    stream = staticmethod(streams.entered)
    current_stream = staticmethod(streams.current)
    default_stream = staticmethod(streams.default)

    def set_device(self, device: object) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    class device:
        """The context manager `torch.vgpu.device(index)`. It does nothing, because there is only one device."""

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


def install(target: Target) -> Autocast:
    """Registers the virtual GPU in this process until it ends, and returns the autocast of the virtual GPU.

    Args:
        target: the properties of the simulated card; not the CPU, which needs no backend.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_DeviceModule())
        autocast = Autocast(NAME)
        autocast.register(library)
        _register_kernels(target)
    _redirect_cuda_autocast()
    _redirect_cuda_tensors()
    assert target.compute_capability is not None
    redirect_cuda_functions(
        NAME, capability=target.compute_capability, sm_count=target.sm_count, memory_bytes=target.memory_bytes
    )
    return autocast


def is_installed() -> bool:
    """True if this process has the virtual GPU."""
    return torch._C._get_privateuse1_backend_name() == NAME


def _names_cuda(device: Any) -> bool:
    """True for the device 'cuda' or 'cuda:0', as a string or as a `torch.device`."""
    kind = device.type if isinstance(device, torch.device) else device
    return isinstance(kind, str) and kind.partition(":")[0] == "cuda"


def _redirect_cuda_tensors() -> None:
    """Makes `tensor.to("cuda")`, `tensor.cuda()` and `torch.as_tensor(..., device="cuda")` mean the virtual GPU."""
    move: Any = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        named = [NAME if _names_cuda(value) else value for value in arguments]
        return move(self, *named, **{name: NAME if _names_cuda(value) else value for name, value in options.items()})

    def cuda(self: torch.Tensor, device: object = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        return move(self, NAME, non_blocking=non_blocking, **options)

    convert = torch.as_tensor

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return convert(data, dtype=dtype, device=NAME if _names_cuda(device) else device)

    tensor: Any = torch.Tensor  # mypy does not allow to patch methods of a class
    tensor.to, tensor.cuda = to, cuda
    torch.as_tensor = as_tensor


_libraries: list[torch.library.Library] = []
"""All libraries that `library` has returned. A registration would end if its library object were destroyed."""


def library(namespace: str) -> torch.library.Library:
    """Returns a new `torch.library.Library` of a namespace. Its registrations last until the process ends."""
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def route(name: str, function: Callable[..., Any], autograd_key: str = "AutogradPrivateUse1") -> None:
    """Registers a function that runs instead of an op, with and without inference mode, until the process ends.

    Args:
        name: the op with its namespace and overload, such as 'aten::lstm.input'.
        autograd_key: dispatch key of composite ops on the device of the rehearsal (`Target.autograd_key`).
    """
    namespace, _, op = name.partition("::")
    library(namespace).impl(op, function, autograd_key)
    inference_mode.note_route(name, function)


def _register_kernels(target: Target) -> None:
    """Registers kernels for ops that run or allocate differently on CUDA than on other devices."""
    aten = library("aten")
    capability = target.compute_capability
    assert capability is not None

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            scale=scale,
            grouped=enable_gqa,
        )
        return run_backend(choose_backend(call, capability), call)

    route("aten::scaled_dot_product_attention", scaled_dot_product_attention)

    def like_last(grad, input):
        """Allocates the gradient as the CUDA kernel does, without intermediate tensors."""
        return torch.empty_like(input)

    for name in ONE_KERNEL_ON_CUDA:
        aten.impl(name, like_last, "PrivateUse1")
    quantized_weights.register(capability, target.sm_count, route)


def _redirect_cuda_autocast() -> None:
    """Makes calls for CUDA's autocast use the autocast of the virtual GPU, because models name CUDA in their code.

    Examples are `torch.autocast("cuda")`, `torch.cuda.amp.autocast()`, and `torch.is_autocast_enabled()`.
    """

    def redirected(device_type: str) -> str:
        return NAME if device_type == "cuda" else device_type

    enabled, dtype_of, initialise = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.amp.autocast.__init__

    def init(self: torch.amp.autocast, device_type: str, *arguments: Any, **options: Any) -> None:
        initialise(self, redirected(device_type), *arguments, **options)

    torch.amp.autocast.__init__ = init  # type: ignore[method-assign]  # mypy allows no patch of a method
    torch.is_autocast_enabled = lambda device_type="cuda": enabled(redirected(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype_of(redirected(device_type))
    torch.get_autocast_gpu_dtype = lambda: dtype_of(NAME)
