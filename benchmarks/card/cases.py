"""The cases: model, precision, optimizer and decisions of each training step. Core cases come first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from benchmarks.card import models
from benchmarks.card.models import Build
from planner.plan_types.decisions import (
    Accumulation,
    ChunkedLoss,
    Decision,
    Optimizer,
    OptimizerKernel,
    Precision,
    StepInBackward,
)
from planner.plan_types.recompute_decisions import Checkpoint, Offload, Replay
from planner.recompute.offload_cost import FROM_BYTES
from planner.workload.optimizer_choice import OptimizerSpec
from planner.workload.workload import Workload, workload


def adamw_fused(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one kernel for the whole step, which needs no temporaries."""
    return torch.optim.AdamW(parameters, fused=True)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": "adamw",
    "adamw-fused": adamw_fused,
    "sgd-momentum": "sgd-momentum",
    "adamw-8bit": "adamw",
    "adamw-kernel-fused": "adamw",
    "adamw-kernel-for-loop": "adamw",
}
"""Optimizers by the name that rows show. 'adamw' is torch's default on a card, foreach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to predict and to measure."""

    name: str
    build: Build
    precision: str | None = None
    """'bf16' or 'fp16' autocast (fp16 with a gradient scaler); None: fp32."""
    optimizer: str = "adamw"
    checkpoint: str | None = None
    """Class of the modules that are checkpointed, one by one."""
    kept: tuple[int, ...] = ()
    """Ops whose outputs those modules keep, by number in the forward of one module (selective checkpointing)."""
    offload: bool = False
    """True if the inputs of checkpointed modules are offloaded to host memory."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Segments (first op, last op) of the model's own forward that are recomputed in backward."""
    chunked_head: str | None = None
    """Linear layer whose logits and loss are computed in 8 chunks; None: in one piece."""
    micro_batches: int = 1
    step_in_backward: bool = False
    core: bool = False
    keep_history: bool = False
    """True if the complete history of the allocator is written to its own file."""

    def workload(self, device: str) -> Workload:
        """Returns the workload with its tensors on 'meta' (no memory) or 'cpu' (values that can be trained on)."""
        torch.manual_seed(0)
        with torch.device(device):
            model, batch, loss_fn = self.build()
        return workload(model, batch, loss_fn=loss_fn, optimizer=OPTIMIZERS[self.optimizer])

    def decisions(self, work: Workload) -> tuple[Decision, ...]:
        """Returns the decisions in the order of a plan."""
        found: list[Decision] = []
        offloads: list[Decision] = []
        if self.precision is not None:
            found.append(Precision(dtype=self.precision))
        if self.optimizer == "adamw-8bit":
            found.append(Optimizer())
        if self.optimizer.startswith("adamw-kernel-"):
            found.append(OptimizerKernel(kernel=self.optimizer.removeprefix("adamw-kernel-")))
        if self.chunked_head is not None:
            found.append(ChunkedLoss(module=self.chunked_head, chunks=8))
        if self.micro_batches > 1:
            size = -(-work.batch_size // self.micro_batches)
            found.append(Accumulation(micro_batch_size=size, micro_batches=self.micro_batches))
        if self.step_in_backward:
            found.append(StepInBackward())
        if self.checkpoint is not None:
            modules = tuple(n for n, m in work.model.named_modules() if type(m).__name__ == self.checkpoint)
            found.append(Checkpoint(modules=modules, kept=(self.kept,) * len(modules) if self.kept else ()))
            if self.offload:
                offloads.append(Offload(modules=modules, inputs_of=modules, from_bytes=FROM_BYTES))
        if self.stretches:
            number = len(self.stretches)
            found.append(Replay(modules=("",) * number, stretches=self.stretches, kept=((),) * number))
        return (*found, *offloads)


def _core() -> tuple[Case, ...]:
    return (
        Case(name="roberta-fp32", build=models.roberta_84m),
        Case(name="gpt2-bf16", build=models.gpt2, precision="bf16", keep_history=True),
        Case(name="resnet50-fp32", build=models.resnet50, keep_history=True),
        Case(name="llama300m-bf16-checkpoint", build=models.llama_300m, precision="bf16",
             checkpoint="LlamaDecoderLayer"),
        Case(name="vit-bf16", build=models.vit_base, precision="bf16"),
        Case(name="unet-fp32", build=models.unet),
        Case(name="mlp-batchnorm-fp32", build=models.mlp_batchnorm, keep_history=True),
        Case(name="roberta-bf16-8bit-accumulate2", build=models.roberta_84m, precision="bf16", optimizer="adamw-8bit",
             micro_batches=2),
    )  # fmt: skip


def _language() -> tuple[Case, ...]:
    roberta, gpt2 = models.roberta_84m, models.gpt2
    llama_300m, llama_1b = models.llama_300m, models.llama_1b
    roberta_odd = functools.partial(roberta, 13, 77)
    gpt2_long = functools.partial(gpt2, 2, 1024)
    return (
        Case(name="roberta-bf16", build=roberta, precision="bf16"),
        Case(name="roberta-fp16", build=roberta, precision="fp16"),
        Case(name="roberta-fp32-fused", build=roberta, optimizer="adamw-fused"),
        Case(name="roberta-fp32-kernel-for-loop", build=roberta, optimizer="adamw-kernel-for-loop"),
        Case(name="roberta-fp16-kernel-fused", build=roberta, precision="fp16", optimizer="adamw-kernel-fused"),
        Case(name="roberta-fp32-sgd-momentum", build=roberta, optimizer="sgd-momentum"),
        Case(name="roberta-fp32-8bit", build=roberta, optimizer="adamw-8bit"),
        Case(name="roberta-fp32-checkpoint", build=roberta, checkpoint="RobertaLayer"),
        Case(name="roberta-fp32-checkpoint-offload", build=roberta, checkpoint="RobertaLayer", offload=True),
        Case(name="roberta-fp32-checkpoint-attention", build=roberta, checkpoint="RobertaAttention"),
        Case(name="roberta-fp32-accumulate4", build=roberta, micro_batches=4),
        Case(name="roberta-bf16-checkpoint-accumulate2", build=roberta, precision="bf16", checkpoint="RobertaLayer",
             micro_batches=2),
        Case(name="roberta-fp32-odd-shapes", build=roberta_odd),
        Case(name="roberta-bf16-odd-shapes", build=roberta_odd, precision="bf16"),
        Case(name="gpt2-fp32", build=gpt2),
        Case(name="gpt2-fp16", build=gpt2, precision="fp16"),
        Case(name="gpt2-bf16-fused", build=gpt2, precision="bf16", optimizer="adamw-fused"),
        Case(name="gpt2-bf16-8bit", build=gpt2, precision="bf16", optimizer="adamw-8bit"),
        Case(name="gpt2-bf16-chunked-loss", build=gpt2, precision="bf16", chunked_head="lm_head"),
        Case(name="gpt2-bf16-step-in-backward", build=gpt2, precision="bf16", step_in_backward=True),
        Case(name="gpt2-bf16-step-in-backward-kernel-fused", build=gpt2, precision="bf16",
             optimizer="adamw-kernel-fused", step_in_backward=True),
        Case(name="gpt2-bf16-checkpoint", build=gpt2, precision="bf16", checkpoint="GPT2Block"),
        Case(name="gpt2-bf16-checkpoint-keeps-products", build=gpt2, precision="bf16", checkpoint="GPT2Block",
             kept=(0, 2, 3)),
        Case(name="gpt2-fp32-accumulate2", build=gpt2, micro_batches=2),
        Case(name="gpt2-bf16-long", build=gpt2_long, precision="bf16"),
        Case(name="llama300m-fp32", build=llama_300m),
        Case(name="llama300m-bf16", build=llama_300m, precision="bf16"),
        Case(name="llama300m-bf16-fused-accumulate2", build=llama_300m, precision="bf16", optimizer="adamw-fused",
             micro_batches=2),
        Case(name="llama300m-bf16-8bit", build=llama_300m, precision="bf16", optimizer="adamw-8bit"),
        Case(name="llama1b-bf16", build=llama_1b, precision="bf16"),
        Case(name="llama1b-bf16-8bit-step-in-backward-chunked-loss", build=llama_1b, precision="bf16",
             optimizer="adamw-8bit", chunked_head="lm_head", step_in_backward=True),
        Case(name="llama1b-bf16-checkpoint-8bit", build=llama_1b, precision="bf16", checkpoint="LlamaDecoderLayer",
             optimizer="adamw-8bit"),
        Case(name="llama1b-fp32-checkpoint-fused", build=llama_1b, checkpoint="LlamaDecoderLayer",
             optimizer="adamw-fused"),
        Case(name="t5-small-fp32", build=models.t5_small),
        Case(name="t5-small-bf16", build=models.t5_small, precision="bf16"),
        Case(name="bert-eager-fp32", build=models.bert_eager),
        Case(name="bert-eager-bf16", build=models.bert_eager, precision="bf16"),
        Case(name="bert-eager-fp32-checkpoint", build=models.bert_eager, checkpoint="BertLayer"),
        Case(name="lstm-fp32", build=models.lstm),
        Case(name="lstm-bf16", build=models.lstm, precision="bf16"),
    )  # fmt: skip


def _vision_and_others() -> tuple[Case, ...]:
    vit, resnet50, unet = models.vit_base, models.resnet50, models.unet
    return (
        Case(name="vit-fp32", build=vit),
        Case(name="vit-fp16", build=vit, precision="fp16"),
        Case(name="vit-bf16-checkpoint", build=vit, precision="bf16", checkpoint="ViTLayer"),
        Case(name="vit-bf16-fused", build=vit, precision="bf16", optimizer="adamw-fused"),
        Case(name="resnet50-bf16", build=resnet50, precision="bf16"),
        Case(name="resnet50-fp32-sgd-momentum-128", build=functools.partial(resnet50, 128), optimizer="sgd-momentum"),
        Case(name="resnet50-fp32-checkpoint-keeps-products", build=resnet50, checkpoint="Bottleneck", kept=(0, 1, 2)),
        Case(name="resnet50-fp32-checkpoint", build=resnet50, checkpoint="Bottleneck"),
        Case(name="convnet-fp32", build=models.convnet),
        Case(name="convnet-bf16-sgd-momentum", build=models.convnet, precision="bf16", optimizer="sgd-momentum"),
        Case(name="unet-bf16", build=unet, precision="bf16"),
        Case(name="unet-fp16", build=unet, precision="fp16"),
        Case(name="unet-fp32-checkpoint", build=unet, checkpoint="ResidualBlock"),
        Case(name="unet-fp32-accumulate2-fused", build=unet, optimizer="adamw-fused", micro_batches=2),
        Case(name="mlp-batchnorm-bf16", build=models.mlp_batchnorm, precision="bf16"),
        Case(name="mlp-batchnorm-fp32-sgd-momentum", build=models.mlp_batchnorm, optimizer="sgd-momentum"),
        Case(name="flat-fp32-replay", build=models.flat, stretches=tuple((n, n + 4) for n in range(1, 289, 4))),
        Case(name="sequential-fp32", build=models.sequential),
        Case(name="sequential-bf16-checkpoint", build=models.sequential, precision="bf16", checkpoint="GELU"),
        Case(name="whisper-tiny-fp32", build=models.whisper_tiny),
        Case(name="whisper-tiny-bf16", build=models.whisper_tiny, precision="bf16"),
    )


CASES: dict[str, Case] = {case.name: case for case in (*(dataclasses.replace(case, core=True) for case in _core()),
                                                       *_language(), *_vision_and_others())}  # fmt: skip
"""The cases by name, in the order in which they run."""
