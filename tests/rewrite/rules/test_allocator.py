"""Allocator: the options are in the environment before PyTorch reads them, and a warning says when it is too late."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from planner.errors import DecisionError
from planner.plan_types.decisions import Allocator
from tests.support.training import rewritten, vectors

EXPANDABLE = Allocator(expandable_segments=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def apply(decision=EXPANDABLE):
    model = torch.nn.Linear(4, 4)
    return rewritten(model, decision, batch=vectors(), loss_fn=lambda output, batch: output.sum())


def test_the_options_are_set_before_cuda_starts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(Allocator(expandable_segments=True, max_split_size_mb=64))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True,max_split_size_mb:64"


def test_a_process_without_a_card_is_left_alone(environment):
    environment.setattr(torch.cuda, "is_available", lambda: False)
    apply()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_options_that_are_set_already_stay(environment, name):
    environment.setenv(name, "garbage_collection_threshold:0.8, expandable_segments:True")
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply()
    environment.setenv(name, "max_split_size_mb:64")
    with pytest.warns(
        UserWarning, match=f"certified with .*expandable_segments:True, but {name} is 'max_split_size_mb:64'"
    ):
        apply()
    assert os.environ[name] == "max_split_size_mb:64"


@pytest.mark.parametrize("former", [None, ""])
def test_the_variable_that_pytorch_reads_is_set(environment, former):
    """PyTorch does not read PYTORCH_ALLOC_CONF if the variable with the former name is set, even to nothing."""
    if former is not None:
        environment.setenv("PYTORCH_CUDA_ALLOC_CONF", former)
    apply()
    assert settings_in_a_new_process(dict(os.environ)) == "expandable_segments:True"


def settings_in_a_new_process(environment):
    """Returns the options that PyTorch reads from an environment."""
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_it_is_too_late_once_cuda_has_started(environment):
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="but CUDA has started without it.*set the variable before the program starts"):
        apply()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sets no option"),
        ({"max_split_size_mb": 20}, "max_split_size_mb=20"),
        ({"max_split_size_mb": 64.5}, "max_split_size_mb=64.5"),
        ({"max_split_size_mb": 10**30}, "a whole number between 21 and"),
        ({"expandable_segments": 1}, "expandable_segments=1: give true or false"),
    ],
)
def test_options_that_pytorch_would_refuse_are_refused(fields, message):
    with pytest.raises(DecisionError, match=message):
        Allocator(**fields)
