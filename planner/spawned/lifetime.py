"""Ends a process when the process that started it ends, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when the thread that started it ends (linux/prctl.h)."""
_SECONDS_BETWEEN_CHECKS = 1.0


def end_with(parent: int) -> None:
    """Makes this process end when the process with the id `parent`, which started it, ends.

    Linux ends it at once. On other systems a thread looks once a second whether the parent is still there. On Windows
    nothing is done, because the id of the parent stays after its end.
    """
    if sys.platform == "win32":
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    os._exit(1)
