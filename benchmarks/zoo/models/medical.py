"""Networks of MONAI for small volumes and images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.case import Case, mean_square, single

BATCH, SIZE = 1, 32
_PLAIN = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
TABLE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": ({**_PLAIN, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}, (1, SIZE, SIZE, SIZE)),
    "AttentionUnet": ({**_PLAIN, "channels": (4, 8, 16), "strides": (2, 2)}, (1, SIZE, SIZE, SIZE)),
    "BasicUNet": ({**_PLAIN, "features": (4, 4, 8, 8, 16, 4)}, (1, SIZE, SIZE, SIZE)),
    "BasicUNetPlusPlus": ({**_PLAIN, "features": (4, 4, 8, 8, 16, 4)}, (1, SIZE, SIZE, SIZE)),
    "DynUNet": (
        {
            **_PLAIN,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [4, 8, 16],
        },
        (1, SIZE, SIZE, SIZE),
    ),
    "SegResNet": ({**_PLAIN, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)}, (1, SIZE, SIZE, SIZE)),
    "SegResNetDS": ({**_PLAIN, "init_filters": 8, "blocks_down": (1, 1, 1)}, (1, SIZE, SIZE, SIZE)),
    "SegResNetVAE": (
        {
            "input_image_size": [SIZE] * 3,
            "in_channels": 1,
            "out_channels": 2,
            "init_filters": 8,
            "blocks_down": (1, 1),
            "blocks_up": (1,),
            "vae_nz": 8,
        },
        (1, SIZE, SIZE, SIZE),
    ),
    "VNet": ({**_PLAIN, "out_channels": 2}, (1, SIZE, SIZE, SIZE)),
    "UNETR": (
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": SIZE,
            "feature_size": 8,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_heads": 2,
        },
        (1, SIZE, SIZE, SIZE),
    ),
    "SwinUNETR": (
        {
            "in_channels": 1,
            "out_channels": 2,
            "feature_size": 12,
            "depths": (1, 1, 1, 1),
            "norm_name": "batch",
            "num_heads": (1, 2, 2, 4),
        },
        (1, SIZE, SIZE, SIZE),
    ),
    "DenseNet121": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 64, 64)),
    "ResNet": (
        {
            "block": "basic",
            "layers": [1, 1, 1, 1],
            "block_inplanes": [4, 8, 8, 16],
            "spatial_dims": 3,
            "n_input_channels": 1,
            "num_classes": 2,
        },
        (1, SIZE, SIZE, SIZE),
    ),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "in_channels": 1, "num_classes": 2},
        (1, 64, 64),
    ),
    "HighResNet": ({**_PLAIN}, (1, 16, 16, 16)),
    "AutoEncoder": ({**_PLAIN, "out_channels": 1, "channels": (4, 8), "strides": (2, 2)}, (1, SIZE, SIZE, SIZE)),
    "VarAutoEncoder": (
        {
            "spatial_dims": 2,
            "in_shape": (1, 32, 32),
            "out_channels": 1,
            "latent_size": 4,
            "channels": (4, 8),
            "strides": (2, 2),
        },
        (1, 32, 32),
    ),
    "ViT": (
        {
            "in_channels": 1,
            "img_size": (16, 16, 16),
            "patch_size": (8, 8, 8),
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_layers": 2,
            "num_heads": 2,
            "classification": True,
        },
        (1, 16, 16, 16),
    ),
    "VQVAE": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (8, 8),
            "num_res_layers": 1,
            "num_res_channels": (8, 8),
            "num_embeddings": 16,
            "embedding_dim": 8,
            "downsample_parameters": ((2, 4, 1, 1),) * 2,
            "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
        },
        (1, SIZE, SIZE),
    ),
    "MedNeXt": (
        {
            "spatial_dims": 3,
            "init_filters": 4,
            "in_channels": 1,
            "out_channels": 2,
            "blocks_down": (1, 1),
            "blocks_bottleneck": 1,
            "blocks_up": (1, 1),
            "encoder_expansion_ratio": 2,
            "decoder_expansion_ratio": 2,
            "bottleneck_expansion_ratio": 2,
        },
        (1, SIZE, SIZE, SIZE),
    ),
}
"""By class: settings, and the shape of one sample."""


def cases() -> Iterator[Case]:
    """Yields one case for each class in the table."""
    for name, (settings, shape) in TABLE.items():
        build = lambda name=name, settings=settings, shape=shape: _built(name, settings, shape)
        yield Case(library="monai", name=name, candidates=single(build))


def _built(name: str, settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[torch.nn.Module, Any, Any]:
    from monai.networks import nets

    return getattr(nets, name)(**settings), torch.randn(2 * BATCH, *shape), mean_square
