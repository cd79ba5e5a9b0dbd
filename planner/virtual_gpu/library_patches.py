"""Patches by which PyTorch's optimizers and modules, and bitsandbytes, treat fake tensors like real ones."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from planner.virtual_gpu.backend import NAME, library


def let_libraries_take_fakes_for_real(device: str = NAME) -> None:
    """Patches PyTorch and bitsandbytes in this process so that they treat fake tensors like real ones.

    Args:
        device: type of the device of the fake tensors.
    """
    for name in _fused_steps_without_a_fake():
        library("aten").impl(name, lambda *arguments, **options: None, "Meta")
    _let_optimizers_choose_as_for_real_tensors()
    _let_modules_convert_as_real_tensors_do()
    _let_parameters_be_copied_as_real_ones()
    if device == NAME:
        _let_fake_kernels_allocate_as_for_cuda()
    _let_bitsandbytes_make_its_tables(device)


def _fused_steps_without_a_fake() -> list[str]:
    """Returns the names of the fused optimizer ops without a fake kernel in torch (torch 2.13: all but Adam's).

    These ops write in place and return nothing, so a fake kernel for them does nothing.
    """
    steps = (getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad"))
    names = [getattr(step, overload)._schema for step in steps for overload in step.overloads()]
    full = [f"{schema.name}.{schema.overload_name}".removesuffix(".") for schema in names]
    return [name for name in full if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")]


def _let_optimizers_choose_as_for_real_tensors() -> None:
    """Lets optimizers choose their foreach variant, as they do for parameters on a card.

    torch checks the type of the parameters before it chooses foreach, and would reject fake tensors.
    """
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(FakeTensor)


def _let_modules_convert_as_real_tensors_do() -> None:
    """Makes `module.to(dtype)` set `parameter.data`, as it does on CUDA.

    For fake tensors it would swap the parameter with the converted tensor, which fails if an autograd graph refers to
    the parameter.
    """

    swap = torch.utils.swap_tensors

    def swap_tensors(parameter: Any, applied: Any) -> None:
        if hasattr(parameter, "_local_tensor"):  # a DTensor, whose device cannot be changed otherwise
            swap(parameter, applied)
        else:
            parameter.data = applied.data

    torch.utils.swap_tensors = swap_tensors


def _let_parameters_be_copied_as_real_ones() -> None:
    """Makes `copy.deepcopy` of a fake parameter run the ops of `torch.nn.Parameter.__deepcopy__`."""
    copy_tensor = torch.Tensor.__deepcopy__

    def deepcopy(self: Any, memo: dict[int, Any]) -> torch.Tensor:
        if not getattr(self, "_is_param", False):
            return copy_tensor(self, memo)
        if id(self) not in memo:
            memo[id(self)] = self.data.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
            memo[id(self)]._is_param = True
        return memo[id(self)]

    fake_tensor: Any = FakeTensor  # mypy does not allow to patch methods of a class
    fake_tensor.__deepcopy__ = deepcopy


def _let_fake_kernels_allocate_as_for_cuda() -> None:
    """Makes PyTorch's fake kernels choose the memory formats of CUDA for tensors on the virtual GPU.

    The fake kernels of Fourier transforms, of padding and of eigenvectors ask `device_hint` for the device.
    """
    fake_kernels: Any = importlib.import_module("torch._meta_registrations")
    hint = fake_kernels.device_hint

    def device_hint(tensor: Any) -> str:
        device: str = hint(tensor)
        return "cuda" if device == NAME else device

    fake_kernels.device_hint = device_hint


def _let_bitsandbytes_make_its_tables(device: str) -> None:
    """Lets bitsandbytes' 8-bit optimizers compute their two tables of 256 floats with real tensors on the CPU.

    The optimizer then moves them to its device. In a rehearsal for the CPU, where nothing is moved, fake tables replace
    them. Does nothing if bitsandbytes is not imported.
    """
    if "bitsandbytes.functional" not in sys.modules:  # An import would take longer than many rehearsals.
        return
    _let_bitsandbytes_page_its_state()
    optimizer = importlib.import_module("bitsandbytes.optim.optimizer")
    fill_with_real_numbers = optimizer.Optimizer8bit.fill_qmap

    def fill_qmap(self: Any) -> None:
        with unset_fake_temporarily():
            fill_with_real_numbers(self)
        if device == "cpu":
            tables = self.name2qmap.items()
            self.name2qmap = {name: torch.empty(table.shape, dtype=table.dtype) for name, table in tables}

    optimizer.Optimizer8bit.fill_qmap = fill_qmap


def _let_bitsandbytes_page_its_state() -> None:
    """Makes the state of paged optimizers tensors in host memory, as bitsandbytes does with CUDA's unified memory.

    The driver moves such state to the card while it is read and back when the card is full, so it is not counted.
    """
    functional: Any = importlib.import_module("bitsandbytes.functional")

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        state = torch.empty(shape, dtype=dtype, device="cpu")
        state.is_paged = True  # type: ignore[attr-defined]  # as in bitsandbytes
        state.page_deviceid = device.index  # type: ignore[attr-defined]
        return state

    def in_place(state: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Fills a tensor, or moves it between the memories."""

    functional.get_paged = get_paged
    functional.fill = functional.prefetch_tensor = in_place
