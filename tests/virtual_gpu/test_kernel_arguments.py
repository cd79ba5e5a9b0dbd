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
    aten._native_batch_norm_legit.default: (R(2, 4, 8), R(4), R(4), R(4), R(4), True, 0.1, 1e-5),
    aten._batch_norm_with_update.default: (R(2, 4, 8), R(4), R(4), R(4), R(4), 0.1, 1e-5),
    aten.addmm_.default: (R(4, 4), R(4, 4), R(4, 4)),
    aten.addbmm_.default: (R(4, 4), R(2, 4, 4), R(2, 4, 4)),
    aten.baddbmm_.default: (R(2, 4, 4), R(2, 4, 4), R(2, 4, 4)),
    aten.put.default: (R(4), ZEROS, R(4)),
    aten.put_.default: (R(4), ZEROS, R(4)),
    aten.index_reduce.default: (R(4, 4), 0, ZEROS, R(4, 4), "mean"),
    aten.index_reduce_.default: (R(4, 4), 0, ZEROS, R(4, 4), "mean"),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar), (R(4), 0, ZEROS, 1.0)),
    **dict.fromkeys((aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor), (R(4), 0, ZEROS, R(()))),
    **dict.fromkeys((aten.ceil.default, aten.floor.default, aten.trunc.default), (R(4),)),
    **dict.fromkeys((aten.ceil_.default, aten.floor_.default, aten.trunc_.default), (R(4),)),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.median.default, aten.nanmedian.default), (R(4),)),
    **dict.fromkeys((aten.median.dim, aten.nanmedian.dim), (R(4), 0)),
    **dict.fromkeys((aten.threshold.default, aten.threshold_.default), (R(4), 0.5, 0.0)),
    aten.topk.default: (R(4), 2),
    **dict.fromkeys((aten.avg_pool2d.default, aten.max_pool2d_with_indices.default), (R(1, 1, 4, 4), [2, 2])),
    **dict.fromkeys((aten.avg_pool3d.default, aten.max_pool3d_with_indices.default), (R(1, 1, 4, 4, 4), [2, 2, 2])),
    aten.masked_fill_.Scalar: (R(4), ZEROS.bool(), 1.0),
    aten.masked_fill_.Tensor: (R(4), ZEROS.bool(), R(())),
    **dict.fromkeys((aten.mul_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor), (R(4), R(4))),
    **dict.fromkeys((aten.complex.default, aten.polar.default, aten.heaviside.default), (R(4), R(4))),
    **dict.fromkeys((aten.addcmul_.default, aten.addcdiv_.default), (R(4), R(4), R(4))),
    **dict.fromkeys((aten.sub.Scalar, aten.rsub.Scalar), (R(4), 1)),
    aten._cdist_forward.default: (R(4, 4), R(4, 4), 2.0, None),
    aten.linalg_cross.default: (R(4, 3), R(4, 3)),
    aten.grid_sampler_3d.default: (R(1, 1, 4, 4, 4), R(1, 4, 4, 4, 3), 0, 0, False),
    aten._adaptive_avg_pool3d.default: (R(1, 1, 4, 4, 4), [2, 2, 2]),
    aten.adaptive_max_pool2d.default: (R(1, 1, 4, 4), [2, 2]),
    aten.adaptive_max_pool3d.default: (R(1, 1, 4, 4, 4), [2, 2, 2]),
    aten.fractional_max_pool2d.default: (R(1, 1, 4, 4), [2, 2], [2, 2], R(1, 1, 2)),
    aten.max_unpool2d.default: (R(1, 1, 2, 2), torch.arange(4).reshape(1, 1, 2, 2), [4, 4]),
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default), (R(4), R(4))),
    aten.multi_margin_loss.default: (R(4, 4), ZEROS),
    aten.multilabel_margin_loss_forward.default: (R(4, 4), torch.zeros(4, 4).long(), 1),
    aten.binary_cross_entropy_with_logits.default: (R(4), R(4)),
    aten.logcumsumexp.default: (R(4, 4), 0),
    aten.multinomial.default: (R(4, 4), 2),
    aten._safe_softmax.default: (R(4, 4), 1),
}
DTYPES = (torch.float64, torch.float16, torch.int64, torch.bool)
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
                with pytest.raises((RuntimeError, NotImplementedError, IndexError)):
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


class InPlace(nn.Linear):
    def forward(self, x):
        counts = torch.ones(4, device=x.device, dtype=torch.long)
        return super().forward(x) + counts.mul_(x[0].detach())


class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 - (x > 0))


@pytest.mark.parametrize(
    ("model", "message"), [(InPlace(4, 4), "would write a result of float32"), (Masked(4, 4), "does not take bool")]
)
def test_arithmetic_that_pytorch_refuses_is_no_plan(model, message):
    with pytest.raises(RuntimeError):
        model(torch.ones(8, 4))
    with pytest.raises(WorkloadError, match=message):
        planner.plan(model, torch.ones(8, 4), vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum())


def test_half_precision_may_be_normalized_with_parameters_in_single_precision():
    half = R(2, 4, 8).half()
    refuse_arguments(aten.native_batch_norm.default, (half, R(4), R(4), R(4), R(4), True, 0.1, 1e-5))
    refuse_arguments(aten.mul_.Tensor, (half, R(())))
    refuse_arguments(aten.mul_.Tensor, (half, R(2, 4, 8)))
    refuse_arguments(aten.index_put.default, (half, [None, torch.ones(4).bool()], half))


def test_a_batch_without_samples_is_refused():
    with pytest.raises(WorkloadError, match="the batch has no samples"):
        planner.plan(
            Net(nn.Linear(4, 4)), torch.ones(0, 4), vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum()
        )


def test_parameters_of_a_batch_norm_have_the_dtype_of_its_running_statistics():
    norm, whole, half = torch.ops.aten.native_batch_norm.default, R(4), R(4).bfloat16()
    inputs = R(2, 4, 8).bfloat16()
    refuse_arguments(norm, (inputs, whole, whole, whole, whole, True, 0.1, 1e-5))
    refuse_arguments(norm, (inputs, half, half, half, half, True, 0.1, 1e-5))
    refuse_arguments(norm, (inputs, half, half, None, None, True, 0.1, 1e-5))
    with pytest.raises(RuntimeError, match="tensors of one dtype"):
        refuse_arguments(norm, (inputs, half, half, whole, whole, True, 0.1, 1e-5))
