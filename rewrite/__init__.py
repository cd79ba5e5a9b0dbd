"""Carry out a plan: `rewrite.apply(plan, model)` on live objects, `rewrite.emit(plan, path)` as a Python file.

`rewrite.certify(plan, model, batch)` rehearses the rewritten step without a GPU. `rewrite.verify(plan, model, batch)`
trains copies of the model with the plan and without it, and compares the results. For transformers' `Trainer`, which
runs the step itself, use `rewrite.apply_for_trainer(plan, model)`, `training_arguments` and `trainer_callback`.

Each decision of a plan is carried out by a rule in `rules/`. The rules, the step and the emitter share the functions in
`portable/`, so the text of an emitted file is the text that runs here.
"""

from __future__ import annotations

if __name__ != "planner.rewrite":
    raise ImportError(f"this folder cannot be imported under the name {__name__}: write `from planner import rewrite`")

from planner.rewrite.application import Rewritten, apply, apply_decisions
from planner.rewrite.certificate import Certificate, certify
from planner.rewrite.emitter.emit import emit, source
from planner.rewrite.memory_promise import MemoryWatch, watch_memory
from planner.rewrite.parity.result import Parity
from planner.rewrite.parity.verify import verify
from planner.rewrite.trainer import trainer_callback
from planner.rewrite.trainer.apply import RewrittenForTrainer, apply_for_trainer
from planner.rewrite.trainer.arguments import training_arguments

__all__ = [
    "Certificate",
    "MemoryWatch",
    "Parity",
    "Rewritten",
    "RewrittenForTrainer",
    "apply",
    "apply_decisions",
    "apply_for_trainer",
    "certify",
    "emit",
    "source",
    "trainer_callback",
    "training_arguments",
    "verify",
    "watch_memory",
]
