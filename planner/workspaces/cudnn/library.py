"""cuDNN's heuristics, asked without a GPU: which algorithm a convolution takes, and its workspace.

From version 9.8 on, cuDNN answers for a card that it knows only by a text ("deviceless"). No driver and no handle is
needed. PyTorch asks the same heuristics on the card: it takes the first configuration of the instant heuristics that
passes its filter, else the first of the fallback list. With `torch.backends.cudnn.benchmark = True` it makes plans of
all configurations that pass, and measures their time.

Sources: aten/src/ATen/native/cudnn/Conv_v8.cpp (`build_opgraph`, `filterEngineConfigs`, `plan_errata_exception`,
`run_single_conv`, `get_plans_from_find`), torch 2.8 to 2.13, and the enumerations of cuDNN's headers cudnn_graph.h and
cudnn_ops.h.

Only `child` uses this module: cuDNN ends the process in which something is missing that it looks for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from planner.workspaces.cudnn.convolution import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Convolution
from planner.workspaces.cudnn.layouts import strides

# cudnnBackendDescriptorType_t
_CONVOLUTION, _ENGINE, _CONFIGURATION, _HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
_OPERATION = {FORWARD: 10, GRAD_WEIGHT: 11, GRAD_INPUT: 12}
# cudnnBackendAttributeType_t
_DATA_TYPE, _BOOLEAN, _INT64, _FLOAT, _DOUBLE, _CONV_MODE, _HEUR_MODE = 1, 2, 3, 4, 5, 7, 8
_NUMERICAL_NOTE, _DESCRIPTOR, _CHAR = 11, 15, 24
# cudnnBackendAttributeName_t: alpha, beta, convolution, w, x and y of the three operations, and others below
_ATTRIBUTES = {
    FORWARD: (700, 701, 702, 703, 704, 705),
    GRAD_INPUT: (706, 707, 708, 709, 710, 711),
    GRAD_WEIGHT: (712, 713, 714, 715, 716, 717),
}
_ALIGNMENT, _TENSOR_TYPE, _SIZES, _STRIDES, _IDENTITY, _IS_VIRTUAL = 900, 901, 902, 903, 906, 907
_COMPUTE_TYPE, _MODE, _DILATION, _STRIDE, _PADDING, _PADDING_AFTER, _DIMENSIONS = 100, 101, 102, 103, 104, 105, 106
_OPERATIONS, _HEURISTIC_MODE, _ASKED_GRAPH, _RESULTS, _ASKED_DEVICE = 801, 200, 201, 202, 204
_OF_ENGINE, _WORKSPACE_BYTES, _ENGINE_NUMBER, _NOTES, _DEVICE_TEXT = 300, 303, 1301, 1303, 2702
# cudnnDataType_t, cudnnBackendHeurMode_t, cudnnBackendNumericalNote_t, cudnnConvolutionMode_t
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_INSTANT, _FALLBACK = 0, 2
_TENSOR_CORE, _DOWN_CONVERTS, _NONDETERMINISTIC = 0, 1, 4
_CROSS_CORRELATION = 1
_FAULTY = (GRAD_INPUT, 23)
"""Operation and number of an engine that PyTorch excludes in three dimensions, because its results may be wrong."""
_ALIGNMENT_BYTES = 32
"""PyTorch looks at no more than this (`getAlignment`), and its allocator's blocks start at multiples of 512."""


class RefusedError(Exception):
    """cuDNN did not accept a description, or cannot compute it."""


class Library:
    """A loaded libcudnn.

    Args:
        path: the file libcudnn.so.9. The other libraries of cuDNN are in its folder.

    Raises:
        OSError: the library cannot be loaded.
        RefusedError: the library is too old to answer without a card.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        pointer, number = ctypes.c_void_p, ctypes.c_int
        of = self._library
        of.cudnnBackendCreateDescriptor.argtypes = [number, ctypes.POINTER(pointer)]
        of.cudnnBackendDestroyDescriptor.argtypes = of.cudnnBackendFinalize.argtypes = [pointer]
        of.cudnnBackendSetAttribute.argtypes = [pointer, number, number, ctypes.c_int64, pointer]
        of.cudnnBackendGetAttribute.argtypes = [
            *(pointer, number, number, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)),
            pointer,
        ]

    @property
    def version(self) -> tuple[int, int, int]:
        """Version of cuDNN, such as (9, 20, 0)."""
        number = int(self._library.cudnnGetVersion())
        return number // 10_000, number // 100 % 100, number % 100

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function of the library.

        Raises:
            RefusedError: the status that it returns is not success.
        """
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RefusedError(f"{function} returned status {status}")


class _Descriptor:
    """A descriptor of cuDNN's backend. It is destroyed with this object, which keeps the descriptors that it refers to.

    Raises:
        RefusedError: (from all methods) cuDNN does not accept the call.
    """

    def __init__(self, library: Library, kind: int) -> None:
        self._library = library
        self._kept: list[_Descriptor] = []
        self.pointer = ctypes.c_void_p()
        library.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:
            self._library.call("cudnnBackendDestroyDescriptor", self.pointer)

    def set(self, attribute: int, kind: int, array: ctypes.Array[ctypes.c_int]) -> None:
        self._library.call("cudnnBackendSetAttribute", self.pointer, attribute, kind, len(array), array)

    def set_integers(self, attribute: int, values: Sequence[int]) -> None:
        self.set(attribute, _INT64, (ctypes.c_int64 * len(values))(*values))  # type: ignore[arg-type]

    def set_choice(self, attribute: int, kind: int, value: int) -> None:
        self.set(attribute, kind, (ctypes.c_int * 1)(value))

    def refer(self, attribute: int, *others: _Descriptor) -> None:
        self._kept += others
        pointers = (ctypes.c_void_p * len(others))(*(other.pointer.value for other in others))
        self.set(attribute, _DESCRIPTOR, pointers)  # type: ignore[arg-type]

    def finalize(self) -> _Descriptor:
        self._library.call("cudnnBackendFinalize", self.pointer)
        return self

    def get(self, attribute: int, kind: int, array: object, length: int) -> int:
        """Fills an array with an attribute, and returns its number of elements. With `length` 0 only counts them."""
        count = ctypes.c_int64()
        self._library.call(
            "cudnnBackendGetAttribute", self.pointer, attribute, kind, length, ctypes.byref(count), array
        )
        return count.value


def device(library: Library, text: str) -> _Descriptor:
    """Returns the description of a card (see `device_text`).

    Raises:
        RefusedError: cuDNN does not read the text; versions before 9.8 cannot.
    """
    raw, described = text.encode(), _Descriptor(library, _DEVICE)
    described.set(_DEVICE_TEXT, _CHAR, (ctypes.c_char * len(raw)).from_buffer_copy(raw))  # type: ignore[arg-type]
    return described.finalize()


@dataclasses.dataclass(frozen=True, slots=True)
class _Configuration:
    """A configuration of an engine: what decides whether PyTorch takes it, and its workspace."""

    engine: int
    notes: frozenset[int]
    size_bytes: int


class Questions:
    """Answers questions about convolutions on a card.

    Convolutions have the same configurations if they differ only in the settings by which PyTorch filters them. So the
    configurations of a question are kept for the next one.
    """

    def __init__(self, library: Library, card: _Descriptor) -> None:
        self._library, self._card = library, card
        self._asked: Convolution | None = None
        self._found: list[_Configuration] = []
        self._more: Iterator[_Configuration] = iter(())

    def workspace_sizes(self, convolution: Convolution) -> tuple[int, ...]:
        """Returns the bytes of the workspaces of the algorithms that PyTorch tries, in the order of its trials.

        The first one is what PyTorch takes where there is enough memory. If a workspace does not fit, PyTorch tries the
        next algorithm. One that needs as much as an earlier one, or more, is left out, because it does not fit either.

        With `Kind.benchmark`, PyTorch tries all algorithms. The result has the workspaces of all, in cuDNN's order.

        Raises:
            RefusedError: no algorithm computes this convolution on this card.
        """
        passing = (each for each in self._configurations(convolution) if _passes(each, convolution))
        if convolution.kind.benchmark:
            found = [each.size_bytes for each in passing]
        else:
            found = []
            for each in passing:
                if not found or each.size_bytes < found[-1]:
                    found.append(each.size_bytes)
                if not found[-1]:
                    break
        if not found:
            raise RefusedError(f"no algorithm computes {convolution.text}")
        return tuple(found)

    def _configurations(self, convolution: Convolution) -> Iterator[_Configuration]:
        """Yields the configurations in cuDNN's order: those of the instant heuristics, and the fallback list."""
        kind = dataclasses.replace(convolution.kind, tf32=False, deterministic=False, benchmark=False)
        asked = Convolution(kind, convolution.shape)
        if asked != self._asked:
            self._asked, self._found = asked, []
            self._more = self._ask(_graph(self._library, asked))
        yield from self._found
        for each in self._more:
            self._found.append(each)
            yield each

    def _ask(self, graph: _Descriptor) -> Iterator[_Configuration]:
        for mode in (_INSTANT, _FALLBACK):
            for descriptor in _recommended(self._library, graph, self._card, mode):
                try:
                    yield _read(self._library, descriptor)
                except RefusedError:
                    continue  # PyTorch, too, goes on to the next one if a configuration does not become a plan


def _graph(library: Library, convolution: Convolution) -> _Descriptor:
    """Returns the description of a convolution, as PyTorch makes it (`build_opgraph`)."""
    kind, shape = convolution.kind, convolution.shape

    def tensor(identity: str, sizes: tuple[int, ...]) -> _Descriptor:
        made = _Descriptor(library, _TENSOR)
        made.set_choice(_TENSOR_TYPE, _DATA_TYPE, _TYPES[kind.dtype])
        made.set_integers(_SIZES, sizes)
        made.set_integers(_STRIDES, strides(sizes, channels_last=kind.channels_last))
        made.set_integers(_IDENTITY, [ord(identity)])
        made.set_integers(_ALIGNMENT, [_ALIGNMENT_BYTES])
        made.set(_IS_VIRTUAL, _BOOLEAN, (ctypes.c_bool * 1)(False))  # type: ignore[arg-type]
        return made.finalize()

    is_double = kind.dtype == "float64"
    options = _Descriptor(library, _CONVOLUTION)
    options.set_choice(_COMPUTE_TYPE, _DATA_TYPE, _TYPES["float64" if is_double else "float32"])
    options.set_choice(_MODE, _CONV_MODE, _CROSS_CORRELATION)
    options.set_integers(_DILATION, shape.dilation)
    options.set_integers(_STRIDE, shape.stride)
    options.set_integers(_PADDING, shape.padding)
    options.set_integers(_PADDING_AFTER, shape.padding)
    options.set_integers(_DIMENSIONS, [len(shape.stride)])
    alpha, beta, convolution_of, w, x, y = _ATTRIBUTES[kind.operation]
    operation = _Descriptor(library, _OPERATION[kind.operation])
    operation.refer(x, tensor("x", shape.x))
    operation.refer(w, tensor("w", shape.w))
    operation.refer(y, tensor("y", shape.y))
    operation.refer(convolution_of, options.finalize())
    for attribute, value in ((alpha, 1.0), (beta, 0.0)):
        if is_double:
            operation.set(attribute, _DOUBLE, (ctypes.c_double * 1)(value))  # type: ignore[arg-type]
        else:
            operation.set(attribute, _FLOAT, (ctypes.c_float * 1)(value))  # type: ignore[arg-type]
    graph = _Descriptor(library, _GRAPH)
    graph.refer(_OPERATIONS, operation.finalize())
    return graph.finalize()


def _recommended(library: Library, graph: _Descriptor, card: _Descriptor, mode: int) -> Iterator[_Descriptor]:
    """Yields the configurations that a heuristic mode recommends, best first; none if it refuses the graph."""
    heuristics = _Descriptor(library, _HEURISTICS)
    heuristics.refer(_ASKED_GRAPH, graph)
    heuristics.set_choice(_HEURISTIC_MODE, _HEUR_MODE, mode)
    heuristics.refer(_ASKED_DEVICE, card)
    try:
        count = heuristics.finalize().get(_RESULTS, _DESCRIPTOR, None, 0)
    except RefusedError:
        return
    found = [_Descriptor(library, _CONFIGURATION) for _ in range(count)]
    pointers = (ctypes.c_void_p * count)(*(each.pointer.value for each in found))
    yield from found[: heuristics.get(_RESULTS, _DESCRIPTOR, pointers, count)]


def _read(library: Library, configuration: _Descriptor) -> _Configuration:
    """Returns the properties of a configuration. Raises `RefusedError` if cuDNN does not name them."""
    engine = _Descriptor(library, _ENGINE)
    configuration.get(_OF_ENGINE, _DESCRIPTOR, (ctypes.c_void_p * 1)(engine.pointer.value), 1)
    notes, number, size = (ctypes.c_int * 32)(), (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)()
    count = engine.get(_NOTES, _NUMERICAL_NOTE, notes, len(notes))
    engine.get(_ENGINE_NUMBER, _INT64, number, 1)
    configuration.get(_WORKSPACE_BYTES, _INT64, size, 1)
    return _Configuration(number[0], frozenset(notes[:count]), size[0])


def _passes(configuration: _Configuration, convolution: Convolution) -> bool:
    """True if PyTorch keeps a configuration (`filterEngineConfigs`, `plan_errata_exception`)."""
    kind, notes = convolution.kind, configuration.notes
    if (kind.deterministic and _NONDETERMINISTIC in notes) or _DOWN_CONVERTS in notes:
        return False
    if len(convolution.shape.x) > 4 and (kind.operation, configuration.engine) == _FAULTY:
        return False
    return kind.dtype != "float32" or kind.tf32 or _TENSOR_CORE not in notes
