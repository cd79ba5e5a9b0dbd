"""One model for each model type of transformers, made small from its default config."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Candidate, Case
from benchmarks.zoo.models import inputs, shrink
from planner.workload.call_convention import LossFn

MOST_PARAMETERS = 40_000_000
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "TIME_SERIES_PREDICTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING",
    "PRETRAINING", "SEQUENCE_CLASSIFICATION",
)  # fmt: skip
"""Tasks, as in the names of the mappings of transformers' auto classes. The first that a model type has is taken."""


def cases() -> Iterator[Case]:
    """Yields one case for each model type that an auto class of transformers can build."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    for shared in (
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "torch._dynamo",
    ):
        importlib.import_module(shared)  # what most models import: once here instead of once in each process
    for kind in sorted(transformers.CONFIG_MAPPING.keys()):
        if class_names(kind):
            yield Case(library="transformers", name=kind, candidates=lambda kind=kind: candidates(kind))


def class_names(kind: str) -> list[str]:
    """Returns the classes to try for a model type: the one with a loss of its own first, then the bare model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    heads = [name for mapping in mappings if (name := mapping.get(kind)) is not None]
    found = [*heads[:1], auto.MODEL_MAPPING_NAMES.get(kind)]
    return list(dict.fromkeys(name if isinstance(name, str) else name[0] for name in found if name is not None))


def candidates(kind: str) -> Iterator[Candidate]:
    """Yields ways to build and feed a model type: narrow first, with a loss of its own first."""
    transformers = importlib.import_module("transformers")
    default = transformers.CONFIG_MAPPING[kind]
    for level, widths in shrink.levels():
        for name in class_names(kind):
            model_class = getattr(transformers, name, None)
            if model_class is None:
                continue
            for how, batch, loss_fn in inputs.variants(model_class):
                yield Candidate(
                    how=f"{name}, {level}, {how}",
                    build=lambda c=model_class, w=widths, b=batch, f=loss_fn: built(default, c, w, b, f),
                )


def built(
    config_class: Any, model_class: Any, widths: bool, make_batch: Any, loss_fn: LossFn | None
) -> tuple[torch.nn.Module, Any, LossFn | None]:
    """Builds a model from a small config.

    Raises:
        ValueError: the model is larger than `MOST_PARAMETERS`.
    """
    config = config_class(**shrink.small_settings(config_class(), widths=widths))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters with small settings")
    model = model_class(config_class(**shrink.small_settings(config_class(), widths=widths))).float()
    return model, make_batch(model), loss_fn
