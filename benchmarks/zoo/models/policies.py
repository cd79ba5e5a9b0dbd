"""Training steps of reinforcement learning: one update of a policy or a value function on recorded experience."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.case import Case, single

BATCH, STATES, ACTIONS, WIDTH, STEPS = 8, 6, 4, 32, 5


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)
    )


class ActorCritic(nn.Module):
    """A shared trunk with a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, WIDTH), nn.Tanh())
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(states)
        return self.actor(x), self.critic(x).squeeze(-1)


class Frozen(nn.Module):
    """A network and its target network, which is not trained."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online, self.target = online, copy.deepcopy(online).requires_grad_(False)


class DeepQ(Frozen):
    """Double Q-learning with the Huber loss."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__(online)

    def forward(self, states, actions, rewards, following, ends) -> torch.Tensor:
        values = self.online(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            wanted = rewards + 0.99 * (1 - ends) * self.target(following).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(values, wanted)


class Quantiles(nn.Module):
    """Quantile regression of returns (QR-DQN)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(STATES, ACTIONS * 8)

    def forward(self, states, actions, returns) -> torch.Tensor:
        found = self.net(states).view(-1, ACTIONS, 8)[torch.arange(len(states), device=states.device), actions]
        errors = returns[:, None] - found
        levels = (torch.arange(8, device=states.device) + 0.5) / 8
        return (
            torch.where(errors < 0, 1 - levels, levels)
            * F.huber_loss(found, returns[:, None].expand_as(found), reduction="none")
        ).mean()


class Proximal(ActorCritic):
    """PPO's clipped objective with `torch.distributions`, an entropy bonus and normalized advantages."""

    def forward(self, states, actions, old, advantages, returns) -> torch.Tensor:
        logits, values = super().forward(states)
        policy = torch.distributions.Categorical(logits=logits)
        ratio = (policy.log_prob(actions) - old).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -clipped.mean() + 0.5 * F.mse_loss(values, returns) - 0.01 * policy.entropy().mean()


class Reinforce(nn.Module):
    """The policy gradient with actions that are drawn in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = perceptron(STATES, ACTIONS)

    def forward(self, states, returns) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=self.policy(states))
        return -(policy.log_prob(policy.sample()) * returns).mean()


class Gaussian(nn.Module):
    """SAC's policy: a squashed normal distribution with the reparameterization trick, and two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = perceptron(STATES, 2 * ACTIONS)
        self.first, self.second = perceptron(STATES + ACTIONS, 1), perceptron(STATES + ACTIONS, 1)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, states, actions, returns) -> torch.Tensor:
        mean, log_std = self.actor(states).chunk(2, -1)
        policy = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        drawn = policy.rsample()
        squashed = drawn.tanh()
        logs = (policy.log_prob(drawn) - (1 - squashed.square() + 1e-6).log()).sum(-1)
        q = torch.minimum(*(critic(torch.cat([states, squashed], -1)) for critic in (self.first, self.second)))
        td = sum(
            F.mse_loss(c(torch.cat([states, actions], -1)).squeeze(-1), returns) for c in (self.first, self.second)
        )
        temperature = self.log_temperature.exp()
        return (
            (temperature.detach() * logs - q.squeeze(-1)).mean() + td - (temperature * (logs.detach() + ACTIONS)).mean()
        )


class Deterministic(Frozen):
    """DDPG: the critic's loss with the target actor and critic."""

    def __init__(self) -> None:
        super().__init__(
            nn.ModuleDict({"actor": perceptron(STATES, ACTIONS), "critic": perceptron(STATES + ACTIONS, 1)})
        )

    def forward(self, states, actions, rewards, following) -> torch.Tensor:
        with torch.no_grad():
            then = torch.cat([following, self.target["actor"](following).tanh()], -1)
            wanted = rewards + 0.99 * self.target["critic"](then).squeeze(-1)
        found = self.online["critic"](torch.cat([states, actions], -1)).squeeze(-1)
        chosen = torch.cat([states, self.online["actor"](states).tanh()], -1)
        return F.mse_loss(found, wanted) - self.online["critic"](chosen).mean()


class Pixels(nn.Module):
    """The convolutional network of Atari agents."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(ACTIONS)
        )
        self.layers(torch.zeros(1, 4, 84, 84))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.layers(frames / 255)


class Recurrent(nn.Module):
    """A recurrent policy over steps, whose state is reset where an episode ends."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(STATES, WIDTH), nn.Linear(WIDTH, ACTIONS)

    def forward(self, states, ends, actions) -> torch.Tensor:
        hidden, losses = states.new_zeros(len(states), WIDTH), []
        for step in range(STEPS):
            hidden = self.cell(states[:, step], hidden * (1 - ends[:, step, None]))
            losses.append(F.cross_entropy(self.head(hidden), actions[:, step]))
        return torch.stack(losses).mean()


class Dreamer(nn.Module):
    """A world model: a recurrent state space model with categorical latents and straight-through gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(STATES, WIDTH), perceptron(WIDTH + 16, STATES)
        self.cell, self.prior, self.posterior = (
            nn.GRUCell(16 + ACTIONS, WIDTH),
            nn.Linear(WIDTH, 16),
            nn.Linear(2 * WIDTH, 16),
        )

    def forward(self, states, actions) -> torch.Tensor:
        hidden, latent, loss = states.new_zeros(len(states), WIDTH), states.new_zeros(len(states), 16), 0.0
        for step in range(STEPS):
            hidden = self.cell(torch.cat([latent, actions[:, step]], -1), hidden)
            posterior = self.posterior(torch.cat([hidden, self.encoder(states[:, step])], -1)).view(-1, 4, 4)
            prior = self.prior(hidden).view(-1, 4, 4)
            drawn = torch.distributions.OneHotCategoricalStraightThrough(logits=posterior).rsample()
            latent = drawn.flatten(1)
            loss = loss + F.mse_loss(self.decoder(torch.cat([hidden, latent], -1)), states[:, step])
            kinds = [torch.distributions.Categorical(logits=logits) for logits in (posterior, prior)]
            loss = loss + torch.distributions.kl_divergence(*kinds).sum(-1).clamp(min=0.1).mean()
        return loss


class Groups(nn.Module):
    """GRPO on a small language model: advantages within groups, and a penalty on the distance to a reference."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.cells, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 40)

    def forward(self, tokens, old, reference, rewards) -> torch.Tensor:
        logits = self.head(self.cells(self.words(tokens[:, :-1]))[0])
        logs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        groups = rewards.view(-1, 4)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
        ratio = (logs - old).exp()
        penalty = (reference - logs).exp() - (reference - logs) - 1
        return (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.04 * penalty).mean()


class Preferences(nn.Module):
    """Direct preference optimization of a small language model with a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen, rejected) -> torch.Tensor:
        def logs(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            return net(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

        ours = logs(self.policy, chosen) - logs(self.policy, rejected)
        with torch.no_grad():
            theirs = logs(self.reference, chosen) - logs(self.reference, rejected)
        return -F.logsigmoid(0.1 * (ours - theirs)).mean()


def _float(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape)


def _actions(*shape: int, count: int = ACTIONS) -> torch.Tensor:
    return torch.randint(count, (BATCH, *shape))


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def advantage(output: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
    """A2C's loss; the targets are (actions, returns)."""
    logits, values = output
    actions, returns = batch[-1][:, 0].long(), batch[-1][:, 1]
    logs = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    return -(logs * (returns - values).detach()).mean() + F.mse_loss(values, returns)


def cases() -> Iterator[Case]:
    """Yields one case for each algorithm."""
    table: tuple[tuple[str, Any, Any, Any], ...] = (
        (
            "dqn",
            lambda: DeepQ(perceptron(STATES, ACTIONS)),
            lambda: (_float(STATES), _actions(), _float(), _float(STATES), torch.rand(BATCH).round()),
            None,
        ),
        ("qr-dqn", Quantiles, lambda: (_float(STATES), _actions(), _float()), None),
        ("a2c", ActorCritic, lambda: (_float(STATES), torch.cat([_actions(1).float(), _float(1)], 1)), advantage),
        ("ppo", Proximal, lambda: (_float(STATES), _actions(), _float(), _float(), _float()), None),
        ("reinforce", Reinforce, lambda: (_float(STATES), _float()), None),
        ("sac", Gaussian, lambda: (_float(STATES), _float(ACTIONS), _float()), None),
        ("ddpg", Deterministic, lambda: (_float(STATES), _float(ACTIONS), _float(), _float(STATES)), None),
        ("behavior cloning from pixels", Pixels, lambda: (_float(4, 84, 84), _actions()), cross_entropy),
        (
            "recurrent policy",
            Recurrent,
            lambda: (_float(STEPS, STATES), torch.zeros(BATCH, STEPS), _actions(STEPS)),
            None,
        ),
        ("world model", Dreamer, lambda: (_float(STEPS, STATES), _float(STEPS, ACTIONS)), None),
        ("grpo", Groups, lambda: (_actions(7, count=40), _float(6), _float(6), _float()), None),
        ("dpo", Preferences, lambda: (_actions(7, count=40), _actions(7, count=40)), None),
    )
    for name, model, batch, loss_fn in table:
        build = lambda model=model, batch=batch, loss_fn=loss_fn: (model(), batch(), loss_fn)
        yield Case(library="reinforcement learning", name=name, candidates=single(build))
