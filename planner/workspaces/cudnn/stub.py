"""A library that stands for libcublasLt while cuDNN is asked about workspaces, so that nobody needs cuBLAS for that.

cuDNN looks for the functions of libcublasLt when it is asked, and ends the process if one is missing. It does not call
them to answer. So a shared library is enough whose functions do nothing. This module writes its bytes without a
compiler: a minimal file in the format ELF, with the names that cuDNN's libraries mention.

The answers are those of a real card more often than with the real libcublasLt: without a card, that library refuses to
start, and cuDNN then leaves out the algorithms that use it.
"""

from __future__ import annotations

import mmap
import pathlib
import re
import struct
from collections.abc import Callable, Iterable

_NAME = re.compile(rb"\x00(cublasLt[A-Z][A-Za-z0-9_]{2,60})(?=\x00)")
_MAJOR = re.compile(rb"libcublasLt\.so\.(\d+)\x00")
_PAGE = 0x1000
_HEADER, _SEGMENT, _SYMBOL = 64, 56, 24
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_EXECUTE_READ, _READ_WRITE = 5, 6
_HASH_TAG, _STRINGS_TAG, _SYMBOLS_TAG, _STRING_BYTES_TAG, _SYMBOL_BYTES_TAG, _OWN_NAME_TAG = 4, 5, 6, 10, 11, 14


def _x86(version: int) -> dict[str, bytes]:
    return {
        "": b"\xb8\x01\x00\x00\x00\xc3",  # mov eax, 1; ret
        "cublasLtGetVersion": b"\xb8" + struct.pack("<I", version) + b"\xc3",  # mov eax, version; ret
        "cublasLtCreate": b"\x48\x89\x3f\x31\xc0\xc3",  # mov [rdi], rdi; xor eax, eax; ret
    }


def _arm(version: int) -> dict[str, bytes]:
    low, high = 0x52800000 | (version & 0xFFFF) << 5, 0x72A00000 | (version >> 16) << 5
    return {
        "": struct.pack("<2I", 0x52800020, 0xD65F03C0),  # mov w0, 1; ret
        "cublasLtGetVersion": struct.pack("<3I", low, high, 0xD65F03C0),  # movz w0; movk w0; ret
        "cublasLtCreate": struct.pack("<3I", 0xF9000000, 0x52800000, 0xD65F03C0),  # str x0, [x0]; mov w0, 0; ret
    }


MACHINES: dict[str, tuple[int, Callable[[int], dict[str, bytes]]]] = {"x86_64": (62, _x86), "aarch64": (183, _arm)}
"""By `platform.machine()`: the number of the machine in ELF, and its code of the functions.

Each function returns 1, 'not initialized'. The two that are named return a version, and a handle that is not null.
"""


def needed(folder: pathlib.Path) -> tuple[int, list[str]]:
    """Returns the major version of libcublasLt, and the names of its functions, that cuDNN's libraries mention.

    Args:
        folder: the folder of the libraries of cuDNN.

    Raises:
        OSError: a library cannot be read.
        ValueError: no library mentions libcublasLt.
    """
    names, major = set[str](), 0
    for path in sorted(folder.glob("libcudnn_*.so.9")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names |= {match[1].decode() for match in _NAME.finditer(content)}
            major = max([major, *(int(match[1]) for match in _MAJOR.finditer(content))])
    if not names or not major:
        raise ValueError(f"no library in {folder} mentions libcublasLt")
    return major, sorted(names)


def shared_library(name: str, functions: Iterable[str], *, machine: str, version: int) -> bytes:
    """Returns the bytes of a shared library for Linux on a 64-bit machine.

    Args:
        name: the library's own name (DT_SONAME). If a process has loaded the library, this name finds it.
        functions: names of its functions.
        machine: a key of `MACHINES`.
        version: what cublasLtGetVersion returns.
    """
    number, code_of = MACHINES[machine]
    functions = sorted(functions)
    strings, text, places = b"\0", b"", {}
    for each, code in code_of(version).items():
        places[each] = len(text)
        text += code.ljust(16, b"\0")
    offsets = []
    for word in (*functions, name):
        offsets.append(len(strings))
        strings += word.encode() + b"\0"
    # A hash table with one bucket: its chain goes through all symbols. Symbol 0 is always empty.
    count = len(functions) + 1
    chain = [0, *range(2, count), 0] if functions else [0]
    table = struct.pack(f"<{4 + count - 1}I", 1, count, min(1, len(functions)), *chain)
    table_at = _HEADER + 4 * _SEGMENT
    symbols_at = _rounded(table_at + len(table), 8)
    strings_at = symbols_at + _SYMBOL * count
    text_at = _rounded(strings_at + len(strings), 16)
    symbols = bytes(_SYMBOL) + b"".join(
        struct.pack("<IBBHQQ", offset, 0x12, 0, 1, text_at + places.get(each, 0), 16)
        for offset, each in zip(offsets, functions, strict=False)
    )
    read_bytes = text_at + len(text)
    dynamic_at = _rounded(read_bytes, _PAGE)
    entries = {
        _HASH_TAG: table_at,
        _STRINGS_TAG: strings_at,
        _SYMBOLS_TAG: symbols_at,
        _STRING_BYTES_TAG: len(strings),
        _SYMBOL_BYTES_TAG: _SYMBOL,
        _OWN_NAME_TAG: offsets[-1],
        0: 0,
    }
    dynamic = b"".join(struct.pack("<2Q", *entry) for entry in entries.items())
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, 4, 0, 0, 0)
    segments = (
        _segment(_LOAD, _EXECUTE_READ, 0, read_bytes, _PAGE)
        + _segment(_LOAD, _READ_WRITE, dynamic_at, len(dynamic), _PAGE)
        + _segment(_DYNAMIC, _READ_WRITE, dynamic_at, len(dynamic), 8)
        + _segment(_STACK, _READ_WRITE, 0, 0, 16)
    )
    content = bytearray(dynamic_at + len(dynamic))
    parts = {0: header + segments, table_at: table, symbols_at: symbols, strings_at: strings, text_at: text}
    for place, part in {**parts, dynamic_at: dynamic}.items():
        content[place : place + len(part)] = part
    return bytes(content)


def _segment(kind: int, access: int, place: int, size: int, alignment: int) -> bytes:
    """Returns a program header: a part of the file that is at the same place in memory."""
    return struct.pack("<IIQQQQQQ", kind, access, place, place, place, size, size, alignment)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
