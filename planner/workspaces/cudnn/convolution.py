"""The description of one convolution as cuDNN runs it: a forward, or one gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes of one element, for the dtypes that cuDNN convolves."""
FORWARD, GRAD_INPUT, GRAD_WEIGHT = "forward", "grad_input", "grad_weight"
OPERATIONS = (FORWARD, GRAD_INPUT, GRAD_WEIGHT)

Sizes = tuple[int, ...]
"""Bytes of the workspaces of the algorithms that PyTorch tries for a convolution, in this order, each smaller than the
one before it. The first one is that of the algorithm which PyTorch takes where it fits. With `Kind.benchmark`, all
algorithms are in the list in cuDNN's order, so that sizes may be equal and may grow. Empty if cuDNN cannot compute the
convolution."""


_SIZES = re.compile(r"[0-9]{1,15}(>[0-9]{1,15}){0,199}")


def written(sizes: Sizes) -> str:
    """Returns sizes as one word, such as '4096>0'; '-' for no algorithm."""
    return ">".join(map(str, sizes)) or "-"


def sizes_of(text: str) -> Sizes:
    """Returns the sizes that `text` describes (see `written`).

    Raises:
        ValueError: the text is not in this notation, or a size has more than 15 digits.
    """
    if text != "-" and _SIZES.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not a list of sizes")
    return () if text == "-" else tuple(map(int, text.split(">")))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The sizes of a convolution. Lists of sizes have the order of PyTorch's dimensions, with channels second."""

    x: tuple[int, ...]
    """Sizes of the image: samples, channels, and two or three spatial dimensions."""
    w: tuple[int, ...]
    """Sizes of the weight: output channels, input channels of one group, and the spatial dimensions."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def y(self) -> tuple[int, ...]:
        """Sizes of the result: samples, output channels, and the spatial dimensions."""
        spatial = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.x[2:], self.w[2:], self.stride, self.padding, self.dilation, strict=True
            )
        )
        return (self.x[0], self.w[0], *spatial)

    @property
    def groups(self) -> int:
        """Number of groups of channels."""
        return self.x[1] // self.w[1]

    @property
    def text(self) -> str:
        """The sizes as one word, such as '32,3,224,224/64,3,7,7/2,2/3,3/1,1'."""
        return "/".join(",".join(map(str, sizes)) for sizes in dataclasses.astuple(self))

    @classmethod
    @functools.cache
    def of(cls, text: str) -> Shape:
        """Returns the sizes that `text` describes (see the property `text`).

        Raises:
            ValueError: the text is not in this notation.
        """
        x, w, stride, padding, dilation = (tuple(map(int, sizes.split(","))) for sizes in text.split("/"))
        return cls(x, w, stride, padding, dilation)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The operation and the numbers of a convolution, without its sizes."""

    operation: str
    """One of `OPERATIONS`."""
    dtype: str
    """Name of the dtype of all tensors; a key of `ITEM_BYTES`."""
    channels_last: bool = False
    """True if the tensors have the memory format channels_last (or channels_last_3d)."""
    tf32: bool = False
    """True if fp32 may be rounded to TF32. Always False for other dtypes."""
    deterministic: bool = False
    """True if only deterministic algorithms are allowed."""
    benchmark: bool = False
    """True if all algorithms are tried, to find the fastest one (`torch.backends.cudnn.benchmark`)."""

    @property
    def text(self) -> str:
        """The kind as one word, such as 'forward:float32:tf32'."""
        options = ("channels_last", "tf32", "deterministic", "benchmark")
        return ":".join((self.operation, self.dtype, *(name for name in options if getattr(self, name))))

    @classmethod
    @functools.cache
    def of(cls, text: str) -> Kind:
        """Returns the kind that `text` describes (see the property `text`).

        Raises:
            ValueError, TypeError: the text is not in this notation.
        """
        operation, dtype, *options = text.split(":")
        return cls(operation, dtype, **dict.fromkeys(options, True))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Convolution:
    """One call of cuDNN: everything that its workspace depends on, apart from the card and the version of cuDNN."""

    kind: Kind
    shape: Shape

    @property
    def text(self) -> str:
        """The convolution as one line of text."""
        return f"{self.kind.text} {self.shape.text}"

    @classmethod
    def of(cls, text: str) -> Convolution:
        """Returns the convolution that `text` describes (see the property `text`).

        Raises:
            ValueError, TypeError: the text is not in this notation.
        """
        kind, shape = text.split(" ")
        return cls(Kind.of(kind), Shape.of(shape))

    def nbytes(self, sizes: tuple[int, ...]) -> int:
        """Returns the bytes of a tensor of these sizes in the dtype of the convolution."""
        return ITEM_BYTES[self.kind.dtype] * math.prod(sizes)
