"""Processes of accelerate that talk by gloo, with the settings that its launcher reads from an emitted config."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.rank_truth import alone
from tests.support.ranks import in_group

T = TypeVar("T")


def launcher_environment(config: str) -> dict[str, str]:
    """Returns the variables that `accelerate launch --config_file` sets for a training script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder, _pretended_cards():
        path = pathlib.Path(folder, "accelerate.yaml")
        path.write_text(config)
        arguments: argparse.Namespace = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, *_ = _validate_launch_command(arguments)
        return prepare_multi_gpu_env(arguments)


@contextlib.contextmanager
def _pretended_cards() -> Iterator[None]:
    """Inside this context, the launcher finds cards, so that it reads a config for them as it does on their machine."""
    counted = torch.cuda.device_count
    torch.cuda.device_count = lambda: 8
    try:
        yield
    finally:
        torch.cuda.device_count = counted


def in_processes(environment: dict[str, str], cards: int, run: Callable[[Any], T], **arguments: Any) -> list[T]:
    """Returns the results of `run(accelerator)` in each of some processes. The arguments are those of `Accelerator`.

    On a CPU accelerate does not turn to FSDP. So the state is set as `AcceleratorState.__init__` sets it on GPUs.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    def of_rank(rank: int) -> T:
        alone()
        os.environ.update(
            {name: value for name, value in environment.items() if name.startswith(("ACCELERATE", "FSDP"))}
        )
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(cards), LOCAL_WORLD_SIZE=str(cards))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        AcceleratorState._reset_state(reset_partial_state=True)  # another test may have made it before the fork
        GradientState._reset_state()
        plugin = FullyShardedDataParallelPlugin() if os.environ.get("ACCELERATE_USE_FSDP") == "true" else None
        accelerator = Accelerator(cpu=True, **arguments)
        assert accelerator.num_processes == cards
        if plugin is not None:
            accelerator.state.distributed_type = DistributedType.FSDP
            if accelerator.mixed_precision != "no":
                plugin.set_mixed_precision(accelerator.mixed_precision)
            accelerator.state.fsdp_plugin = plugin
        result = run(accelerator)
        dist.barrier()
        return result

    return in_group(cards, of_rank)


def plugin(classes: tuple[str, ...]) -> Any:
    """Returns accelerate's settings of FSDP2 for a model with units of these classes."""
    from accelerate import FullyShardedDataParallelPlugin

    policy = "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=policy, transformer_cls_names_to_wrap=list(classes) or None,
        cpu_ram_efficient_loading=False,
    )  # fmt: skip


def wrapped_by_accelerate(
    model: torch.nn.Module, classes: tuple[str, ...]
) -> list[tuple[tuple[str, ...], bool | None]]:
    """Returns the modules that accelerate's own function gives to `fully_shard`, and `reshard_after_forward`.

    The calls are recorded without a process group. A module counts as sharded from then on.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed import fsdp

    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    calls: list[tuple[tuple[str, ...], bool | None]] = []

    def record(given: Any, reshard_after_forward: bool | None = None, **_: Any) -> None:
        modules = given if isinstance(given, list) else [given]
        calls.append((tuple(paths[id(module)] for module in modules), reshard_after_forward))
        for module in modules:
            module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})

    shard, fsdp.fully_shard = fsdp.fully_shard, record
    try:
        state = SimpleNamespace(fsdp_plugin=plugin(classes))
        fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="no", is_main_process=False), model)
    finally:
        fsdp.fully_shard = shard
    return calls
