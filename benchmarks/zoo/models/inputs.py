"""Random batches for transformers models: the planner's synthetic batch, or one by the arguments of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.zoo.case import mean_square
from planner.errors import WorkloadError
from planner.workload.call_convention import LossFn
from planner.workload.synthetic_batch import synthetic_batch

BATCH, TOKENS, FRAMES, SAMPLES, PATCH_FRAMES = 2, 16, 4, 4000, 64

Variant = tuple[str, Callable[[Any], dict[str, Any]], LossFn | None]
"""(description, function from the model to a batch, loss function)"""


def variants(model_class: type[torch.nn.Module]) -> Iterator[Variant]:
    """Yields ways to feed a model, the most natural first."""
    accepted = list(inspect.signature(model_class.forward).parameters)
    if "labels" in accepted or "start_positions" in accepted:
        yield "synthetic batch", synthetic, None
    if "future_values" in accepted:
        yield "series", lambda model: _by_name(model, ["past_values", "future_values"]), None
    if "labels" in accepted:
        yield "with labels", lambda model: with_labels(model, accepted), None
    if "return_loss" in accepted:
        yield "pairs", lambda model: {**_by_name(model, ["input_ids", *_main(model)]), "return_loss": True}, None
    yield "mean square", lambda model: _by_name(model, _main(model)), mean_square
    if "decoder_input_ids" in accepted:
        yield "mean square, decoder", lambda m: _by_name(m, [*_main(m), "decoder_input_ids"]), mean_square
    several = [name for name in ("input_ids", "pixel_values", "input_features", "input_values") if name in accepted]
    if len(several) > 1:
        yield "mean square, " + " and ".join(several), lambda model: _by_name(model, several), mean_square
        for name in several:
            yield f"mean square, {name}", lambda model, name=name: _by_name(model, [name]), mean_square


def synthetic(model: Any) -> dict[str, Any]:
    """Returns the planner's synthetic batch, with shorter sounds."""
    batch = synthetic_batch(model, batch_size=BATCH, seq_len=TOKENS, device="cpu")
    if "input_values" in batch and batch["input_values"].dim() == 2:
        batch["input_values"] = batch["input_values"][:, :SAMPLES].clone()
    if batch["labels"].dim() == 2 and "CTC" in type(model).__name__:
        batch["labels"] = 1 + batch["labels"][:, :4] % 8
    return batch


def with_labels(model: Any, accepted: list[str]) -> dict[str, Any]:
    """Returns the main inputs, and labels for the task that the name of the class says."""
    batch = _by_name(model, _main(model))
    if "decoder_input_ids" in accepted and "input_ids" not in batch and "labels" not in accepted:
        batch["decoder_input_ids"] = _tokens(model)
    return {**batch, "labels": _labels(model)}


def _labels(model: Any) -> Any:
    name = type(model).__name__
    labels = max(getattr(model.config, "num_labels", 2) or 2, 1)
    if "Detection" in name:
        one = {"class_labels": torch.zeros(2, dtype=torch.long), "boxes": torch.rand(2, 4) / 2}
        return [{key: value.clone() for key, value in one.items()} for _ in range(BATCH)]
    if "Segmentation" in name:
        height, width = _image(model.config)
        return torch.randint(labels, (BATCH, height, width))
    if "Depth" in name:
        return torch.rand(BATCH, *_image(model.config))
    if any(task in name for task in ("Classification", "XVector")) and "Token" not in name and "Frame" not in name:
        return torch.randint(labels, (BATCH,))
    return _tokens(model)


def _main(model: Any) -> list[str]:
    """Returns the names of the main input and of the arguments of `forward` that have no default."""
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    main = getattr(model, "main_input_name", "input_ids")
    if main not in parameters:
        main = next((name for name in ("input_ids", "pixel_values", "input_features") if name in parameters), main)
    return list(dict.fromkeys([main, *required]))


def _by_name(model: Any, names: list[str]) -> dict[str, Any]:
    """Returns random values for these arguments.

    Raises:
        WorkloadError: what an argument takes is not known.
    """
    batch = {}
    for name in names:
        if name not in _MAKERS:
            raise WorkloadError(f"{type(model).__name__} needs '{name}', for which the zoo has no values")
        batch[name] = _MAKERS[name](model)
    return batch


def _config(config: Any, *kinds: str) -> Any:
    """Returns the part of a config for a modality, or the config itself."""
    for kind in kinds:
        if hasattr(config, kind) and getattr(config, kind) is not None:
            return getattr(config, kind)
    return config


def _tokens(model: Any) -> torch.Tensor:
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 32
    special = {
        value
        for name, value in vars(text).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    special |= {
        value
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    allowed = torch.tensor([word for word in range(words) if word not in special] or [0])
    return allowed[torch.randint(len(allowed), (BATCH, TOKENS))]


def _image(config: Any) -> tuple[int, int]:
    size = (
        getattr(_config(config, "vision_config", "backbone_config"), "image_size", None)
        or getattr(config, "image_size", None)
        or 64
    )
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _pixels(model: Any) -> torch.Tensor:
    config = _config(model.config, "vision_config", "backbone_config")
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    shape = (BATCH, channels if isinstance(channels, int) else 3, *_image(model.config))
    if (
        "Video" in type(model).__name__
        or hasattr(config, "tubelet_size")
        or type(config).__name__.startswith("Timesformer")
    ):
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or FRAMES
        return torch.randn(BATCH, frames, *shape[1:])
    return torch.randn(shape)


def _features(model: Any) -> torch.Tensor:
    config = _config(model.config, "audio_config", "encoder_config")
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
    width = next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), 80)
    if getattr(config, "max_source_positions", None) and "Speech2Text" not in type(config).__name__:
        return torch.randn(BATCH, width, 2 * config.max_source_positions)
    return torch.randn(BATCH, PATCH_FRAMES, width)


def _sound(model: Any) -> torch.Tensor:
    config = model.config
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return torch.randn(BATCH, config.max_length, config.num_mel_bins)
    if hasattr(config, "codebook_size") or hasattr(config, "audio_channels"):
        return torch.randn(BATCH, getattr(config, "audio_channels", 1) or 1, SAMPLES)
    return torch.randn(BATCH, SAMPLES)


def _series(kind: str) -> Callable[[Any], torch.Tensor]:
    def make(model: Any) -> torch.Tensor:
        config = model.config
        length = config.prediction_length if kind == "future" else config.context_length
        if kind == "past" and hasattr(config, "lags_sequence"):
            length += max(config.lags_sequence)
        channels = getattr(config, "num_input_channels", 1)
        return (
            torch.randn(BATCH, length, channels)
            if hasattr(config, "num_input_channels")
            else torch.randn(BATCH, length)
        )

    return make


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "input_ids": _tokens,
    "inputs": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _pixels,
    "pixel_values_videos": lambda model: torch.randn(
        BATCH, getattr(model.config, "frames_per_clip", FRAMES), 3, *_image(model.config)
    ),
    "input_features": _features,
    "input_values": _sound,
    "bbox": lambda model: torch.zeros(BATCH, TOKENS, 4, dtype=torch.long),
    "past_values": _series("past"),
    "future_values": _series("future"),
    "past_time_features": lambda model: torch.randn(*_series("past")(model).shape, model.config.num_time_features),
    "past_observed_mask": lambda model: torch.ones_like(_series("past")(model)),
    "attention_mask": lambda model: torch.ones(BATCH, TOKENS, dtype=torch.long),
    "token_type_ids": lambda model: torch.zeros(BATCH, TOKENS, dtype=torch.long),
    "hidden_states": lambda model: torch.randn(BATCH, TOKENS, model.config.hidden_size),
    "inputs_embeds": lambda model: torch.randn(BATCH, TOKENS, model.config.hidden_size),
    "encoder_hidden_states": lambda model: torch.randn(BATCH, TOKENS, model.config.hidden_size),
}
"""By name of an argument of `forward`: a function from the model to random values."""
