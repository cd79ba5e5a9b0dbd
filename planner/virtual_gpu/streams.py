"""Streams of the virtual GPU. Nothing runs, so nothing waits, but the stream of each allocation is recorded.

The caching allocator keeps the blocks of each stream apart: a free block serves requests of its own stream only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

_numbers = itertools.count()


class Stream:
    """A stream. The first one is the default stream, with number 0."""

    def __init__(self, device: object = None, priority: int = 0, **options: object) -> None:
        self.number = next(_numbers)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def _nothing(self, *arguments: object) -> None:
        """Stands in for methods that wait for work that is already done."""

    synchronize = wait_stream = wait_event = _nothing


class Event:
    """An event, which has always happened. The time between two events is 0."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def _nothing(self, *arguments: object) -> None:
        """Stands in for methods that wait or record."""

    record = wait = synchronize = _nothing


_entered = [Stream()]
"""The streams that were entered, the current one last."""


def current(device: object = None) -> Stream:
    """Returns the stream in which ops run now."""
    return _entered[-1]


def default(device: object = None) -> Stream:
    """Returns the default stream."""
    return _entered[0]


@contextlib.contextmanager
def entered(stream: Stream | None) -> Iterator[None]:
    """Returns a context in which ops run in a stream; None stays in the current one."""
    _entered.append(stream or current())
    try:
        yield
    finally:
        _entered.pop()


def serve_accelerator() -> None:
    """Makes `torch.accelerator.current_stream` return the current stream in this process, permanently."""
    torch.accelerator.current_stream = current  # type: ignore[assignment]  # C++ would ask a device guard
