"""Makes the lines that train with a plan in a kind of training loop, for the user to paste into a script or config."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

from planner.errors import DecisionError
from planner.for_program import UNSUPPORTED
from planner.plan_types.decision_base import cards_of, optimizer_kernel_of
from planner.plan_types.plan import Plan
from planner.plan_types.words import Loop, counted
from planner.profiles.links import CARDS_PER_NODE
from planner.rewrite.emitted_code import environment_source, literal, torchrun
from planner.rewrite.emitter import quoted
from planner.rewrite.emitter.model_source import adapted_model
from planner.rewrite.rules.allocator import environment_of
from planner.rewrite.trainer.arguments import micro_batches, training_arguments
from planner.rewrite.trainer.on_cards import accelerate_config, checkpoints, is_fsdp, is_on_cards
from planner.rewrite.trainer.program_config import program_config
from planner.workload.optimizer_choice import OPTIMIZERS

LOOPS: dict[Loop, tuple[str, ...]] = {
    "loop": (),
    "trainer": ("step-in-backward",),
    "lightning": (),
    "accelerate": (),
    "axolotl": UNSUPPORTED,
    "llama-factory": UNSUPPORTED,
}
"""Kinds of training loops, and the techniques that each does not support."""


def config_text(plan: Plan, cards_per_node: int | None) -> str:
    """Returns the text of the config that --emit writes, for a program or for `accelerate launch`.

    Args:
        cards_per_node: number of cards in a machine; None for the default.
    """
    if plan.model.program is not None:
        return program_config(plan)
    return accelerate_config(plan, machines=-(-cards_of(plan.decisions) // (cards_per_node or CARDS_PER_NODE)))


_MODULES = ("accelerate", "bitsandbytes", "lightning", "peft", "planner", "torch", "transformers")
"""The modules that the lines may use."""


def training_lines(plan: Plan, loop: Loop, path: pathlib.Path | None) -> str:
    """Returns Python lines that train with the plan; for axolotl and LLaMA-Factory the YAML config.

    Args:
        loop: a key of `LOOPS`.
        path: the file of the saved plan; None if it was not saved.

    Raises:
        PlannerError: the loop cannot follow the plan.
    """
    if loop == "axolotl" or loop == "llama-factory":
        return program_config(plan)
    if is_on_cards(plan):
        return _on_cards(plan, loop)
    saved = str(path or "plan.json")
    text = _LINES[loop](plan)
    comment = "" if path else "  # add --save plan.json to the command"
    return _with_imports(plan, f"plan = planner.Plan.load({literal(saved)}){comment}\n{_model_lines(plan)}{text}")


def _with_imports(plan: Plan, lines: str, variables: Sequence[tuple[str, str | None]] = ()) -> str:
    """Returns the lines after their imports, and after the environment: the planned allocator and further variables."""
    used = [name for name in _MODULES if re.search(rf"(?<![\w.]){name}\.", lines)]
    source = environment_source((*environment_of(plan), *variables))
    environment = f"import os\n\n{source}  # before CUDA starts\n\n" if source else ""
    return environment + "".join(f"import {name}\n" for name in used) + f"\n{lines}"


def _model_lines(plan: Plan) -> str:
    """Returns the lines that build the model, or one with `...` if the plan does not say how."""
    reference, kind = plan.model.reference, plan.model.name
    if reference is None:
        return f"model = ...  # the {quoted.remark(kind)} that you planned\n"
    if ":" in reference:
        adapter = "" if plan.model.adapter is None else f", with {plan.model.adapter}"
        return f"model = ...  # the model that {quoted.remark(reference + ' returns' + adapter)}\n"
    name = _weights(reference)
    if plan.model.adapter is not None:
        return adapted_model(plan, literal(name))
    kind, dtype = quoted.class_name(kind, "the class of the planned model"), quoted.dtype(plan.model.dtype)
    return f"model = transformers.{kind}.from_pretrained({literal(name)}, dtype={dtype})\n"


def _weights(reference: str) -> str:
    """Returns the folder or the hub id with the weights of a model."""
    folder = pathlib.Path(reference)
    return str(folder.parent if folder.suffix.lower() == ".json" else folder)


def _loss(plan: Plan) -> str:
    return ", loss_fn=loss_fn" if plan.workload.has_loss_fn else ""


def _for_trainer(plan: Plan) -> str:
    source = None if plan.run is None else plan.run.source
    evaluates = source is not None and source.eval_batch_size is not None
    is_padded = source is not None and bool(source.lengths)
    further: dict[str, Any] = {"eval_strategy": "epoch"} if evaluates else {}
    settings = training_arguments(plan, output_dir="out", **further)
    arguments = "".join(f"    {name}={value!r},\n" for name, value in settings.items())
    datasets = f"    train_dataset=dataset,{_samples_comment(plan) if is_padded else ''}\n"
    if evaluates:
        datasets += "    eval_dataset=eval_dataset,\n"
    if source is not None and source.eval_samples:
        datasets += "    compute_metrics=compute_metrics,\n"
    return f"""\
rewritten = planner.rewrite.apply_for_trainer(plan, model)
arguments = transformers.TrainingArguments(
{arguments})
{_tokenizer(plan) if is_padded else ""}\
trainer = transformers.Trainer(
    model,
    arguments,
{datasets}{_collator(plan) if is_padded else ""}\
    callbacks=[planner.rewrite.trainer_callback(rewritten)],
)
trainer.train()
"""


def _samples_comment(plan: Plan) -> str:
    return f"  # samples of at most {plan.workload.seq_len} tokens, which are not padded"


def _tokenizer(plan: Plan) -> str:
    """Returns the line that loads the tokenizer, which pads batches."""
    reference = plan.model.reference
    if reference is None or ":" in reference:
        return "tokenizer = ...  # the tokenizer of your model\n"
    return f"tokenizer = transformers.AutoTokenizer.from_pretrained({literal(_weights(reference))})\n"


def _collator(plan: Plan) -> str:
    """Returns the argument with the collator that pads batches as planned, and labels if each token has one."""
    assert plan.run is not None and plan.run.source is not None
    multiple = plan.run.source.multiple
    shapes = {path: shape for path, shape, _ in plan.workload.batch}
    padded = next((shape for path, shape in shapes.items() if path.endswith("input_ids")), None)
    labels = next((shape for path, shape in shapes.items() if path.endswith("labels")), ())
    name = "DataCollatorForSeq2Seq" if padded is not None and len(labels) == len(padded) else "DataCollatorWithPadding"
    option = f", pad_to_multiple_of={multiple}" if multiple > 1 else ""
    return f"    data_collator=transformers.{name}(tokenizer{option}),\n"


def _samples(plan: Plan) -> str:
    return counted(plan.workload.batch_size, "sample")


def _for_loop(plan: Plan) -> str:
    return f"""\
model.to(device)
optimizer = {_optimizer(plan)}
rewritten = planner.rewrite.apply(plan, model, optimizer{_loss(plan)})
for batch in loader:  # batches of {_samples(plan)} on the device
    loss = rewritten.step(batch)  # forward, backward, update and zero_grad
"""


def _for_accelerate(plan: Plan) -> str:
    return f"""\
accelerator = accelerate.Accelerator(mixed_precision="no")  # the plan sets precision and accumulation
loader = accelerator.prepare(loader)  # batches of {_samples(plan)}; leave model and optimizer out
model.to(accelerator.device)
optimizer = {_optimizer(plan)}
rewritten = planner.rewrite.apply(plan, model, optimizer{_loss(plan)})
for batch in loader:
    loss = rewritten.step(batch)  # forward, backward, update and zero_grad
"""


def _on_cards(plan: Plan, loop: Loop) -> str:
    """Returns the lines with which the Trainer or accelerate trains on several cards, by settings alone."""
    if loop == "accelerate":
        return _with_imports(plan, _accelerate_on_cards(plan))
    if loop != "trainer":
        raise DecisionError(f"{loop} does not prepare a model for several cards: use --for trainer or --for accelerate")
    # With this variable, only one process reads the weights (`transformers.distributed.fsdp.is_fsdp_enabled`).
    return _with_imports(plan, _trainer_on_cards(plan), (("ACCELERATE_USE_FSDP", "true"),) if is_fsdp(plan) else ())


def _trainer_on_cards(plan: Plan) -> str:
    settings = training_arguments(plan, output_dir="out")
    arguments = "".join(f"    {name}={value!r},\n" for name, value in settings.items())
    return f"""\
# {torchrun(plan)} train.py
arguments = transformers.TrainingArguments(  # before the model is loaded
{arguments})
{_model_lines(plan)}\
trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
trainer.train()
"""


def _accelerate_on_cards(plan: Plan) -> str:
    size, count = micro_batches(plan)
    samples = counted(size, "sample")
    steps = f"num_steps={count}" + (", sync_each_batch=True" if is_fsdp(plan) and count > 1 else "")
    recomputes = ""
    if checkpoints(plan) and not is_fsdp(plan):
        recomputes = 'model.gradient_checkpointing_enable({"use_reentrant": False})\n'
    loss = "loss_fn(model(batch), batch)  # your loss function" if plan.workload.has_loss_fn else "model(**batch).loss"
    cache = "" if plan.model.reference is None or ":" in plan.model.reference else "model.config.use_cache = False\n"
    return f"""\
# accelerate launch --config_file accelerate.yaml train.py; --emit accelerate.yaml writes the config
accelerator = accelerate.Accelerator(
    gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin({steps}),
)
{_model_lines(plan)}{cache}{recomputes}\
optimizer = {_optimizer_on_cards(plan)}
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # batches of {samples} for each card
model.train()
for batch in loader:
    with accelerator.accumulate(model):
        loss = {loss}
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def _for_lightning(plan: Plan) -> str:
    return f"""\

class Planned(lightning.LightningModule):  # precision and accumulation of the Trainer stay at their defaults
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = model

    def configure_optimizers(self):
        optimizer = {_optimizer(plan).replace("model.", "self.model.")}
        self.rewritten = planner.rewrite.apply(plan, self.model, optimizer{_loss(plan)})
        return self.rewritten.optimizer

    def training_step(self, batch, _):  # batches of {_samples(plan)}
        self.log("loss", self.rewritten.step(batch))
"""


def _optimizer(plan: Plan) -> str:
    """Returns the expression that creates the planned optimizer, before the plan changes its kernel or its state."""
    known = OPTIMIZERS.get(plan.workload.optimizer)
    path = known.path if known is not None else quoted.torch_optimizer(plan.workload.optimizer)
    momentum = known.hyperparameters.get("momentum") if known is not None else None
    return f"{path}(model.parameters(), lr=1e-4{'' if momentum is None else f', momentum={momentum}'})"


def _optimizer_on_cards(plan: Plan) -> str:
    """Returns the expression that creates the planned optimizer with its planned kernel or 8-bit state."""
    if any(decision.eight_bit_state for decision in plan.decisions):
        return "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)"
    kernel = ", fused=True" if optimizer_kernel_of(plan.decisions) == "fused" else ""
    return f"{_optimizer(plan)[:-1]}{kernel})"


_LINES = {"trainer": _for_trainer, "loop": _for_loop, "accelerate": _for_accelerate, "lightning": _for_lightning}
