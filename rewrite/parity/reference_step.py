"""The step as anybody writes it, and what is seen of a training step: the other side of `rewrite.verify`.

Nothing here is shared with `planner.rewrite.step`, which is what is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator
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
    """One optimizer step. `parts` yields the parts of a batch with the weights of their losses."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    calling: Calling
    loss_fn: LossFn | None
    max_grad_norm: float | None
    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    scheduler: LRScheduler | None = None
    parts: Callable[[Any], Iterator[tuple[Any, Any]]] | None = None

    def __call__(self, batch: Any) -> torch.Tensor:
        losses = []
        for part, weight in [(batch, None)] if self.parts is None else self.parts(batch):
            with torch.autocast(
                next(self.model.parameters()).device.type,
                dtype=self.autocast_dtype,
                enabled=self.autocast_dtype is not None,
            ):
                loss = loss_of(self.calling.call(self.model, part), part, self.loss_fn).reshape(())
            if weight is not None and weight == 0:  # no term of it counts: the loss is 0/0
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
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if self.max_grad_norm is not None:
                self._clip()
            self.optimizer.step()
        if self.scheduler and trains:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return functools.reduce(torch.add, losses)

    def _gradients(self) -> list[torch.Tensor]:
        """Whole, or the values of sparse ones."""
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found]

    def _clip(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in trained:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        values = [p.grad.values().detach() if p.grad.is_sparse else p.grad for p in trained]
        total = torch.nn.utils.get_total_norm(values)  # torch's, which adds up by dtype and device
        for value in values:
            value.mul_((self.max_grad_norm / (total + 1e-6)).clamp(max=1.0))


@dataclasses.dataclass(kw_only=True)
class StepTrace:
    """What was seen of some steps; tensors are copies in host memory, by their first name in the model."""

    losses: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Of the first update, as the optimizer was shown them."""
    times: dict[str, int]
    """How often the optimizer was shown a gradient during all steps."""
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    """Parameters."""
    buffers: dict[str, torch.Tensor]
    state: dict[str, object]
    """Of the optimizer, by 'parameter.key', and of a scaler."""
    left: tuple[str, ...]
    """Parameters that have a gradient after the last step."""
    updates: int
    drew: bool
    """Whether the first step drew random numbers."""
    numbers: torch.Tensor
    """State of the generator of random numbers after all steps, which others go on from."""
    kind: type[torch.optim.Optimizer]
    eps: float | None
    """Smallest number that the optimizer adds to what it divides by."""

    def growth(self) -> float:
        """By how much more an update may be off than the gradient it comes from, both relative to the largest."""
        if self.eps is None:
            return 1.0 if self.kind in (torch.optim.SGD, torch.optim.ASGD) else math.inf
        sizes = [gradient.abs().max().item() for gradient in map(torch.Tensor.to_dense, self.gradients.values())]
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
    """Step until there were so many updates, or so many calls: a gradient scaler skips what overflows. Seeded."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    run = StepTrace(
        losses={}, gradients={}, times={}, before=_on_host(model.named_parameters()), after={}, buffers={}, state={},
        left=(), updates=0, drew=False, numbers=torch.empty(0), kind=type(optimizer), eps=_eps(optimizer),
    )  # fmt: skip
    shown: set[str] = set()

    def note(shown_to: torch.optim.Optimizer, *_: object) -> None:
        overflow = getattr(shown_to, "found_inf", None)
        if overflow is not None and overflow.item():
            return
        scale = getattr(shown_to, "grad_scale", None)
        for parameter in (parameter for group in shown_to.param_groups for parameter in group["params"]):
            if parameter.grad is None or parameter not in names:
                continue
            name = names[parameter]
            shown.add(name)
            run.times[name] = run.times.get(name, 0) + 1
            if run.updates == 0:
                gradient = parameter.grad.detach().cpu().clone()
                run.gradients[name] = gradient if scale is None else gradient / scale.cpu()

    device = next(model.parameters()).device
    _seed()
    numbers = _numbers(device)
    hook = optimizer.register_step_pre_hook(note)
    try:
        while run.updates < updates and len(run.losses) < calls:
            shown.clear()
            run.losses[str(len(run.losses) + 1)] = step(batch).detach().cpu().clone()
            run.drew |= len(run.losses) == 1 and not torch.equal(numbers, _numbers(device))
            run.updates += bool(shown)
    finally:
        hook.remove()
    run.after, run.buffers = _on_host(model.named_parameters()), _on_host(model.named_buffers())
    run.numbers = _host(_numbers(device))
    run.left = tuple(name for parameter, name in names.items() if parameter.grad is not None)
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
    found = [group.get("eps") for group in optimizer.param_groups]
    return min(found) if all(isinstance(eps, float) and eps > 0 for eps in found) else None


def _on_host(named) -> dict[str, torch.Tensor]:
    return {name: _host(tensor) for name, tensor in named}


def _host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _numbers(device: torch.device) -> torch.Tensor:
    """State of the generator that random numbers on this device come from."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """After it, random numbers of torch, Python and numpy go on as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    before, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    kept = torch.random.fork_rng() if device.type == "cpu" else torch.random.fork_rng(device_type=device.type)
    try:
        with kept:
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Without kernels that add up in another order each time; torch warns where it has no other."""
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
    """Without dropout, whose masks depend on how a batch is split, and in double where a model asks for float.

    Without dropout, numbers that a model draws by itself are all the same: they would be others for another split.
    What is made as float from nothing stays so, such as an optimizer's step numbers, which kernels want as float.
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
            with self:  # it would run without this mode, and the forwards that run again in it too
                one = (torch.ones_like(args[0]),)
                return _engine_run_backward(args, one, False, False, (), allow_unreachable=True, accumulate_grad=True)
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
        """Drawn all the same: whether there are random numbers to go on from must not change."""
        drawn, value = function(*args, **kwargs), 0.5
        if "bernoulli" in function.__name__:
            value = 1.0
        elif function is torch.Tensor.uniform_:
            ends = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
            value = (ends.get("from", 0.0) + ends.get("to", 1.0)) / 2
        drawn.detach().fill_(value)
        return drawn


class Narrowing(TorchDispatchMode):
    """Finds the lowest precision that numbers in double are rounded to on their way."""

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
