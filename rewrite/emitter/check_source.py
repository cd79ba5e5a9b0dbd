"""Write `check`, the function of an emitted file that compares a step by the plan with a plain step."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import WIDTH, EmittedCode
from planner.rewrite.portable.batch_slicing import map_tensors
from planner.rewrite.portable.plain_comparison import (
    Rounding,
    compare,
    compare_updates,
    in_single,
    largest,
    result_of,
    without_dropout,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSource:
    """The parts of an emitted file that compare a step by the plan with a plain step."""

    imports: tuple[str, ...]
    functions: tuple[str, ...]
    """Sources of functions; the last is `check`."""


def check_source(plan: Plan, fragments: list[EmittedCode], loss: str, clipped: str | None) -> CheckSource:
    """Return the source of `check` and of the functions that it calls.

    Args:
        plan: the plan.
        fragments: the code that the plan's decisions contribute to the file.
        loss: expression that computes the loss of `batch` with `model`.
        clipped: expression that clips the gradients of `model` to `max_grad_norm`; None if the step clips nothing.
    """
    is_split = any(fragment.split for fragment in fragments)
    is_scaled = any(fragment.scaled for fragment in fragments)
    is_quantized = plan.model.adapter is not None and plan.model.adapter.is_quantized
    has_8_bit_state = any(fragment.optimizer for fragment in fragments)
    has_floats = any("float" in dtype for _, _, dtype in plan.workload.batch)
    replaces_forwards = any(".forward = " in text for fragment in fragments for text in fragment.rewriting)
    named = [
        *(["scaler=scaler"] if is_scaled else []),
        *(["loss_fn=loss_fn"] if plan.workload.has_loss_fn else []),
        *(["max_grad_norm=max_grad_norm"] if clipped else []),
        "**options",
    ]
    statements = [
        _docstring(is_cast=any(fragment.autocast for fragment in fragments), is_split=is_split),
        _REFUSAL if replaces_forwards else "",
        "scaler = torch.amp.GradScaler(next(model.parameters()).device.type)\n" if is_scaled else "",
        _COPIES,
        "in_single(planned)\nin_single(plain)\n" if is_quantized else "",
        "without_dropout(planned)\nwithout_dropout(plain)\n" if is_split else "",
        _IN_DOUBLE if has_floats else "",
        _STEPS.format(planned=_call(named), loss=loss, clip=_CLIP.format(clipped=clipped) if clipped else ""),
        f"compare(expected, found, rounding.eps{_REMARK if is_split else ''})\n",
        'compare_updates(model, expected["gradient"], make_optimizer)\n' if has_8_bit_state else "",
        'print("the step by the plan agrees with a plain step")\n',
    ]
    keywords = [
        *(["loss_fn"] if plan.workload.has_loss_fn else []),
        *(["max_grad_norm=None"] if clipped else []),
    ]
    parameters = ", ".join(["model", "batch", *(["*", *keywords] if keywords else []), "**options"])
    check = f"def check({parameters}):\n{textwrap.indent(''.join(statements), '    ')}"
    functions: list[Callable[..., Any]] = [
        *([map_tensors] if has_floats else []),
        result_of,
        compare,
        largest,
        Rounding,
        *([in_single] if is_quantized else []),
        *([without_dropout] if is_split else []),
        *([compare_updates] if has_8_bit_state else []),
    ]
    return CheckSource(
        imports=(
            "import copy",
            "from torch.utils._python_dispatch import TorchDispatchMode",
            "from torch.utils._pytree import tree_leaves",
            *(["import dataclasses", "from collections.abc import Mapping"] if has_floats else []),
        ),
        functions=(*(inspect.getsource(function) for function in functions), check),
    )


def _call(named: list[str]) -> str:
    """Return the call of the step by the plan with these keyword arguments, formatted as `ruff format` does."""
    positional = "model, optimizer, copy.deepcopy(batch)"
    call = f"training_step({', '.join([positional, *named])})"
    if len(f"        return {call}") <= WIDTH:
        return call
    arguments = ", ".join([positional, *named])
    if len(arguments) + 12 > WIDTH:
        arguments = "".join(f"{argument},\n" for argument in [*positional.split(", "), *named]).rstrip("\n")
    return f"training_step(\n{textwrap.indent(arguments, ' ' * 8)}\n    )"


def _docstring(*, is_cast: bool, is_split: bool) -> str:
    text = (
        "Pass a model that `rewrite` has not changed, and the options of `training_step`. Both steps run on copies in "
        + ("double, where autocast has no effect" if is_cast else "double")
        + ", so that their results differ only by the order of sums."
    )
    if is_split:
        text += (
            " Dropout is off, and batch normalization uses its running statistics. The model must not draw other "
            "random numbers."
        )
    text = textwrap.fill(text, WIDTH - 4)
    return f'"""{_SUMMARY}\n\n{text}\n"""\n'


_SUMMARY = "Compare a step by the plan with a plain step, and raise RuntimeError if they differ by more than rounding."

_REMARK = ''', " (random numbers other than those of dropout also cause this)"'''

_REFUSAL = """\
if any(getattr(vars(module).get("forward"), "__globals__", None) is globals() for module in model.modules()):
    raise RuntimeError("check needs the original model, but this one is rewritten: call check before rewrite")
"""

_COPIES = """\
batch = copy.deepcopy(batch)
planned, plain = rewrite(copy.deepcopy(model)).double(), copy.deepcopy(model).double()
for parameter, ours in zip(plain.parameters(), planned.parameters(), strict=True):
    parameter.requires_grad_(ours.requires_grad)
"""

_IN_DOUBLE = """\
batch = map_tensors(lambda tensor: tensor.detach().double() if tensor.is_floating_point() else tensor, batch)
"""

_CLIP = """\
    if max_grad_norm is not None:
        {clipped}
"""

_STEPS = """\

def planned_step(model, optimizer):
    return {planned}

def plain_step(model, optimizer):
    loss = {loss}
    loss.backward()
{clip}    optimizer.step()
    return loss

trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
try:
    found = result_of(planned_step, planned, make_optimizer(planned))
    with Rounding() as rounding:
        expected = result_of(plain_step, plain, torch.optim.SGD(trained))
except torch.OutOfMemoryError as error:
    raise RuntimeError(
        "check ran out of memory, because both steps run in double: pass fewer samples, or run on the CPU"
    ) from error
"""
