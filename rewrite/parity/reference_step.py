"""The reference for `rewrite.verify`: a plain training step, and a record of the results of training steps.

`ReferenceStep` shares no code with `planner.rewrite.step`, the code under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.workload.call_convention import Calling, LossFn, loss_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One optimizer step of a plain training loop.

    Its options (autocast, a gradient scaler, micro-batches, clipping) change rounding or the order of sums. With the
    same options as a plan, its results can be compared with those of the plan bit by bit.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    calling: Calling
    loss_fn: LossFn | None
    max_grad_norm: float | None
    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    scheduler: LRScheduler | None = None
    parts: Callable[[Any], Iterator[tuple[Any, Any]]] | None = None
    """Yields the micro-batches of a batch with the weights of their losses; None if the batch is not split."""

    def __call__(self, batch: Any) -> torch.Tensor:
        losses = []
        for part, weight in [(batch, None)] if self.parts is None else self.parts(batch):
            with torch.autocast(
                next(self.model.parameters()).device.type,
                dtype=self.autocast_dtype,
                enabled=self.autocast_dtype is not None,
            ):
                loss = loss_of(self.calling.call(self.model, part), part, self.loss_fn).reshape(())
            if weight is not None and weight == 0:  # no term counts, and the loss is 0/0
                losses.append(torch.zeros_like(loss))
                continue
            if weight is not None:
                loss = loss * (weight.to(loss.dtype) if isinstance(weight, torch.Tensor) else weight)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(loss.detach())
        trains = self.scaler is None or all(torch.isfinite(gradient).all() for gradient in self._gradients())
        if self.scaler:
            if self.max_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip(self.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if self.max_grad_norm is not None:
                self._clip(self.max_grad_norm)
            self.optimizer.step()
        if self.scheduler and trains:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return functools.reduce(torch.add, losses)

    def _gradients(self) -> list[torch.Tensor]:
        """Return all gradients; for a sparse gradient, the tensor of its values."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]

    def _clip(self, max_norm: float) -> None:
        """Clip gradients by their global norm. Unlike `clip_grad_norm_`, this supports sparse gradients."""
        for parameter in self.model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        values = [gradient.values().detach() if gradient.is_sparse else gradient for gradient in gradients]
        total = torch.nn.utils.get_total_norm(values)  # adds up by device and dtype: the same order as clip_grad_norm_
        for value in values:
            value.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))


@dataclasses.dataclass(kw_only=True)
class StepTrace:
    """The results of some training steps. Tensors are copies in host memory, by their first name in the model."""

    losses: dict[str, torch.Tensor]
    """Number of the step, from '1' -> its loss."""
    gradients: dict[str, torch.Tensor]
    """Gradients of the first update, as the optimizer received them."""
    gradient_counts: dict[str, int]
    """For each parameter, the number of updates in which the optimizer received a gradient for it."""
    before: dict[str, torch.Tensor]
    """Parameters before the first step."""
    after: dict[str, torch.Tensor]
    """Parameters after the last step."""
    buffers: dict[str, torch.Tensor]
    """Buffers after the last step."""
    state: dict[str, Any]
    """State of the optimizer, by 'parameter.key', and of the gradient scaler, after the last step."""
    leftover_gradients: tuple[str, ...]
    """Names of the parameters that still have a gradient after the last step."""
    updates: int
    """Number of steps that updated at least one parameter."""
    drew_random_numbers: bool
    """True if the first step drew random numbers."""
    rng_state: torch.Tensor
    """State of the random number generator after the last step."""
    optimizer_type: type[torch.optim.Optimizer]
    eps: float | None
    """Smallest `eps` of the parameter groups (a number that is added to a divisor); None if a group has no `eps`."""

    def growth(self) -> float:
        """Return the factor by which the relative error of an update can exceed the relative error of its gradient.

        Adam and its relatives divide by the size of the gradient plus eps: if a gradient vanishes, its rounding error
        is divided by eps. For an optimizer without eps, the factor is 1 if it is SGD, which does not divide, and else
        infinite, because nothing is known of it.
        """
        if self.eps is None:
            return 1.0 if self.optimizer_type in (torch.optim.SGD, torch.optim.ASGD) else math.inf
        dense = [gradient.to_dense() for gradient in self.gradients.values()]
        sizes = [gradient.abs().max().item() for gradient in dense if gradient.numel()]
        return max(1.0, max(sizes, default=0.0) / self.eps)


def trace_steps(
    step: Callable[[Any], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    updates: int,
    calls: int,
    scaler: torch.amp.GradScaler | None = None,
) -> StepTrace:
    """Run steps with seeded random numbers, and return a record of their results.

    Args:
        updates: number of updates after which to stop.
        calls: maximum number of calls of `step`. It may exceed `updates`, because a gradient scaler skips updates whose
            gradients overflow.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    run = StepTrace(
        losses={}, gradients={}, gradient_counts={}, before=_on_host(model.named_parameters()), after={}, buffers={},
        state={}, leftover_gradients=(), updates=0, drew_random_numbers=False, rng_state=torch.empty(0),
        optimizer_type=type(optimizer), eps=_eps(optimizer),
    )  # fmt: skip
    updated: set[str] = set()  # parameters that the running step has updated

    def note(stepping: torch.optim.Optimizer, *_: object) -> None:
        """Record the gradients that the optimizer is about to use. A step in backward calls this for each parameter."""
        # A fused optimizer unscales gradients in its kernel, and skips the update if a gradient is not finite.
        overflow = getattr(stepping, "found_inf", None)
        if overflow is not None and overflow.item():
            return
        scale = getattr(stepping, "grad_scale", None)
        for parameter in (parameter for group in stepping.param_groups for parameter in group["params"]):
            if parameter.grad is None or parameter not in names:
                continue
            name = names[parameter]
            updated.add(name)
            run.gradient_counts[name] = run.gradient_counts.get(name, 0) + 1
            if run.updates == 0:
                gradient = parameter.grad.detach().cpu().clone()
                run.gradients[name] = gradient if scale is None else gradient / scale.cpu()

    device = next(model.parameters()).device
    _seed()
    rng_state = _rng_state(device)
    hook = optimizer.register_step_pre_hook(note)
    try:
        while run.updates < updates and len(run.losses) < calls:
            updated.clear()
            run.losses[str(len(run.losses) + 1)] = step(batch).detach().cpu().clone()
            run.drew_random_numbers |= len(run.losses) == 1 and not torch.equal(rng_state, _rng_state(device))
            run.updates += bool(updated)
    finally:
        hook.remove()
    # What is left after the last step.
    run.after, run.buffers = _on_host(model.named_parameters()), _on_host(model.named_buffers())
    run.rng_state = _host(_rng_state(device))
    run.leftover_gradients = tuple(name for parameter, name in names.items() if parameter.grad is not None)
    for parameter, state in optimizer.state.items():
        name = names.get(parameter, "?")
        tensors = {f"{name}.{key}": value for key, value in state.items()}
        run.state |= {
            key: _host(value) for key, value in tensors.items() if isinstance(value, (torch.Tensor, float, int))
        }
    for number, group in enumerate(optimizer.param_groups):
        run.state[f"group {number}.lr"] = float(group["lr"])
    if scaler is not None:
        run.state |= {f"scaler.{key}": value for key, value in scaler.state_dict().items()}
    return run


def _eps(optimizer: torch.optim.Optimizer) -> float | None:
    values = [group.get("eps") for group in optimizer.param_groups]
    positive = [eps for eps in values if isinstance(eps, float) and eps > 0]
    return min(positive) if len(positive) == len(values) else None


def _on_host(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: _host(tensor) for name, tensor in named}


def _host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's random number generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state of torch, Python and numpy on exit."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    torch_state_kept = (
        torch.random.fork_rng() if device.type == "cpu" else torch.random.fork_rng(device_type=device.type)
    )
    try:
        with torch_state_kept:
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels inside the context. torch warns about ops that have none.

    On the CPU nothing is changed, because the kernels are deterministic anyway.
    """
    if device.type == "cpu":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn = torch.backends.cudnn
    try:
        with cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


class Comparable(TorchFunctionMode):
    """Mode for steps that are compared although their batches are split differently, or that run in double.

    Args:
        dropout: False to switch dropout off, because its masks depend on how a batch is split. All other random numbers
            are then replaced by a constant, for the same reason.
        double: True to turn casts of double tensors to float32 into casts to double. A tensor that is created as
            float32 stays so: for example the step counters of an optimizer, which kernels require as float32.
    """

    _DROPOUTS = (
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        F.multi_head_attention_forward,
    )  # fmt: skip

    _DRAWS = (
        torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.normal, torch.bernoulli,
        torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.bernoulli_, torch.Tensor.bernoulli,
    )  # fmt: skip

    def __init__(self, *, dropout: bool, double: bool) -> None:
        super().__init__()
        self.dropout, self.double = dropout, double

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.backward and all(value in (None, False) for value in kwargs.values()):
            # loss.backward() would run with this mode off, and so would the forwards that it recomputes. Therefore call
            # autograd's engine, as loss.backward() does, with the mode on.
            with self:
                one = (torch.ones_like(args[0]),)
                return _engine_run_backward(args, one, False, False, (), allow_unreachable=True, accumulate_grad=True)
        # Classes with their own __torch_function__, such as the logits of a chunked loss, come first.
        for value in args:
            if not isinstance(value, torch.Tensor) and hasattr(type(value), "__torch_function__"):
                with self:
                    return type(value).__torch_function__(function, types, args, kwargs)
        if not self.dropout:
            args, kwargs = self._without_dropout(function, args, kwargs)
            if function in self._DRAWS:
                return self._same_number(function, args, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if self.double and any(t.dtype is torch.float64 or not t.is_floating_point() for t in tensors):
            function = torch.Tensor.double if function is torch.Tensor.float else function
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)

    def _without_dropout(self, function, args, kwargs):
        if function in self._DROPOUTS:
            kwargs["training"] = False
        elif function is torch.dropout:
            args, kwargs = (args[0] if args else kwargs["input"],), {"p": 0.0, "train": False}
        elif function is F.scaled_dot_product_attention:
            kwargs = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
            args, kwargs["dropout_p"] = (), 0.0
        return args, kwargs

    def _same_number(self, function, args, kwargs):
        """Draw random numbers, so that the generator advances as usual, and overwrite all of them with one number."""
        drawn, value = function(*args, **kwargs), 0.5
        if "bernoulli" in function.__name__:
            value = 1.0
        elif function is torch.Tensor.uniform_:
            ends = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
            value = (ends.get("from", 0.0) + ends.get("to", 1.0)) / 2
        drawn.detach().fill_(value)
        return drawn


class Narrowing(TorchDispatchMode):
    """Finds the lowest precision to which an op rounds double tensors. `eps` is the eps of this precision."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64 for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return result
