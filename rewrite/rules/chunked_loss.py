"""Chunked loss: compute the logits of a language-model head and their cross entropy for a few rows (tokens) at a time.

With a large vocabulary the logits and their gradient are often the largest tensors of the step. In training the head
returns an object of class `Logits`, which holds the hidden states instead of the logits. When `F.cross_entropy` is
called on it, `ChunkedCrossEntropy` loops over chunks of rows. For each chunk it

1. computes logits = hidden W^T + b, and adds their negative log likelihood to the loss;
2. computes the gradient of the logits, softmax(logits) - onehot(label);
3. computes from it the gradients of the hidden states, the weight and the bias.

Backward multiplies these gradients by the gradient of the loss, so nothing is recomputed. At most one chunk of logits
exists at a time (Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024).

Exactness: the loss and the gradients of weight and bias are sums over chunks, accumulated in fp32 (or fp64). They only
differ from those without chunks by the order of the additions. The gradient of the logits is computed before the
gradient scaler's factor is known. So with fp16, `half_precision_scale` chooses a factor that keeps it in range.

Limits: the head must be a plain `torch.nn.Linear`, and the loss a mean or sum of cross entropy with one label per row.
Any other op on the logits would need all of them, and raises an error that names the op. In evaluation, and if
gradients are disabled, the head returns ordinary logits. A second backward over the same graph raises an error, because
the gradients are freed after the first one.
"""

from __future__ import annotations

import inspect
import math
import types

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from planner.errors import DecisionError
from planner.plan_types.decisions import ChunkedLoss
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.rewriting import Rewriting
from planner.workload.module_hooks import has_backward_hooks


def chunked_loss(rewriting: Rewriting, decision: ChunkedLoss) -> None:
    """Make the language-model head that the plan names return `Logits` in training.

    Raises:
        DecisionError: if the head is not a plain `torch.nn.Linear`, or has backward hooks.
    """
    head = rewriting.module(decision.module, decision.kind)
    if type(head) is not torch.nn.Linear:
        raise DecisionError(
            f"{decision.kind} cannot be applied to '{decision.module}', a {type(head).__name__}: the head must be a "
            f"torch.nn.Linear; use one, or forbid {decision.kind}"
        )
    if has_backward_hooks(head):
        raise DecisionError(
            f"{decision.kind} cannot be applied to '{decision.module}', because its backward hooks need the gradient "
            f"of all logits, which is never computed at once: remove the hooks, or forbid {decision.kind}"
        )
    forward = types.MethodType(logits_in_chunks(decision.chunks), head)
    rewriting.chunked_head = head
    rewriting.replace(head, "forward", forward, place=f"forward of '{decision.module}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def logits_in_chunks(chunks):
    """Return a forward for a linear layer. In training it returns `Logits`, which only cross entropy can use.

    In evaluation, and if gradients are disabled, it returns an ordinary tensor.
    """

    def forward(self, hidden):
        if not (self.training and torch.is_grad_enabled()):
            return F.linear(hidden, self.weight, self.bias)
        return Logits(hidden, self.weight, self.bias, chunks, compute_dtype(hidden))

    return forward


def compute_dtype(hidden):
    """Return the dtype of a linear layer's output for `hidden`, taking autocast into account."""
    kind = hidden.device.type
    casts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else hidden.dtype


class Logits:
    """The output of a linear layer, whose values are not computed yet. Cross entropy computes them in chunks of rows.

    It has the shape, dtype and device of the logits. It can be sliced and reshaped, which slices and reshapes the
    hidden states, and cast to fp32, which happens when the values are computed. Everything else that needs the values
    raises an error. `whole()` computes all of them.
    """

    def __init__(self, hidden, weight, bias, chunks, dtype, upcast=False):
        self.hidden, self.weight, self.bias, self.chunks = hidden, weight, bias, chunks
        self.layer_dtype, self.upcast = dtype, upcast

    def _with(self, hidden, upcast=False):
        return Logits(hidden, self.weight, self.bias, self.chunks, self.layer_dtype, self.upcast or upcast)

    def whole(self):
        """Return all logits as an ordinary tensor."""
        weight, bias = self.weight.to(self.layer_dtype), None if self.bias is None else self.bias.to(self.layer_dtype)
        with torch.autocast(self.device.type, enabled=False):
            logits = F.linear(self.hidden.to(self.layer_dtype), weight, bias)
        return logits.float() if self.upcast else logits

    @property
    def shape(self):
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def ndim(self):
        return self.hidden.ndim

    @property
    def device(self):
        return self.hidden.device

    @property
    def dtype(self):
        return torch.float32 if self.upcast else self.layer_dtype

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.ndim

    def float(self):
        return self._with(self.hidden, upcast=True)

    def to(self, *args, **kwargs):
        result = self
        for value in (*args, *kwargs.values()):
            if value == torch.float32:
                result = result.float()
            elif value != self.device and value != self.dtype and not isinstance(value, bool):
                refuse(f"to({value})")
        return result

    def contiguous(self):
        return self

    def view(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if -1 in shape:
            known = math.prod(size for size in shape if size != -1)
            shape = tuple(math.prod(self.shape) // known if size == -1 else size for size in shape)
        if not shape or shape[-1] != self.shape[-1]:
            refuse(f"view{shape}")  # a view of the hidden states exists only if the last dimension is unchanged
        return self._with(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim=0, end_dim=-1):
        end = end_dim % self.ndim
        return self.view(*self.shape[:start_dim], -1, *self.shape[end + 1 :])

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)  # for example [..., :-1, :], to shift the labels
        plain = all(part is Ellipsis or isinstance(part, (slice, int)) for part in parts)
        reaches_last = len(parts) == self.ndim or any(part is Ellipsis for part in parts)
        if not plain or (reaches_last and parts[-1] != slice(None)):
            refuse(f"[{index}]")
        return self._with(self.hidden[index])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(name)

    def __eq__(self, other):
        refuse("==")

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.cross_entropy:
            refuse(getattr(function, "__name__", function))
        return chunked_cross_entropy(*args, **(kwargs or {}))


def refuse(what):
    raise AttributeError(
        f"the loss is computed in chunks of logits, but {what} needs all logits or changes them: "
        "call logits.whole() to compute them all, or plan again with chunked-loss forbidden"
    )


def chunked_cross_entropy(
    logits,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """Return the loss for a call of `F.cross_entropy` on `Logits`. The arguments are those of `F.cross_entropy`.

    The logits must have two dimensions, and the target one label per row. Class weights, label smoothing and
    reduction='none' raise an error.
    """
    if not isinstance(logits, Logits) or logits.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        refuse("a cross entropy that is not over rows with one label each")
    if not (weight is size_average is reduce is None) or reduction not in ("mean", "sum") or label_smoothing != 0.0:
        refuse("a cross entropy with class weights, label smoothing, or reduction='none'")
    inputs = (logits.hidden, logits.weight, logits.bias, target.long())
    loss = ChunkedCrossEntropy.apply(*inputs, logits.chunks, logits.layer_dtype, ignore_index, reduction == "mean")
    return loss if torch.is_autocast_enabled(target.device.type) else loss.to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """A linear layer and the cross entropy of its output. The forward also computes all gradients, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, chunks, dtype, ignore_index, mean):
        wanted = ctx.needs_input_grad[:3]
        exact = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if wanted[2] else None
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for number, (rows, labels) in enumerate(zip(hidden.chunk(chunks), target.chunk(chunks), strict=True)):
                rows, counted = rows.to(dtype), (labels != ignore_index).unsqueeze(1)
                log_probabilities = F.linear(rows, weight, bias).to(exact).log_softmax(1)
                total += F.nll_loss(log_probabilities, labels, ignore_index=ignore_index, reduction="sum")
                if not any(wanted):
                    continue
                # Gradient of the logits, in place: softmax(logits) - onehot(label). Rows whose label is ignored are
                # given label 0 here, and multiplied by `counted`, 0, in the products below.
                gradient = log_probabilities.exp_()
                at_label = labels.where(counted.squeeze(1), 0).unsqueeze(1)
                gradient.scatter_(1, at_label, gradient.gather(1, at_label) - 1)
                del log_probabilities
                # Gradients of hidden states, weight and bias: products with `gradient` in the dtype of the layer.
                scale = half_precision_scale(rows, weight) if dtype == torch.float16 else None
                gradient = (gradient if scale is None else gradient.mul_(scale)).to(dtype)
                if hidden_grad is not None:
                    hidden_grad.chunk(chunks)[number].copy_(unscaled((gradient @ weight) * counted, scale))
                if weight_grad is not None:
                    weight_grad += unscaled(gradient.t() @ (rows * counted), scale)
                if bias_grad is not None:
                    bias_grad += unscaled((counted.to(dtype).t() @ gradient)[0], scale)
                del gradient
        ctx.gradients = (hidden_grad, weight_grad, bias_grad)
        ctx.terms, ctx.mean = (target != ignore_index).sum(), mean
        return total / ctx.terms if mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx, share):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran twice on a chunked loss, whose gradients can be used once: run the forward again before "
                "each backward"
            )
        gradients, ctx.gradients = ctx.gradients, None
        # If all labels are ignored, the gradient is 0, as in `F.cross_entropy`, and not 0/0.
        share = torch.where(ctx.terms == 0, 0.0, share / ctx.terms if ctx.mean else share)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if grad is None else grad.mul_(share).to(dtype) for grad, dtype in pairs), *[None] * 5


def half_precision_scale(rows, weight):
    """Return the factor that the gradient of the logits is multiplied by before its products in fp16.

    It makes small probabilities larger, which would underflow, and large sums over rows smaller, which would overflow.
    It is the largest factor, up to 1024, for which no product exceeds 16384, a quarter of the largest fp16 number.
    """
    largest = torch.maximum(len(rows) * rows.abs().amax().float(), 2 * weight.abs().amax().float())
    return (16384 / largest).clamp(max=1024)


def unscaled(product, scale):
    return product if scale is None else product.float() / scale


def chunked_loss_source(plan: Plan, decision: ChunkedLoss) -> EmittedCode:
    """Return the code that does the same as `chunked_loss` in an emitted file."""
    parts = (
        logits_in_chunks,
        compute_dtype,
        Logits,
        refuse,
        chunked_cross_entropy,
        ChunkedCrossEntropy,
        half_precision_scale,
        unscaled,
    )
    rewriting = """\
head = model.get_submodule(HEAD)
head.forward = types.MethodType(logits_in_chunks(CHUNKS), head)
"""
    return EmittedCode(
        imports=(
            "import math",
            "import types",
            "import torch.nn.functional as F",
            "from torch.autograd.function import once_differentiable",
        ),
        constants=(assignment("HEAD", decision.module), assignment("CHUNKS", decision.chunks)),
        functions=tuple(inspect.getsource(part) for part in parts),
        rewriting=(rewriting,),
    )
