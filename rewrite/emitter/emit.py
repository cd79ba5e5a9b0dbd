"""Write a plan as a readable Python file of plain torch that runs without this package.

Each rule contributes an `EmittedCode`, and this module joins them to a file. The functions in the file are copies of
the source text of those that `rewrite.apply` uses (`inspect.getsource`), so both do the same.
"""

from __future__ import annotations

import inspect
import pathlib
import textwrap
from collections.abc import Iterable

from planner.errors import PlanFileError
from planner.files.writing import write_atomically
from planner.plan_types.plan import Plan
from planner.rewrite.application import one_of_each_kind, turns_cache_off
from planner.rewrite.emitted_code import WIDTH, EmittedCode, environment_source, literal, torchrun
from planner.rewrite.emitter import own_step_source
from planner.rewrite.emitter.check_source import CheckSource, check_source
from planner.rewrite.emitter.header import header
from planner.rewrite.emitter.main_of_rank import main_of_rank, receives_weights
from planner.rewrite.emitter.model_source import ModelSource, batch_source, model_source
from planner.rewrite.emitter.optimizer_source import optimizer_source
from planner.rewrite.emitter.own_function import loaded_function
from planner.rewrite.portable.loss_and_clipping import clip_gradients
from planner.rewrite.rules import SOURCES
from planner.rewrite.rules.allocator import environment_of
from planner.workload.call_convention import Calling
from planner.workload.optimizer_choice import OPTIMIZERS
from planner.workload.torch_optimizers import may_take_sparse


def emit(plan: Plan, path: str | pathlib.Path) -> None:
    """Write `source(plan)` to a file. An existing file is replaced atomically, so it is never incomplete.

    Args:
        path: Where the file is written.

    Raises:
        PlanFileError: if the file cannot be written, or if the configuration file of the model cannot be read.
    """
    path = pathlib.Path(path)
    write_atomically(path, source(plan, file_name=path.name, folder=path.resolve().parent))


def source(plan: Plan, *, file_name: str = "train_step.py", folder: pathlib.Path | None = None) -> str:
    """Return the text of the emitted file: `rewrite`, `make_optimizer`, `training_step`, and a `main` that runs them.

    The sections have this order: constants, `build` (which creates the model), `rewrite`, `make_optimizer`,
    `training_step`, `main`, the functions and classes that these use, and `check`, which compares a step with plain
    training. If the plan was made for a live model, the file cannot build the model, so it has no `build`, and its
    `main` only says how to import the other functions.

    Args:
        plan: The plan.
        file_name: Name of the file, for the text.
        folder: Folder of the file, from which the text names the user's own file; None to name its absolute path.

    Raises:
        PlanFileError: if the configuration file of the model cannot be read, or the plan is for a program's config.
        DecisionError: if the plan is for a step of the user's own and has 8-bit optimizer state.
    """
    if plan.model.program is not None:
        raise PlanFileError(
            f"the plan was made for the config of {plan.model.program.name}: write it with --for "
            f"{plan.model.program.name} --emit config.yaml, or plan the model again without --for"
        )
    by_kind = one_of_each_kind(plan.decisions)
    fragments = [emitted(plan, by_kind[kind]) for kind, emitted in SOURCES.items() if kind in by_kind]
    model = model_source(plan, folder)
    scaled = any(fragment.scaled for fragment in fragments)
    is_own = plan.workload.calling == Calling.STEP.name
    if is_own:
        own_step_source.refuse_replaced_optimizers(fragments)
        check = CheckSource(imports=own_step_source.IMPORTS, functions=(own_step_source.CHECK,))
    elif any(fragment.cards > 1 for fragment in fragments):
        check = CheckSource(imports=("import os",), functions=())
    else:
        check = check_source(plan, fragments, _loss(plan, model, "batch"), _clipping(plan, fragments))
    groups = _without_repetition((model.constants, *(code.constants for code in fragments)))
    constants = ["\n".join(group) for group in groups if group]
    # Several rules may need the same function: it is written once, where it is first needed.
    functions = tuple(dict.fromkeys(function for fragment in fragments for function in fragment.functions))
    helpers = [
        *functions,
        *model.functions,
        *(loaded_function(name, of, folder) for fragment in fragments for name, of in fragment.loads),
        *([inspect.getsource(clip_gradients)] if _clips_sparse(plan, fragments) else []),
        *(function for function in check.functions if function not in functions),
    ]
    sections = [
        _imports(
            (*check.imports, *(line for fragment in fragments for line in fragment.imports)),
            model,
            plan,
            dict((*environment_of(plan), *(pair for fragment in fragments for pair in fragment.environment))),
        )
        + ("\n\n" + "\n\n".join(constants) if constants else ""),
        *([model.build] if model.build else []),
        *([model.structure] if receives_weights(model, fragments) else []),
        _rewrite(plan, fragments),
        *(_own_step(plan, fragments) if is_own else _planners_step(plan, fragments, model)),
        *(
            [
                batch_source(plan, model),
                own_step_source.MAIN if is_own else _main(plan, model, fragments, scaled=scaled),
            ]
            if model.build
            else [_guidance(file_name, f"{'check, ' * bool(check.functions)}make_optimizer{'s' * is_own}")]
        ),
        *([_HELPERS] if helpers else []),
        *helpers,
    ]
    body = "\n\n\n".join(section.strip("\n") for section in sections)
    return f'{header(plan, file_name)}\n\n{body}\n\n\nif __name__ == "__main__":\n    main()\n'


def _planners_step(plan: Plan, fragments: list[EmittedCode], model: ModelSource) -> list[str]:
    """Return the sources of `make_optimizer`, of defaults of the step's parameters, and of `training_step`."""
    return [
        next((fragment.optimizer for fragment in fragments if fragment.optimizer), optimizer_source(plan, fragments)),
        *dict.fromkeys(function for fragment in fragments for function in fragment.defaults),
        _training_step(plan, fragments, model),
    ]


def _own_step(plan: Plan, fragments: list[EmittedCode]) -> list[str]:
    """Return the sources of `make_optimizers` and `training_step` for a step of the user's own."""
    names = tuple(name for decision in plan.decisions for name in decision.optimizer_names)
    is_watched = any(fragment.is_watched for fragment in fragments)
    return [
        own_step_source.optimizers_source(plan, names),
        own_step_source.training_step_source(is_watched=is_watched),
    ]


_HELPERS = "# ---- Functions and classes that the functions above use."
_LIBRARIES = ("torch", "transformers", "bitsandbytes", "peft")


def _imports(needed: tuple[str, ...], model: ModelSource, plan: Plan, environment: dict[str, str | None]) -> str:
    """Return the import statements of the file, in the order of isort, given those that its functions need.

    The standard library comes first, then libraries, then the user's own modules. In each block `import` statements
    come before `from` statements. Environment variables are set before libraries are imported.
    """
    named = {part.rpartition(": ")[2] for part in plan.workload.optimizer.split(", ")}
    optimizers = {f"import {OPTIMIZERS[name].path.rpartition('.')[0]}" for name in named & OPTIMIZERS.keys()}
    optimizers.discard("import torch.optim")
    lines = {"import torch", *model.imports, *needed, *optimizers}
    if model.build:
        lines.add("import argparse")
    if environment:
        lines.add("import os")
    lines = _merged(lines)
    third_party = {line for line in lines if line.split()[1].split(".")[0] in _LIBRARIES}
    blocks = ["from __future__ import annotations"]
    for block in (lines - third_party - model.own_imports, third_party, model.own_imports):
        if block:
            blocks.append("\n".join(sorted(block, key=lambda line: (line.startswith("from"), line.split()[1]))))
        if environment and "import os" in block:
            blocks.append(environment_source(environment.items()))
    return "\n\n".join(blocks)


def _merged(lines: set[str]) -> set[str]:
    """Return import statements with one `from` statement for each module, its names in the order of isort."""
    names: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("from "):
            module, _, imported = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, set()).update(imported.split(", "))
    ordered = {module: sorted(each, key=lambda name: (not name[0].isupper(), name)) for module, each in names.items()}
    return {line for line in lines if not line.startswith("from ")} | {
        _from_statement(module, each) for module, each in ordered.items()
    }


def _from_statement(module: str, names: list[str]) -> str:
    """Return the import statement as `ruff format` writes it, with one name on each line if it is long."""
    line = f"from {module} import {', '.join(names)}"
    each = "".join(f"    {name},\n" for name in names)
    return line if len(line) <= WIDTH else f"from {module} import (\n{each})"


def _without_repetition(groups: Iterable[Iterable[str]]) -> list[list[str]]:
    """Return groups of constants without those that an earlier group has, too."""
    seen: set[str] = set()
    found = []
    for group in groups:
        found.append([constant for constant in group if constant not in seen])
        seen.update(group)
    return found


def _rewrite(plan: Plan, fragments: list[EmittedCode]) -> str:
    """Return the source of `rewrite(model)`, which changes the model as the rules do."""
    if any(fragment.shards for fragment in fragments):
        signature, doc = "def rewrite(model, device):\n", _SHARDED_DOC
    else:
        signature, doc = "def rewrite(model):\n", _REWRITE_DOC
    statements = "".join(text for fragment in fragments for text in fragment.rewriting)
    if turns_cache_off(plan):
        statements += _CACHE_OFF
    returned = next((fragment.wrapped for fragment in fragments if fragment.wrapped), "model")
    return f"{signature}{doc}{textwrap.indent(statements, '    ')}    return {returned}\n"


_REWRITE_DOC = (
    '    """Prepare the model for the planned step, in place. Parameters and `state_dict` keys stay the same."""\n'
)
_SHARDED_DOC = '''\
    """Prepare the model for the planned step: this process keeps its shards, and moves them to the device.

    The parameters become DTensors with the same names: make the optimizer afterwards.
    """
'''
_CACHE_OFF = """\
for module in model.modules():
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # training does not read the key-value cache
"""


def _training_step(plan: Plan, fragments: list[EmittedCode], model: ModelSource) -> str:
    """Return the source of `training_step`.

    It does the same as `planner.rewrite.step.TrainingStep`, but only contains the statements that this plan needs.
    """
    # Forward, in autocast if the plan has it.
    autocast = next((fragment.autocast for fragment in fragments if fragment.autocast), "")
    split = next((fragment.split for fragment in fragments if fragment.split), "")
    scaled = any(fragment.scaled for fragment in fragments)
    part = "part" if split else "batch"
    forward = f"loss = {_loss(plan, model, part)}\n"
    if autocast:
        forward = f"with {autocast}:\n    {forward}"
    share = next((fragment.share for fragment in fragments if fragment.share), "")
    # Backward, of the scaled loss if there is a gradient scaler. With step-in-backward it also updates the parameters.
    stepping = next((fragment.backward for fragment in fragments if fragment.backward), "")
    backward = "scaler.scale(loss).backward()\n" if scaled else "loss.backward()\n"
    if stepping:
        backward = f"with {stepping}:\n    {backward}"
    # A loop over micro-batches, if the batch is split, which frees each loss before the next forward.
    if split:
        weigh = "if weight is not None:\n    loss = weighted(loss, weight)\n"
        if share:
            weigh = "loss = weighted(loss, share_of_part(share, weight))\n"
        compute = forward + weigh + backward
        # On several cards, gradients may be reduced only in the backward of the last micro-batch.
        before = next((fragment.before_micro_batch for fragment in fragments if fragment.before_micro_batch), "")
        around = next((fragment.around_micro_batch for fragment in fragments if fragment.around_micro_batch), "")
        if around:
            compute = f"with {around}:\n{textwrap.indent(compute, '    ')}"
        running = "total = loss.detach() if total is None else total + loss.detach()\ndel loss\n"
        body = textwrap.indent(before + compute + running, "    ")
        each = "part, weight, is_last in marking_last(parts)" if before or around else "part, weight in parts"
        compute = f"total = None\nparts = {split}\nfor {each}:\n{body}"
    else:
        compute = forward + ("loss = weighted(loss, share)\n" if share else "") + backward
    if share:
        compute = f"share = {share}\n{compute}"
    if any(fragment.is_watched for fragment in fragments):
        compute = f"RECOMPUTE_CHECK.begin_step()\n{compute}RECOMPUTE_CHECK.refuse_difference()\n"
    if split or any(fragment.is_watched for fragment in fragments):
        compute = f"try:\n{textwrap.indent(compute, '    ')}{_AFTER_ERROR}"
    # Update: unscale and clip gradients, step, advance the scheduler, clear gradients. With step-in-backward, only the
    # scheduler and clearing gradients remain.
    unscale = "    scaler.unscale_(optimizer)\n" if scaled else ""
    clipping = _clipping(plan, fragments)
    clip = f"if max_grad_norm is not None:\n{unscale}    {clipping}\n" if clipping else ""
    step = _SCALED_STEP if scaled else "optimizer.step()\n"
    skipped = " and scaler.get_scale() >= scale" if scaled else ""
    update = (
        clip
        + ("" if stepping else step)
        + f"if scheduler is not None{skipped}:\n    scheduler.step()\n"
        + "optimizer.zero_grad(set_to_none=True)\n"
        + ("return total\n" if split else "return loss.detach()\n")
    )
    # The signature: parameters without a default, then those with one.
    options = list(dict.fromkeys(option for fragment in fragments for option in fragment.options))
    named = [
        *(["scaler"] if scaled else []),
        *(["loss_fn"] if plan.workload.has_loss_fn else []),
        *(option for option in options if "=" not in option),
        *(["max_grad_norm=None"] if clipping else []),
        "scheduler=None",
        *(option for option in options if "=" in option),
    ]
    parameters = ", ".join(["model", "optimizer", "batch", "*", *named])
    signature = f"def training_step({parameters}):\n"
    if len(signature) > WIDTH + 1:
        signature = f"def training_step(\n    {parameters}\n):\n"
    needs_loss_terms = "loss_terms" in options
    return (
        f"{signature}"
        '    """Take one optimizer step on a batch, which must be on the model\'s device, and return its loss.'
        + (_LOSS_TERMS if needs_loss_terms else "")
        + '"""\n'
        + textwrap.indent(compute + update, "    ")
    )


def _clipping(plan: Plan, fragments: list[EmittedCode]) -> str | None:
    """Return an expression that clips the gradients; None if the step never has all of them at once."""
    if any(fragment.backward for fragment in fragments):
        return None
    if own := next((fragment.clipping for fragment in fragments if fragment.clipping), ""):
        return f"{own}(model, max_grad_norm)"
    if _clips_sparse(plan, fragments):
        return "clip_gradients(model, max_grad_norm)"
    return "torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)"


def _clips_sparse(plan: Plan, fragments: list[EmittedCode]) -> bool:
    """Return True if the gradients that are clipped may be sparse, which `torch.nn.utils.clip_grad_norm_` refuses."""
    replaced = any(fragment.backward or fragment.optimizer or fragment.clipping for fragment in fragments)
    return may_take_sparse(plan.workload.optimizer) and not replaced


_LOSS_TERMS = """

    loss_terms(batch, samples) returns the number of terms that the loss is a mean over. If the loss is a mean over
    samples, pass samples_only, else a function of your own.
    """

_AFTER_ERROR = """\
except BaseException:
    optimizer.zero_grad(set_to_none=True)  # the next step must not add to gradients of this one
    raise
"""

_SCALED_STEP = """\
scale = None if scheduler is None else scaler.get_scale()
scaler.step(optimizer)
scaler.update()  # lowers the scale if a gradient was not finite, in which case the step was skipped
"""


def _loss(plan: Plan, model: ModelSource, part: str) -> str:
    """Return the expression that computes the loss.

    `part` is the name of the variable that holds the batch or micro-batch.
    """
    call = Calling[plan.workload.calling].value.replace("batch", part)
    if plan.workload.has_loss_fn:
        return f"loss_fn({call}, {part})"
    if model.returns_model_output:
        return f"{call}.loss"
    return f"loss_of({call})"


def _main(plan: Plan, model: ModelSource, fragments: list[EmittedCode], scaled: bool) -> str:
    """Return the source of `main`, which trains a few steps on random data."""
    own = [
        *(["loss_fn=loss_fn"] if plan.workload.has_loss_fn else []),
        *dict.fromkeys(argument for fragment in fragments for argument in fragment.main_arguments),
    ]
    named = [*(["scaler=scaler"] if scaled else []), *own]
    call = f"training_step({', '.join(['model', 'optimizer', 'batch', *named])})"
    if any(fragment.cards > 1 for fragment in fragments):
        named.append("max_grad_norm=arguments.max_grad_norm")
        return main_of_rank(model, fragments, named, launcher=torchrun(plan))
    lines = [
        "def main():",
        '    parser = argparse.ArgumentParser(description="Train a few steps on random data.")',
        '    parser.add_argument("--steps", type=int, default=3)',
        '    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")',
        '    parser.add_argument("--check", action="store_true", help="compare a step with a plain step, and exit")',
        *(f"    {line}" for line in model.arguments),
        "    arguments = parser.parse_args()",
        "    torch.manual_seed(0)",
        f"    {model.target} = build({model.build_arguments})",
        "    model = model.to(arguments.device).train()",
        "    batch = synthetic_batch(arguments.device)",
        "    if arguments.check:",
        f"        check({', '.join(['model', 'batch', *own])})",
        "        return",
        "    optimizer = make_optimizer(rewrite(model))",
        *(["    scaler = torch.amp.GradScaler(arguments.device)"] if scaled else []),
        "    for step in range(1, arguments.steps + 1):",
        f"        loss = {call}",
        '        print(f"step {step}: loss {loss.item():.4f}")',
    ]
    return "\n".join(lines) + "\n"


def _guidance(file_name: str, names: str) -> str:
    """Return the source of `main` for a plan of a live model. It only says how to import the file's functions."""
    return (
        "def main():\n"
        "    raise SystemExit(\n"
        '        "The plan was made for a live model, which this file cannot build. Where yours is built:\\n"\n'
        f"        {literal(f'    from {pathlib.Path(file_name).stem} import {names}, rewrite, training_step')}\n"
        "    )\n"
    )
