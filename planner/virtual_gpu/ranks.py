"""Makes a process one rank of several that do not exist: collectives allocate their buffers, and send no data.

`fully_shard`, `DistributedDataParallel` and DTensors then run unmodified on fake tensors. PyTorch's own fake process
group (`torch.testing._internal.distributed.fake_pg`) serves as the backend. What it lacks is replaced here:

- Device meshes and the reducer of DistributedDataParallel compute with tensors of ranks and indices on the host. These
  tensors are real, although a fake mode is active.
- DistributedDataParallel compares and broadcasts the values of parameters when it is made. This is left out, because
  fake tensors have no values. Gradients are averaged by a hook, in the same memory as without a hook.
- FSDP2 divides each parameter into the shards of all ranks, and takes one of them. Only the shards that it takes are
  made, so that more cards do not take more time.
- DTensor derives the sharding of an op for each tensor of a list, such as all parameters in a step of the optimizer.
  Tensors of the same shape and sharding get the same result, so it is derived once for all of them.
- FSDP2 pads uneven shards again in the first forward, unless their memory has the same address as before. Fake tensors
  have no addresses, so their storages are compared.
- Waiting for a collective of tensor parallelism returns the tensor that the collective makes. For fakes, PyTorch would
  return a copy.
"""

from __future__ import annotations

import contextlib
import copy
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
    _propagate_by_kind()
    _let_shards_stay()
    kernels.KERNELS[torch.ops._c10d_functional.wait_tensor.default] = _waited
    streams.serve_accelerator()
    backend = "fake" if device == "cpu" else f"cpu:fake,{device}:fake"
    dist.init_process_group(backend, rank=rank, world_size=cards, store=FakeStore())


def _waited(dependence: Any, op: Any, tensor: torch.Tensor) -> kernels.Made:
    """Returns the result of a collective when it is there."""
    return tensor, []


def _let_shards_stay() -> None:
    """Keeps FSDP2 from padding shards a second time, in the first forward."""
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
    """The shards of a tensor for all ranks, as `torch.chunk` makes them. If there are fewer, the last ranks' are empty.

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


def _propagate_by_kind() -> None:
    """Makes DTensor derive the sharding of an op on lists of tensors from one tensor of each kind."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator  # mypy does not allow to patch methods of a class
    propagate = propagator.propagate_op_sharding_non_cached
    propagator.propagate_op_sharding_non_cached = lambda self, schema: propagate_by_kind(
        functools.partial(propagate, self), schema
    )


def propagate_by_kind(propagate: Callable[[Any], Any], schema: Any) -> Any:
    """Return the `OutputSharding` of an op, which PyTorch derives only once for tensors of the same kind.

    Args:
        propagate: PyTorch's function, from an `OpSchema` to an `OutputSharding`.
        schema: the op, with the specs of its tensors. Two tensors of its lists are of the same kind if all lists have
            equal elements there.
    """
    lists = [value for value in (*schema.args_schema, *schema.kwargs_schema.values()) if _is_list(value)]
    is_by_element = schema.op.name().startswith(("aten::_foreach_", "aten::_fused_"))
    if not is_by_element or len({len(value) for value in lists}) != 1:
        return propagate(schema)
    kinds: dict[tuple, int] = {}
    kind_of = [kinds.setdefault(elements, len(kinds)) for elements in zip(*lists, strict=True)]
    firsts = [kind_of.index(kind) for kind in range(len(kinds))]

    def shorten(value: Any) -> Any:
        return type(value)(value[i] for i in firsts) if _is_list(value) else value

    sharding = propagate(
        type(schema)(
            schema.op,
            tuple(shorten(value) for value in schema.args_schema),
            {name: shorten(value) for name, value in schema.kwargs_schema.items()},
            schema.schema_info,
        )
    )
    if sharding.needs_redistribute or sharding.redistribute_schema is not None:
        return propagate(schema)  # the result has arguments for each tensor
    if sharding.output_spec is not None:
        sharding.output_spec = tuple(copy.copy(sharding.output_spec[kind]) for kind in kind_of)
    return sharding


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


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

    The reducer asks a future for its tensor, and the futures of the fake process group have none.
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
