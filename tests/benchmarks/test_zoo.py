"""The zoo's judge on models with one difficulty each, and its command on a few models."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.zoo import __main__ as command
from benchmarks.zoo import judge, libraries, page
from benchmarks.zoo.case import ASSUMED, ERROR, EXACT, FITS, NOT_BUILT, REFUSED, SLOW, WRONG, Case, Verdict, single

pytestmark = pytest.mark.slow
WIDTH = 8


class Layer(nn.Module):
    """A linear layer, and what a function makes of its output."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.layer(x)).square().mean()


def replaced_buffer(model: Layer, x: torch.Tensor) -> torch.Tensor:
    """The forward replaces a buffer by a larger one."""
    model.kept = torch.ones(200, device=x.device)
    return x * model.kept.sum()


def largest_by_group(model: Layer, x: torch.Tensor) -> torch.Tensor:
    """Graph networks pool so: in backward, `scatter_add` adds to a tensor that is used afterwards."""
    groups = (torch.arange(len(x), device=x.device) // 2)[:, None].expand_as(x)
    return x.new_zeros(len(x) // 2, WIDTH).scatter_reduce(0, groups, x, "amax", include_self=False)


def chosen_by_a_mask(model: Layer, x: torch.Tensor) -> torch.Tensor:
    return x[x.abs() >= 0]


def where_with_a_number(model: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, -1.0)


def sound_from_its_spectrum(model: Layer, x: torch.Tensor) -> torch.Tensor:
    window = torch.ones(16, device=x.device)
    spectrum = torch.stft(x.flatten().repeat(4)[None], 16, window=window, return_complex=True)
    return torch.istft(spectrum, 16, window=window)


def experts_of_equal_size(model: Layer, x: torch.Tensor) -> torch.Tensor:
    """A router counts the tokens of each expert with floats."""
    experts = x.topk(2, dim=1)[1]
    counts = torch.zeros(len(x), WIDTH, device=x.device).scatter(1, experts, 1).long().sum(0).tolist()
    return torch.cat([part * number for number, part in enumerate(x.repeat(2, 1).split(counts), 1)])


def value(model: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def failing(model: Layer, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("it never trains")


def more_than_rehearsed(model: Layer, x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, FakeTensor) else x.exp().repeat(50, 1)


def hooked(function) -> nn.Module:
    """A model whose parameter has a hook that changes its gradient."""
    model = Layer(function)
    model.layer.weight.register_hook(lambda gradient: gradient.repeat(30, 1)[:WIDTH])
    return model


def of_function(function):
    return Case(library="test", name="one", candidates=single(lambda: (Layer(function), torch.randn(16, WIDTH), None)))


def bags() -> tuple:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(30, WIDTH, mode="sum", sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words).square().mean()

    return Bags(), torch.randint(30, (4, 6)), None


def judged(case: Case, **options) -> Verdict:
    return judge.judged(case, **{"with_plan": False, "limit_s": 120, **options})


def test_a_rehearsal_gives_the_bytes_of_the_real_step():
    parts = (replaced_buffer, largest_by_group, where_with_a_number, sound_from_its_spectrum, experts_of_equal_size)

    def build() -> tuple:
        return hooked(lambda model, x: torch.cat([part(model, x).flatten() for part in parts])), torch.randn(16, WIDTH)

    verdict = judged(Case(library="test", name="one", candidates=single(build)))
    assert (verdict.result, verdict.note) == (EXACT, "")
    assert verdict.parameters == WIDTH * WIDTH + WIDTH


def test_sparse_gradients_of_bags_have_a_row_for_each_index():
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    verdict = judged(Case(library="test", name="one", candidates=single(bags, optimizer=optimizer)))
    assert (verdict.result, verdict.note) == (EXACT, "")


def test_a_mask_with_unknown_values_is_assumed_to_select_all():
    verdict = judged(of_function(chosen_by_a_mask))
    assert verdict.result == ASSUMED  # on a CPU, the kernel of the index holds the positions, not a tensor
    assert "all elements are selected, which is an upper bound" in verdict.note


def test_what_is_not_exact_is_called_by_its_name():
    assert judged(of_function(value)).result == REFUSED
    assert judged(of_function(failing)).result == NOT_BUILT
    wrong = judged(of_function(more_than_rehearsed))
    assert wrong.result == WRONG
    assert "peak of step 1" in wrong.note
    assert judged(of_function(lambda model, x: time.sleep(60)), limit_s=1).result == SLOW


def test_a_plan_is_made_under_a_budget():
    assert judged(of_function(lambda model, x: x.exp().sin().exp().sin()), with_plan=True).plan in (
        FITS,
        "no plan fits",
    )


def test_the_command_writes_one_line_for_each_model_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        libraries, "FAMILIES", {"recommenders": ("recommenders", ()), "absent": ("absent", ("absent",))}
    )
    arguments = ["--only", "two towers", "--planned", "0", "--out", str(tmp_path / "zoo.jsonl")]
    assert command.main(arguments) == 0
    (verdict,) = command.read(tmp_path / "zoo.jsonl")
    assert (verdict.library, verdict.name, verdict.result) == ("recommenders", "two towers", EXACT)
    assert "absent, because absent is not installed" in capsys.readouterr().out
    assert "| recommenders |" in page.text([verdict, Verdict(library="timm", name="net", result=ERROR, note="why")])
