"""Writes a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import stat

from planner.errors import PlanFileError


def write_atomically(path: pathlib.Path, data: bytes | str) -> None:
    """Write a file at once: to a new temporary file in the same folder, which is then renamed.

    If `path` is a symbolic link, the file that it points to is written, as by other programs. The permissions of a file
    that is replaced are kept.

    Raises:
        PlanFileError: the file cannot be written. It is then as before, and no temporary file is left.
    """
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    try:
        target = os.path.realpath(path)
        mode = _mode_of(target)
        _replace(target, content, mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PlanFileError(f"'{path}' cannot be written: {why}") from error


def _replace(target: str, content: bytes, mode: int | None) -> None:
    """Write a file with a random name, which nobody else can have created, and rename it to `target`."""
    temporary = os.path.join(os.path.dirname(target), f".planner-{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(content)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _mode_of(target: str) -> int | None:
    """Return the permissions of the file that is replaced; None if there is none.

    Raises:
        OSError: there is something else than a regular file.
    """
    try:
        facts = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(facts.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EEXIST, "it is a folder, a device or a pipe; name a file", target)
    return stat.S_IMODE(facts.st_mode)
