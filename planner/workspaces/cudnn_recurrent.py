"""The formula for the workspace that cuDNN takes for recurrent layers.

The source of cuDNN is not public. The formula was fitted to 6,000 answers of `cudnnGetRNNTempSpaceSizes`, which are
the same for cuDNN 9.10.2, 9.19.1 and 9.20.0 (`python -m benchmarks.cudnn_recurrent`). This function names the sizes
before it looks for a card, and then reports that it found none. So the formula is an estimate. It holds for the
standard algorithm. PyTorch takes another one for small hidden sizes and, in fp16, for some single layers
(native/cudnn/RNN.cpp, `get_algo`), about which cuDNN does not answer without a card. `planner.virtual_gpu.rnn` has the
size of what cuDNN saves for backward.
"""

from __future__ import annotations

import dataclasses

from planner.profiles.device import DeviceProfile
from planner.workspaces.registry import KernelCall, takes_scratch

_LSTM, _GRU = 2, 3
"""Values of `cudnnRNNMode_t`."""
_WORKSPACE = {
    (0, 1): (4, 3, 5), (1, 1): (4, 3, 5), (_LSTM, 1): (6, 3, 11), (_GRU, 1): (5, 3, 5),
    (0, 2): (6, 6, 7), (1, 2): (6, 6, 7), (_LSTM, 2): (7, 6, 13), (_GRU, 2): (6, 6, 7),
}  # fmt: skip
"""Number of tensors in the workspace, by mode and number of directions: of the hidden size for each time step and
direction, of the input's size for each time step, and of the hidden size for each sample, layer and direction."""
_MATRIX_PRODUCT_BYTES = 8 << 20
"""Bytes in the workspace for the matrix products of each layer and direction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A recurrent net and the size of its input."""

    mode: int
    """Value of `cudnnRNNMode_t`: 0 and 1 for a plain net, 2 for an LSTM, 3 for a GRU."""
    rows: int
    """Number of time steps of all samples."""
    samples: int
    input_size: int
    hidden_size: int
    projected: int
    """Size of the projections; 0 without them."""
    layers: int
    directions: int
    itemsize: int

    def workspace_bytes(self, weights: int) -> int:
        """Returns an upper bound of the workspace's bytes. For half of the nets it is at most 5 % above cuDNN's answer.

        Args:
            weights: number of elements of all weight matrices; the workspace has a copy of them in another layout.
        """
        of_hidden, of_input, of_sample = _WORKSPACE[self.mode, self.directions]
        streams = self.layers * self.directions
        elements = weights + self.rows * (of_hidden * self.hidden_size * self.directions + of_input * self.input_size)
        elements += of_sample * self.samples * self.hidden_size * streams
        elements += self.projected * (2 * self.rows * self.directions + streams * self.hidden_size)
        return streams * _MATRIX_PRODUCT_BYTES + elements * self.itemsize + 8 * self.samples + 1024


@takes_scratch("aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default")
def recurrent(call: KernelCall, card: DeviceProfile) -> list[int]:
    """Returns an estimate of the bytes of the workspace of a forward or a backward.

    The backward allocates it twice: for the gradient of the input, and again after the gradient of the weights is
    allocated. Only the second time is counted, because more tensors are alive then.

    Source: native/cudnn/RNN.cpp (`_cudnn_rnn`, `_cudnn_rnn_backward_input`, `_cudnn_rnn_backward_weight`).
    """
    given, layout = call.arguments, call.tensor("input")
    net = Recurrent(
        mode=given["mode"],
        rows=layout.numel // layout.shape[-1],
        samples=call.tensor("hx").shape[1],
        input_size=layout.shape[-1],
        hidden_size=given["hidden_size"],
        projected=given["proj_size"],
        layers=given["num_layers"],
        directions=2 if given["bidirectional"] else 1,
        itemsize=layout.itemsize,
    )
    return [net.workspace_bytes(sum(weight.numel for weight in given["weight"] if len(weight.shape) == 2))]
