"""Small models with losses that people write. Some are the mean of their micro-batches' losses, some are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES, LENGTH, WORDS, CLASSES = 32, 24, 500, 8

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, batches and a loss function."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    """Returns a batch drawn from torch's generator."""
    loss_fn: LossFn | None = None


class Speaker(nn.Module):
    """A language model near its initialisation: its loss is about the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(32, WORDS)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


class Pictures(nn.Module):
    """A convolutional classifier with frozen batch normalisation (in evaluation mode)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2))
        self.head = nn.Linear(32, CLASSES)

    def train(self, mode: bool = True) -> Pictures:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def padded() -> tuple[torch.Tensor]:
    """Returns sentences of different lengths, padded with zeros."""
    ids, lengths = torch.randint(1, WORDS, (SAMPLES, LENGTH)), torch.randint(3, LENGTH, (SAMPLES, 1))
    return (ids.masked_fill(torch.arange(LENGTH) >= lengths, 0),)


def late_padding() -> tuple[torch.Tensor]:
    """Returns sentences of which only the last are padded."""
    ids = padded()[0]
    ids[:-6] = torch.randint(1, WORDS, (SAMPLES - 6, LENGTH))
    return (ids,)


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, 10), torch.randint(0, CLASSES, (SAMPLES,))


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, 3, 24, 24), torch.randint(0, CLASSES, (SAMPLES,))


# ---- tokens ----------------------------------------------------------------------------------------------------------


def costs(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch[0], reduction="none")


def mask_of(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return (batch[0] != 0).to(output.dtype)


def mean_by_mask(output, batch):
    return (costs(output, batch) * mask_of(output, batch)).sum() / mask_of(output, batch).sum()


def focal_by_mask(output, batch):
    cost, mask = costs(output, batch), mask_of(output, batch)
    return ((1 - torch.exp(-cost)).square() * cost * mask).sum() / mask.sum()


def smoothed_by_mask(output, batch):
    smooth = -output.log_softmax(-1).mean(-1)
    return ((0.9 * costs(output, batch) + 0.1 * smooth) * mask_of(output, batch)).sum() / mask_of(output, batch).sum()


def sum_of_tokens(output, batch):
    return costs(output, batch).sum() / 1000


def perplexity(output, batch):
    return costs(output, batch).mean().exp()


def mean_and_penalty(output, batch):
    return costs(output, batch).mean() + 1e-2 * (output.logsumexp(-1).mean()).square()


def contrastive(output, batch):
    unit = F.normalize(output.mean(1), dim=1)
    return -(10 * unit @ unit.T).log_softmax(1).diagonal().mean()


def balanced(output, batch):
    """Cross entropy with a load-balancing term over the batch, as in mixture-of-experts routers."""
    return costs(output, batch).mean() + 5 * output.softmax(-1).mean((0, 1)).square().sum()


def token_mean(output, batch):
    return costs(output, batch).mean()


def mean_of_each(output, batch):
    mask = mask_of(output, batch)
    return ((costs(output, batch) * mask).sum(1) / mask.sum(1)).mean()


def sum_over_samples(output, batch):
    return (costs(output, batch) * mask_of(output, batch)).sum() / len(output)


# ---- samples ---------------------------------------------------------------------------------------------------------


def weighted_by_hand(output, batch):
    weight = 1.0 + batch[1]
    return (F.cross_entropy(output, batch[1], reduction="none") * weight).sum() / weight.sum()


def class_weights(output, batch):
    return F.cross_entropy(output, batch[1], weight=torch.linspace(0.2, 3.0, CLASSES).to(output))


def hardest(output, batch):
    cost = F.cross_entropy(output, batch[1], reduction="none")
    return cost.topk(max(1, int(0.7 * len(cost))))[0].mean()


def supervised_contrastive(output, batch):
    unit, itself = F.normalize(output, dim=1), torch.eye(len(output), device=output.device).bool()
    same = (batch[1][:, None] == batch[1][None]) & ~itself
    likely = (unit @ unit.T / 0.1).masked_fill(itself, -1e9).log_softmax(1)
    return -((likely * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def triplets(output, batch):
    far = torch.cdist(output, output)
    same = batch[1][:, None] == batch[1][None]
    hardest_same = far.masked_fill(~same, 0.0).amax(1)
    hardest_other = far.masked_fill(same, 1e4).amin(1)
    return F.relu(hardest_same - hardest_other + 1.0).mean()


def correlation(output, batch):
    """One minus the correlation of a score with a target, over the batch."""
    score, target = output[:, 0] - output[:, 0].mean(), batch[0][:, 0] - batch[0][:, 0].mean()
    return 1 - (score * target).sum() / (score.norm() * target.norm())


def root_mean_square(output, batch):
    return (output[:, 0] - batch[0][:, 0]).square().mean().sqrt()


def dice(output, batch):
    """Dice loss over the batch, as used in segmentation."""
    likely, true = output.softmax(1), F.one_hot(batch[1], CLASSES)
    return 1 - 2 * (likely * true).sum() / (likely.square().sum() + true.sum())


def decorrelated(output, batch):
    """Cross-correlation loss of two views (Barlow Twins)."""
    one, other = output, output + 0.1 * output.detach().roll(1, 1)
    normed = [(each - each.mean(0)) / (each.std(0) + 1e-4) for each in (one, other)]
    across = normed[0].T @ normed[1] / len(output)
    return (across - torch.eye(CLASSES, dtype=output.dtype, device=output.device)).square().sum()


def survival(output, batch):
    """Cox's partial likelihood."""
    risk, order = output[:, 0], batch[0][:, 0].argsort(descending=True)
    return -(risk[order] - risk[order].logcumsumexp(0)).mean()


def ranked_pairs(output, batch):
    difference = output[:, :1] - output[:, :1].T
    sign = torch.sign(batch[0][:, :1] - batch[0][:, :1].T)
    return F.softplus(-difference * sign).mean()


def variance_of_the_batch(output, batch):
    return F.cross_entropy(output, batch[1]) + 0.5 * F.relu(1 - output.std(0)).mean()


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch[1])


def label_smoothing(output, batch):
    return F.cross_entropy(output, batch[1], label_smoothing=0.1)


def focal(output, batch):
    cost = F.cross_entropy(output, batch[1], reduction="none")
    return ((1 - torch.exp(-cost)).square() * cost).mean()


def squared(output, batch):
    return F.mse_loss(output[:, 0], batch[0][:, 0])


def huber_and_decay(output, batch):
    return F.smooth_l1_loss(output, batch[0][:, :CLASSES]) + 1e-3 * output.square().mean()


def one_against_all(output, batch):
    return F.binary_cross_entropy_with_logits(output, F.one_hot(batch[1], CLASSES).to(output.dtype))


def distilled(output, batch):
    teacher = (3 * output.detach().roll(1, 1)).softmax(1)
    return F.kl_div(output.log_softmax(1), teacher, reduction="batchmean") + cross_entropy(output, batch)


def evidence(output, batch):
    """Evidence lower bound of an autoencoder: two terms, summed per sample and averaged."""
    mean, spread = output.chunk(2, 1)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return ((mean - batch[0][:, : mean.shape[1]]).square().sum(1) + divergence).mean()


CASES = (
    *(
        Case(f"{loss.__name__}, {name}", Speaker, batch, loss)
        for name, batch in (("padded", padded), ("padded late", late_padding))
        for loss in (mean_by_mask, focal_by_mask, smoothed_by_mask)
    ),
    *(
        Case(loss.__name__, Speaker, padded, loss)
        for loss in (
            sum_of_tokens, perplexity, mean_and_penalty, contrastive, balanced, token_mean, mean_of_each,
            sum_over_samples,
        )
    ),
    *(
        Case(loss.__name__, perceptron, vectors, loss)
        for loss in (
            weighted_by_hand, class_weights, hardest, supervised_contrastive, triplets, correlation, root_mean_square,
            dice, decorrelated, survival, ranked_pairs, variance_of_the_batch, cross_entropy, label_smoothing, focal,
            squared, huber_and_decay, one_against_all, distilled, evidence,
        )
    ),
    *(
        Case(f"{loss.__name__}, convolutions", Pictures, pictures, loss)
        for loss in (weighted_by_hand, hardest, supervised_contrastive, cross_entropy, focal)
    ),
)  # fmt: skip
"""All cases. The benchmark measures which of them may be split."""
