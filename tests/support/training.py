"""Tiny models, batches and plans for the tests of the rewriter, and the comparison that most of them use."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import pathlib
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

from planner.plan_types.fingerprint import fingerprint
from planner.plan_types.plan import Footprint, ModelFacts, Plan, SolverFacts, WorkloadFacts
from planner.rewrite import Parity, Rewritten, apply, apply_decisions, emit, verify
from planner.workload.call_convention import Calling
from planner.workload.model_loss import own_loss
from planner.workload.workload import batch_size_of, described


class Convolutional(nn.Module):
    """Batch normalisation, dropout, and a block that is called twice, the second time by keyword."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU())
        self.twice = Twice(momentum)
        self.head = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image)
        out = self.twice(x, scale=0.5)
        out = self.twice(image=None, x=out["parts"][0] + out["rest"].mean, scale=2.0)
        return self.head(out["parts"][1].mean((2, 3)))


class Mean:
    def __init__(self, mean: torch.Tensor) -> None:
        self.mean = mean


class Twice(nn.Module):
    """Keyword inputs, and an output nested in a dict, a tuple and an object."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=momentum)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scale: float, image: torch.Tensor | None = None) -> dict:
        y = self.dropout(torch.relu(self.norm(self.conv(x)) * scale))
        return {"parts": (y, y * x), "rest": Mean(y.mean((2, 3), keepdim=True))}


class Perceptron(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth))
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def cross_entropy(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[-1])


def seeded(build, *arguments, **options) -> nn.Module:
    torch.manual_seed(0)
    return build(*arguments, **options)


def images(samples: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 6, 6, generator=generator), torch.randint(4, (samples,), generator=generator)


def vectors(samples: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 16, generator=generator, dtype=dtype), torch.randint(3, (samples,), generator=generator)


def tokens(samples: int = 6, length: int = 10, seed: int = 0, vocabulary: int = 60) -> dict[str, torch.Tensor]:
    """Token ids with unevenly padded samples, whose padding does not count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(samples):
        mask[row, length - (row * 7 + seed) % (length - 1) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def roberta(**options) -> nn.Module:
    import transformers

    config = transformers.RobertaConfig(**roberta_config(**options))
    return transformers.RobertaForMaskedLM(config)


def roberta_config(**options) -> dict:
    return {
        "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 40, **options,
    }  # fmt: skip


def gpt2(**options) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32, **options)
    return transformers.GPT2LMHeadModel(config)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def rewritten(model: nn.Module, *decisions, batch, loss_fn=None, optimizer=sgd, **options):
    tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return apply_decisions(
        decisions, model, optimizer=optimizer, calling=Calling.of(batch, loss_fn), batch_size=tensor.shape[0],
        loss_fn=loss_fn, **options,
    )  # fmt: skip


def train(result, batches) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Returns the losses and the gradients that the optimizer saw, for one step on each batch from a fixed seed."""
    torch.manual_seed(1)
    gradients: list[dict[str, torch.Tensor]] = []

    def note(*_) -> None:
        named = result.module.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    handle = result.optimizer.register_step_pre_hook(note)
    losses = [result.step(batch) for batch in batches]
    handle.remove()
    return losses, gradients


def differences(model: nn.Module, *decisions, batches, steps=None, **options) -> list[str]:
    """Returns what differs in any bit between the rewritten model and the baseline after one step on each batch."""
    plain = rewritten(copy.deepcopy(model), batch=batches[0], **options)
    other = rewritten(copy.deepcopy(model), *decisions, batch=batches[0], **options)
    (losses, gradients), (other_losses, other_gradients) = train(plain, batches), train(other, batches)
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(losses, other_losses, strict=True)) if not torch.equal(a, b)]
    for i, (a, b) in enumerate(zip(gradients, other_gradients, strict=True)):
        found += [f"gradient {i} {name}" for name in a.keys() | b.keys() if not torch.equal(a[name], b[name])]
    a, b = plain.module.state_dict(), other.module.state_dict()
    assert list(a) == list(b)
    return found + [name for name in a if not torch.equal(a[name], b[name])]


def largest_relative_error(model: nn.Module, *decisions, batches, **options) -> float:
    """Returns the largest error of losses and gradients, each relative to the largest entry of its tensor."""
    plain = rewritten(copy.deepcopy(model), batch=batches[0], **options)
    other = rewritten(copy.deepcopy(model), *decisions, batch=batches[0], **options)
    (losses, gradients), (other_losses, other_gradients) = train(plain, batches), train(other, batches)
    pairs = list(zip(losses, other_losses, strict=True))
    largest = max(gradient.abs().max().item() for gradient in gradients[0].values())
    for a, b in zip(gradients, other_gradients, strict=True):
        pairs += [(a[name], b[name]) for name in a if a[name].abs().max() > 1e-6 * largest]
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def plan_for(model: nn.Module, batch, *decisions, loss_fn=None, optimizer="adamw", reference=None, **changes) -> Plan:
    shapes = tuple(described(batch))
    footprint = Footprint(
        allocated_bytes=300 << 20, reserved_bytes=320 << 20, total_bytes=720 << 20, phase="backward", module="head",
        op="aten.mm", breakdown={"parameters": 100 << 20, "activations": 200 << 20, "CUDA context": 420 << 20},
        step_ns=10_000_000, flops=10**9,
    )  # fmt: skip
    plan = Plan(
        model=ModelFacts(
            reference=reference, name=type(model).__name__, fingerprint=fingerprint(model),
            parameters=sum(p.numel() for p in model.parameters()),
        ),
        workload=WorkloadFacts(
            batch_size=batch_size_of(batch), seq_len=None, batch=shapes, calling=Calling.of(batch, loss_fn).name,
            has_loss_fn=loss_fn is not None, optimizer=optimizer,
            own_loss=own_loss(model, Calling.of(batch, loss_fn), loss_fn),
        ),
        card="rtx-2060", card_source="datasheet", vram_bytes=6 << 30, fidelity="partial", forced=(), forbidden=(),
        baseline=footprint, peak=footprint, decisions=tuple(decisions), fits=True, certified=True,
        solver=SolverFacts(status="optimal", gap=0.0, seconds=0.1, promised_bytes=300 << 20, certified_bytes=300 << 20),
        shortfall=None, notes=("the card runs nothing else",), versions={"torch": torch.__version__}, seconds=1.0,
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)


def verified(build, batch, *decisions, loss_fn=None, optimizer="adamw", **options) -> Parity:
    """Verify a plan with these decisions against the baseline."""
    model = seeded(build)
    plan = plan_for(model, batch, *decisions, loss_fn=loss_fn)
    return verify(plan, model, batch, loss_fn=loss_fn, optimizer=optimizer, **options)


def printed_by_emitted_files(
    folder: pathlib.Path, model_source: str, *choices: tuple, edit: Callable[[str], str] = lambda text: text
) -> list[str]:
    """Emit a file for the model that the source builds, run it, and return its output, for each set of decisions."""
    path = folder / "net.py"
    path.write_text(model_source)
    spec = importlib.util.spec_from_file_location("net", path)
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)  # not in sys.modules: other tests have their own `net`
    torch.manual_seed(0)
    model, batch = net.build()
    printed = []
    for decisions in choices:
        emit(plan_for(model, batch, *decisions, reference=f"{path}:build"), folder / "train.py")
        (folder / "train.py").write_text(edit((folder / "train.py").read_text()))
        ran = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
        printed.append(ran.stdout)
    return printed


def imported(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location("emitted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of_file(emitted, model, batches, scaled: bool, **options) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = emitted.make_optimizer(emitted.rewrite(model))
    if scaled:
        options["scaler"] = torch.amp.GradScaler("cpu")
    stated = inspect.signature(emitted.training_step).parameters.get("loss_terms")
    if stated is not None and stated.default is stated.empty:
        options.setdefault("loss_terms", emitted.samples_only)
    return [emitted.training_step(model, optimizer, batch, **options) for batch in batches]


def assert_same_training(plan, emitted, model, other, batches, **options) -> None:
    result = apply(plan, model, **options)
    options.pop("optimizer", None)
    torch.manual_seed(1)
    losses = [result.step(batch) for batch in batches]
    other_losses = losses_of_file(emitted, other, batches, result.step.scaler is not None, **options)
    assert all(torch.equal(a, b) for a, b in zip(losses, other_losses, strict=True)), (losses, other_losses)
    state, other_state = model.state_dict(), other.state_dict()
    assert list(state) == list(other_state)
    assert [name for name in state if not torch.equal(state[name], other_state[name])] == []


def without_coupling_check(rewritten: Rewritten) -> None:
    """Let the step check the weights of micro-batches, and compare no samples."""
    check = rewritten.step.observers[-1]
    check.coupling = None
    check.start_watching()
