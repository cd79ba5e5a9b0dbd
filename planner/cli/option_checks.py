"""Checks of the options of the `plan` command: which go together, and which values exist. They do not import torch."""

from __future__ import annotations

import argparse
import os
from typing import Literal, get_args

from planner import profiles
from planner.errors import DeviceProfileError, WorkloadError
from planner.plan_types.sizes import margin_bytes, parse_size
from planner.plan_types.words import Loop, ProgramName
from planner.progress.durations import parse_duration


def refuse_what_does_not_go_together(options: argparse.Namespace) -> None:
    """Refuse options that cannot be combined with --tradeoff, --largest-batch or --smallest-card, or that need one.

    Raises:
        WorkloadError: two options cannot be combined, an option lacks another one that it needs, or its value is empty;
            the message names them.
    """
    _refuse_empty(options)
    used = {name for name, value in vars(options).items() if value}
    question = next((name for name in _QUESTIONS if name in used), None)
    for name in sorted(used):
        needed = _BELONGS_TO.get(name)
        if needed is not None and needed != question:
            raise WorkloadError(
                f"{option(name)} works only with {option(needed)}: add {option(needed)}, or leave {option(name)} out"
            )
        if question is not None and name in _QUESTIONS[question]:
            reason = _QUESTIONS[question][name]
            raise WorkloadError(f"{option(name)} cannot be combined with {option(question)}: {reason}")
    if "cards" in used and options.cards != 1:
        _refuse_for_cards(options, used)
    for name, other in _NEEDS.items():
        if name in used and other not in used:
            raise WorkloadError(f"{option(name)} works only with {option(other)}: add it, or leave {option(name)} out")
    if {"input_shapes", "lengths"} <= used:
        raise WorkloadError(
            "--lengths cannot be combined with --input-shapes, which states all sizes: leave one of them out"
        )
    if {"input_shapes", "seq_len"} <= used:
        raise WorkloadError(
            "--seq-len cannot be combined with --input-shapes, which states all sizes: leave --seq-len out"
        )
    if {"time_limit", "seconds"} <= used:
        raise WorkloadError("--seconds cannot be combined with --time-limit, which says the same: leave --seconds out")
    if options.snapshot is not None and options.gpu == "bare":
        raise WorkloadError(
            "--snapshot cannot be combined with --gpu bare, which has no allocator: name another card, or leave "
            "--gpu out"
        )
    if emitted_form(options) == "json" and options.loop != "trainer":
        raise WorkloadError("--emit FILE.json writes the Trainer's arguments: add --for trainer, or name a .py file")
    _refuse_for_program(options, used)
    if question == "largest_batch" and "vram" not in used:
        raise WorkloadError("--largest-batch needs a budget: give --vram, such as --vram 6GiB")


def _refuse_empty(options: argparse.Namespace) -> None:
    """Refuse options whose value is an empty text, as from a variable of a shell that is not set.

    Raises:
        WorkloadError: the message names the option.
    """
    for name, value in vars(options).items():
        texts = value if isinstance(value, list) else [value]
        if name not in _MAY_BE_EMPTY and any(isinstance(text, str) and not text.strip(" ,") for text in texts):
            raise WorkloadError(f"{option(name)} has an empty value: give one, or leave {option(name)} out")


def _refuse_for_cards(options: argparse.Namespace, used: set[str]) -> None:
    """Refuse what cannot be combined with several cards.

    Raises:
        WorkloadError: the message says why, and what to give instead.
    """
    refused = dict(_NOT_FOR_CARDS)
    if options.loop in CARDS_LOOPS:
        del refused["loop"]
        if options.emit is not None and emitted_form(options) != _CARDS_FORMS[options.loop]:
            raise WorkloadError(
                f"--emit {options.emit} is not what {options.loop} reads: name a file that ends in "
                f"{'.json' if options.loop == 'trainer' else '.yaml'}"
            )
    for name in sorted(used & refused.keys()):
        raise WorkloadError(f"{option(name)} cannot be combined with --cards: {refused[name]}")


def _refuse_for_program(options: argparse.Namespace, used: set[str]) -> None:
    """Refuse what cannot be combined with a program that trains by its own loop, and a config without one.

    Raises:
        WorkloadError: the message says what to leave out or to add.
    """
    is_config = emitted_form(options) == "config"
    if options.loop not in get_args(ProgramName):
        is_on_cards = options.cards or options.model.endswith(".json")  # the latter may be a saved plan
        if is_config and not (options.loop == "accelerate" and is_on_cards):
            raise WorkloadError(
                f"--emit {options.emit} writes the config of a program: add --for axolotl or --for llama-factory, or "
                "--for accelerate and --cards, or name a .py file"
            )
        return
    for name in sorted(used & _NOT_FOR_PROGRAMS.keys()):
        raise WorkloadError(f"{option(name)} cannot be combined with --for {options.loop}: {_NOT_FOR_PROGRAMS[name]}")
    if options.fidelity in ("adapted", "partial"):
        raise WorkloadError(
            f"--fidelity {options.fidelity} cannot be combined with --for {options.loop}: give --lora or --qlora to "
            "train adapters"
        )
    if options.emit is not None and not is_config:
        raise WorkloadError(
            f"{options.loop} reads a YAML config, not '{options.emit.name}': name a file that ends in .yaml or .yml"
        )
    if ":" in options.model and not os.path.exists(options.model):
        raise WorkloadError(
            f"{options.loop} loads the model from a folder or the hub, and '{options.model}' is a function: give a "
            "folder or a hub id, or another loop with --for"
        )


def refuse_unknown_values(options: argparse.Namespace) -> None:
    """Refuse a budget or a margin that cannot be read and a card that is not known, before torch is imported.

    Raises:
        SizeError: --vram or --margin is not a size.
        WorkloadError: --time-limit is not a duration.
        DeviceProfileError: --gpu is not a known card.
    """
    if options.vram is not None:
        parse_size(options.vram, device_bytes=1 << 40)
    if options.time_limit is not None:
        parse_duration(options.time_limit)
    margin_bytes(options.margin, card_bytes=1 << 40)
    if options.gpu is not None and options.gpu not in _STAND_INS:
        try:
            profiles.load(options.gpu)
        except profiles.ProfileError as error:
            raise DeviceProfileError(str(error)) from error


_EMITTED_FORMS: dict[str, Literal["json", "config"]] = {".json": "json", ".yaml": "config", ".yml": "config"}
"""Forms of emitted files by the endings of their names in lower case. A file with another ending is a Python file."""
_MAY_BE_EMPTY = ("alloc_conf", "arguments")
"""Options whose value may be empty: it stands for PyTorch's defaults, or is an argument of the user's script."""
_OF_RUN = ("lengths", "pad_to_multiple_of", "eval_batch_size", "eval_samples", "between")
"""Options that describe the whole run."""
_OUR_BATCH = "the program makes batches of token ids and attention masks, padded to --seq-len"
_NOT_FOR_PROGRAMS = {
    "batch_values": _OUR_BATCH,
    "by_sample": _OUR_BATCH,
    "gradients_alive": "the program accumulates as the plan says",
    "input_shapes": _OUR_BATCH,
    "largest_batch": "give --batch-size, which the program splits into micro-batches",
    "smallest_card": "give --gpu or --vram",
    **dict.fromkeys(_OF_RUN, "its loop is planned one step at a time"),
}
"""Options that cannot be combined with a program that trains by its own loop, each with the reason."""
CARDS_LOOPS: tuple[Loop, ...] = ("trainer", "accelerate")
"""Loops that train on several cards by settings of accelerate, which prepares the model."""
_CARDS_FORMS: dict[str, str] = {"trainer": "json", "accelerate": "config"}
"""The form of the file that --emit writes for these loops."""
_NOT_FOR_CARDS = {
    **dict.fromkeys(_OF_RUN, "for several cards only one step is planned, not the whole run; leave it out"),
    **dict.fromkeys(
        ("tradeoff", "largest_batch", "smallest_card"),
        "this question is answered for one card only; leave one of the options out",
    ),
    "verify": "it trains on one card; leave it out, and start the file that --emit writes with torchrun",
    "loop": "only trainer and accelerate have settings for several cards; for other loops, leave it out: --emit writes "
    "a training step that torchrun starts",
    "gradients_alive": "the plan says how each card accumulates; leave it out, and give the samples of one optimizer "
    "step with --batch-size",
}
"""Options that cannot be combined with several cards, each with the reason."""
_STAND_INS = ("generic", "unlisted")
"""Cards that a plan may name although they have no profile file."""
_MANY_PLANS = "--tradeoff returns several plans; choose one, and plan again with its memory as --vram"
_ONE_STEP = dict.fromkeys(_OF_RUN, "it plans single steps; plan the run afterwards, with the answer as --vram or --gpu")
_QUESTIONS = {
    "tradeoff": {**dict.fromkeys(("save", "emit", "snapshot", "verify", "loop", "quiet"), _MANY_PLANS), **_ONE_STEP},
    "largest_batch": {
        **_ONE_STEP,
        "batch_size": "the batch size is the answer; leave it out",
        "max_slowdown": "the search for the largest batch ignores the step time; leave the limit out",
    },
    "smallest_card": {
        **_ONE_STEP,
        "vram": "each card's own memory is the budget; leave it out",
        "gpu": "the card is the answer; leave it out",
    },
}
"""For each option of the group 'questions': the options that cannot be combined with it, each with the reason."""
_BELONGS_TO = {"svg": "tradeoff", "seconds": "tradeoff"}
"""Options that work only together with a question, and that question."""
_OF_CARDS = ("sharding", "mesh", "parallelize", "cards_per_node", "link", "offload_shards")
"""Options that describe several cards."""
_NEEDS = {"pad_to_multiple_of": "lengths", "eval_samples": "eval_batch_size", **dict.fromkeys(_OF_CARDS, "cards")}
"""Options that work only together with another option that is not a question, and that other option."""
_SPELLINGS = {"gradients_alive": "--accumulating-loop (--gradients-alive)", "loop": "--for", "arguments": "--"}
"""Options that have two names on the command line, and how messages write them."""


def emitted_form(options: argparse.Namespace) -> Literal["json", "config", "python"] | None:
    """Returns what --emit writes: the Trainer's arguments, a program's config or a Python file; None without --emit."""
    if options.emit is None:
        return None
    return _EMITTED_FORMS.get(options.emit.suffix.lower(), "python")


def option(name: str) -> str:
    """Returns the command-line spelling of an option, given its name in the parsed namespace: '--batch-size'."""
    return _SPELLINGS.get(name, f"--{name.replace('_', '-')}")


def names(texts: list[str]) -> tuple[str, ...]:
    """Returns all names in the values of a repeated option: ['a,b', 'c'] gives ('a', 'b', 'c')."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
