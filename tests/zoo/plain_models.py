"""Models in plain PyTorch, each with one thing that a recorder can stumble over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, STEPS, WIDTH = 2, 6, 8


class Loss(nn.Module):
    """A model that returns the mean square of what `forward_all` returns."""

    def __init__(self, inner: nn.Module, forward_all: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.forward_all = inner, forward_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_all(self.inner, x).float().square().mean()


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    """A builder of one recurrent module over [batch, steps, width], or [steps, batch, width]."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        model = Loss(kind(WIDTH, 4, **settings), lambda inner, x: inner(x)[0])
        shape = (BATCH, STEPS, WIDTH) if settings.get("batch_first") else (STEPS, BATCH, WIDTH)
        return model, (torch.zeros(shape),)

    return build


def cells() -> tuple[nn.Module, torch.Tensor]:
    """Recurrence by hand over a GRU cell and an LSTM cell."""

    def run(inner: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        h, c = x.new_zeros(BATCH, 4), x.new_zeros(BATCH, 4)
        for step in range(STEPS):
            h = inner["gru"](x[:, step], h)
            h, c = inner["lstm"](x[:, step], (h, c))
        return h

    model = nn.ModuleDict({"gru": nn.GRUCell(WIDTH, 4), "lstm": nn.LSTMCell(WIDTH, 4)})
    return Loss(model, run), torch.zeros(BATCH, STEPS, WIDTH)


def packed() -> tuple[nn.Module, torch.Tensor]:
    """An LSTM over a packed sequence whose lengths are constants."""

    def run(inner: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([STEPS, STEPS - 2])
        return inner(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data

    return Loss(nn.LSTM(WIDTH, 4, batch_first=True), run), torch.zeros(BATCH, STEPS, WIDTH)


def packed_by_batch() -> tuple[nn.Module, tuple]:
    """The same with lengths from the batch."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(WIDTH, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.inner(nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True))[0].data.mean()

    return Packed(), (torch.zeros(BATCH, STEPS, WIDTH), torch.ones(BATCH, dtype=torch.long))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kept = x * 2
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad + 0 * ctx.kept


def simple(run: Callable[[nn.Module, torch.Tensor], torch.Tensor], inner: nn.Module | None = None):
    """A builder of a model that does `run` around a linear layer."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        return Loss(inner or nn.Linear(WIDTH, WIDTH), run), torch.zeros(BATCH, WIDTH)

    return build


def custom_function(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _Cube.apply(inner(x))


def in_place(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = inner(x)
    y[:, 0] = 0
    y.add_(1).index_fill_(1, torch.tensor([1], device=x.device), 2.0)
    return F.relu_(y)


def control_flow_on_shapes(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for _ in range(x.shape[0]):
        x = inner(x) if x.shape[1] % 2 == 0 else x
    return x


def control_flow_on_values(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = inner(x)
    if y.sum() > 0:
        y = y * 2
    return y


def a_check_of_values(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = inner(x)
    if torch.isnan(y).any():
        raise ValueError("the activations are not numbers")
    if not (y.abs() < 1e9).all():
        raise ValueError("the activations are not finite")
    assert (y > -1e9).all()
    return y


def known_values(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    even = positions[positions % 2 == 0]
    kept = int(even.max()) + 1
    sizes = torch.tensor([2, 3, kept - 5], device=x.device).tolist()
    first, second, third = inner(x)[:, :kept].split([*sizes[:2], kept - 5], dim=1)
    mask = torch.ones_like(second, dtype=torch.bool).tril()
    spread = torch.repeat_interleave(third, torch.tensor([1, 3], device=x.device), dim=0)
    return torch.cat([first.flatten(), second[mask], spread.flatten(), even.cpu().to(x.device).to(x.dtype)])


def numbers_of_the_batch(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return inner(x) * float(x.cpu().numpy().max())


def full_backward_hook() -> tuple[nn.Module, torch.Tensor]:
    """Hooks that hand gradients back."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[0].register_full_backward_hook(lambda module, given, grads: tuple(g if g is None else g * 2 for g in given))
    model[2].register_full_backward_hook(lambda module, given, grads: given)
    return Loss(model, lambda inner, x: inner(x)), torch.zeros(BATCH, WIDTH)


def failing_hook(*, registered_first: bool) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    """A builder of a model whose backward hook raises an error, registered before or during the step."""

    def fail(*_: Any) -> None:
        raise ValueError("the hook does not like this gradient")

    def build() -> tuple[nn.Module, torch.Tensor]:
        model = nn.Linear(WIDTH, WIDTH)
        if registered_first:
            model.register_full_backward_hook(fail)

        def run(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y = inner(x)
            if not registered_first:
                y.register_hook(fail)
            return y

        return Loss(model, run), torch.zeros(BATCH, WIDTH)

    return build


def batch_norm() -> tuple[nn.Module, torch.Tensor]:
    """BatchNorm with a cumulative average: its factor comes from a counter in a buffer."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
    return Loss(model, lambda inner, x: inner(x)), torch.zeros(BATCH, 3, 8, 8)


def embedded(*, sparse: bool, head: bool = True) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    """A builder of an embedding, with a linear layer after it or alone."""

    def build() -> tuple[nn.Module, torch.Tensor]:
        layers = [nn.Embedding(32, WIDTH, sparse=sparse), *([nn.Linear(WIDTH, WIDTH)] if head else [])]
        model = Loss(nn.Sequential(*layers), lambda inner, x: inner(x))
        return model, torch.zeros(BATCH, STEPS, dtype=torch.long)

    return build


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(x)).flatten(0, 1), x.flatten())


class Nested(nn.Module):
    """Several losses and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        shared = self.trunk(x)
        return {"heads": [head(shared) for head in self.heads], "more": {"shared": (shared, x)}}


def several_losses(output: dict[str, Any], batch: Any) -> torch.Tensor:
    left, right = output["heads"]
    distance = F.smooth_l1_loss(left, right) + F.mse_loss(left, right) + F.huber_loss(left, right)
    return distance + F.kl_div(left.log_softmax(-1), right.softmax(-1), reduction="batchmean")


def nested() -> tuple[nn.Module, torch.Tensor, Any]:
    return Nested(), torch.zeros(BATCH, WIDTH), several_losses


def torch_transformer() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)
    mask = functools.partial(nn.Transformer.generate_square_subsequent_mask, STEPS)
    return (
        Loss(model, lambda inner, x: inner(x, x, tgt_mask=mask(device=x.device, dtype=x.dtype), tgt_is_causal=True)),
        torch.zeros(BATCH, STEPS, WIDTH),
    )


def multihead_attention() -> tuple[nn.Module, torch.Tensor]:
    model = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
    return Loss(model, lambda inner, x: inner(x, x, x)[0]), torch.zeros(BATCH, STEPS, WIDTH)


def ctc() -> tuple[nn.Module, tuple, Any]:
    """CTC with constant lengths."""

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        steps, count = output.shape[:2]
        lengths = torch.full((count,), steps, dtype=torch.long), torch.full((count,), 3, dtype=torch.long)
        return F.ctc_loss(output.log_softmax(-1), batch[-1], *lengths)

    return nn.Linear(WIDTH, 5), (torch.zeros(STEPS, BATCH, WIDTH), torch.ones(BATCH, 3, dtype=torch.long)), loss


def plain_linear() -> tuple[nn.Module, torch.Tensor]:
    return Loss(nn.Linear(WIDTH, WIDTH), lambda inner, x: inner(x)), torch.zeros(BATCH, WIDTH)


def u_net() -> tuple[nn.Module, torch.Tensor]:
    """Convolutions down and up with a skip."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mid = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.up, self.norm = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.GroupNorm(2, 4)
            self.out = nn.Conv2d(7, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.silu(self.norm(self.up(F.mish(self.mid(self.down(x))))))
            return self.out(torch.cat([x, y], 1)).mean()

    return Net(), torch.zeros(BATCH, 3, 8, 8)
