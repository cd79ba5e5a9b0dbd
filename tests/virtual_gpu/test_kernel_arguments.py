"""Steps that PyTorch's kernels refuse are refused in a rehearsal, too, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import WorkloadError
from planner.virtual_gpu.values.kernel_arguments import RULES, refuse_arguments

aten, R = torch.ops.aten, torch.rand
ZEROS = torch.zeros(4, dtype=torch.long)
ARGUMENTS = {
    aten.mm.default: (R(4, 4), R(4, 4)),
    aten.bmm.default: (R(2, 4, 4), R(2, 4, 4)),
    aten.mv.default: (R(4, 4), R(4)),
    aten.dot.default: (R(4), R(4)),
    aten.addmm.default: (R(4), R(4, 4), R(4, 4)),
    aten.addbmm.default: (R(4, 4), R(2, 4, 4), R(2, 4, 4)),
    aten.baddbmm.default: (R(2, 4, 4), R(2, 4, 4), R(2, 4, 4)),
    aten.addmv.default: (R(4), R(4, 4), R(4)),
    aten.linear.default: (R(4, 4), R(4, 4), R(4)),
    aten.convolution.default: (R(2, 4, 8), R(4, 4, 3), R(4), [1], [1], [1], False, [0], 1),
    aten.index_put.default: (R(4, 4), [ZEROS], R(4, 4)),
    aten.index_put_.default: (R(4, 4), [ZEROS], R(4, 4)),
    aten.index_add.default: (R(4, 4), 0, ZEROS, R(4, 4)),
    aten.index_add_.default: (R(4, 4), 0, ZEROS, R(4, 4)),
    aten.index_copy.default: (R(4, 4), 0, torch.arange(4), R(4, 4)),
    aten.index_copy_.default: (R(4, 4), 0, torch.arange(4), R(4, 4)),
    aten.index_select.default: (R(4, 4), 0, ZEROS),
    aten.nll_loss_forward.default: (R(4, 4), ZEROS, R(4), 1, -100),
    aten.nll_loss2d_forward.default: (R(2, 4, 4, 4), torch.zeros(2, 4, 4).long(), R(4), 1, -100),
    aten.binary_cross_entropy.default: (R(4), R(4)),
    aten.grid_sampler_2d.default: (R(1, 1, 4, 4), R(1, 4, 4, 2), 0, 0, False),
    aten._prelu_kernel.default: (R(4, 4), R(4, 4)),
    aten.glu.default: (R(4),),
    aten._softmax.default: (R(4, 4), 1, False),
    aten._log_softmax.default: (R(4, 4), 1, False),
    aten._adaptive_avg_pool2d.default: (R(1, 1, 4, 4), [2, 2]),
    aten.upsample_bilinear2d.default: (R(1, 1, 4, 4), [8, 8], False),
    aten.native_layer_norm.default: (R(4, 4), [4], R(4), R(4), 1e-5),
    aten.native_group_norm.default: (R(2, 4, 8), R(4), R(4), 2, 4, 8, 2, 1e-5),
    aten.native_batch_norm.default: (R(2, 4, 8), R(4), R(4), R(4), R(4), True, 0.1, 1e-5),
}
DTYPES = (torch.float64, torch.float16, torch.int64)
ONLY_ON_CUDA = {"mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "linear", "convolution"}
"""CUDA refuses products of whole numbers, which a CPU computes."""


@pytest.mark.parametrize("op", RULES, ids=str)
def test_what_the_check_refuses_is_what_the_kernel_refuses(op):
    args = ARGUMENTS.get(op, (R(4),))
    refuse_arguments(op, args)
    op(*map(copied, args))
    refused = 0
    for at, argument in enumerate(args):
        for dtype in DTYPES if isinstance(argument, torch.Tensor) else ():
            changed = [*args[:at], argument.to(dtype), *args[at + 1 :]]
            try:
                refuse_arguments(op, changed)
            except RuntimeError:
                refused += 1
                with pytest.raises((RuntimeError, NotImplementedError)):
                    op(*map(copied, changed))
    assert refused


def copied(argument):
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("name", sorted(ONLY_ON_CUDA))
def test_products_of_whole_numbers_are_refused_as_on_cuda(name):
    op = getattr(aten, name).default
    args = [argument.long() if isinstance(argument, torch.Tensor) else argument for argument in ARGUMENTS[op]]
    with pytest.raises(RuntimeError, match="is not implemented on CUDA for int64"):
        refuse_arguments(op, args)


def test_missing_biases_and_weights_are_no_mismatch():
    refuse_arguments(aten.convolution.default, (R(2, 4, 8), R(4, 4, 3), None, [1], [1], [1], False, [0], 1))
    refuse_arguments(aten.nll_loss_forward.default, (R(4, 4), ZEROS, None, 1, -100))


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(4, 4), (8, 4)), (nn.Conv1d(4, 4, 3), (8, 4, 9))], ids=str)
def test_a_batch_of_another_dtype_than_the_weights_is_no_plan(layer, shape, dtype):
    model, batch = Net(layer), torch.ones(shape, dtype=dtype)
    with pytest.raises(RuntimeError):
        model(batch)
    with pytest.raises(WorkloadError, match=r"needs tensors of one dtype|same dtype|should be the same"):
        planner.plan(model, batch, vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum())


def test_a_batch_without_samples_is_refused():
    with pytest.raises(WorkloadError, match="the batch has no samples"):
        planner.plan(
            Net(nn.Linear(4, 4)), torch.ones(0, 4), vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum()
        )
