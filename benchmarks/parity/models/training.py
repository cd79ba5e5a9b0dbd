"""Cases: optimizers, parameter groups, schedules, clipping and gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.parity.case import Registry
from benchmarks.parity.models.plain import Perceptron, cross_entropy, vectors

CASES = Registry()


def by_name(kind: str, **settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda model, **options: getattr(torch.optim, kind)(model.parameters(), **settings, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": by_name("SGD", lr=0.1),
    "SGD, Nesterov": by_name("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, dampening": by_name("SGD", lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, maximize": by_name("SGD", lr=0.01, maximize=True),
    "Adam": by_name("Adam", lr=1e-2),
    "Adam, amsgrad, decay": by_name("Adam", lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam, foreach by the user": by_name("Adam", lr=1e-2, foreach=True),
    "Adam, fused by the user": by_name("Adam", lr=1e-2, fused=True),
    "Adam, lr as a tensor": lambda model, **o: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), **o),
    "AdamW": by_name("AdamW", lr=1e-2),
    "Adagrad": by_name("Adagrad", lr=1e-2),
    "RMSprop": by_name("RMSprop", lr=1e-2, momentum=0.5, centered=True),
    "Adadelta": by_name("Adadelta", lr=1.0),
    "Adamax": by_name("Adamax", lr=1e-2),
    "NAdam": by_name("NAdam", lr=1e-2),
    "RAdam": by_name("RAdam", lr=1e-2),
    "ASGD": by_name("ASGD", lr=1e-2),
    "Rprop": by_name("Rprop", lr=1e-2),
    "Adafactor": by_name("Adafactor", lr=1e-2),
}
for name, optimizer in OPTIMIZERS.items():
    CASES.add(f"optimizer: {name}", Perceptron, vectors, loss=cross_entropy, optimizer=optimizer,
              single=name != "Rprop",  # its steps follow the signs of gradients, which bf16 rounds
              rounding=1e-5 if name in ("Rprop", "Adadelta", "Adafactor") else 1e-8)  # fmt: skip


def groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns an optimizer with three groups of different options."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed[:3], "lr": 3e-2, "weight_decay": 0.1},
            {"params": decayed[3:], "lr": 1e-2, "betas": (0.5, 0.9)},
            {"params": others, "lr": 2e-2, "weight_decay": 0.0},
        ],
        lr=1e-2,
        **options,
    )


def part(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns an optimizer of a part of the parameters, although all require a gradient."""
    return torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9, **options)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_(torch.tanh(1e3 * (0.9 * momentum + 0.1 * p.grad)), alpha=-group["lr"])
                    momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class ByNorm(torch.optim.SGD):
    """Divides the step by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        total = torch.stack(
            [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        ).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(total + 1e-3)
        super().step(closure)


CASES.add("parameter groups", Perceptron, vectors, loss=cross_entropy, optimizer=groups)
CASES.add("optimizer of a part of the parameters", Perceptron, vectors, loss=cross_entropy, optimizer=part)
CASES.add("optimizer of a part, clipping", Perceptron, vectors, loss=cross_entropy, optimizer=part, clip=0.1)
CASES.add("optimizer of the user's", Perceptron, vectors, loss=cross_entropy,
          optimizer=lambda model, **o: Lion(model.parameters(), **o))  # fmt: skip
CASES.add("optimizer that uses the norm of all gradients", Perceptron, vectors, loss=cross_entropy,
          optimizer=lambda model, **o: ByNorm(model.parameters(), lr=0.1, **o))  # fmt: skip


def hooked(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns an optimizer whose hook adds decay before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def decay(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)

    optimizer.register_step_pre_hook(decay)
    return optimizer


CASES.add("optimizer with a step hook", Perceptron, vectors, loss=cross_entropy, optimizer=hooked)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "cosine with warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        ],
        [2],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / math.sqrt(step + 1)),
    "cyclic with momentum": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}
for name, scheduler in SCHEDULERS.items():
    CASES.add(f"scheduler: {name}", Perceptron, vectors, loss=cross_entropy, scheduler=scheduler,
              optimizer=by_name("SGD", lr=0.1, momentum=0.9))  # fmt: skip
CASES.add("scheduler and clipping, groups", Perceptron, vectors, loss=cross_entropy, optimizer=groups, clip=0.05,
          scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.7))  # fmt: skip


def steep(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """Returns a loss whose scaled fp16 gradients overflow in the first steps."""
    return F.cross_entropy(output, batch[-1]) * 30


CASES.add("steps that a gradient scaler skips", Perceptron, vectors, loss=steep, optimizer=by_name("SGD", lr=1e-3),
          scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))  # fmt: skip
CASES.add("steps that a gradient scaler skips, clipping", Perceptron, vectors, loss=steep, clip=0.5,
          optimizer=by_name("AdamW", lr=1e-2))  # fmt: skip
