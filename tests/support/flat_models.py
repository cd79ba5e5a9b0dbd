"""Networks that compute everything in one forward, each with a difficulty for segment checkpointing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Flat(nn.Module):
    """A module with parameters and no submodules; subclasses compute in one function."""

    def __init__(self, *, width: int = 16, depth: int = 3, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        for name, shape in shapes.items():
            for number in range(depth):
                self.register_parameter(f"{name}{number}", nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5))
        self.head = nn.Parameter(torch.randn(4, width) / width**0.5)

    def of(self, number: int, *names: str) -> list[torch.Tensor]:
        return [getattr(self, f"{name}{number}") for name in names]


class Perceptron(Flat):
    """Norm, two products, an activation in place, dropout, and a residual sum."""

    def __init__(self, **options: int) -> None:
        super().__init__(up=(32, 16), down=(16, 32), scale=(16,), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            up, down, scale = self.of(number, "up", "down", "scale")
            hidden = F.relu_(F.linear(F.layer_norm(x, (16,), scale), up))
            x = x + F.dropout(F.linear(torch.tanh(hidden), down), 0.2)
        return F.linear(x, self.head)


class Convolutions(Flat):
    """Batch norm as a function and as a module, with running statistics, and a sum that is changed in place."""

    def __init__(self) -> None:
        super().__init__(conv=(16, 16, 3, 3))
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for number in range(self.depth):
            (weight,) = self.of(number, "conv")
            y = F.conv2d(x, weight, padding=1)
            y = F.batch_norm(y, self.mean, self.var, training=True) if number else self.norm(y)
            x = F.relu(y).neg().add_(x)
        return F.linear(x.mean((2, 3)), self.head)


class Attention(Flat):
    """Attention that drops out, between views of all kinds."""

    def __init__(self) -> None:
        super().__init__(qkv=(48, 16), out=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        for number in range(self.depth):
            qkv, out = self.of(number, "qkv", "out")
            parts = F.linear(x, qkv).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, dropout_p=0.3 * (number % 2))
            x = x + F.linear(mixed.transpose(1, 2).flatten(-2), out) * torch.sigmoid(x[..., :1])
        return F.linear(x[0], self.head)


class Double(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y * 2)
        return y * 2 + x

    @staticmethod
    def backward(ctx, grad):
        x, doubled = ctx.saved_tensors
        return grad * doubled + grad * torch.ones_like(x)


class Odd(Flat):
    """A function of the user's own, a part that is checkpointed, own random numbers, buffers that count and are read.

    Complex numbers, a tensor seen as another dtype, memory that is filled late, numbers of Python in the sums.
    """

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("history", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            x = Double.apply(torch.tanh(F.linear(x, weight)) * 0.1)
            x = x * (1 + self.history)
            self.history += x.detach().mean(0) * 0.1
            x = x + checkpoint(lambda a, b: torch.sigmoid(F.linear(a, b)), x, weight, use_reentrant=False)
            noise = torch.rand(x.shape, generator=self.generator)
            x = torch.where(noise > 0.1, x * 2.0, x.sin())
            x = torch.fft.irfft(torch.fft.rfft(x).conj() * 1.5, n=16).cos()
            signs = (x.detach().contiguous().view(torch.int32) >> 31).to(x.dtype)
            filled = torch.empty_like(x)
            filled.copy_(x).mul_(0.5)
            x = x * (1 + signs * 0.1) + filled.exp()
            self.calls += 1
            if self.calls % 2 == 0:
                x = x + torch.arange(16, dtype=x.dtype).softmax(0)
        return F.linear(x, self.head)


class Interrupted(Flat):
    """Takes gradients in its own forward, and runs a part without any."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            y = torch.tanh(F.linear(x, weight)).exp()
            (grad,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
            with torch.no_grad():
                factor = (grad * grad).mean().sqrt().clamp(max=2.0)
            x = y * factor + x.sin()
        return F.linear(x, self.head)


class Written(Flat):
    """Slices filled one by one, views of what changes, memory that is filled late, shapes that change in place."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))
        self.register_buffer("log", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            whole = F.linear(torch.tanh(x), weight) + 0
            self.log.copy_(whole[:, :8].detach().mean(1))
            part = whole[:2, :8].exp().sin()
            whole.add_(1)
            x = torch.cat([part, part], 1).repeat(len(x) // 2, 1) * whole.tanh()
            filled = torch.empty_like(x)
            for column in range(0, 16, 4):
                filled[:, column : column + 4] = torch.sigmoid(x[:, column : column + 4]) * column
            column = F.linear(x, weight).sum(1) + 0
            spread = column[:, None].expand(len(x), 16)
            mixed = (spread + x).tanh()
            column.mul_(2)
            x = mixed + filled + column[:, None]
            late = x.new_empty(len(x), 1).bernoulli_(0.8) * torch.empty_like(x).copy_(x).sin()
            flat = torch.tanh(x).unsqueeze(1).neg()
            flat.squeeze_(1)
            x = torch.mul(late, 2, out=torch.empty_like(late)) if not late.requires_grad else late * flat.sin()
            with torch.inference_mode():
                fixed = (x.detach() @ weight.detach()).tanh()
            x = x * fixed.clone().cos()
        return F.linear(x, self.head)


class Complex(Flat):
    """Conjugates and negatives that are only marked so, of memory that is written later."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            z = torch.complex(F.linear(x, weight), x)
            c = z.conj() @ torch.eye(16, dtype=torch.complex64)
            z.mul_(2)
            n = torch.complex(x, F.linear(x, weight)).conj().imag.sin()
            x = c.imag.tanh() + z.real + torch.fft.ifft(torch.fft.fft(x).conj()).imag.exp() + n
        return F.linear(x, self.head)


class Statistics(Flat):
    """Running statistics that are read before a batch norm changes them, and after."""

    def __init__(self) -> None:
        super().__init__(weight=(16, 16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            (weight,) = self.of(number, "weight")
            y = F.linear(x, weight)
            ratio = (y.std(0) / self.var.sqrt()).detach()
            z = F.batch_norm(torch.tanh(y * (1 + self.mean)), self.mean, self.var, training=True)
            x = (z * ratio).tanh() * torch.exp(self.mean * y)
        return F.linear(x, self.head)
