"""Makes a process one rank of many, without the others: collectives allocate what they must, and move nothing.

`fully_shard`, `DistributedDataParallel` and DTensors then run unmodified on fake tensors. PyTorch's own fake process
group (`torch.testing._internal.distributed.fake_pg`) serves as the backend. What it lacks is replaced here:

- Device meshes and the reducer of DistributedDataParallel compute with tensors of ranks and indices on the host. They
  get real tensors there, although a fake mode is active.
- DistributedDataParallel compares and broadcasts the values of parameters when it is made. This is left out: fake
  tensors have no values. It averages gradients by a hook, in the same memory as without one.
- FSDP2 divides each parameter into the shards of all ranks, and takes one of them. Only the shards that it takes are
  made, so that more cards do not take more time.
- FSDP2 pads uneven shards again when the model runs first, unless their memory has the address that it had before.
  Fakes have no addresses, so their storages are compared.
- Waiting for a collective of tensor parallelism returns the tensor that the collective makes. For fakes, PyTorch would
  return a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.virtual_gpu import kernels, streams


def join(device: str, *, cards: int, rank: int) -> None:
    """Makes this process rank `rank` of `cards` processes until it ends.

    Args:
        device: type of the device of the fake tensors. A virtual GPU must be installed already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name in ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten"):
        _compute_on_real_host(DeviceMesh, name)
    _let_data_parallel_run()
    _make_shards_on_demand()
    _let_shards_stay()
    kernels.KERNELS[torch.ops._c10d_functional.wait_tensor.default] = _waited
    streams.serve_accelerator()
    backend = "fake" if device == "cpu" else f"cpu:fake,{device}:fake"
    dist.init_process_group(backend, rank=rank, world_size=cards, store=FakeStore())


def _waited(dependence: Any, op: Any, tensor: torch.Tensor) -> kernels.Made:
    """Returns the result of a collective when it is there."""
    return tensor, []


def _let_shards_stay() -> None:
    """Keeps FSDP2 from padding shards a second time, when the model runs first."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    pad = FSDPParam.reset_sharded_param

    def pad_if_replaced(self: Any) -> None:
        shard = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        if self._sharded_param_data.untyped_storage()._cdata != shard.untyped_storage()._cdata:
            pad(self)

    parameter: Any = FSDPParam  # mypy does not allow to patch methods of a class
    parameter.reset_sharded_param = pad_if_replaced


def _make_shards_on_demand() -> None:
    """Replaces the function by which FSDP2 divides a parameter among all ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    patched: Any = _fsdp_param  # mypy does not allow to patch functions of a module
    patched._chunk_with_empty = ShardsOnDemand


class ShardsOnDemand:
    """The shards of a tensor for all ranks, as `torch.chunk` makes them. Ranks that get nothing have empty shards.

    Args:
        num_chunks: number of ranks.
        dim: dimension that is divided.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._rows = -(-tensor.size(dim) // num_chunks)
        """Number of rows of a shard that is not the last one."""

    def __getitem__(self, rank: int) -> torch.Tensor:
        rows = self._tensor.size(self._dim)
        first = min(rank * self._rows, rows)
        if rank > 0 and first == rows > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._rows, rows - first))


def _let_data_parallel_run() -> None:
    """Lets DistributedDataParallel be made of fake parameters, and rebuild its buckets."""
    from torch.nn.parallel import distributed

    patched: Any = distributed  # mypy does not allow to patch functions of a module
    patched._verify_param_shape_across_processes = lambda *arguments, **options: None
    patched._sync_module_states = lambda *arguments, **options: None
    _compute_on_real_host(distributed.DistributedDataParallel, "_pre_forward")
    initialise = distributed.DistributedDataParallel.__init__

    @functools.wraps(initialise)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        self.register_comm_hook(None, _averaged)
        self.logger = _SilentLogger(self.logger)

    patched.DistributedDataParallel.__init__ = init


class _SilentLogger:
    """A logger of DistributedDataParallel that collects no times, and does not warn that this device has none."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        pass


def _averaged(state, bucket):  # PyTorch compares annotations with classes, and here they would be texts
    """Averages a bucket of gradients in place, as DistributedDataParallel does without a hook.

    A future of the fake process group holds no tensor, which the reducer asks for.
    """
    torch.distributed.all_reduce(bucket.buffer().div_(torch.distributed.get_world_size()))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _compute_on_real_host(owner: type, name: str) -> None:
    """Makes a method compute with real tensors on the host. Fake tensors that it gets stay fake."""
    method = owner.__dict__[name]
    function: Callable = method.__func__ if isinstance(method, staticmethod) else method

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily() as fakes, contextlib.nullcontext() if fakes is None else _RealHost(fakes):
            return function(*arguments, **options)

    setattr(owner, name, staticmethod(call) if isinstance(method, staticmethod) else call)


class _RealHost(TorchDispatchMode):
    """A mode in which ops with a fake argument, or for the fake device, run in a fake mode, and all others really."""

    def __init__(self, fakes: TorchDispatchMode) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves) or any(
            isinstance(leaf, torch.device) and leaf.type != "cpu" for leaf in leaves
        )
        with self._fakes if is_fake else contextlib.nullcontext():
            return op(*args, **(kwargs or {}))
