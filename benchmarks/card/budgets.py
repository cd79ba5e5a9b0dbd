"""The promises that are measured: models at several budgets."""

from __future__ import annotations

import dataclasses

MODELS = "benchmarks.card.models"
LARGER = "benchmarks.card.larger_models"
SHARES = ("80%", "60%", "45%", "35%")
"""Default budgets, relative to the baseline's total."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch, as arguments of `plan`, and the budgets to plan for."""

    name: str
    reference: str
    batch_size: int
    seq_len: int | None = None
    budgets: tuple[str, ...] = SHARES
    """Sizes, or shares of the baseline's total."""
    fidelity: str = "rounded"


def _text(name: str, module: str, batch_size: int, seq_len: int, **others) -> Case:
    return Case(name=name, reference=f"{module}:{name}", batch_size=batch_size, seq_len=seq_len, **others)


def _other(name: str, module: str, batch_size: int, **others) -> Case:
    return Case(name=name, reference=f"{module}:{name}", batch_size=batch_size, **others)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _text("roberta_84m", MODELS, 64, 128, budgets=("6GiB", "4GiB", "3GiB", "8GiB", "12GiB")),
        _other("flat", MODELS, 64, budgets=("6GiB", "12GiB", "24GiB")),
        _text("gpt2", MODELS, 8, 512),
        _other("resnet50", MODELS, 256),
        _text("llama_1b", MODELS, 4, 1024),
        _text("roberta_1b", LARGER, 64, 128, budgets=("16GB", "20GiB", "32GiB", "60%")),
        _other("unet", MODELS, 16),
        _other("vit_large", LARGER, 64),
        _text("t5_base", LARGER, 16, 512),
        _text("whisper_small", LARGER, 8, 128),
        _text("mixtral", LARGER, 8, 512),
        _text("lstm", MODELS, 256, 256),
        _text("gpt2_medium", LARGER, 8, 512),
        _text("gpt2_xl", LARGER, 4, 512),
        _text("bert_eager", MODELS, 64, 256),
        _other("sequential", MODELS, 8192),
        _text("llama_8b", LARGER, 1, 2048, budgets=("76GiB", "60GiB", "40GiB"), fidelity="partial"),
    )
}
"""The cases by name."""


def pairs() -> list[tuple[Case, str]]:
    """Returns all (case, budget) in the order in which they run: the first budget of every case comes first."""
    longest = max(len(case.budgets) for case in CASES.values())
    return [
        (case, case.budgets[number])
        for number in range(longest)
        for case in CASES.values()
        if number < len(case.budgets)
    ]
