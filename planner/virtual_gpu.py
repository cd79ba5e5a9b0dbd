"""A virtual GPU: PyTorch runs on it eagerly; nothing is computed and nothing is stored.

PrivateUse1 becomes a Python backend named `vgpu`, `FakeTensorMode` supplies shapes and dtypes, and the
places where CUDA differs from other devices are registered here: autocast with its weight-cast cache,
the choice of attention kernel, ops that are one kernel on CUDA and composite elsewhere.

`install` changes a process for good (PrivateUse1 becomes torch's accelerator), so it is only ever called
in a child process: see `planner.child`.

Sources: ATen/autocast_mode.h (the op lists), ATen/autocast_mode.cpp (`cached_cast`),
ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp (attention).
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from planner.attention import AttentionCall, choose_backend, run_backend

NAME = "vgpu"

LOWER_PRECISION = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention"
).split()
FULL_PRECISION = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm nuclear_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
FULL_PRECISION_BY_DTYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward")
"""CompositeImplicit ops with a CUDA kernel: they would decompose on a device that registers none."""


class VirtualGpuMode(FakeTensorMode):
    """Fake tensors that never try to initialise a device (else `torch.tensor(...)` inside a model fails)."""

    @property
    def avoid_device_init(self) -> bool:
        return True


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

    class device:  # noqa: N801  torch looks it up by this name
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


class WeightCasts:
    """CUDA autocast's cache: casts of fp32 leaves live until the outermost autocast region ends."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.on_cast = lambda tensor: None
        """Called with every cast that enters the cache."""

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if id(weight) not in self._casts:
            cast = weight.to(dtype)
            self.on_cast(cast)
            self._casts[id(weight)] = (weight, cast)
        return self._casts[id(weight)][1]

    def clear(self) -> None:
        self._casts.clear()


def install(target: Target) -> WeightCasts:
    """Register the virtual GPU in this process, for good. Returns autocast's weight-cast cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_DeviceModule())
        casts = WeightCasts()
        _register_autocast(casts)
        _register_kernels(target)
    _let_optimizers_choose_as_for_real_tensors()
    _let_bitsandbytes_make_its_tables()
    return casts


_libraries: list[torch.library.Library] = []
"""Registrations live as long as their library object, that is, as long as the child process."""


def _library(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def _register_autocast(casts: WeightCasts) -> None:
    _library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = _library("aten")
    for names, adapt in (
        (LOWER_PRECISION, _lower_precision),
        (FULL_PRECISION, _full_precision),
        (FULL_PRECISION_BY_DTYPE, _full_precision_by_dtype),
        (PROMOTE, _promote),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            if hasattr(torch.ops.aten, packet):  # lists differ by a few names between torch versions
                _register_autocast_op(library, name, getattr(getattr(torch.ops.aten, packet), overload or "default"), adapt, casts)

    clear_real_caches = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        casts.clear()
        clear_real_caches()

    torch.clear_autocast_cache = clear_autocast_cache


def _register_autocast_op(library, name, op, adapt, casts) -> None:
    autocast_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args, **kwargs):
        args, kwargs = adapt(casts, op, args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(autocast_key):
            return op(*args, **kwargs)

    library.impl(name, kernel, "AutocastPrivateUse1")


def _lower_precision(casts, op, args, kwargs):
    dtype = torch.get_autocast_dtype(NAME)
    return _cast_all(casts, args, dtype), {k: _cast(casts, v, dtype) for k, v in kwargs.items()}


def _full_precision(casts, op, args, kwargs):
    return _cast_all(casts, args, torch.float32), {k: _cast(casts, v, torch.float32) for k, v in kwargs.items()}


def _full_precision_by_dtype(casts, op, args, kwargs):
    """CUDA asks these ops for an fp32 result instead of casting their input, unless the caller gave a dtype."""
    names = [argument.name for argument in op._schema.arguments]
    given = kwargs.get("dtype") or (args[names.index("dtype")] if len(args) > names.index("dtype") else None)
    if given is None and _eligible(args[0]):
        args = args[: names.index("dtype")]
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _promote(casts, op, args, kwargs):
    floating = [value for value in _tensors((args, tuple(kwargs.values()))) if _eligible(value)]
    if not any(value.dtype == torch.float32 for value in floating):
        return args, kwargs
    return _full_precision(casts, op, args, kwargs)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == NAME
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast_all(casts: WeightCasts, values, dtype: torch.dtype):
    return type(values)(_cast(casts, value, dtype) for value in values)


def _cast(casts: WeightCasts, value, dtype: torch.dtype):
    if isinstance(value, (list, tuple)):
        return _cast_all(casts, value, dtype)
    if not _eligible(value) or value.dtype == dtype:
        return value
    cacheable = (
        dtype == torch.get_autocast_dtype(NAME)
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    return casts.cast(value, dtype) if cacheable else value.to(dtype)


def _register_kernels(target: Target) -> None:
    library = _library("aten")

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        call = AttentionCall(
            query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale, grouped=enable_gqa
        )
        return run_backend(choose_backend(call, target.compute_capability), call)

    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")

    def like_last(grad, input):
        return torch.empty_like(input)

    for name in ONE_KERNEL_ON_CUDA:
        library.impl(name, like_last, "PrivateUse1")


def _let_optimizers_choose_as_for_real_tensors() -> None:
    """Optimizers choose foreach by a type check that fake tensors fail; parameters on a card pass it."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(FakeTensor)


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
