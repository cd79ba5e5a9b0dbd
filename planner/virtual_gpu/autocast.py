"""CUDA's autocast on the virtual GPU: the same op lists, the same promotion, the same cache of weight casts.

The memory of a step under autocast depends on which ops cast their inputs, and on how long casts of weights live.
PyTorch has no autocast for a PrivateUse1 device, so its autocast kernels are registered here.

Sources: ATen/autocast_mode.h (the lists), ATen/autocast_mode.cpp (`cached_cast`, `set_opt_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention
""".split()
"""Ops whose floating point inputs are cast to the lower precision (`AT_FORALL_LOWER_PRECISION_FP`)."""

FULL_PRECISION = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm nuclear_norm
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
"""Ops whose floating point inputs are cast to fp32 (`AT_FORALL_FP32`)."""

FULL_PRECISION_BY_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
"""Ops that get `dtype=torch.float32`, while their inputs are not cast (`AT_FORALL_FP32_SET_OPT_DTYPE`)."""

PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()
"""Ops whose inputs are cast to the widest type among them (`AT_FORALL_PROMOTE`)."""

AUTOCAST_KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]  # not in the stub of torch._C
"""Dispatch key of autocast on a PrivateUse1 device."""

_Cast = Callable[["Autocast", Any, tuple, dict], tuple[tuple, dict]]
"""A function of (autocast, op, args, kwargs) that returns the (args, kwargs) with which autocast calls the op."""


class Autocast:
    """Autocast for a PrivateUse1 device.

    Its cache keeps the casts of fp32 leaf tensors (the weights) until the outermost autocast region ends.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_cast: Callable[[torch.Tensor], None] = lambda tensor: None
        """Called with every cast that enters the cache."""
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The cache: (original, cast) by the id of the original. Keeping the original here keeps its id valid."""

    def register(self, library: Callable[[str], torch.library.Library]) -> None:
        """Registers the autocast kernels in this process.

        `torch.clear_autocast_cache`, which autocast calls when its outermost region ends, is replaced by a function
        that also clears this cache.

        Args:
            library: function that returns the `torch.library.Library` of a namespace, and keeps it alive.
        """
        library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        aten = library("aten")
        for names, adapt in (
            (LOWER_PRECISION, _to_lower_precision),
            (FULL_PRECISION, _to_full_precision),
            (FULL_PRECISION_BY_DTYPE, _by_dtype_argument),
            (PROMOTE, _to_widest),
        ):
            for name in names:
                packet, _, overload = name.partition(".")
                if hasattr(torch.ops.aten, packet):  # The lists differ by a few names between torch versions.
                    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    aten.impl(name, self._kernel(op, adapt), "AutocastPrivateUse1")
        clear_real_caches = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            self._casts.clear()
            clear_real_caches()

        torch.clear_autocast_cache = clear_autocast_cache

    def _kernel(self, op: torch._ops.OpOverload, adapt: _Cast) -> Callable[..., Any]:
        """Returns the autocast kernel of an op, which adapts the arguments and then calls the op without autocast."""
        autocast_key = torch._C.DispatchKeySet(AUTOCAST_KEY)

        def kernel(*args, **kwargs):
            args, kwargs = adapt(self, op, args, kwargs)
            with torch._C._ExcludeDispatchKeyGuard(autocast_key):
                return op(*args, **kwargs)

        return kernel

    @property
    def lower_dtype(self) -> torch.dtype:
        """Dtype to which the current autocast region casts the inputs of `LOWER_PRECISION` ops."""
        return torch.get_autocast_dtype(self.device)

    def takes(self, value: object) -> TypeGuard[torch.Tensor]:
        """True if autocast may cast this argument: a floating point tensor of this device that is not fp64."""
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == self.device
            and value.is_floating_point()
            and value.dtype != torch.float64
        )

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Casts the tensors in nested lists and tuples to `dtype`. Casts of weights are cached, as in `cached_cast`."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(item, dtype) for item in value)
        if not self.takes(value) or value.dtype == dtype:
            return value
        cacheable = (
            dtype == self.lower_dtype
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return value.to(dtype)
        if id(value) not in self._casts:
            cast = value.to(dtype)
            self.on_cast(cast)
            self._casts[id(value)] = (value, cast)
        return self._casts[id(value)][1]


def _to_lower_precision(autocast: Autocast, op: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Adapts arguments for `LOWER_PRECISION`: casts all floating point tensors to the lower precision."""
    dtype = autocast.lower_dtype
    return autocast.cast(args, dtype), {name: autocast.cast(value, dtype) for name, value in kwargs.items()}


def _to_full_precision(autocast: Autocast, op: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Adapts arguments for `FULL_PRECISION`: casts all floating point tensors to fp32."""
    dtype = torch.float32
    return autocast.cast(args, dtype), {name: autocast.cast(value, dtype) for name, value in kwargs.items()}


def _by_dtype_argument(autocast: Autocast, op: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Adapts arguments for `FULL_PRECISION_BY_DTYPE`: sets `dtype` to fp32, unless the caller has set it."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    requested = kwargs.get("dtype") or (args[position] if len(args) > position else None)
    if requested is None and autocast.takes(args[0]):
        return args[:position], {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _to_widest(autocast: Autocast, op: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Adapts arguments for `PROMOTE`: casts all floating point tensors to fp32 if one of them is fp32.

    Otherwise all of them have the lower precision already.
    """
    floating = [value for value in _tensors((args, tuple(kwargs.values()))) if autocast.takes(value)]
    if any(value.dtype == torch.float32 for value in floating):
        return _to_full_precision(autocast, op, args, kwargs)
    return args, kwargs


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
