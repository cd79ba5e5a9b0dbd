"""DTensor derives the sharding of an op on lists of tensors once for tensors of the same kind, with the same result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.virtual_gpu.ranks import propagate_by_kind

aten = torch.ops.aten
PROPAGATOR = DTensor._op_dispatcher.sharding_propagator


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def specs(mesh: DeviceMesh, *kinds: tuple[tuple[int, ...], Placement]) -> list[DTensorSpec]:
    def meta(shape: tuple[int, ...]) -> TensorMeta:
        return TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)

    return [DTensorSpec(mesh, (placement,), tensor_meta=meta(shape)) for shape, placement in kinds]


WIDE, TALL, WHOLE = ((8, 3), Shard(0)), ((16, 2), Shard(0)), ((5,), Replicate())
KINDS = (WIDE, TALL, WIDE, WHOLE, TALL, WIDE)
OPS = {
    "one list": (aten._foreach_sqrt.default, lambda x: (x,), {}),
    "two lists, in place": (aten._foreach_add_.List, lambda x: (x, x), {"alpha": 2}),
    "a scalar": (aten._foreach_mul.Scalar, lambda x: (x, 0.5), {}),
    "equal scalars for each tensor": (aten._foreach_mul_.ScalarList, lambda x: (x, [0.5] * len(x)), {}),
    "other scalars for each tensor": (aten._foreach_div.ScalarList, lambda x: (x, [*range(len(x))]), {}),
    "three lists": (aten._foreach_addcdiv_.Scalar, lambda x: (x, x, x), {}),
    "norms": (aten._foreach_norm.Scalar, lambda x: (x, 2), {}),
}


def outcome(sharding: OutputSharding) -> tuple:
    asked = sharding.redistribute_schema
    return sharding.output_spec, sharding.needs_redistribute, None if asked is None else asked.args_schema


@pytest.mark.parametrize("name", OPS)
def test_equal_tensors_share_a_derivation_and_get_what_they_got_alone(mesh, name):
    op, arguments, options = OPS[name]
    schema = OpSchema(op, arguments(specs(mesh, *KINDS)), options)
    lengths = []

    def propagate(given: OpSchema) -> OutputSharding:
        lengths.append(len(given.args_schema[0]))
        return PROPAGATOR.propagate_op_sharding_non_cached(given)

    by_kind = propagate_by_kind(propagate, schema)
    expected = PROPAGATOR.propagate_op_sharding_non_cached(schema)
    assert outcome(by_kind) == outcome(expected)
    assert lengths == [6 if name == "other scalars for each tensor" else 3]
    if expected.output_spec is not None:
        assert len({id(spec) for spec in by_kind.output_spec}) == len(KINDS)


def test_lists_whose_tensors_must_be_redistributed_are_derived_as_a_whole(mesh):
    schema = OpSchema(aten._foreach_add_.List, (specs(mesh, WIDE, WIDE), specs(mesh, *[((8, 3), Replicate())] * 2)), {})
    propagate = PROPAGATOR.propagate_op_sharding_non_cached
    expected = outcome(propagate(schema))
    assert expected[1] and len(expected[2][0]) == 2
    assert outcome(propagate_by_kind(propagate, schema)) == expected


def test_tensors_are_of_one_kind_only_if_they_are_so_in_all_lists(mesh):
    first = specs(mesh, WIDE, WIDE)
    second = specs(mesh, WIDE, ((8, 3), Replicate()))
    schema = OpSchema(aten._foreach_add.List, (first, second), {})
    propagate = PROPAGATOR.propagate_op_sharding_non_cached
    assert outcome(propagate_by_kind(propagate, schema)) == outcome(propagate(schema))


def test_an_op_that_joins_a_list_is_left_alone(mesh):
    schema = OpSchema(aten.stack.default, (specs(mesh, WIDE, WIDE), 0), {})
    seen = []
    assert propagate_by_kind(lambda given: seen.append(given), schema) is None
    assert seen == [schema]
