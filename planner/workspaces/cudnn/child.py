"""The process that loads libcudnn and asks it: `python -m planner.workspaces.cudnn.child`.

It is a process of its own because cuDNN ends a process in which something is missing, and because its libraries would
stay loaded. Its input is JSON: the path of libcudnn.so.9, the compute capability of the card, a folder for the library
that stands for libcublasLt, and the texts of convolutions. It prints the version of cuDNN, and then for each
convolution the bytes of the workspaces that PyTorch tries, such as '4096>0', or the reason why there are none.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import platform
import sys

from planner.workspaces.cudnn import stub
from planner.workspaces.cudnn.convolution import Convolution, written
from planner.workspaces.cudnn.device_text import device_text
from planner.workspaces.cudnn.library import Library, Questions, RefusedError, device


def main() -> None:
    asked = json.load(sys.stdin)
    path = pathlib.Path(asked["library"])
    library = Library(path)
    print(*library.version, flush=True)
    _load_stub(path, library.version, pathlib.Path(asked["folder"]))
    questions = Questions(library, device(library, device_text(tuple(asked["capability"]))))
    for text in asked["convolutions"]:
        try:
            answer = written(questions.workspace_sizes(Convolution.of(text)))
        except RefusedError as error:
            answer = str(error)
        print(answer, flush=True)  # what is printed counts, also if the next question ends the process


def _load_stub(path: pathlib.Path, version: tuple[int, int, int], folder: pathlib.Path) -> None:
    """Loads the library that stands for libcublasLt. It is written once for each build of cuDNN.

    Reading the names that it needs takes seconds, so the file is kept.
    """
    size = path.with_name("libcudnn_engines_precompiled.so.9").stat().st_size
    kept = folder / f"libcublasLt-for-{'.'.join(map(str, version))}-{size}.so"
    if not kept.exists():
        major, names = stub.needed(path.parent)
        content = stub.shared_library(
            f"libcublasLt.so.{major}", names, machine=platform.machine(), version=10_000 * major + 100
        )
        written = kept.with_name(f"{kept.name}.{os.getpid()}")
        written.write_bytes(content)
        written.replace(kept)
    ctypes.CDLL(str(kept), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    main()
