"""Programs of layers: norms, losses, convolutions, attention, recurrent nets, optimizers (see `programs`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Named = Iterator[tuple[str, Callable[[str], object]]]
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": torch.float16}


def _step(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Run forward and backward of a layer, with a gradient for its input too."""
    layer = layer.to(device=device, dtype=dtype)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    out = layer(x)
    out.backward(torch.ones_like(out))


def _make(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    with torch.device("meta" if device == "meta" else "cpu"):
        layer = make()
    _step(layer, shape, dtype, device)


def _loss(kind: str, rows: int, classes: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, classes, device=device, dtype=dtype, requires_grad=True)
    match kind:
        case "cross-entropy":
            loss = F.cross_entropy(x, torch.randint(0, classes, (rows,), device=device))
        case "softmax":
            loss = x.softmax(-1).sum()
        case "mse":
            loss = F.mse_loss(x, torch.zeros_like(x))
        case "bce":
            loss = F.binary_cross_entropy_with_logits(x, torch.ones_like(x))
    loss.backward()


def layers() -> Named:
    """Linear layers, norms, activations, dropout, pooling and losses."""
    sizes = [
        ("linear-768x3072", lambda: nn.Linear(768, 3072), (8192, 768)),
        ("linear-768x52000", lambda: nn.Linear(768, 52_000), (8192, 768)),
        ("linear-nobias-1024x2816", lambda: nn.Linear(1024, 2816, bias=False), (4096, 1024)),
        ("linear-3d-768x768", lambda: nn.Linear(768, 768), (64, 128, 768)),
        ("linear-odd-77x33", lambda: nn.Linear(77, 33), (1001, 77)),
        ("layernorm-8192x768", lambda: nn.LayerNorm(768), (64, 128, 768)),
        ("layernorm-65537x64", lambda: nn.LayerNorm(64), (65_537, 64)),
        ("layernorm-131072x256", lambda: nn.LayerNorm(256), (131_072, 256)),
        ("layernorm-100x77", lambda: nn.LayerNorm(77), (100, 77)),
        ("rmsnorm-4096x1024", lambda: nn.RMSNorm(1024), (4096, 1024)),
        ("rmsnorm-131072x128", lambda: nn.RMSNorm(128), (131_072, 128)),
        ("groupnorm-16x64x64x64", lambda: nn.GroupNorm(8, 64), (16, 64, 64, 64)),
        ("groupnorm-16x512x8x8", lambda: nn.GroupNorm(8, 512), (16, 512, 8, 8)),
        ("batchnorm1d-4096x2048", lambda: nn.BatchNorm1d(2048), (4096, 2048)),
        ("batchnorm1d-100x33", lambda: nn.BatchNorm1d(33), (100, 33)),
        ("batchnorm2d-32x64x112x112", lambda: nn.BatchNorm2d(64), (32, 64, 112, 112)),
        ("batchnorm2d-32x256x56x56", lambda: nn.BatchNorm2d(256), (32, 256, 56, 56)),
        ("batchnorm2d-32x2048x7x7", lambda: nn.BatchNorm2d(2048), (32, 2048, 7, 7)),
        ("dropout-8192x768", lambda: nn.Dropout(0.1), (8192, 768)),
        ("gelu-8192x3072", lambda: nn.GELU(), (8192, 3072)),
        ("silu-8192x2816", lambda: nn.SiLU(), (8192, 2816)),
        ("mish-4096x512", lambda: nn.Mish(), (4096, 512)),
        ("prelu-4096x512", lambda: nn.PReLU(), (4096, 512)),
        ("glu-4096x512", lambda: nn.GLU(), (4096, 512)),
        ("maxpool-32x64x112x112", lambda: nn.MaxPool2d(3, 2, 1), (32, 64, 112, 112)),
        ("avgpool-32x256x14x14", lambda: nn.AvgPool2d(2), (32, 256, 14, 14)),
        ("adaptivepool-32x2048x7x7", lambda: nn.AdaptiveAvgPool2d(1), (32, 2048, 7, 7)),
        ("upsample-16x128x32x32", lambda: nn.Upsample(scale_factor=2.0), (16, 128, 32, 32)),
        ("pad-16x64x32x32", lambda: nn.ReflectionPad2d(2), (16, 64, 32, 32)),
    ]
    for (name, make, shape), dtype in itertools.product(sizes, ("fp32", "bf16")):
        yield f"{name}-{dtype}", functools.partial(_make, make, shape, DTYPES[dtype])
    rows = [("cross-entropy", 8192, 52_000), ("cross-entropy", 32, 1000), ("softmax", 12_288, 512)]
    rows += [("softmax", 100, 5000), ("mse", 16, 12_288), ("bce", 4096, 100)]
    for (kind, count, classes), dtype in itertools.product(rows, ("fp32", "bf16")):
        yield f"{kind}-{count}x{classes}-{dtype}", functools.partial(_loss, kind, count, classes, DTYPES[dtype])


_RESNET = (
    # inputs, outputs, kernel, stride, image: the layers of ResNet-50 for 224 x 224
    (3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 56), (128, 128, 3, 2, 56), (256, 512, 1, 2, 56), (128, 512, 1, 1, 28), (512, 128, 1, 1, 28),
    (128, 128, 3, 1, 28), (512, 256, 1, 1, 28), (256, 256, 3, 2, 28), (512, 1024, 1, 2, 28), (256, 1024, 1, 1, 14),
    (256, 256, 3, 1, 14), (1024, 512, 1, 1, 14), (512, 512, 3, 2, 14), (1024, 2048, 1, 2, 14), (512, 2048, 1, 1, 7),
    (512, 512, 3, 1, 7),
)  # fmt: skip
_UNET = (
    (3, 64, 3, 1, 64), (64, 64, 3, 1, 64), (64, 64, 3, 2, 64), (64, 128, 3, 1, 32), (128, 128, 3, 1, 32),
    (128, 256, 3, 1, 16), (256, 256, 3, 1, 8), (256, 768, 1, 1, 8), (512, 256, 3, 1, 8), (384, 256, 3, 1, 16),
    (192, 64, 3, 1, 64), (192, 64, 1, 1, 64), (64, 3, 3, 1, 64),
)  # fmt: skip


def _conv(size: tuple[int, int, int, int, int], bias: bool) -> nn.Module:
    inputs, outputs, kernel, stride, _ = size
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)


def convolutions() -> Named:
    """The layers of ResNet-50 and of the U-Net, patch embeddings, and other kinds."""
    for size, dtype in itertools.product(_RESNET, ("fp32", "bf16")):
        shape = (32, size[0], size[4], size[4])
        make = functools.partial(_conv, size, False)
        yield f"resnet-conv-{'-'.join(map(str, size))}-{dtype}", functools.partial(_make, make, shape, DTYPES[dtype])
    for size, dtype in itertools.product(_UNET, ("fp32", "bf16")):
        shape = (16, size[0], size[4], size[4])
        make = functools.partial(_conv, size, True)
        yield f"unet-conv-{'-'.join(map(str, size))}-{dtype}", functools.partial(_make, make, shape, DTYPES[dtype])
    others = [
        ("patches-768", lambda: nn.Conv2d(3, 768, 16, stride=16), (32, 3, 224, 224)),
        ("conv1d-80x384", lambda: nn.Conv1d(80, 384, 3, padding=1), (8, 80, 3000)),
        ("conv1d-384x384-stride2", lambda: nn.Conv1d(384, 384, 3, stride=2, padding=1), (8, 384, 3000)),
        ("depthwise-256", lambda: nn.Conv2d(256, 256, 7, padding=3, groups=256), (32, 256, 28, 28)),
        ("grouped-256", lambda: nn.Conv2d(256, 256, 3, padding=1, groups=32), (32, 256, 28, 28)),
        ("transposed-256x128", lambda: nn.ConvTranspose2d(256, 128, 2, stride=2), (16, 256, 32, 32)),
        ("conv3d-16x32", lambda: nn.Conv3d(16, 32, 3, padding=1), (4, 16, 16, 32, 32)),
    ]
    for (name, make, shape), dtype in itertools.product(others, ("fp32", "bf16")):
        yield f"{name}-{dtype}", functools.partial(_make, make, shape, DTYPES[dtype])


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _attend(
    backend: str, size: tuple[int, int, int, int, int], kind: str, dtype: torch.dtype, device: str
) -> torch.Tensor:
    batch, heads, groups, length, width = size
    query = torch.randn(batch, length, heads, width, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
    key, value = (
        torch.randn(batch, length, groups, width, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
        for _ in range(2)
    )
    if groups != heads:
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    mask = torch.ones(batch, 1, length, length, device=device, dtype=torch.bool) if kind == "mask" else None
    with sdpa_kernel(_BACKENDS[backend]):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=kind == "causal", dropout_p=0.1 if kind == "dropout" else 0.0
        )
    out.backward(torch.ones_like(out))
    return out


def attention() -> Named:
    """Attention by each backend that supports the shape (batch, heads, groups, length, head width)."""
    sizes = [(64, 12, 12, 128, 64), (8, 12, 12, 512, 64), (4, 16, 4, 1024, 64), (13, 12, 12, 77, 64)]
    sizes += [(32, 12, 12, 197, 64), (2, 8, 8, 300, 128), (16, 4, 4, 64, 64)]
    kinds = ("plain", "causal", "dropout", "mask")
    for backend, size, kind, dtype in itertools.product(_BACKENDS, sizes, kinds, ("fp32", "bf16")):
        half_only = backend in ("flash", "cudnn") and dtype == "fp32"
        if half_only or (backend == "flash" and kind == "mask") or (backend == "math" and size not in sizes[1:3]):
            continue
        name = f"attention-{backend}-{'x'.join(map(str, size))}-{kind}-{dtype}"
        yield name, functools.partial(_attend, backend, size, kind, DTYPES[dtype])


def _recur(kind: str, layers: int, width: int, dtype: torch.dtype, dropout: float, device: str) -> None:
    with torch.device("meta" if device == "meta" else "cpu"):
        layer = getattr(nn, kind)(width, width, num_layers=layers, batch_first=True, dropout=dropout)
    layer = layer.to(device=device, dtype=dtype)
    x = torch.randn(64, 64, width, device=device, dtype=dtype, requires_grad=True)
    out, _ = layer(x)
    out.backward(torch.ones_like(out))


def recurrent() -> Named:
    """Recurrent networks of cuDNN, which keep a reserve for backward and take a workspace."""
    for kind, (layers_of, width, dropout), dtype in itertools.product(
        ("LSTM", "GRU", "RNN"), ((2, 1024, 0.1), (1, 256, 0.0)), ("fp32", "bf16")
    ):
        name = f"{kind.lower()}-{layers_of}x{width}-{dtype}"
        yield name, functools.partial(_recur, kind, layers_of, width, DTYPES[dtype], dropout)


_WEIGHTS = ((768, 768), (3072, 768), (768,), (52_000, 768), (77, 33))


def _optimize(make: Callable, clip: bool, device: str) -> None:
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in _WEIGHTS]
    optimizer = make(weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        if clip:
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def optimizers() -> Named:
    """Two optimizer steps: one that creates the state, and one that uses it."""
    kinds: dict[str, Callable] = {
        "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
        "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
        "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False),
        "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
    }
    for name, make in kinds.items():
        yield f"optimizer-{name}", functools.partial(_optimize, make, False)
    yield "optimizer-clip", functools.partial(_optimize, kinds["adamw-foreach"], True)
