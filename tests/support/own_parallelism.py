"""Functions that divide a Llama of transformers among cards, as users write them."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Divides the matrices of attention and MLP; all other parameters stay plain tensors."""
    for block in model.model.layers:
        parallelize_module(block, mesh["tp"], _matrices())


def sequence_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Divides the tokens between the blocks, too, and turns all parameters into DTensors."""
    divided = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    tensors = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], tensors)
    for block in model.model.layers:
        plan = {
            **_matrices(output_layouts=Shard(1)),
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "mlp": PrepareModuleInput(**divided),
        }
        parallelize_module(block, mesh["tp"], plan)


def tensor_parallel_encoder(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Divides the matrices of attention and MLP of a BERT, which have biases."""
    for block in model.bert.encoder.layer:
        plan = {f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"attention.output.dense": RowwiseParallel(), "output.dense": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], {**plan, "intermediate.dense": ColwiseParallel()})


def pair(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Divides two linear layers of a `Sequential`, and shards what is left over the other dimensions."""
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]) if mesh.ndim > 1 else model


def _matrices(**layouts: object) -> dict[str, ColwiseParallel | RowwiseParallel]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return {
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel(**layouts) for name in rows},
    }


def sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Shards all parameters over the whole mesh, or over its dimensions that divide the batch (FSDP2)."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp"))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh[names])
    return fully_shard(model, mesh=mesh[names])


def tensor_parallel_and_sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    tensor_parallel(model, mesh)
    return sharded(model, mesh)


def sequence_parallel_and_sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    sequence_parallel(model, mesh)
    return sharded(model, mesh)


def copied(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Keeps the whole model on each card (DistributedDataParallel)."""
    return torch.nn.parallel.DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
    )


def without_average(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Forgets the dimension 'dp'."""
    tensor_parallel(model, mesh)
