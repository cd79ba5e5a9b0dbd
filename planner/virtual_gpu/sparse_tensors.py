"""Keeps the indices and values of fake sparse tensors (COO) alive.

A real sparse tensor refers to the tensors of indices and values from which it was created
(ATen/native/sparse/SparseTensor.cpp). A fake one that an op returns has no elements and refers to no tensors
(`_sparse_coo_tensor_with_dims_and_tensors` in torch/_subclasses/fake_impls.py). Here it gets an attribute that refers
to them.

There are two kinds of sparse tensors:

- Gradients. How many rows they have depends on values. Because the fakes have no elements, temporaries that optimizers
  allocate for them (to coalesce gradients, or for the rows of an update) are not recorded.
- Buffers of the model and tensors of the batch (`virtual_sparse`). How many elements they have is known. Few ops run on
  them (`run`): products with a dense matrix, and ops that keep the number of elements or add it up; others are refused.
  The workspace of cuSPARSE is not recorded.

The plan's notes state what is left out as an assumption.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from planner.virtual_gpu.kernels import Made, cuda_kernel
from planner.virtual_gpu.values.data_dependence import DataDependence
from planner.virtual_gpu.values.shadow_ops import nested_tensors

ASSUMED_TEMPORARIES = "temporaries of ops on sparse gradients are small enough to leave out"
ASSUMED_WORKSPACES = "workspaces of cuSPARSE are small enough to leave out"

_PARTS, _HAS_ELEMENTS = "_planner_sparse_parts", "_planner_sparse_has_elements"
"""Names of the attributes of a sparse tensor that have its indices and values, and whether these are counted."""

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: _aten.mm.default,
    _aten.addmm.default: _aten.addmm.default,
    _aten._sparse_addmm.default: _aten.addmm.default,
}
"""Products of a sparse matrix with a dense one, each with the op that gives the same result for a dense matrix."""
_TO_DENSE = (_aten._to_dense.default, _aten.to_dense.default)
_SHARING = (_aten.detach.default, _aten.alias.default)
"""Ops whose sparse result has the indices and values of the argument."""
_SPARSE_RESULT = (
    _aten.t.default,
    _aten.transpose.int,
    _aten.clone.default,
    _aten.neg.default,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten._to_copy.default,
    _aten._coalesce.default,
)
"""Ops that allocate a sparse result. It has at most as many elements as all sparse arguments together."""


def virtual_sparse(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a fake sparse tensor on a device with as many elements as a tensor of the model or of the batch.

    Call it while a `FakeTensorMode` is active.
    """
    with unset_fake_temporarily():
        indices, values, is_coalesced = tensor._indices(), tensor._values(), tensor.is_coalesced()
    parts = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in (indices, values)]
    return _sparse(parts[0], parts[1], tensor.shape, is_coalesced=is_coalesced, requires_grad=tensor.requires_grad)


def with_parts(
    dependence: DataDependence, op: torch._ops.OpOverload, result: torch.Tensor, args: tuple, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Returns the sparse result of an op, after making it keep its indices and values alive.

    Args:
        dependence: receives the assumptions that the size of the result needs.
        op, args, kwargs: the op that returned the result, and its arguments.
        result: the sparse tensor. If the op has made it from a tensor with elements, it is replaced by one that has
            elements too.
    """
    inputs = list(nested_tensors((args, kwargs)))
    if has_elements(result) or parts_of(result):
        return result
    if any(map(has_elements, inputs)):
        return detached(inputs[0]) if op in _SHARING else run(dependence, op, args, kwargs)[0]
    dependence.assume((ASSUMED_TEMPORARIES,))
    parts = (parts_of(tensor) if tensor.is_sparse else [tensor] for tensor in inputs)
    setattr(result, _PARTS, list(itertools.chain.from_iterable(parts)))
    return result


def run_without_fake_kernel(
    dependence: DataDependence, op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> Made:
    """Returns the fake result of an op without a fake kernel, which must have sparse arguments, as `run` does.

    Raises:
        RehearsalError: it is not known what the op allocates.
    """
    if any(map(has_elements, nested_tensors((args, kwargs)))):
        return run(dependence, op, args, kwargs)
    way_out = "register a fake kernel with torch.library.register_fake"
    if "sparse" in op.name():
        way_out = (
            "use a dense tensor there, or make the sparse tensor before the step, as a buffer or part of the batch"
        )
    if "batch_norm_stats" in op.name():
        way_out = "SyncBatchNorm cannot be planned for several cards: plan the model with BatchNorm"
    raise dependence.refusal(f"{op} has no fake kernel, so a rehearsal cannot run it", way_out)


def run(dependence: DataDependence, op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Made:
    """Returns the fake result of an op on sparse tensors of the model or of the batch, and its scratch tensors.

    Raises:
        RehearsalError: it is not known what the op allocates.
    """
    inputs = list(nested_tensors((args, kwargs)))
    sparse = [tensor for tensor in inputs if has_elements(tensor)]
    dependence.assume((ASSUMED_WORKSPACES,))
    dense_args, dense_kwargs = _with_dense(args), _with_dense(kwargs)
    if op in _PRODUCTS and [tensor.is_sparse for tensor in inputs[-2:]] == [True, False]:
        if inputs[-2].dtype != inputs[-1].dtype:  # as in `s_addmm_out_sparse_dense_cuda`
            raise RuntimeError(f"{op}: a sparse {inputs[-2].dtype} and a dense {inputs[-1].dtype} cannot be multiplied")
        result = _PRODUCTS[op](*dense_args, **dense_kwargs)
        return result, _scratch_of_product(op, sparse[0], result)
    if op in _SHARING:
        return detached(sparse[0]), []
    if op in _TO_DENSE:
        return torch.empty_like(dense_args[0], dtype=kwargs.get("dtype")), []
    if op in _SPARSE_RESULT and (len(sparse) == len(inputs) or op in (_aten.mul.Tensor, _aten.div.Tensor)):
        like = dense_args[0] if op is _aten._coalesce.default else op(*dense_args, **dense_kwargs)
        parts = [part for tensor in sparse for part in parts_of(tensor)]
        indices = torch.cat(parts[::2], 1)
        return _sparse(indices, torch.cat(parts[1::2]).to(like.dtype, copy=True), like.shape), []
    raise dependence.refusal(
        f"it is not known what {op} allocates for a sparse tensor with elements", "use a dense tensor there"
    )


def _scratch_of_product(op: torch._ops.OpOverload, matrix: torch.Tensor, result: torch.Tensor) -> list[torch.Tensor]:
    """Returns what the product of a sparse and a dense matrix allocates in addition to its result.

    These are the start of each row and the row and column numbers as int32, the result in column-major order
    (`s_addmm_out_sparse_dense_cuda` in sparse/cuda/SparseCUDATensorMath.cu), and for `mm` zeros to add the product to
    (`_sparse_mm` in sparse/SparseTensorMath.cpp).
    """
    elements = parts_of(matrix)[1].shape[0]
    zeros = [torch.empty_like(result)] if op is _aten.mm.default else []
    lengths = (matrix.shape[0] + 1, elements, elements)
    numbers = [torch.empty(length, dtype=torch.int32, device=result.device) for length in lengths]
    return [*zeros, *numbers, torch.empty_like(result)]


def _with_dense(arguments: Any) -> Any:
    """Returns the arguments of an op with a dense tensor in place of each sparse one."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if tensor.is_sparse else tensor
        ),
        arguments,
    )


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, **options: Any) -> torch.Tensor:
    """Returns a fake sparse tensor with elements."""
    result = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, **options)
    setattr(result, _PARTS, [indices, values])
    setattr(result, _HAS_ELEMENTS, True)
    return result


def has_elements(tensor: torch.Tensor) -> bool:
    """True for a sparse tensor that comes from the model or the batch: its parts are its indices and its values."""
    return getattr(tensor, _HAS_ELEMENTS, False)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor that is not part of autograd's graph and has the same indices and values."""
    if has_elements(tensor):
        indices, values = parts_of(tensor)
        return _sparse(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())
    result = tensor.detach()
    setattr(result, _PARTS, parts_of(tensor))
    return result


def stored_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the indices and values of a sparse tensor; 0 for a gradient, whose rows are not known."""
    return sum(part.numel() * part.itemsize for part in parts_of(tensor)) if has_elements(tensor) else 0


@cuda_kernel(_aten._indices.default, _aten.indices.default, _aten._values.default, _aten.values.default)
def _part(dependence: DataDependence, op: Any, tensor: torch.Tensor) -> Made:
    """Returns the indices or the values of a sparse tensor, which are no new memory."""
    if not has_elements(tensor):
        return op(tensor), []
    return parts_of(tensor)["values" in op.name()].detach(), []


def no_rows_of(table: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor that has the shape of `table` but no rows."""
    indices = torch.empty(1, 0, dtype=torch.long, device=table.device)
    return torch.sparse_coo_tensor(
        indices, table.detach().new_empty(0, *table.shape[1:]), table.shape, check_invariants=False
    )


@cuda_kernel(torch.ops.aten.sparse_mask.default)
def _sparse_mask(dependence: DataDependence, op: Any, table: torch.Tensor, mask: torch.Tensor) -> Made:
    """Stands for `sparse_mask`, with which optimizers select rows of a table. The selected rows are not counted."""
    return no_rows_of(table), []


@cuda_kernel(_aten._embedding_bag_backward.default)
def _embedding_bag_backward(
    dependence: DataDependence, op: Any, grad: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any
) -> Made:
    """Returns the gradient of a table. A sparse one has one row for each index (EmbeddingBag.cpp)."""
    table_rows, is_sparse = args[4], args[7]
    if not is_sparse:
        return op(grad, indices, *args, **kwargs), []
    dependence.assume((ASSUMED_TEMPORARIES,))
    rows = grad.new_empty(indices.numel(), grad.shape[1])
    result = no_rows_of(grad.new_empty(table_rows, grad.shape[1]))
    setattr(result, _PARTS, [indices.reshape(1, -1), rows])
    return result, []


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor; empty if no recorded op returned the tensor."""
    return getattr(tensor, _PARTS, [])
