"""Small models and losses whose samples are coupled in the backward only: values of the loss add up, gradients do not.

In some cases, the gradient of an activation is changed by numbers that depend on the whole batch. In others, the value
of the loss does not show what its gradient is. Each kind also has similar cases whose samples are not coupled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.guard.losses import CLASSES, Case, cross_entropy, vectors

GradientOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the gradient that is passed on, given an activation and its gradient. Dimension 0 is the sample."""


class Backward(nn.Module):
    """A module that returns its input unchanged and has another backward."""

    def __init__(self, gradient_of: GradientOf) -> None:
        super().__init__()
        self.gradient_of = gradient_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Changed.apply(x, self.gradient_of)


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gradient_of):
        ctx.save_for_backward(x)
        ctx.gradient_of = gradient_of
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient_of(*ctx.saved_tensors, gradient), None


class Hooked(nn.Module):
    """A module that returns a copy of its input with a gradient hook."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self.hook)
        return x


class Estimated(nn.Module):
    """A module whose value is `value(x)` and whose gradient is that of `estimate(x)` (straight-through)."""

    def __init__(
        self, value: Callable[[torch.Tensor], torch.Tensor], estimate: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.value, self.estimate = value, estimate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        estimate = self.estimate(x)
        return self.value(x).detach() + estimate - estimate.detach()


def around(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), middle, nn.Linear(32, CLASSES))


# ---- gradients of activations ----------------------------------------------------------------------------------------


def normalized(_, gradient):
    return gradient / gradient.norm()


def clipped(_, gradient):
    return gradient * (0.02 / gradient.norm()).clamp(max=1.0)


def centred(_, gradient):
    return gradient - gradient.mean(0)


def standardized(x, gradient):
    """The backward of batch normalization."""
    unit = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    return gradient - gradient.mean(0) - unit * (gradient * unit).mean(0)


def reversed_by_the_mean(x, gradient):
    return -gradient * (4 * x.mean()).sigmoid()


def times_the_batch(_, gradient):
    return gradient * len(gradient)


def largest_only(_, gradient):
    return gradient.where(gradient.abs() >= gradient.abs().float().flatten().quantile(0.7), 0.0)


def reversed_gradient(_, gradient):
    return -0.1 * gradient


def clamped(_, gradient):
    return gradient.clamp(-1e-3, 1e-3)


def unit_by_sample(_, gradient):
    return F.normalize(gradient, dim=1)


def scaled_by_sample(x, gradient):
    return gradient * x.norm(dim=1, keepdim=True)


def in_standard_units(x):
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


# ---- losses ----------------------------------------------------------------------------------------------------------


def likelihood(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return -F.cross_entropy(output, batch[1], reduction="none")


def ratio(output, batch):
    """Ratio of the new policy to the old one, which is 1 before the first update."""
    likely = likelihood(output, batch)
    return (likely - likely.detach()).exp()


def rewards(batch):
    return batch[0][:, 0]


def normalized_advantages(output, batch):
    """Proximal policy optimization with advantages that are normalized over the batch."""
    advantage = (rewards(batch) - rewards(batch).mean()) / (rewards(batch).std(correction=0) + 1e-6)
    change = ratio(output, batch)
    return -torch.minimum(change * advantage, change.clamp(0.8, 1.2) * advantage).mean()


def mean_as_baseline(output, batch):
    """REINFORCE with the mean reward of the batch as its baseline."""
    return -((rewards(batch) - rewards(batch).mean()) * ratio(output, batch)).mean()


def over_itself(output, batch):
    loss = cross_entropy(output, batch)
    return loss / loss.detach()


def two_balanced(output, batch):
    """Two losses, each divided by its own size."""
    first, second = cross_entropy(output, batch), (output[:, 0] - batch[0][:, 0]).square().mean()
    return first / first.detach() + second / second.detach()


def advantages(output, batch):
    change, advantage = ratio(output, batch), rewards(batch)
    return -torch.minimum(change * advantage, change.clamp(0.8, 1.2) * advantage).mean()


def each_over_itself(output, batch):
    costs = F.cross_entropy(output, batch[1], reduction="none")
    return (costs / costs.detach()).mean()


def _changed(gradient_of: GradientOf) -> Case:
    return Case(f"gradient {gradient_of.__name__}", lambda: around(Backward(gradient_of)), vectors, cross_entropy)


CASES = (
    *map(
        _changed,
        (
            normalized, clipped, centred, standardized, reversed_by_the_mean, times_the_batch, largest_only,
            reversed_gradient, clamped, unit_by_sample, scaled_by_sample,
        ),
    ),
    Case("hook, gradient over its norm", lambda: around(Hooked(lambda g: g / g.norm())), vectors, cross_entropy),
    Case("hook, centred", lambda: around(Hooked(lambda g: g - g.mean(0))), vectors, cross_entropy),
    Case("hook, signs", lambda: around(Hooked(torch.sign)), vectors, cross_entropy),
    Case("straight through, statistics", lambda: around(Estimated(torch.sign, in_standard_units)), vectors,
         cross_entropy),
    Case("straight through, tanh", lambda: around(Estimated(torch.sign, torch.tanh)), vectors, cross_entropy),
    Case("mean without gradient", lambda: around(Estimated(lambda x: x, lambda x: x - x.mean(0))), vectors,
         cross_entropy),
    *(
        Case(loss.__name__, lambda: around(nn.Identity()), vectors, loss)
        for loss in (
            normalized_advantages, mean_as_baseline, over_itself, two_balanced, advantages, each_over_itself,
        )
    ),
)  # fmt: skip
"""All cases. The benchmark measures which of them may be split."""
