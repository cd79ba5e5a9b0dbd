"""Training loops of users that are not forward, loss, backward, update: one step function for each."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A model, its optimizers, and one step of its training."""

    model: Callable[[], nn.Module]
    step: Callable[[Any, Any, Any], Any]
    optimizer: Any = "adamw"
    """The `optimizer` argument of `planner.plan`; a `FromModel` makes it from the model."""
    batch: Callable[[int], Any] = lambda samples: torch.randn(samples, WIDTH)

    def optimizer_of(self, model: nn.Module) -> Any:
        return self.optimizer(model) if isinstance(self.optimizer, FromModel) else self.optimizer


@dataclasses.dataclass(frozen=True)
class FromModel:
    """Makes the optimizers of a loop from its model."""

    make: Callable[[nn.Module], Any]

    def __call__(self, model: nn.Module) -> Any:
        return self.make(model)


def network(out: int = WIDTH, depth: int = 3, dropout: float = 0.0) -> nn.Sequential:
    """Blocks of a linear layer and an activation, and a last linear layer."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(dropout), nn.LayerNorm(WIDTH))
        for _ in range(depth)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, out))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


# ---- steps --------------------------------------------------------------------------------------------------------


def gan(model, optimizer, real):
    noise = torch.randn(len(real), WIDTH, device=real.device)
    optimizer["D"].zero_grad()
    fake = model["G"](noise).detach()
    loss = F.softplus(-model["D"](real)).mean() + F.softplus(model["D"](fake)).mean()
    loss.backward()
    optimizer["D"].step()
    optimizer["G"].zero_grad()
    noise = torch.randn(len(real), WIDTH, device=real.device)
    of_generator = F.softplus(-model["D"](model["G"](noise))).mean()
    of_generator.backward()
    optimizer["G"].step()
    return loss.detach(), of_generator.detach()


def wgan_gp(model, optimizer, real):
    for _ in range(2):
        noise = torch.randn(len(real), WIDTH, device=real.device)
        with torch.no_grad():
            fake = model["G"](noise)
        share = torch.rand(len(real), 1, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(model["D"](between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        loss = model["D"](fake).mean() - model["D"](real).mean() + 10 * penalty
        optimizer["D"].zero_grad()
        loss.backward()
        optimizer["D"].step()
    for parameter in model["D"].parameters():
        parameter.requires_grad_(False)
    loss = -model["D"](model["G"](torch.randn(len(real), WIDTH, device=real.device))).mean()
    optimizer["G"].zero_grad()
    loss.backward()
    optimizer["G"].step()
    for parameter in model["D"].parameters():
        parameter.requires_grad_(True)
    return loss.detach()


def distillation(model, optimizer, batch):
    with torch.no_grad():
        target = model["teacher"](batch)
    output = model["student"](batch)
    loss = F.kl_div(output.log_softmax(1), target.softmax(1), reduction="batchmean") + output.square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model["student"].parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def dpo(model, optimizer, batch):
    chosen, rejected = batch["chosen"], batch["rejected"]

    def log_probabilities(network, samples):
        return network(samples).log_softmax(1)[:, 0]

    with torch.no_grad():
        reference = log_probabilities(model["reference"], chosen) - log_probabilities(model["reference"], rejected)
    policy = log_probabilities(model["policy"], chosen) - log_probabilities(model["policy"], rejected)
    loss = -F.logsigmoid(0.1 * (policy - reference)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def accumulation(model, optimizer, batch):
    optimizer.zero_grad()
    total = 0.0
    for part in batch.chunk(4):
        loss = model(part).square().mean() / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def ema(model, optimizer, batch):
    loss = model["net"](batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, parameter in zip(model["average"].parameters(), model["net"].parameters(), strict=True):
            average.lerp_(parameter, 0.01)
    return loss.detach()


def with_average() -> nn.Module:
    net = network()
    return nn.ModuleDict({"net": net, "average": frozen(copy.deepcopy(net))})


def actor_critic(model, optimizer, batch):
    actor, critic = optimizer
    value = model["critic"](batch).squeeze(1)
    distribution = torch.distributions.Categorical(logits=model["actor"](batch))
    action = distribution.sample()
    reward = (action == 0).float()
    advantage = reward - value
    loss = -(distribution.log_prob(action) * advantage.detach()).mean() - 0.01 * distribution.entropy().mean()
    actor.zero_grad()
    loss.backward()
    actor.step()
    critic.zero_grad()
    advantage.square().mean().backward()
    critic.step()
    return loss.detach()


def muon_and_adamw(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    for each in optimizer.values():
        each.step()
        each.zero_grad()
    return loss.detach()


def sharpness_aware(model, optimizer, batch):
    """One step of SAM, by hand: ascend, take the gradient there, go back, update."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(batch).square().mean().backward()
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        ascent = [parameter.grad * (0.05 / (norm + 1e-12)) for parameter in parameters]
        torch._foreach_add_(parameters, ascent)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, ascent)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def closure(model, optimizer, batch):
    def run():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    return optimizer.step(run).detach()


def shared_trunk(model, optimizer, batch):
    """Two losses on one trunk, each with its own backward (`retain_graph`)."""
    hidden = model["trunk"](batch)
    optimizer.zero_grad()
    model["left"](hidden).square().mean().backward(retain_graph=True)
    model["right"](hidden).abs().mean().backward()
    optimizer.step()


def reptile(model, optimizer, batch):
    """An inner optimizer trains a copy of the network; the outer one moves the network towards the copy."""
    fast = copy.deepcopy(model["net"])
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    for part in batch.chunk(2):
        inner.zero_grad()
        fast(part).square().mean().backward()
        inner.step()
    for parameter, trained in zip(model["net"].parameters(), fast.parameters(), strict=True):
        parameter.grad = parameter.detach() - trained.detach()
    optimizer.step()
    optimizer.zero_grad()


def two(first: str, second: str, *, out: tuple[int, int] = (WIDTH, WIDTH), **options) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({first: network(out[0], **options), second: network(out[1], **options)})


def with_frozen(trained: str, reference: str) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({trained: network(dropout=0.1), reference: frozen(network())})


def _muon(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    inner = [parameter for name, parameter in model.named_parameters() if parameter.dim() == 2 and name[0] != "3"]
    others = [parameter for parameter in model.parameters() if not any(parameter is known for known in inner)]
    return {"muon": torch.optim.Muon(inner, lr=1e-2), "adamw": torch.optim.AdamW(others)}


LOOPS: dict[str, Loop] = {
    "GAN": Loop(model=two("G", "D", out=(WIDTH, 1)), step=gan, optimizer={"G": "adam", "D": "adamw"}),
    "WGAN-GP": Loop(
        model=two("G", "D", out=(WIDTH, 1)),
        step=wgan_gp,
        optimizer={"G": torch.optim.RMSprop, "D": lambda parameters: torch.optim.Adam(parameters, betas=(0.0, 0.9))},
    ),
    "distillation": Loop(model=with_frozen("student", "teacher"), step=distillation),
    "DPO": Loop(
        model=with_frozen("policy", "reference"),
        step=dpo,
        batch=lambda samples: {"chosen": torch.randn(samples, WIDTH), "rejected": torch.randn(samples, WIDTH)},
    ),
    "manual accumulation": Loop(model=lambda: network(dropout=0.1), step=accumulation, optimizer="sgd-momentum"),
    "EMA": Loop(
        model=with_average,
        step=ema,
        optimizer=FromModel(lambda model: torch.optim.Adam(model["net"].parameters())),
    ),
    "Reptile": Loop(model=lambda: nn.ModuleDict({"net": network(dropout=0.1)}), step=reptile, optimizer="sgd"),
    "actor-critic": Loop(
        model=two("actor", "critic", out=(4, 1)),
        step=actor_critic,
        optimizer=FromModel(
            lambda model: (
                torch.optim.Adam(model["actor"].parameters()),
                torch.optim.SGD(model["critic"].parameters(), lr=0.1, momentum=0.9),
            )
        ),
    ),
    "Muon and AdamW": Loop(model=network, step=muon_and_adamw, optimizer=FromModel(_muon)),
    "SAM": Loop(model=network, step=sharpness_aware, optimizer="sgd-momentum"),
    "closure": Loop(model=network, step=closure, optimizer="adamw"),
    "shared trunk": Loop(
        model=lambda: nn.ModuleDict({"trunk": network(), "left": network(4), "right": network(2)}), step=shared_trunk
    ),
}
