"""4- and 8-bit weights of bitsandbytes: their bytes on a card, and the ops that multiply with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner import profiles
from planner.estimate.add_workspaces import unknown_ops
from planner.pipeline import record_step
from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.quantized import element_count, stored_bytes
from planner.virtual_gpu.quantized_weights import state_tensors
from planner.workload.workload import workload

bnb = pytest.importorskip("bitsandbytes", exc_type=ImportError)

WIDTH = 512


class Adapted(nn.Module):
    """A frozen quantized layer between layers that are trained."""

    def __init__(self, quantized: nn.Module) -> None:
        super().__init__()
        self.before, self.quantized, self.after = nn.Linear(WIDTH, WIDTH), quantized, nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.quantized(self.before(x)))


def four_bits(nested: bool) -> nn.Module:
    layer = bnb.nn.Linear4bit(WIDTH, 3 * WIDTH, bias=False, quant_type="nf4", compress_statistics=nested)
    outputs = nn.Linear(3 * WIDTH, WIDTH)
    return nn.Sequential(layer, outputs)


def eight_bits(threshold: float = 0.0) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(WIDTH, 3 * WIDTH, bias=False, has_fp16_weights=False, threshold=threshold)
    return nn.Sequential(layer, nn.Linear(3 * WIDTH, WIDTH))


def planned(model: nn.Module, rows: int = 2048, gpu: str = "rtx-3060-12gb", **options) -> planner.Plan:
    options = {"vram": None, "loss_fn": lambda output, _: output.square().mean()} | options
    return planner.plan(model, torch.empty(rows, WIDTH), gpu=gpu, **options)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double quantization"])
def test_the_state_of_4_bit_weights_counts(nested):
    model = Adapted(four_bits(nested)).to("cpu")  # quantizes
    weight = model.quantized[0].weight
    state = list(state_tensors(weight))
    blocks = weight.quant_state.shape.numel() // 64
    assert (
        sum(part.nbytes for part in state) == (blocks + 4 * blocks // 256 + 4 * 256 + 4 if nested else 4 * blocks) + 64
    )
    expected = sum(parameter.nbytes for parameter in model.parameters()) + sum(part.nbytes for part in state)
    assert planned(model, gpu="bare").baseline.breakdown["parameters"] == expected


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double quantization"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_are_not_quantized_yet_are_planned_as_quantized_ones(nested, device):
    with torch.device(device):
        later = Adapted(four_bits(nested))
    now = Adapted(four_bits(nested)).to("cpu")
    assert not later.quantized[0].weight.bnb_quantized and now.quantized[0].weight.bnb_quantized
    before, after = planned(later), planned(now)
    assert before.baseline == after.baseline
    assert before.model == after.model
    assert fingerprint(later) == fingerprint(now)
    for each in (later, now):
        weight = each.quantized[0].weight
        assert (element_count(weight), stored_bytes(weight)) == (3 * WIDTH * WIDTH, 3 * WIDTH * WIDTH // 2)


def test_planning_does_not_quantize_the_users_weights():
    model = Adapted(four_bits(True))
    planned(model)
    weight = model.quantized[0].weight
    assert weight.dtype == torch.float32 and weight.quant_state is None


@pytest.mark.slow
def test_a_budget_below_the_bytes_before_quantization_is_met():
    layers = [bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4") for _ in range(32)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    in_fp32 = sum(parameter.nbytes for parameter in model.parameters())
    plan = planned(model, rows=64, gpu="bare", vram=in_fp32 // 2)
    assert plan.fits


@pytest.mark.parametrize(("rows", "times"), [(4, 1), (2048, 2)])
def test_a_large_product_dequantizes_the_weight(rows, times):
    """bitsandbytes multiplies more than 1536 rows with a dequantized weight. The backward always dequantizes."""
    layer = bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    task = workload(model, torch.empty(rows, WIDTH), loss_fn=lambda output, _: output.mean(), optimizer="sgd")
    graph = record_step(task, profiles.load("rtx-3060-12gb"))
    names = [op.name for op in graph.ops]
    assert names.count("bitsandbytes.dequantize_4bit.default") == 2 * times  # in two steps
    assert names.count("bitsandbytes.gemm_4bit.default") == 2 * (times == 1)
    dequantized = {storage.size_bytes for storage in graph.storages if storage.op is not None
                   and graph.ops[storage.op].name == "bitsandbytes.dequantize_4bit.default"}  # fmt: skip
    assert dequantized == ({2 * WIDTH**2, 4 * WIDTH**2} if times == 2 else {4 * WIDTH**2})
    assert unknown_ops(graph) == {}


def test_8_bit_weights_count_as_8_bit_weights():
    model = Adapted(eight_bits())
    weight = model.quantized[0].weight
    rest = sum(parameter.nbytes for parameter in model.parameters() if parameter is not weight)
    scales = 4 * 3 * WIDTH
    assert planned(model, gpu="bare").baseline.breakdown["parameters"] == rest + weight.numel() + scales
    assert weight.dtype == torch.float32 and weight.CB is None


def test_columns_with_outliers_are_bounded_and_their_number_can_be_stated():
    def planned_with(threshold: float, **options) -> planner.Plan:
        model = Adapted(eight_bits(threshold)).half()
        return planner.plan(
            model,
            torch.empty(64, WIDTH).half(),
            vram=None,
            gpu="bare",
            loss_fn=lambda out, _: out.square().mean(),
            **options,
        )

    bound = planned_with(6.0)
    (note,) = [note for note in bound.notes if "all columns have outliers (LLM.int8), which is an upper bound" in note]
    line = note.rpartition("/")[2]
    few, none = planned_with(6.0, values={line: 4}), planned_with(0.0)
    assert bound.peak.allocated_bytes > few.peak.allocated_bytes >= none.peak.allocated_bytes
