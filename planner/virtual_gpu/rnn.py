"""Runs recurrent layers as CUDA does: one cuDNN op for all layers and time steps, with the weights in one flat buffer.

Sources, in aten/src/ATen: native/cudnn/RNN.cpp (`_cudnn_impl`, `_cudnn_rnn`, `_cudnn_rnn_backward`), cudnn/
AutocastRNN.cpp (`_cudnn_rnn_cast_reflatten`: autocast casts to fp16, even if bf16 is asked for), and
torch/nn/modules/rnn.py (`flatten_parameters`).

Packed sequences have one row for each time step of each sample, so the lengths of the sequences have to be known or
assumed (ATen/native/PackedSequence.cpp).

The sizes of cuDNN's *reserve* (what the forward saves for backward) and of its workspace are estimates: only the
closed-source function `cudnnGetRNNTempSpaceSizes` knows them. `reserve_bytes` follows from what it answers without a
card; the workspace is in `planner.workspaces.cudnn_recurrent`. A note in the plan says that both are estimates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import flop_registry, register_flop_formula

from planner.virtual_gpu import backend
from planner.virtual_gpu.autocast import AUTOCAST_KEY
from planner.virtual_gpu.kernels import Made, cuda_kernel
from planner.virtual_gpu.values.data_dependence import DataDependence

ASSUMED_RESERVE = (
    "cuDNN saves the gates, cells and outputs of recurrent layers for backward, and takes a workspace (both sizes are "
    "estimates from what cuDNN 9.20 answers without a card for its standard algorithm)"
)

ASSUMED_FULL = "all packed sequences have full length"

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Values of `cudnnRNNMode_t`; the functions of this module have them as argument `mode`."""
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Number of gates, by mode."""
_SAVED_PER_STEP = {0: 1, 1: 1, 2: 5, 3: 6}
"""Number of tensors of the hidden size that a layer saves for each time step of a sample, by mode: gates and cells."""
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)
"""Dtypes that run on cuDNN (`cudnn_is_acceptable` in native/Convolution.cpp). bf16 layers run without it."""


def register(dependence: DataDependence) -> None:
    """Makes `aten.lstm`, `aten.gru` and `aten.rnn_*` run cuDNN's ops on the virtual GPU, until this process ends.

    Args:
        dependence: gives the lengths of packed sequences.
    """
    for name, mode in _MODES.items():
        packet = getattr(_aten, name)
        backend.route(f"aten::{name}.input", _route(packet.input, mode))
        backend.route(f"aten::{name}.data", _packed_route(packet.input, mode, dependence))
    backend.route("aten::_pad_packed_sequence", functools.partial(_pad, dependence))
    backend.route("aten::_pack_padded_sequence_backward", functools.partial(_pack_backward, dependence))
    backend.library("aten").impl("_cudnn_rnn", _in_half_precision, "AutocastPrivateUse1")
    if _aten._cudnn_rnn not in flop_registry:
        register_flop_formula(_aten._cudnn_rnn, get_raw=True)(_forward_flops)
        register_flop_formula(_aten._cudnn_rnn_backward, get_raw=True)(_backward_flops)


def flatten_weights(module: torch.nn.RNNBase) -> None:
    """Moves the weights of a recurrent module into one flat buffer, as `flatten_parameters` does on a CUDA card.

    Weights that are missing, of mixed dtypes or shared stay where they are, also as in `flatten_parameters`.
    """
    weights: list[Any] = [getattr(module, name, None) for name in module._flat_weights_names]
    module._flat_weights = weights
    if any(w is None or w.dtype not in _CUDNN_DTYPES or w.dtype != weights[0].dtype for w in weights):
        return
    if len({id(w) for w in weights}) != len(weights):
        return
    mode = _MODES[module.mode.lower()]
    elements = _weight_elements(weights, len(module._all_weights[0]), mode, module.hidden_size)
    flat = torch.empty(elements, dtype=weights[0].dtype, device=backend.NAME)
    with torch.no_grad():
        for weight, part in zip(weights, _parts(flat, weights), strict=True):
            weight.data = part


def _weight_elements(weights: Sequence[torch.Tensor], stride: int, mode: int, hidden_size: int) -> int:
    """Returns the number of elements of cuDNN's weight buffer.

    The buffer has room for two biases for each layer and direction, even if the module has no biases
    (`try_get_weight_buf`).

    Args:
        weights: the weights (and biases) of all layers and directions.
        stride: number of weights per layer and direction.
        mode: a value of `_MODES`.
        hidden_size: the module's hidden size.
    """
    missing = 0 if stride >= 4 else 2 * _GATES[mode] * hidden_size * (len(weights) // stride)
    return sum(weight.numel() for weight in weights) + missing


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Splits a flat buffer into adjacent views with the shapes of the tensors in `like`."""
    sizes = [weight.numel() for weight in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(weight.shape) for part, weight in zip(parts, like, strict=True)]


def _flat_buffer(weights: Sequence[torch.Tensor], elements: int) -> torch.Tensor | None:
    """Returns the flat buffer of which all weights are views; None if they share no buffer of at least this size."""
    storage = weights[0].untyped_storage()
    if any(w.untyped_storage()._cdata != storage._cdata for w in weights):
        return None
    if storage.nbytes() < elements * weights[0].itemsize:
        return None
    return weights[0].detach().as_strided((elements,), (1,), 0)


def _route(op: torch._ops.OpOverload, mode: int) -> Any:
    """Returns a kernel for `aten.lstm`, `aten.gru` or `aten.rnn_*` that runs `_cudnn_rnn`, as `_cudnn_impl` does."""

    def run(
        input: Any, hidden: Any, weights: Any, has_biases: bool, layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, batch_sizes: Sequence[int] = (),
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        if input.dtype not in _CUDNN_DTYPES:
            return op.decompose(input, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
        hx, cx = hidden if mode == 2 else (hidden, None)
        hidden_size = (hx if cx is None else cx).shape[2]
        projected = hx.shape[2] if hx.shape[2] != hidden_size else 0
        stride = (4 if has_biases else 2) + bool(projected)
        buffer = _flat_buffer(weights, _weight_elements(weights, stride, mode, hidden_size))
        output, hy, cy, *_ = _aten._cudnn_rnn(
            input, weights, stride, buffer, hx, cx, mode, hidden_size, projected, layers, batch_first, dropout, train,
            bidirectional, batch_sizes, None,
        )  # fmt: skip
        return (output, hy, cy) if mode == 2 else (output, hy)

    return run


def _packed_route(op: torch._ops.OpOverload, mode: int, dependence: DataDependence) -> Any:
    """Returns a kernel for packed sequences. `op` is the overload for padded sequences."""
    padded = _route(op, mode)

    def run(data: Any, batch_sizes: Any, hidden: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        if data.dtype not in _CUDNN_DTYPES:
            raise dependence.refusal(
                f"{op.name()} runs on packed sequences without cuDNN in {data.dtype}, which a rehearsal cannot follow",
                "use weights in float32 or float16, or padded sequences",
            )
        return padded(data, hidden, *rest, False, batch_sizes=dependence.list_or_refuse(batch_sizes))

    return run


@cuda_kernel(_aten._pack_padded_sequence.default)
def _pack(dependence: DataDependence, op: Any, input: Any, lengths: Any, batch_first: bool) -> Made:
    """Allocates the rows of a packed sequence, and the copies of its parts that are not contiguous."""
    ordered = input.transpose(0, 1) if batch_first else input
    if lengths in dependence.known:
        known = dependence.list_or_refuse(lengths)
    else:
        known = dependence.list_or_assume(lengths, ordered.shape[0], ASSUMED_FULL)
    present = [sum(length > time for length in known) for time in range(max(known, default=0))]
    data = input.new_empty((sum(present), *ordered.shape[2:]))
    batch_sizes = torch.empty(len(present), dtype=torch.int64, device="cpu")
    _learn(dependence, batch_sizes, present, lengths)
    parts = [ordered[begin:end, :samples] for begin, end, samples in _parts_of_equal_size(present)]
    return (data, batch_sizes), [part.new_empty(part.shape) for part in parts if not part.is_contiguous()]


def _pack_backward(
    dependence: DataDependence, grad: Any, input_size: Sequence[int], batch_sizes: Any, batch_first: bool
) -> torch.Tensor:
    """Runs the ops of `_pack_padded_sequence_backward`."""
    shape = [input_size[1], input_size[0], *input_size[2:]] if batch_first else list(input_size)
    padded, offset = grad.new_zeros(shape), 0
    for time, samples in enumerate(dependence.list_or_refuse(batch_sizes)):
        padded[time, :samples].copy_(grad[offset : offset + samples])
        offset += samples
    return padded.transpose(0, 1) if batch_first else padded


def _pad(
    dependence: DataDependence, data: Any, batch_sizes: Any, batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the ops of `_pad_packed_sequence`."""
    present = dependence.list_or_refuse(batch_sizes)
    steps = max(total_length, len(present))
    padded, offset = data.new_full((steps, present[0], *data.shape[1:]), padding), 0
    for begin, end, samples in _parts_of_equal_size(present):
        rows = (end - begin) * samples
        padded[begin:end, :samples].copy_(data[offset : offset + rows].view(end - begin, samples, *data.shape[1:]))
        offset += rows
    lengths = torch.empty(present[0], dtype=torch.int64, device="cpu")
    known = [sum(samples > sample for samples in present) for sample in range(present[0])]
    _learn(dependence, lengths, known, batch_sizes)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _parts_of_equal_size(present: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first step, last step + 1, samples) for each run of time steps with the same number of samples."""
    begin = 0
    for samples, run in itertools.groupby(present):
        end = begin + len(list(run))
        yield begin, end, samples
        begin = end


def _learn(dependence: DataDependence, fake: torch.Tensor, values: Sequence[int], origin: torch.Tensor) -> None:
    """Sets the values of a fake tensor, which depend on the assumptions of the tensor `origin`."""
    with unset_fake_temporarily():
        real = torch.tensor(values, dtype=fake.dtype, device="cpu")
    dependence.known.learn(fake, real, dependence.known.assumptions((origin,)))


def _in_half_precision(input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int, *rest: Any):
    """Runs `_cudnn_rnn` under autocast: copies the weights into one fp16 buffer, and casts the inputs to fp16.

    PyTorch does the same in `_cudnn_rnn_cast_reflatten`.
    """
    half = torch.float16
    if weight[0].dtype != half:
        elements = _weight_elements(weight, stride, mode, rest[0])
        buffer = torch.zeros(elements, dtype=half, device=weight[0].device)
        offset, copies = 0, []
        for original in weight:
            copy = buffer.new_empty(0).set_(buffer.untyped_storage(), offset, original.shape, original.stride())
            copies.append(copy.copy_(original))
            offset += original.numel()
        weight = copies
    key = torch._C.DispatchKeySet(AUTOCAST_KEY)
    with torch._C._ExcludeDispatchKeyGuard(key):
        cx = None if cx is None else cx.to(half)
        return _aten._cudnn_rnn(input.to(half), weight, stride, buffer, hx.to(half), cx, mode, *rest)


@cuda_kernel(_aten._cudnn_rnn.default)
def _forward(
    dependence: DataDependence, op: Any, input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int,
    hidden_size: int, projected: int, layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Any, dropout_state: Any,
) -> Made:  # fmt: skip
    """Allocates what `_cudnn_rnn` does: the output, the final states and, in training, the reserve for backward."""
    directions = 2 if bidirectional else 1
    ordered = input.transpose(0, 1) if batch_first else input
    scratch = [] if ordered.is_contiguous() else [torch.empty(ordered.shape, dtype=input.dtype, device=input.device)]
    output = input.new_empty((*ordered.shape[:-1], (projected or hidden_size) * directions))
    hy = torch.empty_like(hx)
    cy = input.new_empty(0) if cx is None else torch.empty_like(cx)
    if buffer is None:
        buffer = input.new_empty(_weight_elements(weight, stride, mode, hidden_size))
    rows = ordered.shape[:-1].numel() * directions
    size_bytes = reserve_bytes(mode, rows, hidden_size, projected, layers, directions, input.itemsize, dropout > 0)
    reserve = torch.empty(size_bytes if train else 0, dtype=torch.uint8, device=input.device)
    if train:
        dependence.assume((ASSUMED_RESERVE,))
    output = output.transpose(0, 1) if batch_first else output
    return (output, hy, cy, reserve, buffer), scratch


def reserve_bytes(
    mode: int, rows: int, hidden_size: int, projected: int, layers: int, directions: int, itemsize: int, dropout: bool
) -> int:
    """Returns the bytes that cuDNN saves for backward. 21 of 6,000 answers of cuDNN are larger, by 32 or 64 bytes.

    A layer saves its gates and cells, and, if it is not the last one, its outputs. With projections, it saves the
    outputs before and after them. Dropout between layers saves a mask of one bit for each output.

    Args:
        mode: a value of `_MODES`.
        rows: number of time steps of all samples and directions.
        hidden_size: the module's hidden size.
        projected: size of the projections; 0 without them.
        layers: number of layers.
        directions: 2 for a bidirectional net, else 1.
        itemsize: bytes of an element.
        dropout: True if the net has dropout between its layers.
    """
    of_layer = _SAVED_PER_STEP[mode] * hidden_size + (hidden_size + projected if projected else 0)
    saved = rows * (layers * of_layer + (layers - 1) * hidden_size) * itemsize
    mask = -(-rows * (projected or hidden_size) // 8) if dropout else 0
    saved, mask = (-(-size // 32) * 32 for size in (saved, mask))
    return saved + (layers - 1) * directions * mask + 256


@cuda_kernel(_aten._cudnn_rnn_backward.default)
def _backward(
    dependence: DataDependence, op: Any, input: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any,
    output: Any, grad_output: Any, grad_hy: Any, grad_cy: Any, mode: int, hidden_size: int, projected: int, layers: int,
    batch_first: bool, dropout: float, train: bool, bidirectional: bool, batch_sizes: Any, dropout_state: Any,
    reserve: Any, output_mask: Any,
) -> Made:  # fmt: skip
    """Allocates what `_cudnn_rnn_backward` does. The gradients of the weights are views of one buffer."""
    ordered = input.transpose(0, 1) if batch_first else input
    # Missing gradients are replaced by zeros, and tensors that are not contiguous are copied.
    scratch = [torch.empty_like(value) for value, grad in ((output, grad_output), (hx, grad_hy)) if grad is None]
    scratch += [torch.empty_like(cx)] if cx is not None and grad_cy is None else []
    scratch += [] if ordered.is_contiguous() else [input.new_empty(ordered.shape)]
    if grad_output is not None and not (grad_output.transpose(0, 1) if batch_first else grad_output).is_contiguous():
        scratch.append(torch.empty_like(grad_output, memory_format=torch.contiguous_format))
    dx = input.new_empty(ordered.shape)
    dhx = torch.empty_like(hx)
    dcx = None if cx is None else torch.empty_like(cx)
    dw = _parts(torch.empty_like(buffer), weight) if output_mask[3] else [None] * len(weight)
    return (dx.transpose(0, 1) if batch_first else dx, dhx, dcx, dw), scratch


def _forward_flops(input: torch.Tensor, weight: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a forward: two for each element of a weight matrix, each sample and each time step."""
    return 2 * input.shape[:-1].numel() * sum(w.numel() for w in weight if w.dim() == 2)


def _backward_flops(input: torch.Tensor, weight: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a backward: one forward's for the gradients of the inputs, one for those of the weights."""
    return 2 * _forward_flops(input, weight)
