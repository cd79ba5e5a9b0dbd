"""Do what a plan says: `rewrite.apply(plan, model)` for live objects, `rewrite.emit(plan, path)` for a Python file.

`rewrite.certify(plan, model, batch)` rehearses the rewritten step without a GPU; `rewrite.verify(plan, model, batch)`
runs it beside the plain one, and compares what comes out. `rewrite.apply_for_trainer(plan, model)` leaves the step to
transformers' `Trainer`, with `training_arguments` and a `trainer_callback`.
"""

from __future__ import annotations

from rewrite.application import Rewritten, apply, apply_decisions
from rewrite.certificate import Certificate, certify
from rewrite.emitter.emit import emit, source
from rewrite.parity.result import Parity
from rewrite.parity.verify import verify
from rewrite.trainer import trainer_callback
from rewrite.trainer.apply import RewrittenForTrainer, apply_for_trainer
from rewrite.trainer.arguments import training_arguments

__all__ = [
    "Certificate",
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
]
