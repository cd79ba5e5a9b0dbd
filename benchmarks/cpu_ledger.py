"""Verify plans for small models on the CPU, and write one row for each model to the ledger.

    python -m benchmarks.cpu_ledger [--out profiles/ledger/cpu.jsonl] [--models NAME ...]

For each model, a plan is made for the profile 'bare', which counts the bytes of tensors only, with a budget below the
baseline's peak and one technique that the plan has to use. The techniques take turns; one that a model cannot use
is skipped. The plan is then verified as `plan --verify` does on a machine without a CUDA card
(`planner.rewrite.on_cpu`). Models that FILE already has with the same versions of torch and transformers are left out.
A model that cannot be planned or verified gets a row with `error`. One thread is used.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import pathlib
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import planner
from benchmarks.card import results
from benchmarks.guard import losses, zoo
from benchmarks.guard.losses import Case
from planner.errors import DecisionError
from planner.plan_types.plan import Plan
from planner.rewrite.on_cpu import worker
from planner.rewrite.on_cpu.verification import CpuVerification
from planner.virtual_gpu.forked_process import run_in_child
from planner.workload.workload import Workload, map_batch, workload

LEDGER = pathlib.Path(__file__).parents[1] / "profiles" / "ledger" / "cpu.jsonl"
TECHNIQUES = (
    "checkpoint", "mixed-precision", "chunked-loss", "accumulation", "segment-checkpoint", "step-in-backward",
    "offload", "8bit-optimizer", "optimizer-kernel", "freeze",
)  # fmt: skip
"""Techniques that take turns, by the names of `--force`."""
SHARES = (0.7, 0.85, 0.97)
"""Budgets as fractions of the baseline's peak, tried in this order."""


# ---- models ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer over a sequence, read out at its end."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.cells = kind(24, 32, num_layers=2, batch_first=True, **settings)
        self.head = nn.LazyLinear(losses.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Separable(nn.Module):
    """A convolutional network with depthwise convolutions and shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 1)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(16, losses.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """PyTorch's own transformer encoder over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(losses.WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, losses.WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(tokens)))


def vgg() -> nn.Module:
    """A chain of convolutions and poolings."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(64, losses.CLASSES))


def autoencoder() -> nn.Module:
    """Convolutions, then transposed convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.GroupNorm(4, 32),
        nn.SiLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
    )  # fmt: skip


def temporal() -> nn.Module:
    """Dilated one-dimensional convolutions."""
    layers = [
        nn.Sequential(nn.Conv1d(16, 16, 3, padding=step, dilation=step), nn.BatchNorm1d(16), nn.Tanh())
        for step in (1, 2, 4, 8)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, losses.CLASSES))


def perceptron() -> nn.Module:
    """Linear layers with layer normalization."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, losses.CLASSES))


def classified(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def reconstructed(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, batch)


def labelled(*shape: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function that returns 16 random samples of this shape with classes."""
    return lambda: (torch.randn(16, *shape), torch.randint(losses.CLASSES, (16,)))


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(losses.WORDS, (16, losses.LENGTH)), torch.randint(losses.WORDS, (16, losses.LENGTH))


HAND_WRITTEN = (
    Case("lstm", lambda: Recurrent(nn.LSTM), labelled(20, 24), classified),
    Case("lstm, bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True), labelled(20, 24), classified),
    Case("gru", lambda: Recurrent(nn.GRU, dropout=0.1), labelled(20, 24), classified),
    Case("rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu"), labelled(20, 24), classified),
    Case("depthwise convolutions", Separable, labelled(3, 24, 24), classified),
    Case("transformer encoder of torch", Encoder, sentences, classified),
    Case("vgg", vgg, labelled(3, 24, 24), classified),
    Case("autoencoder", autoencoder, lambda: torch.randn(16, 3, 24, 24), reconstructed),
    Case("temporal convolutions", temporal, labelled(16, 40), classified),
    Case("perceptron", perceptron, labelled(64), classified),
)


def wide() -> nn.Module:
    """Linear layers whose outputs are large enough to be offloaded."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(256, losses.CLASSES))


def pictures() -> nn.Module:
    """Convolutions whose outputs are large enough to be offloaded."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)
    )


def language_model(kind: str, head: str, **settings: Any) -> Callable[[], nn.Module]:
    """Returns a function that builds a small transformers model with `VOCABULARY` words."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip
    return lambda: getattr(transformers, head)(config)


def text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (8, 64))
    return {"input_ids": tokens, "labels": tokens.clone()}


VOCABULARY = 4000
LARGER = (
    (Case("gpt2, 4000 words", language_model("gpt2", "GPT2LMHeadModel"), text), "chunked-loss"),
    (Case("bert, 4000 words", language_model("bert", "BertForMaskedLM"), text), "chunked-loss"),
    (Case("llama, 4000 words", language_model("llama", "LlamaForCausalLM"), text), "chunked-loss"),
    (
        Case("qwen2, 4000 words", language_model("qwen2", "Qwen2ForCausalLM", num_key_value_heads=2), text),
        "chunked-loss",
    ),
    (Case("wide perceptron", wide, lambda: (torch.randn(4096, 256), torch.randint(8, (4096,))), classified), "offload"),
    (
        Case("wide convolutions", pictures, lambda: (torch.randn(32, 3, 64, 64), torch.randint(8, (32,))), classified),
        "offload",
    ),
    (
        Case(
            "recurrent over long sequences",
            lambda: Recurrent(nn.GRU),
            lambda: (torch.randn(64, 400, 24), torch.randint(8, (64,))),
            classified,
        ),
        "offload",
    ),
)
"""Models, each with a technique that needs more than the models above have, such as larger activations."""
LEFT_OUT = ("llava", "paligemma")
"""Models that refuse random tokens, because these do not have one image token for each part of the image."""


def cases() -> Iterator[tuple[Case, str]]:
    """Yields the models that are written here, and the transformers models of the tests' zoo, each with a technique."""
    filled = (case for case in zoo.cases() if not case.name.endswith(zoo.UNFILLED) and case.name not in LEFT_OUT)
    yield from zip((*HAND_WRITTEN, *filled), itertools.cycle(TECHNIQUES), strict=False)
    yield from LARGER


# ---- one model ------------------------------------------------------------------------------------------------------


def built(case: Case) -> Workload:
    """Builds a model and its batch, always with the same random values."""
    torch.manual_seed(0)
    model, batch = case.build().train(), map_batch(torch.clone, case.batch())  # a copy that belongs to this run
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        with torch.no_grad():
            model(batch[0])
    return workload(model, batch, loss_fn=case.loss_fn, optimizer="adamw")


def planned(work: Workload, first: str) -> Plan | None:
    """Returns a plan that uses `first`, or else the next technique that gives a plan that fits; None if none does."""
    whole, turn = plan_of(work, None), TECHNIQUES.index(first)
    for technique in (*TECHNIQUES[turn:], *TECHNIQUES[:turn]):
        for share in SHARES:
            try:
                plan = plan_of(work, int(share * whole.baseline.total_bytes), technique)
            except DecisionError:
                break
            if plan.fits and technique in {decision.kind for decision in plan.decisions}:
                return plan
    return None


def plan_of(work: Workload, vram: int | None, technique: str | None = None) -> Plan:
    return planner.plan(
        work.model, work.batch, vram=vram, loss_fn=work.loss_fn, gpu="bare", optimizer="adamw",
        fidelity="partial" if technique == "freeze" else "rounded",
        force=() if technique is None else (technique,),
    )  # fmt: skip


def row_of(case: Case, technique: str) -> results.Row:
    """Plans and verifies one model, and returns the row for the ledger."""
    about = {
        "model": case.name, "date": datetime.date.today().isoformat(), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__, "error": None,
    }  # fmt: skip
    try:
        work = built(case)
        about |= {"class": type(work.model).__name__, "parameters": sum(p.numel() for p in work.model.parameters())}
        plan = planned(work, technique)
        if plan is None:
            return {**about, "error": "no technique makes a plan that fits a budget below the baseline"}
        found = CpuVerification(plan=plan, ran=worker.run(plan, lambda with_weights: built(case))).to_json()
    except Exception as error:  # also a fault of the planner is a result, which the row names
        return {**about, "error": without_folders(f"{type(error).__name__}: {error}")}
    return {
        **about,
        "batch_size": plan.workload.batch_size,
        "optimizer": plan.workload.optimizer,
        "techniques": [decision.kind for decision in plan.decisions],
        "plan": [decision.describe() for decision in plan.decisions],
        **{key: found[key] for key in ("kept", "steps", "parity")},
        "notes": [without_folders(note) for note in found["notes"]],
    }


def without_folders(text: str) -> str:
    """Returns the text with files named without their folders."""
    return re.sub(r"(?:/[^\s/:;]+)+/", "", text)


def summary(rows: list[results.Row]) -> str:
    """Returns the totals of the ledger in a few lines."""
    ran = [row for row in rows if row["error"] is None]
    steps = [step for row in ran for step in row["steps"]]
    equal = [row for row in ran if all(step["predicted_bytes"] == step["measured_bytes"] for step in row["steps"])]
    counts = collections.Counter(kind for row in ran for kind in row["techniques"])
    lines = [
        f"{len(ran)} models verified, {len(rows) - len(ran)} not; {sum(row['kept'] for row in ran)} kept",
        f"parity passed: {sum(row['parity']['passed'] for row in ran)}, "
        f"{sum(row['parity']['quantities'] for row in ran):,} quantities",
        f"bytes at the peak equal in all steps: {len(equal)} models; "
        f"{sum(step['predicted_bytes'] == step['measured_bytes'] for step in steps)} of {len(steps)} steps",
        "techniques: " + ", ".join(f"{kind} {count}" for kind, count in counts.most_common()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=LEDGER, help="file to which rows are added")
    parser.add_argument("--models", nargs="*", help="names of models; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = (torch.__version__, transformers.__version__)
    rows = list(results.rows(options.out)) if options.out.exists() else []
    known = {row["model"] for row in rows if (row["torch"], row["transformers"]) == versions}
    for case, technique in cases():
        if case.name in known or (options.models and case.name not in options.models):
            continue
        row = run_in_child(lambda case=case, technique=technique: row_of(case, technique))
        results.append(options.out, row)
        rows.append(row)
        print(case.name, row["error"] or f"{row['techniques']} kept={row['kept']}", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
