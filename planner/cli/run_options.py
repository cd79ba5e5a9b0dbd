"""The options of the `plan` command about the whole run and about several cards."""

from __future__ import annotations

import argparse
import pathlib

from planner.plan_types.words import FEWEST, MOST_CARDS, SHARDINGS, not_a_number_of_cards, unknown_sharding
from planner.profiles.links import known


def add_run(group: argparse._ArgumentGroup) -> None:
    """Adds the options that describe the whole run."""
    group.add_argument(
        "--lengths",
        type=pathlib.Path,
        metavar="FILE",
        help="plan for the whole run over samples of these lengths, in tokens: one length per line, or a length and a "
        "count per line, or JSON; batches of --batch-size samples are padded to their longest sample, and cut at "
        "--seq-len",
    )
    group.add_argument(
        "--pad-to-multiple-of",
        type=positive,
        metavar="N",
        help="with --lengths: batches are padded to a multiple of N tokens (default: 1)",
    )
    group.add_argument(
        "--eval-batch-size",
        type=positive,
        metavar="N",
        help="plan for evaluations between the steps, with batches of N samples (default: no evaluation)",
    )
    group.add_argument(
        "--eval-samples",
        type=positive,
        metavar="N",
        help="with --eval-batch-size: the evaluation keeps the logits of N samples on the card, as the Trainer does "
        "with compute_metrics and without eval_accumulation_steps (default: it keeps none)",
    )
    group.add_argument(
        "--between",
        action="append",
        default=[],
        metavar="NAMES",
        help="what else happens between the steps: average (a moving average of the weights, EMA), save (saving a "
        "checkpoint), resume (loading a checkpoint onto the card)",
    )


def add_cards(group: argparse._ArgumentGroup) -> None:
    """Adds the options that describe several cards."""
    group.add_argument(
        "--cards",
        type=_number_of_cards,
        metavar="N",
        help="train on N cards, among which the samples of --batch-size are divided; --vram is then the budget of each "
        "card; 'fewest' stands for the smallest number of cards with which a plan fits (default: 1)",
    )
    group.add_argument(
        "--sharding",
        type=_sharding,
        choices=SHARDINGS,
        help="with --cards: ddp (a copy of the model on each card), zero1 (the same, with divided optimizer state), "
        "fsdp (FSDP2: parameters, gradients and state are divided), or zero2 (FSDP2 whose parameters stay gathered "
        "between forward and backward); default: the fastest of them that fits",
    )
    group.add_argument(
        "--mesh",
        type=_mesh,
        metavar="CxN",
        help="with --cards: C copies of the model, each sharded over N cards, such as 2x4 (default: one copy); with "
        "--parallelize: the sizes of the dimensions of your mesh, such as dp=2,tp=4",
    )
    group.add_argument(
        "--parallelize",
        type=_function,
        metavar="FILE.py:FUNCTION",
        help="with --cards: your own function(model, mesh), which divides the model among the cards (tensor "
        "parallelism, FSDP2 or both)",
    )
    group.add_argument(
        "--cards-per-node", type=positive, metavar="N", help="with --cards: number of cards in a machine (default: 8)"
    )
    group.add_argument(
        "--link",
        choices=known(),
        help="with --cards: the link between the cards of a machine (default: the fastest one of the card)",
    )
    group.add_argument(
        "--offload-shards",
        action="store_true",
        help="with --cards: keep shards and optimizer state in host memory, where the optimizer then runs",
    )


def _mesh(text: str) -> tuple[int, ...] | dict[str, int]:
    """Parses whole numbers above 0, such as '2x4', or with names, such as 'dp=2,tp=4'."""
    try:
        if "=" not in text:
            return tuple(positive(size) for size in text.lower().split("x"))
        named = (part.partition("=") for part in text.split(","))
        return {name.strip(): positive(size.strip()) for name, _, size in named}
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a mesh: give numbers of cards, such as 2x4, or with names, such as dp=2,tp=4"
        ) from None


def _function(text: str) -> str:
    """Checks that the text names a function of a file that exists, or of a module."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not the name of a function: give FILE.py:FUNCTION, or package.module:FUNCTION"
        )
    if place.lower().endswith(".py") and not pathlib.Path(place).is_file():
        raise argparse.ArgumentTypeError(
            f"file '{place}' does not exist: give the file that defines {name}(model, mesh)"
        )
    return text


def _number_of_cards(text: str) -> int | str:
    """Parses a number of cards, or 'fewest'."""
    if text == FEWEST:
        return text
    count = int(text) if text.isdecimal() and len(text) < 20 else 0
    if not 1 <= count <= MOST_CARDS:
        raise argparse.ArgumentTypeError(not_a_number_of_cards(text))
    return count


def _sharding(text: str) -> str:
    """Checks the name of a way in which several cards train one model."""
    if text not in SHARDINGS:
        raise argparse.ArgumentTypeError(unknown_sharding(text))
    return text


def positive(text: str) -> int:
    """Parses a whole number above 0. Tensors of more than `_MOST` samples or tokens would have no 64-bit size."""
    number = int(text) if text.isdecimal() and len(text) < 20 else 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a whole number above 0 and at most {_MOST:,}")
    return number


_MOST = 2**31 - 1
