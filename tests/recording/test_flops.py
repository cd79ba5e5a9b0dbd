"""Floating point operations of recorded ops are those of their loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.recording.flops import flops_of

PRODUCTS = ("convolution", "mm", "mv")


class Counted(TorchDispatchMode):
    """FLOPs by the name of the op."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name.startswith("convolution") or any(product in name for product in PRODUCTS):
            self.by_name[name] = self.by_name.get(name, 0) + flops_of(op, args, kwargs or {}, out)
        return out


def counted(function) -> dict[str, int]:
    with torch.device("meta"), Counted() as mode:
        function()
    return mode.by_name


@pytest.mark.parametrize("groups", [1, 2, 4, 12])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_each_gradient_of_a_convolution_takes_what_the_convolution_does(groups, transposed, bias):
    def run() -> None:
        kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
        layer = kind(12, 24, 3, stride=2, groups=groups, bias=bias)
        layer(torch.empty(5, 12, 9, 9, requires_grad=True)).sum().backward()

    found = counted(run)
    places = 5 * 9 * 9 if transposed else 5 * 4 * 4
    assert found["convolution"] == 2 * places * 9 * 12 * 24 // groups
    assert found["convolution_backward"] == 2 * found["convolution"]


def test_a_gradient_that_nobody_asks_for_takes_nothing():
    def run() -> None:
        torch.nn.Conv1d(6, 6, 3, groups=6)(torch.empty(2, 6, 10)).sum().backward()

    found = counted(run)
    assert found["convolution_backward"] == found["convolution"] == 2 * 2 * 8 * 6 * 3


GROUPED = {
    "rows": ((7, 4), (3, 4, 5), 2 * 7 * 4 * 5),
    "columns": ((3, 7, 4), (4, 6), 2 * 7 * 4 * 6),
    "what is summed over": ((7, 4), (4, 6), 2 * 7 * 4 * 6),
    "nothing": ((3, 7, 4), (3, 4, 5), 2 * 3 * 7 * 4 * 5),
}


@pytest.mark.parametrize("split", GROUPED)
def test_products_in_groups_are_counted(split):
    left, right, flops = GROUPED[split]
    a, b = (torch.empty(shape, device="meta") for shape in (left, right))
    assert flops_of(torch.ops.aten._grouped_mm.default, (a, b), {"offs": None}, None) == flops


def test_the_experts_of_a_mixture_are_counted():
    """transformers lets all experts of a layer run in one product."""
    a, b = torch.empty(8, 16, device="meta", requires_grad=True), torch.empty(4, 16, 32, device="meta")
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    found = counted(lambda: F.grouped_mm(a.bfloat16(), b.bfloat16(), offs=ends).square().sum().backward())
    assert found["_grouped_mm"] == 2 * (2 * 8 * 16 * 32)


INTO = {
    "addmm_": (lambda: torch.empty(3, 5).addmm_(torch.empty(3, 4), torch.empty(4, 5)), 2 * 3 * 4 * 5),
    "baddbmm_": (lambda: torch.empty(2, 3, 5).baddbmm_(torch.empty(2, 3, 4), torch.empty(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "addbmm": (lambda: torch.addbmm(torch.empty(3, 5), torch.empty(2, 3, 4), torch.empty(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "mv": (lambda: torch.mv(torch.empty(3, 4), torch.empty(4)), 2 * 3 * 4),
    "addmv": (lambda: torch.addmv(torch.empty(3), torch.empty(3, 4), torch.empty(4)), 2 * 3 * 4),
}


@pytest.mark.parametrize("name", INTO)
def test_products_that_are_added_are_counted(name):
    run, flops = INTO[name]
    assert counted(run)[name] == flops
