"""Chunked loss: the logits of a language model's head exist for a few rows at a time, never all at once.

The head returns `Logits`, which cross entropy takes in chunks of rows; the gradients of hidden states and weights are
computed along the way, so that nothing is recomputed in backward (Hsu et al., Liger Kernel: Efficient Triton Kernels
for LLM Training, 2024). The gradient of the weights is the sum over chunks: only the order of a sum differs.

Whatever else is done with the logits computes them whole, as before.
"""

from __future__ import annotations

import inspect
import types

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from planner.decisions import ChunkedLoss
from planner.errors import DecisionError
from planner.plan_file import Plan
from rewrite.fragment import Fragment, assignment
from rewrite.rewriting import Rewriting


def chunked_loss(rewriting: Rewriting, decision: ChunkedLoss) -> None:
    """Let the named head, a `torch.nn.Linear`, return `Logits`. Raises `DecisionError` for any other module."""
    head = rewriting.module(decision.module, decision.kind)
    if type(head) is not torch.nn.Linear:
        raise DecisionError(
            f"{decision.kind} names '{decision.module}', a {type(head).__name__}: the head must be a torch.nn.Linear"
        )
    forward = types.MethodType(logits_in_chunks(decision.chunks), head)
    rewriting.replace(head, "forward", forward, place=f"forward of '{decision.module}'")


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def logits_in_chunks(chunks):
    """A forward for a linear layer whose output is only wanted by cross entropy."""

    def forward(self, hidden):
        return Logits(hidden, self.weight, self.bias, chunks)

    return forward


def on_whole(name):
    def operator(self, *others):
        return getattr(self.whole(), name)(*others)

    return operator


class Logits:
    """What a linear layer returns, before it is computed: cross entropy takes it by rows, all else takes it whole."""

    def __init__(self, hidden, weight, bias, chunks, upcast=False):
        self.hidden, self.weight, self.bias, self.chunks, self.upcast = hidden, weight, bias, chunks, upcast

    def whole(self):
        """The logits as a tensor."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        return logits.float() if self.upcast else logits

    def _of(self, hidden, upcast=False):
        return Logits(hidden, self.weight, self.bias, self.chunks, self.upcast or upcast)

    @property
    def shape(self):
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self):
        return self.hidden.device

    @property
    def dtype(self):
        return torch.float32 if self.upcast else compute_dtype(self.hidden)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.hidden.dim()

    def float(self):
        return self._of(self.hidden, upcast=True)

    def contiguous(self):
        return self

    def view(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not shape or shape[-1] != self.shape[-1]:
            return self.whole().reshape(shape)
        return self._of(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is Ellipsis or isinstance(part, (slice, int)) for part in parts)
        reaches_last = len(parts) == self.dim() or any(part is Ellipsis for part in parts)
        if plain and (not reaches_last or parts[-1] == slice(None)):
            return self._of(self.hidden[index])
        return self.whole()[index]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    __add__, __radd__, __sub__, __rsub__ = map(on_whole, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __mul__, __rmul__, __truediv__, __neg__ = map(on_whole, ("__mul__", "__rmul__", "__truediv__", "__neg__"))
    __matmul__, __len__, __iter__ = map(on_whole, ("__matmul__", "__len__", "__iter__"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.cross_entropy and can_be_chunked(*args, **kwargs):
            return chunked_cross_entropy(*args, **kwargs)
        return function(*as_tensors(args), **as_tensors(kwargs))


def as_tensors(value):
    if isinstance(value, Logits):
        return value.whole()
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    return type(value)(map(as_tensors, value)) if type(value) in (tuple, list) else value


def compute_dtype(hidden):
    """In which a linear layer would compute."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def can_be_chunked(logits, target, weight=None, *_, reduction="mean", label_smoothing=0.0, **__):
    return (
        isinstance(logits, Logits)
        and logits.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
        and weight is None
        and reduction in ("mean", "sum")
        and label_smoothing == 0.0
    )


def chunked_cross_entropy(logits, target, weight=None, *_, ignore_index=-100, reduction="mean", **__):
    inputs = (logits.hidden, logits.weight, logits.bias)
    if not torch.is_grad_enabled():
        inputs = tuple(None if tensor is None else tensor.detach() for tensor in inputs)
    loss = SummedCrossEntropy.apply(*inputs, target, logits.chunks, ignore_index)
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss if torch.is_autocast_enabled(target.device.type) else loss.to(logits.dtype)


class SummedCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear layer's output, summed over rows; its gradients are made along the way."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, chunks, ignore_index):
        dtype, wanted = compute_dtype(hidden), ctx.needs_input_grad[:3]
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
                gradient = log_probabilities.exp_()  # of the logits: the probabilities, less one at the label
                at_label = labels.where(counted.squeeze(1), 0).unsqueeze(1)
                gradient.scatter_(1, at_label, gradient.gather(1, at_label) - 1)
                del log_probabilities
                gradient = gradient.to(dtype)
                if wanted[0]:
                    hidden_grad.chunk(chunks)[number].copy_((gradient @ weight) * counted)
                if wanted[1]:
                    weight_grad += gradient.t() @ (rows * counted)
                if wanted[2]:
                    bias_grad += (counted.to(dtype).t() @ gradient)[0]
                del gradient
        ctx.gradients = (hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, share):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked loss are used up: run its forward again")
        gradients, ctx.gradients = ctx.gradients, None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if grad is None else grad.mul_(share).to(dtype) for grad, dtype in pairs), None, None, None


def chunked_loss_source(plan: Plan, decision: ChunkedLoss) -> Fragment:
    parts = (
        logits_in_chunks,
        on_whole,
        Logits,
        as_tensors,
        compute_dtype,
        can_be_chunked,
        chunked_cross_entropy,
        SummedCrossEntropy,
    )
    rewriting = """\
head = model.get_submodule(HEAD)
head.forward = types.MethodType(logits_in_chunks(CHUNKS), head)
"""
    return Fragment(
        imports=(
            "import types",
            "import torch.nn.functional as F",
            "from torch.autograd.function import once_differentiable",
        ),
        constants=(assignment("HEAD", decision.module), assignment("CHUNKS", decision.chunks)),
        functions=tuple(inspect.getsource(part) for part in parts),
        rewriting=(rewriting,),
    )
