"""Every example builds without memory, trains for a step, and has the size its name promises."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from planner.workload.call_convention import Calling, loss_of

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SMALL_BUILDS = {
    "convnet": {"batch_size": 2, "image_size": 32, "width": 8, "classes": 10},
    "flat": {"batch_size": 2, "image_size": 8, "width": 16, "depth": 3},
    "sequential": {"batch_size": 4, "features": 16, "width": 32, "depth": 24},
    "unet": {"batch_size": 2, "image_size": 16, "channels": 16, "multipliers": (1, 2, 2)},
}

BUILD_PARAMETERS = {"convnet": 11_689_512, "flat": 42_518_016, "sequential": 23_673_866, "unet": 23_986_563}

CONFIG_PARAMETERS = {
    "gpt2": 124_439_808,
    "llama2_70b": 68_976_648_192,
    "llama2_7b": 6_738_415_616,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "roberta_12": 126_031_648,
    "roberta_84m": 83_504_416,
    "vit_base": 85_806_346,
}

TEXT_SMALL = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
SMALL_CONFIGS = {
    "gpt2": {**TEXT_SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama2_70b": {**TEXT_SMALL, "hidden_size": 256, "head_dim": 4, "intermediate_size": 64, "num_hidden_layers": 2},
    "llama2_7b": {**TEXT_SMALL, "hidden_size": 128, "head_dim": 4, "intermediate_size": 64, "num_hidden_layers": 2},
    "llama_1b": {**TEXT_SMALL, "hidden_size": 32, "head_dim": 4, "intermediate_size": 64, "num_hidden_layers": 2},
    "llama_8b": {**TEXT_SMALL, "hidden_size": 32, "head_dim": 4, "intermediate_size": 64, "num_hidden_layers": 2},
    "roberta_12": {**TEXT_SMALL, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
    "roberta_84m": {**TEXT_SMALL, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
    "vit_base": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 32},
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(name: str, **changes: object) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(EXAMPLES / name, **changes)
    return getattr(transformers, config.architectures[0])(config)


def text_or_image_batch(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    config = model.config
    if config.model_type == "vit":
        images = torch.randn(2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (2,))}
    tokens = torch.randint(3, config.vocab_size, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_trains(model: torch.nn.Module, loss: torch.Tensor) -> None:
    assert torch.isfinite(loss)
    loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


LOOPS = {"plain_loop": None, "trainer": "accelerate", "lightning_module": "lightning"}
"""The example loops, each with the package that it needs in addition to this project."""


def test_every_example_is_tested_here() -> None:
    assert {path.stem for path in (EXAMPLES / "loops").glob("*.py")} == set(LOOPS)
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"gan"} == set(SMALL_BUILDS) == set(BUILD_PARAMETERS)
    configs = {path.parent.name for path in EXAMPLES.glob("*/config.json")}
    assert configs == set(SMALL_CONFIGS) == set(CONFIG_PARAMETERS)


@pytest.mark.parametrize("name", sorted(BUILD_PARAMETERS))
def test_a_built_example_needs_no_memory_on_meta(name: str) -> None:
    with torch.device("meta"):
        model, batch, loss_fn = example(name).build()
        loss = loss_of(Calling.of(batch, loss_fn).call(model, batch), batch, loss_fn)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), *batch)} == {"meta"}
    assert loss.shape == ()
    assert parameter_count(model) == BUILD_PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(SMALL_BUILDS))
def test_a_small_built_example_trains_on_the_processor(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = example(name).build(**SMALL_BUILDS[name])
    assert_trains(model, loss_of(Calling.of(batch, loss_fn).call(model, batch), batch, loss_fn))


def test_the_gan_trains_both_networks_by_its_own_step() -> None:
    torch.manual_seed(0)
    built = example("gan").build(batch_size=4, channels=8)
    before = {name: [p.clone() for p in module.parameters()] for name, module in built["model"].items()}
    losses = built["step"](built["model"], built["optimizer"], built["batch"])
    assert set(losses) == set(before)
    for name, module in built["model"].items():
        assert not any(torch.equal(a, b) for a, b in zip(before[name], module.parameters(), strict=True))


@pytest.mark.parametrize("name", sorted(CONFIG_PARAMETERS))
def test_a_config_has_the_parameters_its_name_promises(name: str) -> None:
    with torch.device("meta"):
        model = configured(name)
    assert parameter_count(model) == CONFIG_PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(SMALL_CONFIGS))
def test_a_small_version_of_a_config_trains_on_the_processor(name: str) -> None:
    torch.manual_seed(0)
    model = configured(name, **SMALL_CONFIGS[name]).train()
    batch = text_or_image_batch(model)
    assert_trains(model, loss_of(Calling.of(batch, None).call(model, batch), batch, None))


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.thorough
def test_a_loop_plans_and_trains_on_the_processor(name: str, capsys: pytest.CaptureFixture) -> None:
    if LOOPS[name] is not None:
        pytest.importorskip(LOOPS[name], reason=f"examples/loops/{name}.py needs {LOOPS[name]}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        example(f"loops/{name}").main()
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.startswith("- "), "the budget asks for no decision"
    losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?([0-9.]+)", printed)]
    assert losses
    assert losses[-1] <= losses[0]


@pytest.mark.parametrize("name", ["llama2_70b", "llama_1b", "llama_8b"])
def test_llama_examples_share_keys_and_values_between_heads(name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(EXAMPLES / name)
    assert config.num_key_value_heads < config.num_attention_heads


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "plan_in_a_notebook.ipynb").read_text())["cells"]
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["plan"].fits and names["plan"].decisions
    assert (tmp_path / "train_step.py").is_file()
