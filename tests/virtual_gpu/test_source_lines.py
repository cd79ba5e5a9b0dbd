"""Which files count as the user's code when a message names a line."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

import planner
from planner.virtual_gpu.source_lines import is_model_code

PACKAGES = pathlib.Path(torch.__file__).parents[1]


@pytest.mark.parametrize("package", ["torch_geometric", "torchvision", "torchao", "transformers", "planners"])
def test_packages_whose_names_begin_like_torch_are_model_code(package):
    assert is_model_code(str(PACKAGES / package / "nn" / "layer.py"))
    assert is_model_code(str(pathlib.Path(planner.__file__).parents[1] / package / "layer.py"))


def test_torch_the_planner_and_the_standard_library_are_not():
    for file in (torch.nn.modules.linear.__file__, planner.__file__, dataclasses.__file__, "<string>"):
        assert not is_model_code(file)
