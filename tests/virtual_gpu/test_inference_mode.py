"""Under inference mode the virtual GPU runs the ops that it runs under `no_grad`."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.recording.rehearsal import make_virtual, on_virtual_gpu
from planner.virtual_gpu.backend import Target
from planner.virtual_gpu.forked_process import run_in_child

HOST_NUMBERS = torch.arange(12)


def recorded(code, model: nn.Module | None = None) -> list[list[tuple]]:
    """Returns the ops, with the sizes of the storages that they made, under `no_grad` and under inference mode."""

    def run() -> list[list[tuple]]:
        found = []
        target = Target(compute_capability=(8, 0), sm_count=108, memory_bytes=40 << 30)
        with on_virtual_gpu(target, refused, what_if=False) as recorder, recorder:
            if model is not None:
                make_virtual(model, "vgpu")
            recorder.setup_ends()
            for context in (torch.no_grad, torch.inference_mode):
                first_op, first_storage = len(recorder.ops), len(recorder.table.storages)
                with context():
                    code() if model is None else code(model)
                ops = [op for op in recorder.ops[first_op:] if op.name != "aten.detach_.default"]  # it makes no tensor
                births = recorder.table.storages[first_storage:]
                found.append([*((op.name, op.shapes) for op in ops), *((s.size_bytes, s.dtype) for s in births)])
        return found

    return run_in_child(run)


def refused(error: Exception) -> None:
    raise error


def on_card(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def composites() -> None:
    x = on_card(4, 8, 16)
    F.linear(x, on_card(32, 16), on_card(32))
    torch.einsum("bij,bkj->bik", x, x)
    F.layer_norm(x, (16,), on_card(16), on_card(16))
    F.cross_entropy(on_card(6, 9), torch.zeros(6, dtype=torch.long, device="cuda"))
    F.conv2d(on_card(2, 3, 8, 8), on_card(4, 3, 3, 3), on_card(4))
    F.dropout(x, 0.1, training=True)
    F.multi_head_attention_forward(
        x, x, x, 16, 4, on_card(48, 16), on_card(48), None, None, False, 0.0, on_card(16, 16), on_card(16),
        need_weights=False,
    )  # fmt: skip
    x.reshape(8, 64).t().contiguous().to(torch.float16)
    torch.isfinite(x).all()


def attention() -> None:
    query = on_card(2, 4, 64, 32, dtype=torch.float16)
    F.scaled_dot_product_attention(query, query, query, is_causal=True)


def autocast() -> None:
    x, weight = on_card(4, 16), nn.Parameter(on_card(16, 16))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        F.linear(F.linear(x, weight), weight)
        torch.tensordot(x, x, dims=2)
        torch.linalg.multi_dot([x, weight, weight])
        F.cosine_similarity(x.bfloat16(), x.bfloat16())


def connectionist_loss() -> None:
    lengths = torch.tensor([5, 7], device="cuda")
    F.ctc_loss(on_card(9, 2, 6), torch.ones(2, 7, dtype=torch.long, device="cuda"), lengths, lengths)


def of_the_host() -> None:
    HOST_NUMBERS.to("cuda")
    HOST_NUMBERS.to("cuda", torch.float32)
    HOST_NUMBERS.cuda()
    torch.as_tensor(HOST_NUMBERS, device="cuda")
    torch.tensor([1.0, 2.0], device="cuda").add_(1)
    torch.ones(3, device="cuda").cpu()


@pytest.mark.parametrize("code", [composites, attention, autocast, connectionist_loss, of_the_host])
def test_composite_ops_are_taken_apart(code):
    without, with_inference_mode = recorded(code)
    assert without
    assert with_inference_mode == without


def test_recurrent_layers_run_cudnn():
    def run(model: nn.Module) -> None:
        model(on_card(5, 3, 16))
        packed = nn.utils.rnn.pack_padded_sequence(on_card(5, 3, 16), torch.tensor([5, 4, 2]))
        nn.utils.rnn.pad_packed_sequence(model(packed)[0])

    without, with_inference_mode = recorded(run, nn.LSTM(16, 32, num_layers=2))
    assert "aten._cudnn_rnn.default" in {name for name, *_ in without}
    assert with_inference_mode == without


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("rows", [1, 512])
def test_quantized_weights_run_the_ops_of_a_card(rows):
    import bitsandbytes as bnb

    model = bnb.nn.Linear4bit(512, 512, bias=False, quant_type="nf4").to("cpu")
    without, with_inference_mode = recorded(lambda model: model(on_card(rows, 512, dtype=torch.float16)), model)
    assert len(without) > 1
    assert with_inference_mode == without


def test_inference_tensors_are_refused_by_autograd_as_on_a_card():
    def run() -> str:
        with on_virtual_gpu(Target(compute_capability=(8, 0)), refused, what_if=False) as recorder, recorder:
            weight = nn.Parameter(on_card(4, 4))
            with torch.inference_mode():
                made = F.linear(weight, weight)
            assert made.is_inference()
            try:
                F.linear(made, weight)
            except RuntimeError as error:
                return str(error)
        return "not refused"

    assert "Inference tensors cannot be saved for backward" in run_in_child(run)
