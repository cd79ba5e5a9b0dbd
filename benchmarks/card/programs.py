"""Small programs whose ops are measured one by one: the ops of training steps, in typical shapes.

A program takes the device, creates its inputs there, and runs forward and, if there is one, backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from benchmarks.card import program_layers

Program = Callable[[str], object]
Named = Iterator[tuple[str, Program]]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: 'float32', 'bfloat16', ..."""
    return str(dtype).removeprefix("torch.")


def _reduce(shape: tuple[int, ...], dims: tuple[int, ...], transposed: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    x = x.transpose(0, -1) if transposed else x
    dims = dims or tuple(range(x.dim()))
    x.sum(dims)
    x.mean(dims)
    x.amax(dims)
    if len(dims) == 1:
        x.max(dims[0])
        x.argmax(dims[0])
    x.var(dims)
    torch.linalg.vector_norm(x, 2, dims)
    torch.logsumexp(x, dims)
    (x > 0).any(dims[0])


def reductions() -> Named:
    """Reductions over rows, over columns and over everything, contiguous and not."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((8192, 768), (0,)),
        ((8192, 3072), (0,)),
        ((8192, 52_000), (0,)),
        ((4096, 2048), (0,)),
        ((1024, 768), (0,)),
        ((1020, 768), (0,)),
        ((1001, 999), (0,)),
        ((65_536, 64), (0,)),
        ((200_000, 16), (0,)),
        ((300_000, 3), (0,)),
        ((8192, 768), (1,)),
        ((64, 100_000), (1,)),
        ((7, 1_000_003), (1,)),
        ((64, 128, 768), (0, 1)),
        ((64, 128, 768), (1,)),
        ((32, 256, 56, 56), (0, 2, 3)),
        ((16, 64, 64, 64), (0, 2, 3)),
        ((16, 512, 8, 8), (2, 3)),
        ((1 << 24,), ()),
        ((1 << 20,), ()),
        ((4097,), ()),
    ]
    for (shape, dims), dtype in itertools.product(shapes, (FP32, BF16)):
        name = f"reduce-{'x'.join(map(str, shape))}-over-{''.join(map(str, dims)) or 'all'}-{short(dtype)}"
        yield name, functools.partial(_reduce, shape, dims, False, dtype)
    for shape, dims in shapes[:8:3]:
        name = f"reduce-transposed-{'x'.join(map(str, shape))}-over-{''.join(map(str, dims))}"
        yield name, functools.partial(_reduce, shape, dims, True, FP32)


def _embedding(rows: int, width: int, indices: int, padding: int | None, device: str) -> None:
    table = torch.randn(rows, width, device=device, requires_grad=True)
    places = torch.randint(0, rows, (indices,), device=device)
    out = F.embedding(places, table, padding_idx=padding)
    out.backward(torch.ones_like(out))


def embeddings() -> Named:
    """Embeddings around the number of indices at which the kernel changes, and in the sizes of language models."""
    sizes = [(52_000, 768, 8192), (50_257, 768, 4096), (50_257, 768, 3073), (50_257, 768, 3072), (30_522, 768, 4096)]
    sizes += [(512, 768, 8192), (2, 768, 8192), (128_256, 2048, 2048), (128_256, 2048, 4096), (10_000, 1000, 5001)]
    for rows, width, indices in sizes:
        yield f"embedding-{rows}x{width}-{indices}", functools.partial(_embedding, rows, width, indices, None)
    yield "embedding-52000x768-8192-padding", functools.partial(_embedding, 52_000, 768, 8192, 1)


def _index(rows: int, width: int, indices: int, device: str) -> None:
    x = torch.randn(rows, width, device=device, requires_grad=True)
    places = torch.randint(0, rows, (indices,), device=device)
    pairs = torch.randint(0, min(rows, width), (2, indices), device=device)
    for out in (x[places], x[pairs[0], pairs[1]], x.index_select(0, places)):
        out.backward(torch.ones_like(out))
    wide = places[:, None].expand(indices, width)
    out = x.gather(0, wide)
    out.backward(torch.ones_like(out))
    torch.zeros_like(x).index_put_((places,), torch.ones(indices, width, device=device), accumulate=True)
    torch.zeros_like(x).index_add_(0, places, torch.ones(indices, width, device=device))
    torch.zeros_like(x).scatter_add_(0, wide, torch.ones(indices, width, device=device))


def _order(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    x.sort(-1)
    x.argsort(dim=-1, stable=True)
    x.topk(min(50, columns), -1)
    x.topk(min(5, columns), -1, sorted=False)
    x.cumsum(-1)
    x.cumsum(0)
    x.ne(1).long().cumsum(-1)


def _found(device: str) -> None:
    """Ops whose results have sizes that depend on values."""
    x = torch.randn(512, 512, device=device)
    torch.nonzero(x > 1)
    x[x > 1]
    torch.unique((x * 10).long())
    torch.multinomial(x.abs() + 0.1, 4)
    torch.bincount((x.abs() * 10).long().flatten())


def indexing() -> Named:
    """Lookups, scatters, sorts and scans."""
    for rows, width, indices in ((10_000, 256, 1000), (10_000, 256, 8192), (512, 64, 100_000)):
        yield f"index-{rows}x{width}-{indices}", functools.partial(_index, rows, width, indices)
    for rows, columns in ((64, 128), (16, 4096), (8, 50_257), (1, 1_000_000), (4096, 64)):
        for dtype in (FP32, BF16):
            yield f"order-{rows}x{columns}-{short(dtype)}", functools.partial(_order, rows, columns, dtype)
    yield "sizes-from-values", _found


def _products(strides: str, dtype: torch.dtype, device: str) -> None:
    a = torch.randn(24, 100, 72, device=device, dtype=dtype)
    b = torch.randn(24, 72, 90, device=device, dtype=dtype)
    match strides:
        case "plain":
            torch.bmm(a, b)
        case "transposed":
            torch.bmm(b.transpose(1, 2), a.transpose(1, 2))
        case "sliced":
            torch.bmm(a[:, ::2, ::2], b[:, ::2])
        case "expanded":
            torch.bmm(a[:1].expand(24, 100, 72), b)
        case "heads-inside":
            x = torch.randn(24, 100, 12, 64, device=device, dtype=dtype)
            torch.einsum("bqhd,bkhd->bhqk", x, x)
        case "matrix":
            torch.mm(a[0, :, ::2], b[0, ::2])
            torch.mm(a[0].t()[:, ::3].t(), b[0])
            torch.addmm(torch.zeros(90, device=device, dtype=dtype), a[0], b[0])


def matrix_products() -> Named:
    """Matrix products of operands that cuBLAS can read in place, and of others."""
    kinds = ("plain", "transposed", "sliced", "expanded", "heads-inside", "matrix")
    for kind, dtype in itertools.product(kinds, (FP32, BF16)):
        yield f"products-{kind}-{short(dtype)}", functools.partial(_products, kind, dtype)


PROGRAMS: dict[str, Program] = {
    name: program
    for family in (
        program_layers.layers,
        program_layers.attention,
        reductions,
        embeddings,
        program_layers.convolutions,
        program_layers.recurrent,
        program_layers.optimizers,
        indexing,
        matrix_products,
    )
    for name, program in family()
}
"""Programs by name, the most common first."""

NEEDS_A_CARD = frozenset({"sizes-from-values", "optimizer-adamw-fused"})
"""Programs that cannot run on the meta device."""
