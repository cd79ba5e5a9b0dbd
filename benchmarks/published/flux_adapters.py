"""Adapters for FLUX.2-klein-base-4B as peft's comparison of methods trains them, on an L40S, at 512 x 512 pixels.

The script is `method_comparison/image-gen/run.py` of github.com/huggingface/peft (commit 1159d5aac, August 2026):
batches of 2, 512 prompt tokens and 1024 image tokens, weights in bf16, gradient checkpointing, AdamW. Prompts and
images are encoded before, and DINOv2-base, which judges generated images, stays on the card. Then the cache is emptied
and peaks are reset. Every 100 steps the script notes
`max_memory_reserved()`, generates images, empties the cache and resets the peaks, so that the published maximum is that
of training steps. Blocks that generation leaves, and fragments of them, are not rehearsed.

    python -m benchmarks.published.flux_adapters    (needs the package diffusers)
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from benchmarks.published.rehearsing import outcome

SAMPLES, PROMPTS, TEXT_TOKENS, TEXT_WIDTH, CHANNELS, SIDE = 2, 14, 512, 7680, 128, 32
STEPS = 3
DINO_SHAPES = [(1370, 768), (768, 3, 14, 14)] + 12 * ([(768, 768)] * 4 + [(3072, 768), (768, 3072)])
"""The larger weights of DINOv2-base, in fp32."""
TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("to_qkv_mlp_proj", "linear_in", "linear_out"),
]


def training(device: torch.device, settings: dict[str, Any] | None) -> None:
    """Train a few steps with an adapter, or all weights if `settings` is None."""
    import diffusers  # type: ignore[import-not-found]  # installed for this benchmark only
    import peft

    with device:
        judge = [torch.empty(shape) for shape in DINO_SHAPES]
        prompts_of_all = torch.zeros(PROMPTS, TEXT_TOKENS, TEXT_WIDTH, dtype=torch.bfloat16)
        places_of_all = torch.zeros(PROMPTS, TEXT_TOKENS, 4, dtype=torch.int64)
        latents_of_all = torch.zeros(PROMPTS, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model: Any = diffusers.Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=TEXT_WIDTH,
            guidance_embeds=False,
        )
        torch.set_default_dtype(before)
        model.enable_gradient_checkpointing()
        if settings is not None:
            model = peft.get_peft_model(model, peft.PeftConfig.from_peft_type(**settings))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    losses = []
    for _ in range(STEPS):
        chosen = torch.zeros(SAMPLES, dtype=torch.int64).to(device)
        latents, prompts = latents_of_all.index_select(0, chosen), prompts_of_all.index_select(0, chosen)
        text_places = places_of_all.index_select(0, chosen)
        image_places = torch.zeros(1, SIDE * SIDE, 4, dtype=torch.int64).expand(SAMPLES, -1, -1).to(device)
        noise = torch.randn_like(latents)
        timesteps = torch.zeros(SAMPLES).to(device)
        sigmas = torch.zeros(SAMPLES, 1, 1, 1, dtype=torch.bfloat16).to(device)
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = noisy.reshape(SAMPLES, CHANNELS, SIDE * SIDE).permute(0, 2, 1)
        optimizer.zero_grad(set_to_none=True)
        predicted = model(
            hidden_states=packed,
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=text_places,
            img_ids=image_places,
            return_dict=False,
        )[0]
        predicted = predicted[:, : packed.size(1)]
        predicted = diffusers.Flux2KleinPipeline._unpack_latents_with_ids(predicted, image_places, SIDE, SIDE)
        weighting = torch.ones_like(sigmas)
        target = noise - latents
        loss = torch.mean((weighting.float() * (predicted.float() - target.float()) ** 2).reshape(SAMPLES, -1), 1)
        loss = loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        losses.append(loss)
    torch.zeros(1, device=device)  # the moment at which the memory is read
    del judge


ALL = {"target_modules": TARGETS}
RESULTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "LoRA, rank 32": (10_708_058_112, {"peft_type": "LORA", "r": 32, "lora_alpha": 32, **ALL}),
    "LoRA, rank 64": (11_383_341_056, {"peft_type": "LORA", "r": 64, "lora_alpha": 64, **ALL}),
    "DoRA, rank 64": (13_176_406_016, {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "use_dora": True, **ALL}),
    "IA3": (9_586_081_792, {"peft_type": "IA3", "feedforward_modules": TARGETS, **ALL}),
    "MiSS, rank 32": (10_561_257_472, {"peft_type": "MISS", "r": 32, **ALL}),
    "VeRA, rank 32": (10_565_451_776, {"peft_type": "VERA", "r": 32, **ALL}),
    "all weights": (39_873_150_976, None),
}
"""Published `accelerator_memory_max` in bytes, and the settings of peft."""


def main() -> None:
    for name in ("bitsandbytes", "peft", "transformers.models.dinov2.modeling_dinov2"):
        importlib.import_module(name)
    diffusers = importlib.import_module("diffusers")
    diffusers.Flux2Transformer2DModel, diffusers.Flux2KleinPipeline  # noqa: B018 (loads the modules)
    for name, (published, settings) in RESULTS.items():
        found = outcome(functools.partial(training, settings=settings), "l40s", "2.12.0").peak_reserved_bytes
        print(
            f"{name:15} published {published / 1e9:.3f} GB, predicted {found / 1e9:.3f}, {found / published - 1:+.2%}"
        )


if __name__ == "__main__":
    main()
