"""Write the parts of an emitted file that run a step of the user's own: optimizers, training step, check and main."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from planner.errors import DecisionError
from planner.plan_types.decision_base import optimizer_kernel_of
from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import EmittedCode, literal
from planner.workload.optimizer_choice import OPTIMIZERS

IMPORTS = ("import copy",)


def refuse_replaced_optimizers(fragments: Sequence[EmittedCode]) -> None:
    """Raise `DecisionError` if the plan replaces an optimizer: the file takes those that the user's `build` returns."""
    if any(fragment.optimizer for fragment in fragments):
        raise DecisionError(
            "no file can be written for a step of your own with 8-bit optimizer state: forbid 8bit-optimizer, or use "
            "rewrite.apply"
        )


def optimizers_source(plan: Plan, names: Sequence[str]) -> str:
    """Return the source of `make_optimizers(model, choice)`.

    Args:
        names: names of the optimizers whose kernel the plan sets; empty for the only one.
    """
    named = [part.rpartition(": ")[2] for part in plan.workload.optimizer.split(", ")]
    by_name = [name for name in OPTIMIZERS if name in named]
    make = "return each(parameters)"
    if by_name:
        arguments = "".join(
            f"    {literal(name)}: ({OPTIMIZERS[name].path}, {literal(OPTIMIZERS[name].hyperparameters)}),\n"
            for name in by_name
        )
        make = (
            "if isinstance(each, str):\n"
            f"    kinds = {{\n{textwrap.indent(arguments, '    ')}    }}\n"
            "    kind, options = kinds[each]\n"
            "    return kind(parameters, **options)\n"
            "return each(parameters)"
        )
    kernel = optimizer_kernel_of(plan.decisions)
    option = {"fused": '"fused"] = True', "for-loop": '"foreach"] = False'}.get(kernel or "")
    places = [f"made{name}" if name.startswith("[") else f"made[{literal(name)}]" for name in names] or ["made"]
    listed = ", ".join(places)
    kernels = (
        f"for optimizer in ({listed},):  # {kernel} kernel\n"
        f"    for group in optimizer.param_groups:\n        group[{option}\n"
        if option
        else ""
    )
    return (
        "def make_optimizers(model, choice):\n"
        '    """Return the optimizers in the form of `choice`: one of them, a dict or a tuple.\n\n'
        "    A name or a function of parameters in a dict gets the parameters of the submodule of its key.\n"
        '    """\n'
        "    modules = dict(model.named_modules())\n\n"
        "    def make(each, name=None):\n"
        "        if isinstance(each, torch.optim.Optimizer):\n"
        "            return each\n"
        "        module = modules.get(name, model)\n"
        "        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]\n"
        f"{textwrap.indent(make, '        ')}\n\n"
        "    if isinstance(choice, dict):\n"
        "        made = {name: make(each, name) for name, each in choice.items()}\n"
        "    else:\n"
        "        made = tuple(map(make, choice)) if isinstance(choice, (list, tuple)) else make(choice)\n"
        f"{textwrap.indent(kernels, '    ')}"
        "    return made\n"
    )


def training_step_source(*, is_watched: bool) -> str:
    """Return the source of `training_step(model, optimizer, batch, step)`."""
    return (
        "def training_step(model, optimizer, batch, step):\n"
        '    """Run your own step on a batch, which must be on the model\'s device, and return what it returns."""\n'
    ) + textwrap.indent(_WATCHED if is_watched else "return step(model, optimizer, batch)\n", "    ")


_WATCHED = """\
try:
    RECOMPUTE_CHECK.begin_step()
    result = step(model, optimizer, batch)
    RECOMPUTE_CHECK.refuse_difference()
except BaseException:
    RECOMPUTE_CHECK.end_step()
    raise
return result
"""

CHECK = '''\
def check(model, batch, step, choice):
    """Compare a step by the plan with a plain step, and raise RuntimeError if weights differ by more than rounding.

    Pass a model that `rewrite` has not changed. Both steps run on copies, with the same random numbers.
    """
    plain, of_plain = copy.deepcopy((model, choice))
    planned, of_planned = copy.deepcopy((model, choice))
    rewrite(planned)
    for parameter, ours in zip(plain.parameters(), planned.parameters(), strict=True):
        parameter.requires_grad_(ours.requires_grad)
    torch.manual_seed(0)
    step(plain, make_optimizers(plain, of_plain), copy.deepcopy(batch))
    torch.manual_seed(0)
    training_step(planned, make_optimizers(planned, of_planned), copy.deepcopy(batch), step)
    found = planned.state_dict()
    for name, expected in plain.state_dict().items():
        if not torch.allclose(found[name].double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            raise RuntimeError(f"'{name}' differs after a step by the plan from a plain step")
    print("the step by the plan agrees with a plain step")
'''

MAIN = """\
def main():
    parser = argparse.ArgumentParser(description="Train a few steps on random data.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="compare a step with a plain step, and exit")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, step, choice = build()
    model = model.to(arguments.device).train()
    batch = synthetic_batch(arguments.device)
    if arguments.check:
        check(model, batch, step, choice)
        return
    optimizer = make_optimizers(rewrite(model), choice)
    for number in range(1, arguments.steps + 1):
        print(f"step {number}: {training_step(model, optimizer, batch, step)}")
"""
