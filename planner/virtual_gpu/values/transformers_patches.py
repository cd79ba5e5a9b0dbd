"""Patches transformers in the process of a rehearsal, where it treats fake tensors otherwise than real ones.

`generate` makes texts of full length. A text ends with a token that the model chooses, which a rehearsal does not know.
Memory grows with the length, so that a rehearsal assumes that no text ends before the largest length that `generate`
was given. The ops are those of a real run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from planner.virtual_gpu.values.shadow_values import ShadowValues

ASSUMED_FULL_LENGTH = "generated texts have the largest length"


def install(known: ShadowValues) -> None:
    """Patches transformers in this process, which must be a child process. Does nothing if it is not imported."""
    utilities: Any = sys.modules.get("transformers.utils.import_utils")
    if hasattr(utilities, "is_fake_tensor"):  # for fake tensors it would build full masks that no kernel needs
        utilities.is_fake_tensor = lambda tensor: False
    criteria: Any = sys.modules.get("transformers.generation.stopping_criteria")
    for name in ("EosTokenCriteria", "StopStringCriteria"):
        if hasattr(criteria, name):
            _never_done(getattr(criteria, name), known)
    mixin: Any = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    if hasattr(mixin, "_beam_search_has_unfinished_sequences"):
        _go_on_while_possible(mixin, known)


def _never_done(criterion: Any, known: ShadowValues) -> None:
    ask = criterion.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_done = ask(self, *args, **kwargs)
        known.assume(is_done, False, ASSUMED_FULL_LENGTH)
        return is_done

    criterion.__call__ = call


def _go_on_while_possible(mixin: Any, known: ShadowValues) -> None:
    """Makes a beam search go on until a criterion that is known, such as the largest length, ends it."""
    ask = mixin._beam_search_has_unfinished_sequences

    def has_unfinished(improves: Any, are_finished: Any, hits_criteria: torch.Tensor, early_stopping: Any) -> Any:
        is_unfinished = ask(improves, are_finished, hits_criteria, early_stopping)
        hits = known.value(hits_criteria)
        if hits is not None:
            with unset_fake_temporarily():
                goes_on = not bool(hits.all())
            known.assume(is_unfinished, goes_on, ASSUMED_FULL_LENGTH)
        return is_unfinished

    mixin._beam_search_has_unfinished_sequences = staticmethod(has_unfinished)
