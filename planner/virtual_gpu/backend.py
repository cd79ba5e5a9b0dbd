"""A virtual GPU: PyTorch runs on it eagerly; nothing is computed and nothing is stored.

PrivateUse1 becomes a Python backend named `vgpu`, `FakeTensorMode` supplies shapes and dtypes, and the
places where CUDA differs from other devices are registered: autocast with its cache (`autocast`), the choice of
attention kernel (`sdpa`), ops that are one kernel on CUDA and composite elsewhere.

`install` changes a process for good (PrivateUse1 becomes torch's accelerator), so it is only ever called
in a child process: see `planner.virtual_gpu.forked_process`.

Source: torch/utils/backend_registration.py (`_setup_privateuseone_for_python_backend`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from planner.virtual_gpu.autocast import Autocast
from planner.virtual_gpu.fake_tensor_cache import CallMemo
from planner.virtual_gpu.sdpa import AttentionCall, choose_backend, run_backend

NAME = "vgpu"

ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward")
"""CompositeImplicit ops with a CUDA kernel: they would decompose on a device that registers none."""


class VirtualGpuMode(FakeTensorMode):
    """Fake tensors that never try to initialise a device (else `torch.tensor(...)` inside a model fails).

    An op without a fake kernel is refused: PyTorch would run the real one on zeros, which this device has not.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._memo = CallMemo(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The recorder, which is outside of this mode, keeps it from being compiled; to do so twice takes its time."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.cache_enabled = not _is_left_out_of_the_cache(func)
        kwargs = kwargs or {}
        return self._memo(func, args, kwargs, lambda: self.dispatch(func, types, args, kwargs))

    @property
    def avoid_device_init(self) -> bool:
        return True


@functools.cache
def _is_left_out_of_the_cache(func: torch._ops.OpOverload) -> bool:
    """The cache of `FakeTensorMode`.

    Over hundreds of tensors, to look such a call up takes longer than to make it. A storage among the arguments would
    be a part of the key, and so never die.
    """
    takes_storage = any(str(argument.type) == "Storage" for argument in func._schema.arguments)
    return takes_storage or func._schema.name.startswith("aten::_foreach")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The properties of the card that decide which kernels PyTorch takes."""

    compute_capability: tuple[int, int]


class _DeviceModule:
    """What torch looks up as `torch.vgpu`."""

    _is_in_bad_fork = False

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
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


def install(target: Target) -> Autocast:
    """Register the virtual GPU in this process, for good. Returns its autocast, which knows the weight casts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_DeviceModule())
        autocast = Autocast(NAME)
        autocast.register(library)
        _register_kernels(target)
    _let_autocast_of_cuda_be_that_of_this_device()
    return autocast


def let_libraries_take_fakes_for_real() -> None:
    """Where libraries do something else when they are given fake tensors, let them not. In this process, for good."""
    _let_optimizers_choose_as_for_real_tensors()
    _let_modules_convert_as_real_tensors_do()
    _let_bitsandbytes_make_its_tables()


_libraries: list[torch.library.Library] = []
"""Registrations live as long as their library object, that is, as long as the child process."""


def library(namespace: str) -> torch.library.Library:
    """Registrations made with it last as long as the process."""
    made = torch.library.Library(namespace, "IMPL")
    _libraries.append(made)
    return made


def _register_kernels(target: Target) -> None:
    aten = library("aten")

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
        return run_backend(choose_backend(call, target.compute_capability), call)

    aten.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")

    def like_last(grad, input):
        return torch.empty_like(input)

    for name in ONE_KERNEL_ON_CUDA:
        aten.impl(name, like_last, "PrivateUse1")
    for name in _fused_steps_without_a_fake():
        aten.impl(name, lambda *arguments, **options: None, "Meta")


def _fused_steps_without_a_fake() -> list[str]:
    """Fused optimizer kernels write in place and return nothing; torch says so for some of them (torch 2.13: Adam)."""
    steps = (getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad"))
    names = [getattr(step, overload)._schema for step in steps for overload in step.overloads()]
    full = [f"{schema.name}.{schema.overload_name}".removesuffix(".") for schema in names]
    return [name for name in full if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")]


def _let_optimizers_choose_as_for_real_tensors() -> None:
    """Optimizers choose foreach by a type check that fake tensors fail; parameters on a card pass it."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(FakeTensor)


def _let_modules_convert_as_real_tensors_do() -> None:
    """`module.to(dtype)` sets a parameter's data on CUDA; for fake tensors it swaps them, which a graph forbids."""

    def swap_tensors(parameter: torch.Tensor, applied: torch.Tensor) -> None:
        parameter.data = applied.data

    torch.utils.swap_tensors = swap_tensors


def _let_bitsandbytes_make_its_tables() -> None:
    """Its 8-bit optimizers compute two tables of 256 floats from real numbers on the CPU."""
    if "bitsandbytes" not in sys.modules:  # importing it takes longer than many a rehearsal
        return
    optimizer = importlib.import_module("bitsandbytes.optim.optimizer")
    fill_with_real_numbers = optimizer.Optimizer8bit.fill_qmap

    def fill_qmap(self: object) -> None:
        with unset_fake_temporarily():
            fill_with_real_numbers(self)

    optimizer.Optimizer8bit.fill_qmap = fill_qmap


def _let_autocast_of_cuda_be_that_of_this_device() -> None:
    """Models name it: `torch.autocast("cuda")`, `torch.cuda.amp.autocast()`, and `torch.is_autocast_enabled()`."""

    def here(device_type: str) -> str:
        return NAME if device_type == "cuda" else device_type

    enabled, dtype_of, make = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.amp.autocast.__init__

    def init(self: torch.amp.autocast, device_type: str, *arguments: object, **options: object) -> None:
        make(self, here(device_type), *arguments, **options)

    torch.amp.autocast.__init__ = init
    torch.is_autocast_enabled = lambda device_type="cuda": enabled(here(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype_of(here(device_type))
    torch.get_autocast_gpu_dtype = lambda: dtype_of(NAME)
