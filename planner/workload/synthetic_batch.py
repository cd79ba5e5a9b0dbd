"""Creates batches of random values for transformers models, with the shapes and masks that their `forward` expects."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Collection
from typing import Any

import torch

from planner.errors import WorkloadError
from planner.plan_types.plan import Plan

_SECONDS_OF_SOUND = 10
_SAMPLES_PER_SECOND = 16_000


MASK = "attention_mask"
"""Name under which a collator of transformers returns the mask, and under which models take it."""


class Masking(enum.Enum):
    """The attention mask of a synthetic batch of tokens."""

    NONE = "none"
    """The batch has no mask, so that every sequence has full length."""
    FULL = "full"
    """The mask is 1 everywhere. Transformers then calls the same kernels as without a mask."""
    PADDED = "padded"
    """The last position of every sample is padding, so that attention gets a mask of all pairs of tokens."""


def masking_of(lengths: Collection[int], *, samples: int, multiple: int, longest: int) -> Masking:
    """Returns the mask that the collator gives batches of samples of these lengths; NONE if there are no lengths.

    A run is rehearsed with one kind of mask. It is PADDED if any of its batches may have padding, because such a batch
    needs more memory than one without padding.

    Args:
        samples: number of samples in a batch.
        multiple: batches are padded to a multiple of this length.
        longest: length to which longer samples are cut, and above which nothing is padded.
    """
    if not lengths:
        return Masking.NONE
    differ = samples > 1 and len({min(length, longest) for length in lengths}) > 1
    are_rounded = any(length < longest and length % multiple for length in lengths)
    return Masking.PADDED if differ or are_rounded else Masking.FULL


def planned_masking(plan: Plan) -> Masking:
    """Returns the mask of the synthetic batch for which a plan was made."""
    source, work = None if plan.run is None else plan.run.source, plan.workload
    if source is not None and source.lengths and work.seq_len is not None:
        lengths = [length for length, _ in source.lengths]
        return masking_of(lengths, samples=work.batch_size, multiple=source.multiple, longest=work.seq_len)
    return Masking.PADDED if any(path == MASK for path, _, _ in work.batch) else Masking.NONE


def synthetic_batch(
    model: Any, *, batch_size: int, seq_len: int, device: str = "meta", masking: Masking = Masking.NONE
) -> dict[str, torch.Tensor]:
    """Returns the inputs and labels of one training step. On the meta device they have shapes and dtypes but no values.

    Language models get `input_ids` of shape [batch, seq], vision models `pixel_values`, and audio models
    `input_features` or `input_values`, in the dtype of the model. The shape of the labels depends on the task.

    Args:
        masking: the attention mask that language models get if their `forward` takes one. It is on the CPU, so that a
            rehearsal knows its values.

    Raises:
        WorkloadError: the model computes no loss, or takes inputs of an unknown kind.
    """
    if hasattr(model, "peft_config"):
        model = model.get_base_model()  # peft's own class says neither the task nor the arguments
    main = getattr(model, "main_input_name", "input_ids")
    accepted = set(inspect.signature(model.forward).parameters)
    with torch.device(device):
        labels = _labels(model, accepted, batch_size, seq_len)
        inputs = _inputs(model, main, batch_size, seq_len)
    dtype = getattr(model, "dtype", torch.float32)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()} | labels
    if masking is Masking.NONE or "input_ids" not in batch or MASK not in accepted:
        return batch
    mask = torch.ones(batch["input_ids"].shape, dtype=torch.int64, device="cpu")
    if masking is Masking.PADDED:
        mask[:, -1] = 0  # in every sample, so that each micro-batch has padding, too
    return {**batch, MASK: mask}


def _inputs(model: Any, main: str, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Returns the model's main input as a dict with one key: its name, `main`."""
    config = model.config
    match main:
        case "input_ids":
            return {"input_ids": torch.randint(_vocabulary(model), (batch, seq_len))}
        case "pixel_values":
            vision = getattr(config, "vision_config", config)
            height, width = _pair(getattr(vision, "image_size", 224))
            return {"pixel_values": torch.randn(batch, getattr(vision, "num_channels", 3), height, width)}
        case "input_features":
            frames = 2 * getattr(config, "max_source_positions", 1500)
            return {"input_features": torch.randn(batch, getattr(config, "num_mel_bins", 80), frames)}
        case "input_values":
            return {"input_values": torch.randn(batch, _SECONDS_OF_SOUND * _SAMPLES_PER_SECOND)}
    raise _unknown(model, f"has the main input '{main}', for which no synthetic batch can be created")


def _labels(model: Any, accepted: set[str], batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Returns labels whose shape is inferred from the name of the model's class."""
    name = type(model).__name__
    if {"start_positions", "end_positions"} <= accepted:
        return {name: torch.randint(seq_len, (batch,)) for name in ("start_positions", "end_positions")}
    if "labels" not in accepted:
        raise _unknown(model, "has no argument 'labels', so it computes no loss")
    if any(part in name for part in ("SequenceClassification", "ImageClassification", "AudioClassification")):
        return {"labels": torch.randint(model.config.num_labels, (batch,))}
    if any(
        part in name for part in ("LM", "ConditionalGeneration", "TokenClassification", "CTC", "Seq2Seq", "PreTraining")
    ):
        tokens = model.config.num_labels if "TokenClassification" in name else _vocabulary(model)
        return {"labels": torch.randint(tokens, (batch, seq_len))}
    raise _unknown(model, "takes labels whose shape cannot be inferred from its class name")


def _unknown(model: Any, reason: str) -> WorkloadError:
    """Returns the error for a model for which no batch can be created. Its message is '<class> <reason>: <remedy>'."""
    return WorkloadError(
        f"{type(model).__name__} {reason}: give a Python function that returns (model, batch) or "
        "(model, batch, loss_fn) as path/file.py:name"
    )


def _vocabulary(model: Any) -> int:
    """Returns the number of tokens in the vocabulary; 1 if the config does not state it."""
    config = model.config
    return getattr(config.get_text_config(), "vocab_size", None) or getattr(config, "vocab_size", None) or 1


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width) of an image size of a config, which is one number if the images are square."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
