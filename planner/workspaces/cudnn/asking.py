"""Finds a libcudnn on this machine, and asks it in a process of its own (`child`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from planner.workspaces.cudnn.convolution import Convolution, Sizes, sizes_of
from planner.workspaces.cudnn.remembered import Remembered

Version = tuple[int, int, int]

LIBRARY_VARIABLE = "PLANNER_CUDNN"
"""Environment variable with the path of a libcudnn.so.9, or with 'none' if no library is to be asked."""
_SECONDS_TO_START, _SECONDS_FOR_EACH = 60.0, 0.5
"""Time limits: loading the library reads up to a gigabyte from disk; a question takes milliseconds."""

_ANSWER = re.compile(r"\d+(>\d+)*")
_MOST_PROCESSES = 4
"""Maximum number of processes for the questions of one call. One is enough unless a question ends the process."""


class CannotAskError(Exception):
    """The library did not answer."""


def libraries() -> tuple[pathlib.Path, ...]:
    """Returns the files libcudnn.so.9 of this machine that can be asked: of a package of NVIDIA, or inside torch."""
    if not sys.platform.startswith("linux"):
        return ()
    if chosen := os.environ.get(LIBRARY_VARIABLE):
        return () if chosen == "none" else (pathlib.Path(chosen),)
    folders = [*_folders_of("nvidia.cudnn", "lib"), *_folders_of("torch", "lib")]
    paths = (folder / "libcudnn.so.9" for folder in folders)
    return tuple(path for path in paths if path.with_name("libcudnn_engines_precompiled.so.9").exists())


def _folders_of(package: str, folder: str) -> list[pathlib.Path]:
    """Returns the folders of this name in a package, without importing it; empty if it is not installed."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package above it is missing
        return []
    return [pathlib.Path(path, folder) for path in (found and found.submodule_search_locations) or ()]


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a library."""

    version: Version
    workspaces: dict[Convolution, Sizes]
    """Bytes by convolution. A convolution that the library cannot compute is missing."""


def ask(path: pathlib.Path, capability: tuple[int, int], convolutions: Iterable[Convolution]) -> Answers:
    """Returns the workspaces of convolutions, which are remembered on disk for the next time.

    Args:
        path: the file libcudnn.so.9.
        capability: compute capability of the card.

    Raises:
        CannotAskError: the library cannot be loaded, or cannot answer without a card.
    """
    wanted = list(dict.fromkeys(convolutions))
    try:
        remembered = Remembered.of(path, capability)
    except OSError as error:
        raise CannotAskError(f"{path} cannot be read: {error}") from error
    missing = [each.text for each in wanted if each.text not in remembered.workspaces]
    if missing or remembered.version is None:
        version, found = _ask_processes(path, capability, missing, remembered)
        remembered = remembered.with_answers(version, found)
    assert remembered.version is not None  # a process that does not state it is an error
    known = {each: remembered.workspaces.get(each.text) for each in wanted}
    return Answers(remembered.version, {each: sizes for each, sizes in known.items() if sizes})


def _ask_processes(
    path: pathlib.Path, capability: tuple[int, int], texts: Sequence[str], remembered: Remembered
) -> tuple[Version, dict[str, Sizes]]:
    """Returns the version, and the answers by question. A question that ends a process has an empty answer.

    Raises:
        CannotAskError: the library has never answered a question, or several questions ended a process.
    """
    found: dict[str, Sizes] = {}
    missing, ended = list(texts), ""
    for _ in range(_MOST_PROCESSES):
        answered = ask_child(path, capability, missing, remembered.folder)
        sizes = [*answered.sizes, ()] if answered.ended else answered.sizes
        found |= dict(zip(missing, sizes, strict=False))
        missing, ended = missing[len(sizes) :], answered.ended or ended
        if not missing:
            break
    answers = any((*found.values(), *remembered.workspaces.values()))
    if ended and (missing or not answers):
        raise CannotAskError(f"cuDNN ({path}) does not answer without a card: {ended}")
    return answered.version, found


@dataclasses.dataclass(frozen=True, slots=True)
class ChildAnswers:
    """The answers of one process."""

    version: Version
    sizes: list[Sizes]
    """Answers in the order of the questions. There are fewer than questions if a question ended the process."""
    ended: str
    """The reason why the process ended before it had answered all questions; empty if it answered them."""


def ask_child(
    path: pathlib.Path, capability: tuple[int, int], texts: Sequence[str], folder: pathlib.Path | None
) -> ChildAnswers:
    """Returns the version of cuDNN, and its answers to the questions in `texts`.

    Args:
        folder: where the library that stands for libcublasLt is kept; None to remove it after the questions.

    Raises:
        CannotAskError: the library cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as temporary:
        question = {
            "library": str(path),
            "capability": capability,
            "folder": str(folder or temporary),
            "convolutions": texts,
        }
        root = str(pathlib.Path(__file__).parents[3])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        try:
            run = subprocess.run(
                [sys.executable, "-m", "planner.workspaces.cudnn.child"],
                input=json.dumps(question),
                capture_output=True,
                text=True,
                env=environment,
                timeout=_SECONDS_TO_START + _SECONDS_FOR_EACH * len(texts),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotAskError(f"{path} was not asked: {error}") from error
    reason = (run.stderr.strip().splitlines() or [f"the process ended with code {run.returncode}"])[-1]
    first, *lines = run.stdout.splitlines() or [""]
    try:
        major, minor, patch = map(int, first.split())
    except ValueError:
        raise CannotAskError(f"{path} did not answer: {reason}") from None
    sizes = [sizes_of(line) if _ANSWER.fullmatch(line) else () for line in lines]
    return ChildAnswers((major, minor, patch), sizes, reason if len(sizes) < len(texts) else "")
