"""Write a plan as a Python file of plain torch that needs nothing of ours to run, and reads like a person's."""

from __future__ import annotations

import inspect
import pathlib
import textwrap

from planner.plan_types.plan import Plan, write_text_atomically
from planner.rewrite.application import one_of_each_kind, turns_cache_off
from planner.rewrite.emitted_code import WIDTH, EmittedCode, literal
from planner.rewrite.emitter.header import header
from planner.rewrite.emitter.model_source import ModelSource, batch_source, model_source
from planner.rewrite.optimizers import OPTIMIZERS
from planner.rewrite.portable.loss_and_clipping import clip_gradients
from planner.rewrite.rules import SOURCES
from planner.workload.call_convention import Calling
from planner.workload.torch_optimizers import may_take_sparse


def emit(plan: Plan, path: str | pathlib.Path) -> None:
    """Write `source(plan)` to a file, whole or not at all.

    Raises:
        PlanFileError: when the file cannot be written.
    """
    path = pathlib.Path(path)
    write_text_atomically(path, source(plan, file_name=path.name))


def source(plan: Plan, *, file_name: str = "train_step.py") -> str:
    """The text of the emitted file: `rewrite`, `make_optimizer`, `training_step`, and a `main` that runs them."""
    by_kind = one_of_each_kind(plan.decisions)
    fragments = [emitted(plan, by_kind[kind]) for kind, emitted in SOURCES.items() if kind in by_kind]
    model = model_source(plan)
    scaled = any(fragment.scaled for fragment in fragments)
    constants = ["\n".join(group) for group in (model.constants, *(each.constants for each in fragments)) if group]
    sections = [
        _imports(fragments, model) + ("\n\n" + "\n\n".join(constants) if constants else ""),
        *([model.build] if model.build else []),
        _rewrite(plan, fragments),
        *dict.fromkeys(function for fragment in fragments for function in fragment.functions),
        *model.functions,
        *([inspect.getsource(clip_gradients)] if _clips_sparse(plan, fragments) else []),
        next((fragment.optimizer for fragment in fragments if fragment.optimizer), _optimizer(plan, fragments)),
        _training_step(plan, fragments, model),
        *(
            [batch_source(plan, model), _main(plan, model, fragments, scaled=scaled)]
            if model.build
            else [_guidance(file_name)]
        ),
    ]
    body = "\n\n\n".join(section.strip("\n") for section in sections)
    return f'{header(plan, file_name)}\n\n{body}\n\n\nif __name__ == "__main__":\n    main()\n'


def _imports(fragments: list[EmittedCode], model: ModelSource) -> str:
    """Standard library first, then the others, each sorted as isort does: plain imports before `from`."""
    lines = {"import torch", *model.imports, *(line for fragment in fragments for line in fragment.imports)}
    if model.build:
        lines.add("import argparse")
    foreign = {line for line in lines if line.split()[1].split(".")[0] in ("torch", "transformers", "bitsandbytes")}
    blocks = ["from __future__ import annotations"]
    for block in (lines - foreign - model.own_imports, foreign, model.own_imports):
        if block:
            blocks.append("\n".join(sorted(block, key=lambda line: (line.startswith("from"), line.split()[1]))))
    return "\n\n".join(blocks)


def _rewrite(plan: Plan, fragments: list[EmittedCode]) -> str:
    statements = "".join(text for fragment in fragments for text in fragment.rewriting)
    if turns_cache_off(plan):
        statements += _CACHE_OFF
    return (
        "def rewrite(model):\n"
        '    """Prepare the model for the planned step, in place: its parameters and `state_dict` keys stay."""\n'
        f"{textwrap.indent(statements, '    ')}    return model\n"
    )


_CACHE_OFF = """\
for module in model.modules():
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # training fills a cache of keys and values for nothing
"""


def _optimizer(plan: Plan, fragments: list[EmittedCode]) -> str:
    name = plan.workload.optimizer
    options = [option for fragment in fragments for option in fragment.optimizer_options]
    parameters = "[parameter for parameter in model.parameters() if parameter.requires_grad]"
    if name.startswith("torch.optim."):
        return (
            "def make_optimizer(model):\n"
            '    """With torch\'s own hyperparameters: set those that the plan was made with."""\n'
            f"    parameters = {parameters}\n"
            f"    return torch.optim.{name.rpartition('.')[2]}({', '.join(['parameters', *options])})\n"
        )
    if name not in OPTIMIZERS:
        return (
            "def make_optimizer(model):\n"
            f'    """The plan was made with {name}: make it here, over the parameters that require a gradient."""\n'
            f'    raise NotImplementedError("make_optimizer: return the {name} that the plan was made with")\n'
        )
    chosen = OPTIMIZERS[name]
    given = [f"{key}={literal(value)}" for key, value in chosen.hyperparameters.items()]
    arguments = ", ".join([*given, *options])
    return (
        "def make_optimizer(model):\n"
        '    """Set the hyperparameters that you train with: what was planned does not depend on them."""\n'
        f"    parameters = {parameters}\n"
        f"    return torch.optim.{chosen.class_name}(parameters, {arguments})\n"
    )


def _training_step(plan: Plan, fragments: list[EmittedCode], model: ModelSource) -> str:
    """The loop of `planner.rewrite.step.TrainingStep`, with only what this plan needs."""
    autocast = next((fragment.autocast for fragment in fragments if fragment.autocast), "")
    split = next((fragment.split for fragment in fragments if fragment.split), "")
    scaled = any(fragment.scaled for fragment in fragments)
    part = "part" if split else "batch"
    forward = f"loss = {_loss(plan, model, part)}\n"
    if autocast:
        forward = f"with {autocast}:\n    {forward}"
    stepping = next((fragment.backward for fragment in fragments if fragment.backward), "")
    backward = "scaler.scale(loss).backward()\n" if scaled else "loss.backward()\n"
    if stepping:
        backward = f"with {stepping}:\n    {backward}"
    if split:
        share = "if weight is not None:\n    loss = weighted(loss, weight)\n"
        running = "total = loss.detach() if total is None else total + loss.detach()\ndel loss\n"
        body = textwrap.indent(forward + share + backward + running, "    ")
        compute = f"total = None\nparts = {split}\nfor part, weight in parts:\n{body}"
    else:
        compute = forward + backward
    unscale = "    scaler.unscale_(optimizer)\n" if scaled else ""
    clipped = "clip_gradients(model, max_grad_norm)"
    if not _clips_sparse(plan, fragments):
        clipped = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)"
    clip = f"if max_grad_norm is not None:\n{unscale}    {clipped}\n"
    step = _SCALED_STEP if scaled else "optimizer.step()\n"
    skipped = " and scaler.get_scale() >= scale" if scaled else ""
    update = (
        ("" if stepping else clip + step)
        + f"if scheduler is not None{skipped}:\n    scheduler.step()\n"
        + "optimizer.zero_grad(set_to_none=True)\n"
        + ("return total\n" if split else "return loss.detach()\n")
    )
    options = [option for fragment in fragments for option in fragment.options]
    named = [
        *(["scaler"] if scaled else []),
        *(["loss_fn"] if plan.workload.has_loss_fn else []),
        *(option for option in options if "=" not in option),
        *([] if stepping else ["max_grad_norm=None"]),
        "scheduler=None",
        *(option for option in options if "=" in option),
    ]
    parameters = ", ".join(["model", "optimizer", "batch", "*", *named])
    signature = f"def training_step({parameters}):\n"
    if len(signature) > WIDTH + 1:
        signature = f"def training_step(\n    {parameters}\n):\n"
    asks = "loss_terms" in options
    return (
        f"{signature}"
        '    """One optimizer step on a batch that is on the model\'s device; returns the batch\'s loss.'
        + (_LOSS_TERMS if asks else "")
        + '"""\n'
        + textwrap.indent(compute + update, "    ")
    )


def _clips_sparse(plan: Plan, fragments: list[EmittedCode]) -> bool:
    """Whether there may be sparse gradients, which torch's function does not clip."""
    replaced = any(fragment.backward or fragment.optimizer for fragment in fragments)
    return may_take_sparse(plan.workload.optimizer) and not replaced


_LOSS_TERMS = """

    loss_terms(batch, samples) says over how many terms the loss is a mean: samples_only, or a function of your own.
    """

_SCALED_STEP = """\
scale = None if scheduler is None else scaler.get_scale()
scaler.step(optimizer)
scaler.update()  # a lower scale: a gradient was not finite, and the step was skipped
"""


def _loss(plan: Plan, model: ModelSource, part: str) -> str:
    call = Calling[plan.workload.calling].value.replace("batch", part)
    if plan.workload.has_loss_fn:
        return f"loss_fn({call}, {part})"
    if model.returns_model_output:
        return f"{call}.loss"
    return f"loss_of({call})"


def _main(plan: Plan, model: ModelSource, fragments: list[EmittedCode], scaled: bool) -> str:
    named = [
        *(["scaler=scaler"] if scaled else []),
        *(["loss_fn=loss_fn"] if plan.workload.has_loss_fn else []),
        *(argument for fragment in fragments for argument in fragment.main_arguments),
    ]
    call = f"training_step({', '.join(['model', 'optimizer', 'batch', *named])})"
    lines = [
        "def main():",
        '    parser = argparse.ArgumentParser(description="Train a few steps on random data.")',
        '    parser.add_argument("--steps", type=int, default=3)',
        *(f"    {line}" for line in model.arguments),
        "    arguments = parser.parse_args()",
        '    device = "cuda" if torch.cuda.is_available() else "cpu"',
        "    torch.manual_seed(0)",
        f"    {model.target} = build({model.build_arguments})",
        "    model = rewrite(model.to(device).train())",
        "    optimizer = make_optimizer(model)",
        *(["    scaler = torch.amp.GradScaler(device)"] if scaled else []),
        "    batch = synthetic_batch(device)",
        "    for step in range(1, arguments.steps + 1):",
        f"        loss = {call}",
        '        print(f"step {step}: loss {loss.item():.4f}")',
    ]
    return "\n".join(lines) + "\n"


def _guidance(file_name: str) -> str:
    module = pathlib.Path(file_name).stem
    return (
        "def main():\n"
        "    raise SystemExit(\n"
        '        "The plan was made for a live model, which this file cannot build. Where yours is made:\\n"\n'
        f'        "    from {module} import make_optimizer, rewrite, training_step"\n'
        "    )\n"
    )
