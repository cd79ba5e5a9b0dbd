"""Accumulation: one optimizer step from micro-batches, with the gradient of the full batch.

The loss of a batch is a mean over its terms, so the loss of the whole is the sum of the parts' losses, each
weighted by its share of the terms. Terms are samples, or for token losses the labels that count: a mean over
uneven parts weighted by samples would be another loss. Only the order of the sum differs from the full batch.
What looks across samples differs too: batch normalisation sees the micro-batch, dropout draws other masks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.calling import Calling
from planner.decisions import Accumulation
from planner.errors import DecisionError
from planner.plan_file import Plan
from rewrite.fragment import Fragment, assignment
from rewrite.rewriting import LossWeight, Rewriting
from rewrite.step import weighted


def accumulation(rewriting: Rewriting, decision: Accumulation) -> None:
    """Make the step split its batch. Raises `DecisionError` if the parts do not make up the planned batch."""
    needed = -(-rewriting.batch_size // decision.micro_batch_size)
    if needed != decision.micro_batches:
        raise DecisionError(
            f"accumulation plans {decision.micro_batches} micro-batches of {decision.micro_batch_size} samples, but a "
            f"batch of {rewriting.batch_size} makes {needed}: make the plan again for this batch size"
        )
    if rewriting.loss_weight is not None:
        loss_terms = functools.partial(_stated_terms, loss_weight=rewriting.loss_weight)
    elif rewriting.loss_fn is None and rewriting.calling is Calling.KEYWORDS:
        loss_terms = functools.partial(
            counted_labels, shifted=shifts_labels(rewriting.model), ignored=ignored_label(rewriting.model)
        )
    else:
        loss_terms = samples_only
    rewriting.split = functools.partial(
        micro_batches,
        micro_batch_size=decision.micro_batch_size,
        batch_size=rewriting.batch_size,
        loss_terms=loss_terms,
    )


def shifts_labels(model: torch.nn.Module) -> bool:
    """Whether the model's own loss leaves out each sample's first label, as next-token losses do.

    Read from the forward that makes the loss: class names do not tell (`XLNetLMHeadModel` and `BartForCausalLM` do
    not shift, `GPT2LMHeadModel` does).
    """
    return _class_shifts_labels(type(model), lambda: getattr(model.loss_function, "__name__", ""))


def ignored_label(model: torch.nn.Module) -> int:
    """The label that the model's own loss leaves out."""
    if "SemanticSegmentation" in type(model).__name__:
        return getattr(getattr(model, "config", None), "semantic_loss_ignore_index", 255)
    return -100


def _stated_terms(batch: Any, samples: int, *, loss_weight: LossWeight) -> torch.Tensor | float:
    return loss_weight(batch)


def _class_shifts_labels(kind: type, loss_function_name: Callable[[], str]) -> bool:
    for base in kind.__mro__:
        if "forward" not in vars(base):
            continue
        try:
            text = inspect.getsource(vars(base)["forward"])
        except (OSError, TypeError):
            continue
        if "labels[..., 1:]" in text or "labels[:, 1:]" in text:
            return True
        if "self.loss_function(" in text:
            return "CausalLM" in loss_function_name()
    return False


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def micro_batches(batch, *, micro_batch_size, batch_size, loss_terms):
    """Parts of a batch, each with the weight of its loss: its share of the terms that the batch's loss averages."""
    samples = count_samples(batch, batch_size)
    if samples <= micro_batch_size:
        yield batch, None
        return
    terms = loss_terms(batch, samples)
    for start in range(0, samples, micro_batch_size):
        stop = min(start + micro_batch_size, samples)
        part = samples_between(start, stop, batch, samples)
        yield part, loss_terms(part, stop - start) / terms


def samples_between(start, stop, batch, samples):
    """The part of a batch with these samples: tensors with a sample dimension are cut, the others are shared."""
    return map_tensors(lambda t: t[start:stop] if t.dim() and t.shape[0] == samples else t, batch)


def count_samples(batch, batch_size):
    """How many samples the batch has: as planned, or for a smaller last batch what all its tensors agree on."""
    sizes = set()
    map_tensors(lambda t: sizes.add(t.shape[0] if t.dim() else 1), batch)
    if batch_size in sizes:
        return batch_size
    found = sizes - {1} or sizes
    if len(found) != 1:
        raise ValueError(
            f"no tensor of the batch has {batch_size} samples, and their first dimensions {sorted(found)} differ: "
            f"give batches of {batch_size} samples (drop_last=True), with the sample as first dimension"
        )
    return found.pop()


def map_tensors(function, batch):
    """Apply a function to every tensor of nested mappings, dataclasses, tuples and lists; share everything else."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = copy.copy(batch)
        for key, value in batch.items():
            mapped[key] = map_tensors(function, value)
        return mapped
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: map_tensors(function, getattr(batch, name)) for name in names})
    if isinstance(batch, (tuple, list)):
        parts = [map_tensors(function, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def samples_only(batch, samples):
    """The loss is a mean over samples."""
    return samples


def counted_labels(batch, samples, *, shifted, ignored):
    """The loss is a mean over the labels that count, on the device of the labels; over samples without such labels."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return samples
    return (labels[..., 1:] if shifted else labels).ne(ignored).sum(dtype=torch.float64)


def accumulation_source(plan: Plan, decision: Accumulation) -> Fragment:
    labels = next((entry for entry in plan.workload.batch if entry[0] == "labels"), None)
    by_labels = (
        labels is not None
        and len(labels[1]) > 1
        and "int" in labels[2]
        and not plan.workload.has_loss_fn
        and plan.workload.calling == Calling.KEYWORDS.name
    )
    counting = counted_labels if by_labels else samples_only
    functions = (micro_batches, samples_between, count_samples, map_tensors, counting)
    arguments = "batch, micro_batch_size=MICRO_BATCH_SIZE, batch_size=BATCH_SIZE"
    constants = [
        assignment("BATCH_SIZE", plan.workload.batch_size),
        assignment("MICRO_BATCH_SIZE", decision.micro_batch_size),
    ]
    if by_labels:
        constants.append(assignment("LABELS_SHIFTED", _named_class_shifts_labels(plan.model.name)) + _SHIFTED_COMMENT)
        constants.append(assignment("IGNORED_LABEL", 255 if "SemanticSegmentation" in plan.model.name else -100))
    terms = "loss_terms" if by_labels else "samples_only"
    return Fragment(
        imports=(
            "import copy",
            "import dataclasses",
            "from collections.abc import Mapping",
        ),
        constants=tuple(constants),
        functions=(
            *map(inspect.getsource, functions),
            *([_LOSS_TERMS] if by_labels else []),
            inspect.getsource(weighted),
        ),
        split=f"micro_batches({arguments}, loss_terms={terms})",
    )


_LOSS_TERMS = '''\
def loss_terms(batch, samples):
    """As this model's loss counts."""
    return counted_labels(batch, samples, shifted=LABELS_SHIFTED, ignored=IGNORED_LABEL)
'''

_SHIFTED_COMMENT = "  # whether the model's loss leaves out each sample's first label (next-token losses do)"


def _named_class_shifts_labels(name: str) -> bool:
    """The same for a class of transformers by its name; a class that is not there is taken not to shift."""
    try:
        import transformers
    except ImportError:
        return False
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type):
        return False
    groups = [group for group in transformers.modeling_utils.LOSS_MAPPING if group in name]
    loss = transformers.modeling_utils.LOSS_MAPPING[groups[0] if groups else "ForCausalLM"]
    return _class_shifts_labels(kind, lambda: loss.__name__)
