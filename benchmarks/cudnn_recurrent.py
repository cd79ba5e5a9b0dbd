"""Asks cuDNN, without a GPU, for the reserve and the workspace of recurrent nets, and compares the planner's formulas.

    LD_LIBRARY_PATH=DIR python -m benchmarks.cudnn_recurrent --cudnn DIR [--calls 1000] [--seed 4]

DIR has the shared libraries of an unpacked wheel nvidia-cudnn-cu13, and a libcublasLt. The function
`cudnnGetRNNTempSpaceSizes` needs a handle, which cannot be made without a card. It gets memory full of zeros instead:
it writes both sizes, and then returns an error, because it finds no card. So its answers are estimates. It answers for
the standard algorithm only. Each printed line is a net in the notation of tests/workspaces/cudnn_recurrent.txt, which
has the known answers: mode, layers, directions, time steps, samples, size of the input, hidden size, size of the
projections, bytes of an element, dropout; then workspace and reserve in bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import pathlib
import random
from collections.abc import Iterator

from planner.virtual_gpu.rnn import reserve_bytes
from planner.workspaces.cudnn_recurrent import Recurrent

ANSWERS = pathlib.Path(__file__).parents[1] / "tests/workspaces/cudnn_recurrent.txt"
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_DTYPES = {4: 0, 8: 1, 2: 2}
"""Values of `cudnnDataType_t` by the bytes of an element."""
_STANDARD, _DOUBLE_BIAS, _LINEAR_INPUT, _TENSOR_CORES, _TRAINING, _PADDED, _UNPACKED = 0, 2, 0, 1, 1, 1, 0


@dataclasses.dataclass(frozen=True)
class Net:
    """A recurrent net with its input, in the order of the notation."""

    mode: int
    layers: int
    directions: int
    steps: int
    samples: int
    input_size: int
    hidden_size: int
    projected: int
    itemsize: int
    has_dropout: int

    @property
    def weights(self) -> int:
        """Number of elements of all weight matrices."""
        outputs = self.projected or self.hidden_size
        inputs = (self.input_size, *[outputs * self.directions] * (self.layers - 1))
        of_projection = self.projected * self.hidden_size
        of_gates = _GATES[self.mode] * self.hidden_size
        return sum(self.directions * (of_gates * (size + outputs) + of_projection) for size in inputs)

    @property
    def formulas(self) -> tuple[int, int]:
        """Workspace and reserve in bytes, by the planner's formulas."""
        values = dataclasses.asdict(self)
        steps, has_dropout = values.pop("steps"), values.pop("has_dropout")
        rows = steps * self.samples
        workspace = Recurrent(rows=rows, **values).workspace_bytes(self.weights)
        del values["samples"], values["input_size"]
        return workspace, reserve_bytes(rows=rows * self.directions, dropout=bool(has_dropout), **values)


def known() -> Iterator[tuple[Net, tuple[int, int]]]:
    """Yields the nets that cuDNN was asked about, and its answers: workspace and reserve in bytes."""
    for line in ANSWERS.read_text().splitlines():
        if not line.startswith("#"):
            *values, workspace, reserve = map(int, line.split())
            yield Net(*values), (workspace, reserve)


def drawn(count: int, seed: int) -> Iterator[Net]:
    """Yields nets at random."""
    draw = random.Random(seed)
    for _ in range(count):
        mode, hidden_size = draw.choice((1, 2, 2, 3)), draw.choice((32, 64, 65, 128, 200, 256, 320, 512, 650, 1024))
        yield Net(
            mode=mode,
            layers=draw.choice((1, 1, 2, 3, 4)),
            directions=draw.choice((1, 2)),
            steps=draw.choice((1, 5, 16, 50, 100, 128, 256, 300, 512, 1000)),
            samples=draw.choice((1, 8, 20, 32, 64, 128)),
            input_size=draw.choice((16, 40, 80, 123, 256, 300, 512, 1024)),
            hidden_size=hidden_size,
            projected=draw.choice((0, 0, hidden_size // 2)) if mode == 2 else 0,
            itemsize=draw.choice((4, 4, 2, 8)),
            has_dropout=draw.choice((0, 1)),
        )


def ask(library: ctypes.CDLL, net: Net) -> tuple[int, int]:
    """Returns the bytes of workspace and reserve."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    handle, states = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 22)
    recurrent, dropout, data = pointer(), pointer(), pointer()
    library.cudnnCreateRNNDescriptor(ctypes.byref(recurrent))
    library.cudnnCreateDropoutDescriptor(ctypes.byref(dropout))
    library.cudnnCreateRNNDataDescriptor(ctypes.byref(data))
    probability, size, seed = ctypes.c_float(0.3 * net.has_dropout), ctypes.c_size_t(1 << 22), ctypes.c_ulonglong(0)
    library.cudnnRestoreDropoutDescriptor(dropout, handle, probability, states, size, seed)
    dtype = _DTYPES[net.itemsize]
    settings = (
        *(recurrent, _STANDARD, net.mode, _DOUBLE_BIAS, net.directions - 1, _LINEAR_INPUT, dtype),
        *(0 if net.itemsize == 2 else dtype, _TENSOR_CORES if net.itemsize == 2 else 0, net.input_size),
        *(net.hidden_size, net.projected or net.hidden_size, net.layers, dropout, _PADDED),
    )
    lengths, padding = (number * net.samples)(*[net.steps] * net.samples), ctypes.c_double(0)
    description = (data, dtype, _UNPACKED, net.steps, net.samples, net.input_size, lengths, ctypes.byref(padding))
    for function, arguments in (("cudnnSetRNNDescriptor_v8", settings), ("cudnnSetRNNDataDescriptor", description)):
        if status := getattr(library, function)(*arguments):
            raise RuntimeError(f"{function} returned status {status} for {net}")
    workspace, reserve = ctypes.c_size_t(), ctypes.c_size_t()
    sizes = (ctypes.byref(workspace), ctypes.byref(reserve))
    library.cudnnGetRNNTempSpaceSizes(handle, recurrent, _TRAINING, data, *sizes)
    return workspace.value, reserve.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cudnn", type=pathlib.Path, required=True)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=4)
    asked = parser.parse_args()
    library = ctypes.CDLL(str(asked.cudnn / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)
    equal = low = 0
    for net in drawn(asked.calls, asked.seed):
        workspace, reserve = ask(library, net)
        print(*dataclasses.astuple(net), workspace, reserve)
        equal += reserve == net.formulas[1]
        low += workspace > net.formulas[0]
    print(f"# {equal} of {asked.calls} reserves are equal to the formula, {low} workspaces are above theirs")


if __name__ == "__main__":
    main()
