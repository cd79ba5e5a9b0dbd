"""Sends the weights of rank 0 to ranks that have only the structure of the model, and saves and loads checkpoints.

The state of the optimizer is saved by the names of parameters, so that another number of processes can load it.
`ZeroRedundancyOptimizer` has an inner optimizer for the parameters of its rank, whose state is saved.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from planner.rewrite.portable.recompute_check import attributes_of

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def receive_from_rank_0(model, whole, device):
    """Send the weights and buffers of rank 0 to the other ranks, which may have built the model on the meta device.

    Call this after `fully_shard`. whole: on rank 0 the state dict of the model before it was sharded, on other ranks
    {}. One tensor after the other is sent, and each process keeps its shard.
    """
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=device)
    refuse_other_model(model)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for buffer in model.buffers():  # a state dict lacks buffers that are not persistent, such as rotary frequencies
        content = buffer.contiguous().flatten().view(torch.uint8)
        torch.distributed.broadcast(content, src=0)
        if torch.distributed.get_rank() > 0:
            buffer.copy_(content.view(buffer.dtype).view(buffer.shape))


def refuse_other_model(model):
    """Raise RuntimeError if numbers, flags or shapes differ from those of rank 0, or a tensor is on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = attributes_of(model) | {f"'{name}'": (list(tensor.shape), tensor.dtype) for name, tensor in tensors}
    unimportant = ("_is_hf_initialized", "_use_kernels", "name_or_path")  # from_pretrained of transformers sets them
    found = {name: repr(value) for name, value in found.items() if name.strip("'").split(".")[-1] not in unimportant}
    expected = [found]
    torch.distributed.broadcast_object_list(expected, src=0)
    different = [name for name in found | expected[0] if found.get(name) != expected[0].get(name)]
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                different.append(f"'{name}.{key}'" if name else f"'{key}'")
    everywhere = [different] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, different[:3])
    if names := dict.fromkeys(name for names in everywhere for name in names):
        raise RuntimeError(
            f"{', '.join(names)}: here the model of rank 0 differs from that of other ranks, which was built on the "
            "meta device. Register each tensor that is named as a buffer, or build the whole model in each process"
        )


def refuse_to_replace(folder, resumed):
    """Exit if a folder has a checkpoint, unless the training resumes from this folder.

    resumed: the folder from which the training resumes, or None.
    """
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        return
    if resumed is None or not os.path.samefile(folder, resumed):
        raise SystemExit(f"{folder} has a checkpoint already: give another folder, or --resume {folder} to continue it")


def save_checkpoint(folder, model, optimizer, step, **others):
    """Save the training to a folder. All processes call this, and each writes its own part.

    A tensor that each process has whole, such as a buffer, is saved by rank 0, even if other ranks have other values. A
    checkpoint in the folder is replaced: if a process ends while it saves, neither the old nor the new can be loaded.

    others: more objects with a state dict, such as scheduler=scheduler.
    """
    content = training_state(model, optimizer, step, others)
    planner = torch.distributed.checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        torch.distributed.checkpoint.save(content, checkpoint_id=folder, planner=planner)


def load_checkpoint(folder, model, optimizer, **others):
    """Load what `save_checkpoint` saved with any number of processes, and return the number of its last step."""
    content = training_state(model, optimizer, 0, others)
    torch.distributed.checkpoint.load(content, checkpoint_id=folder)
    inner = getattr(optimizer, "optim", optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True, strict=not weights_in_4_bits(model))
    set_state_dict(
        model, inner, model_state_dict=content["model"], optim_state_dict=content["optimizer"], options=options
    )
    copy_settings(inner, optimizer)
    for name, other in others.items():
        other.load_state_dict(content[name])
    return content["step"]


def training_state(model, optimizer, step, others):
    """Return the state dicts of a checkpoint. In that of the optimizer, the names of parameters are the keys."""
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer: that of this process's parameters
    copy_settings(optimizer, inner)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, inner, options=options)
    for frozen in weights_in_4_bits(model):
        weights = {name: value for name, value in weights.items() if not f"{name}.".startswith(f"{frozen}.")}
    nested = "__bnb_optimizer_quant_state__."  # optimizers of bitsandbytes put their state into one more dict
    return {
        "model": weights,
        "optimizer": {name.replace(nested, ""): value for name, value in state.items()},
        "step": step,
        **{name: other.state_dict() for name, other in others.items()},
    }


def weights_in_4_bits(model):
    """Return the names of weights that are not saved: they are frozen, and each process quantizes them again."""
    names = [name for name, weight in model.named_parameters() if weight.dtype == torch.uint8]
    return [name.removeprefix("module.") for name in names]


def copy_settings(optimizer, other):
    """Copy the hyperparameters of an optimizer to another, such as the learning rate that a scheduler has set."""
    for group, settings in zip(other.param_groups, optimizer.param_groups, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


CHECKPOINT_FUNCTIONS: tuple[Callable, ...] = (
    refuse_to_replace,
    save_checkpoint,
    load_checkpoint,
    training_state,
    weights_in_4_bits,
    copy_settings,
)
"""The functions that an emitted file needs to save and load checkpoints."""
