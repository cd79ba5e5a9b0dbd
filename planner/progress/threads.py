"""Runs a function in a thread for as long as a context is open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def in_thread(function: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `function` in another thread. It gets an event that is set when the context ends, and must then return."""
    is_over = threading.Event()
    thread = threading.Thread(target=function, args=(is_over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
