"""Writes `make_optimizer`, the function of an emitted file that makes the optimizer."""

from __future__ import annotations

from planner.plan_types.plan import Plan
from planner.rewrite.emitted_code import WIDTH, EmittedCode, literal
from planner.rewrite.emitter.quoted import docstring, torch_optimizer
from planner.workload.optimizer_choice import OPTIMIZERS


def optimizer_source(plan: Plan, fragments: list[EmittedCode]) -> str:
    """Return the source of `make_optimizer(model)` for a plan that does not replace the optimizer.

    If the class of the optimizer is not known, the function raises NotImplementedError, and the user must write it.
    """
    name = plan.workload.optimizer
    options = [option for fragment in fragments for option in fragment.optimizer_options]
    parameters = "[parameter for parameter in model.parameters() if parameter.requires_grad]"
    if name.startswith("torch.optim."):
        return (
            "def make_optimizer(model):\n"
            '    """These are torch\'s default hyperparameters: set the ones that you train with."""\n'
            f"    parameters = {parameters}\n"
            + _returned(f"{torch_optimizer(name)}({', '.join(['parameters', *options])})", fragments)
        )
    if name not in OPTIMIZERS:
        doc = docstring(f"Return the {name} that the plan was made with, over the parameters that require a gradient.")
        message = literal(f"make_optimizer must return the {name} that the plan was made with")
        return f"def make_optimizer(model):\n    {doc}\n    raise NotImplementedError({message})\n"
    choice = OPTIMIZERS[name]
    hyperparameters = [f"{key}={literal(value)}" for key, value in choice.hyperparameters.items()]
    dividing = next((fragment.optimizer_class for fragment in fragments if fragment.optimizer_class), "")
    kind = [f"optimizer_class={choice.path}"] if dividing else []
    arguments = ", ".join(["parameters", *kind, *hyperparameters, *options])
    made = f"{dividing or choice.path}({arguments})"
    if len(made) > WIDTH - len("    return "):
        made = f"{dividing or choice.path}(\n        {arguments}\n    )"
    return (
        "def make_optimizer(model):\n"
        '    """Set the hyperparameters that you train with here: the plan does not depend on them."""\n'
        f"    parameters = {parameters}\n" + _returned(made, fragments)
    )


def _returned(optimizer: str, fragments: list[EmittedCode]) -> str:
    """Return the statements that return an optimizer, given the expression that makes it.

    With a gradient scaler, torch's fused kernels would handle skipped steps themselves, and momentum of SGD would start
    from memory that was never written if the first step is skipped. The scaler skips such steps instead.
    """
    is_fused = any("fused=True" in fragment.optimizer_options for fragment in fragments)
    if not (is_fused and any(fragment.scaled for fragment in fragments)):
        return f"    return {optimizer}\n"
    return (
        f"    optimizer = {optimizer}\n"
        "    optimizer._step_supports_amp_scaling = False  # the scaler skips steps that are not finite\n"
        "    return optimizer\n"
    )
