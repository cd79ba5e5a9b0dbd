"""Describes errors of the step, and handles those of Python code that autograd calls in backward.

An exception in backward would abort the process (signal 6): it would unwind through the C++ code of the autograd
engine, where the device guard of a Python backend calls into Python from a destructor while the exception is still set.
An error of a backward hook is stored, backward continues, and the first error is raised after the step. Backward cannot
continue after an error of a recomputed module (in a hook for saved tensors) or of the backward of a
`torch.autograd.Function`: these are reported at once.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch

from planner.errors import PlannerError, WorkloadError
from planner.recording.storage_table import local_part
from planner.virtual_gpu.source_lines import is_model_code, optimizer_in


class HookErrors:
    """Collects the errors that backward hooks raise during one rehearsal.

    `install` replaces methods of torch's classes, so it must be called in a child process only.

    Args:
        report: function that is called with an error after which backward cannot continue, and that ends the process.
    """

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report
        self._raised: list[Exception] = []

    def raise_first(self) -> None:
        """Raises the error of the hook that failed first; does nothing if no hook failed."""
        if self._raised:
            raise self._raised[0]

    def install(self, model: torch.nn.Module) -> None:
        """Wraps the hooks that the model has, and all hooks that are registered later."""
        of_modules = [hooks for m in model.modules() for hooks in (m._backward_hooks, m._backward_pre_hooks)]
        of_parameters: list[Any] = [
            hooks for p in model.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        ]
        for hooks in (*of_modules, *of_parameters):
            for number, hook in (hooks or {}).items():
                hooks[number] = self._storing_errors(hook)
        for kind, name in (
            (torch.Tensor, "register_hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook"),
            (torch.nn.Module, "register_full_backward_hook"),
            (torch.nn.Module, "register_full_backward_pre_hook"),
        ):
            setattr(kind, name, self._wrapping_hooks(getattr(kind, name)))
        set_hooks = torch.autograd.graph.saved_tensors_hooks.__init__

        @functools.wraps(set_hooks)
        def set_guarded(hooks: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
            set_hooks(hooks, pack_hook, self._reporting_errors(unpack_hook))

        torch.autograd.graph.saved_tensors_hooks.__init__ = set_guarded  # type: ignore[method-assign, assignment]  # a patch
        function = torch.autograd.function.BackwardCFunction
        function.apply = self._reporting_errors(function.apply)  # type: ignore[method-assign]  # a patch

    def _reporting_errors(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reports an exception in backward before it raises it."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:  # whatever the user's code raises
                if torch._C._current_autograd_node() is not None:
                    self._report(error)
                raise

        return guarded

    def _storing_errors(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls the hook, and stores an exception instead of raising it."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:  # raised again outside of autograd, whatever it is
                self._raised.append(error)
                return None

        return guarded

    def _wrapping_hooks(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that wraps a hook and then registers it with `register`, a method of torch."""

        @functools.wraps(register)
        def wrapping(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return register(owner, self._storing_errors(hook), *args, **kwargs)

        return wrapping


def failure(error: BaseException, message: str, model: torch.nn.Module, between: str | None = None) -> str:
    """Returns the message for an error of the training step: what failed, where, and what the user can change.

    Args:
        between: name of the activity between steps that failed; None for the training step.
    """
    running = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    what = "the training step failed with this batch" if between is None else f"'{between}' failed between the steps"
    way_out = "check that it runs without the planner"
    where = _location(error, model)
    if isinstance(error, TypeError) and "positional argument" in message and ".forward()" in message:
        way_out = (
            "if the last item of the batch is the target, give the loss function (loss_fn=), so that the model gets "
            "only the other items"
        )
    if isinstance(error, TypeError) and "unexpected keyword argument" in message and ".forward()" in message:
        way_out = (
            "every item of a dict is passed to the model; leave out what the model does not take. If only the loss "
            "function uses an item, give a tuple of the model's arguments in order and this item last, or let the "
            "model's forward take **kwargs"
        )
    if (optimizer := optimizer_in(running)) is not None:
        name = type(optimizer).__name__
        what = f"the step of the optimizer {name} failed in a rehearsal"
        way_out = f"if {name} runs without the planner, a rehearsal cannot run it: give another optimizer"
        own = [frame for frame in running if is_model_code(frame.f_code.co_filename)]
        if own and own[-1].f_locals.get("closure", running) is None:
            way_out = (
                f"check that {name} steps without a closure outside of the planner; a step that needs one, because it "
                "runs the model again, cannot be planned: give the optimizer that it wraps, or another one"
            )
        if _has_dtensors(model):
            what = f"{name} cannot update parameters that are divided among cards (DTensors)"
            way_out = (
                "choose --sharding zero1 or ddp, with which each card has whole parameters, or give another optimizer"
            )
    elif "mixed torch.Tensor and DTensor" in message:
        way_out = (
            "a parameter that is divided among cards is whole only while the forward of its block runs: call the block "
            "instead of its modules or parameters, or choose --sharding zero1 or ddp"
        )
    if "uniform original parameter dtype" in message or "same dense type" in message:
        way_out = "give all trained parameters one dtype, or choose --sharding ddp"
    if "Expected to have finished reduction" in message:  # the advice of PyTorch follows in lines of their own
        message = "DistributedDataParallel waits for the gradient of a parameter that the loss does not use"
        message += _names_of_unused(str(error), model)
        way_out = "set requires_grad_(False) for the parameters that are not used, or shard the model (fsdp)"
    if any(text in message for text in _TOO_LARGE):
        message = "a tensor would have more than 2**63 - 1 bytes"
        way_out = "give a smaller batch" if between is None else "evaluate smaller batches (--eval-batch-size)"
    if "same device" in message:
        way_out = _ON_HOST
    if "getNewGenerator" in message:
        message = "a rehearsal cannot make a random generator of a card"
        way_out = "for planning, let the step use the default one (torch.manual_seed)"
    if operator := re.search(r"no rule registered for HigherOrderOperator (\w+)", message):
        message = f"a rehearsal cannot run the higher-order operator {operator[1]}"
        way_out = (
            "for planning, write it in Python (`if` in place of torch.cond, a loop in place of scan or while_loop), "
            "and state a value that a condition reads from a tensor with --value"
        )
    if subclass := re.search(r"Creating a new Tensor subclass (\w+) but", message):
        message = f"a rehearsal cannot convert a tensor to the subclass {subclass[1]}"
        way_out = "for planning, use plain tensors"
    for frame in running:
        for part, advice in _WAYS_OUT.items():
            way_out = advice if part in frame.f_code.co_filename else way_out
    return f"{what}: {type(error).__name__}: {message} ({where}): {way_out}"


def _has_dtensors(model: torch.nn.Module) -> bool:
    """True if FSDP2 or tensor parallelism divides a parameter of the model among cards."""
    return any(local_part(parameter) is not parameter for parameter in model.parameters())


_TOO_LARGE = ("Storage size calculation overflowed", "integer multiplication overflow", "Overflow when unpacking long")
"""Parts of PyTorch's messages about sizes that do not fit into 64 bits."""
_MOST_UNUSED_NAMED = 3
"""Maximum number of parameters that a message names."""


def _names_of_unused(message: str, model: torch.nn.Module) -> str:
    """Returns the names of the parameters that DistributedDataParallel counts as unused, after a colon.

    PyTorch's message has only their positions among the trained parameters of the model.
    """
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = [trained[number] for number in map(int, numbers[1].split()) if number < len(trained)] if numbers else []
    if not unused:
        return ""
    more = f" and {len(unused) - _MOST_UNUSED_NAMED} more" if len(unused) > _MOST_UNUSED_NAMED else ""
    named = "', '".join(unused[:_MOST_UNUSED_NAMED])
    return f": '{named}'{more}"


_ON_HOST = (
    "put every module that the step uses, such as a frozen teacher, into the model (with step=..., a dict of modules), "
    "and tensors into the batch or the buffers of a module, or make them in the step on the device of the batch; "
    "if the loss function has tensors, write it as a torch.nn.Module, or move them with .to(output.device)"
)
"""Advice on an op that mixes tensors of the rehearsal with tensors that the rehearsal did not replace."""
_WAYS_OUT = {
    "torch/nn/attention/flex_attention.py": (
        "a rehearsal cannot run FlexAttention, whose kernel torch.compile makes; plan the model with "
        "torch.nn.functional.scaled_dot_product_attention"
    ),
    "torchao/optim/": (
        "a rehearsal cannot run torchao's optimizers, whose update torch.compile makes; plan with 8-bit AdamW of "
        "bitsandbytes (--force 8bit-optimizer), whose state takes nearly as many bytes as torchao's AdamW8bit"
    ),
    "rewrite/rules/checkpoint.py": "if the step runs without the planner, forbid checkpoint",
    "rewrite/portable/replay_tape.py": "if the step runs without the planner, forbid segment-checkpoint",
    "rewrite/rules/offload.py": "if the step runs without the planner, forbid offload",
    "torch/fx/experimental/proxy_tensor.py": (
        "a rehearsal cannot run make_fx, with which torch.func.linearize traces a function; for planning, use "
        "torch.func.jvp"
    ),
    "torch/nested/": "a rehearsal cannot run nested or jagged tensors; plan the model with padded tensors and a mask",
}
"""Advice on errors in these files or in what they call, by a part of the file's path."""


def failure_in_backward(error: Exception, model: torch.nn.Module) -> PlannerError:
    """Returns the error to report for an exception of Python code that autograd called in backward."""
    if isinstance(error, PlannerError):
        return error
    message = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return WorkloadError(
        f"backward failed with this batch: {type(error).__name__}: {message} ({_location(error, model)}). If the step "
        "runs without the planner, the module cannot be recomputed: forbid the technique that recomputes it, such as "
        "checkpoint"
    )


def _location(error: BaseException, model: torch.nn.Module) -> str:
    """Returns text for an error message: the innermost module and the innermost line of model code in a traceback."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = names.get(id(frame.f_locals.get("self")), module)
        if is_model_code(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    return f"in '{module or 'the step'}'" + (f" at {line}" if line else "")
