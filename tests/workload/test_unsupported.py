"""What cannot be rehearsed is refused in words that name it and a way out."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import planner
from planner.errors import WorkloadError
from planner.workload.unsupported import library

pytestmark = pytest.mark.slow


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return flex_attention(q, k, v)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 8], device=x.device)
        return torch.nested.nested_tensor_from_jagged(self.project(x), offsets).values()


class Subclass(torch.Tensor):
    """A tensor class without ops of its own."""


class Calling(nn.Module):
    """A linear layer that a function of torch calls: `call(layer, x)`."""

    def __init__(self, call) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(16, 16), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def planned(model: nn.Module, batch: object) -> None:
    planner.plan(model, batch, vram=None, gpu="bare", loss_fn=squares)


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(16, 16))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(16, 16), torch.randn(8, 16))


@pytest.mark.parametrize("make", [scripted, traced])
def test_torchscript_is_refused(make):
    x = torch.randn(8, 16)
    with pytest.raises(WorkloadError, match=r"the model is a TorchScript module .* give the module from which it was"):
        planned(make(), (x,))
    with pytest.raises(WorkloadError, match="module '1' is a TorchScript module"):
        planned(nn.Sequential(nn.Linear(16, 16), make()), (x,))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_the_batch_are_refused(layout):
    batch = {"x": torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)}
    with pytest.raises(WorkloadError, match=r"'x' of the batch has layout torch.jagged.*a padded tensor and a mask"):
        planned(Jagged(), batch)


def test_nested_tensors_in_the_forward_are_refused():
    with pytest.raises(
        WorkloadError, match="a rehearsal cannot run nested or jagged tensors; plan the model with padded"
    ):
        planned(Jagged(), (torch.randn(8, 16),))


def test_flex_attention_is_refused():
    with pytest.raises(WorkloadError, match=r"a rehearsal cannot run FlexAttention.*scaled_dot_product_attention"):
        planned(Flexible(), (torch.randn(2, 128, 16),))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layer, x: torch.cond(x.sum() > 0, layer, lambda x: -layer(x), (x,)),
            r"cannot run the higher-order operator cond .*in 'Calling' at .*`if` in place of torch.cond.*--value",
        ),
        (
            lambda layer, x: layer(x.as_subclass(Subclass)),
            r"cannot convert a tensor to the subclass Subclass .*use plain tensors",
        ),
        (
            lambda layer, x: torch.func.linearize(layer, x)[1](x),
            r"a rehearsal cannot run make_fx.*for planning, use torch.func.jvp",
        ),
    ],
    ids=["cond", "subclass", "linearize"],
)
def test_functions_that_torch_runs_in_modes_of_its_own_are_refused(call, message):
    with pytest.raises(WorkloadError, match=message) as refused:
        planned(Calling(call), (torch.randn(8, 16),))
    assert "Recorder" not in str(refused.value)


def test_a_sparse_parameter_is_refused():
    model = nn.Linear(16, 16)
    model.weight = nn.Parameter(torch.eye(16).to_sparse())
    with pytest.raises(WorkloadError, match="parameter 'weight' is a sparse tensor"):
        planned(model, (torch.randn(8, 16),))


BROKEN = {
    "raise ImportError('libfoo.so: cannot open')": "broken or too old (ImportError: libfoo.so: cannot open)",
    "raise AttributeError('no bool8')": "broken or too old (AttributeError: no bool8)",
    "__version__ = '0.0.1'": "broken or too old (AttributeError",
    "import bitsandbytes": "pip install --upgrade --force-reinstall bitsandbytes",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_library_that_cannot_be_used_is_named_with_a_way_out(text, tmp_path, monkeypatch):
    for name in ("peft", "bitsandbytes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text if name == "peft" else "raise OSError('no CUDA')")
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkloadError, match="LoRA needs peft, whose installation is broken or too old") as caught:
        library("peft", "LoRA")
    assert BROKEN[text] in str(caught.value) and "\n" not in str(caught.value)
    for name in ("peft", "bitsandbytes"):
        sys.modules.pop(name, None)


def test_a_library_that_is_missing_is_named():
    with pytest.raises(WorkloadError, match="it needs no_such_library, which is not installed: pip install no_such"):
        library("no_such_library", "it")


class Refusing(torch.Tensor):
    """A class whose code fails whenever something is asked of a tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError("not here")


def nested(depth):
    batch = torch.randn(2, 16)
    for _ in range(depth):
        batch = [batch]
    return batch


def in_itself():
    batch = {"x": torch.randn(2, 16)}
    batch["again"] = batch
    return batch


UNUSUAL = {
    "a quantized tensor": (
        lambda: torch.empty(2, 16, dtype=torch.quint4x2),
        r"the batch is quantized \(torch.quint4x2\).*dequantize",
    ),
    "bits": (lambda: {"x": torch.empty(2, 16, dtype=torch.bits8)}, "tensor 'x' of the batch has dtype torch.bits8"),
    "a wrapper": (lambda: TwoTensor(torch.ones(2, 16), torch.ones(2, 16)), "the batch is of class TwoTensor, which"),
    "a class that fails": (
        lambda: {"x": torch.ones(2, 16).as_subclass(Refusing)},
        r"tensor 'x' of the batch is of class Refusing, whose code fails \(ValueError: not here\)",
    ),
    "a deep list": (lambda: nested(3000), "the batch is nested more than 100 levels deep"),
    "a dict in itself": (in_itself, "the batch is nested more than 100 levels deep, or contains itself"),
    "a loader of deep lists": (lambda: iter([nested(3000)]), "the batch is nested more than 100 levels deep"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_batches_are_refused_by_name(name):
    make, message = UNUSUAL[name]
    with pytest.raises(WorkloadError, match=message):
        planned(nn.Linear(16, 16), make())


def test_a_parameter_whose_class_holds_other_tensors_is_refused():
    model = nn.Linear(16, 16)
    model.weight = nn.Parameter(TwoTensor(torch.ones(16, 16), torch.ones(16, 16)))
    with pytest.raises(WorkloadError, match=r"tensor 'weight' of the model is of class TwoTensor.*give plain tensors"):
        planned(model, torch.randn(2, 16))


def test_a_reduction_of_a_constant_with_a_trillion_rows_takes_no_time():
    """Its value is not computed on the host, where it would be added up row by row."""
    began = time.perf_counter()
    batch = torch.empty(1, 8).expand(10**12, 8)
    planner.plan(nn.Linear(8, 8), batch, vram=None, gpu="bare", loss_fn=lambda output, batch: output.sum())
    assert time.perf_counter() - began < 30


def test_a_library_that_compiles_functions_when_imported_compiles_them_when_they_are_called(tmp_path, monkeypatch):
    compiled = []

    def compile_now(model, **options):
        compiled.append((model.__name__, options))
        return lambda x: model(x) + 1

    (tmp_path / "compiling_library.py").write_text(
        "import torch\n\n\ndef plain(x):\n    return x\n\n\n"
        "@torch.compile(dynamic=True)\ndef decorated(x):\n    return 2 * x\n\n\ncalled = torch.compile(plain)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "compile", compile_now)
    module = library("compiling_library", "this test")
    assert compiled == [] and torch.compile is compile_now
    assert [module.decorated(1), module.decorated(2), module.called(1)] == [3, 5, 2]
    assert compiled == [("decorated", {"dynamic": True}), ("plain", {})]


def test_a_lazy_module_that_has_not_run_is_refused_by_name_and_planned_after_its_first_call():
    with torch.device("meta"):
        model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyBatchNorm1d())
    with pytest.raises(WorkloadError, match=r"tensor '0.weight' of the model has no shape yet.*call the model once"):
        planned(model, torch.randn(4, 16))
    model(torch.randn(4, 16, device="meta"))
    planned(model, torch.randn(4, 16))
