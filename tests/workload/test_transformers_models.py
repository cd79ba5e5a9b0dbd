"""Models that are built from a config have the dtypes of `from_pretrained`, and batches that are not too long."""

from __future__ import annotations

import json

import pytest
import torch

from planner.errors import WorkloadError
from planner.plan_types.fingerprint import fingerprint
from planner.workload.loading import load_workload
from planner.workload.synthetic_batch import Masking, masking_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES, vocab_size=100, num_key_value_heads=2),
    "T5ForConditionalGeneration": transformers.T5Config(
        d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=100
    ),
    "ViTForImageClassification": transformers.ViTConfig(**SIZES, image_size=32, patch_size=8),
    "WhisperForConditionalGeneration": transformers.WhisperConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=100, max_target_positions=40,
    ),
}  # fmt: skip


def loaded(reference, **options):
    options = {"batch_size": 2, "seq_len": None, "optimizer": "adamw"} | options
    return load_workload(str(reference), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_planned_with_the_dtypes_that_from_pretrained_loads(name, dtype, tmp_path):
    model_class = getattr(transformers, name)
    model_class(MODELS[name]).to(dtype).save_pretrained(tmp_path)
    task = loaded(tmp_path)
    assert fingerprint(task.model) == fingerprint(model_class.from_pretrained(tmp_path))
    assert task.model_facts().dtype == str(dtype).removeprefix("torch.")
    forced = loaded(tmp_path, dtype="float32")
    assert fingerprint(forced.model) == fingerprint(model_class.from_pretrained(tmp_path, dtype=torch.float32))


def test_without_a_dtype_in_the_config_that_of_the_weights_counts(tmp_path):
    transformers.LlamaForCausalLM(MODELS["LlamaForCausalLM"]).to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loaded(tmp_path).model_facts().dtype == "bfloat16"
    next(tmp_path.glob("*.safetensors")).unlink()
    assert loaded(tmp_path).model_facts().dtype == "float32"


@pytest.mark.parametrize(
    ("kind", "config", "longest"),
    [
        ("BertForMaskedLM", transformers.BertConfig(**SIZES, vocab_size=50, max_position_embeddings=24), 24),
        ("RobertaForMaskedLM", transformers.RobertaConfig(**SIZES, vocab_size=50, max_position_embeddings=24), 22),
        ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=24), 24),
        ("BartForConditionalGeneration", transformers.BartConfig(d_model=64, max_position_embeddings=24), 24),
    ],
)
def test_a_sample_is_not_longer_than_the_table_of_positions(kind, config, longest, tmp_path):
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    assert loaded(tmp_path).seq_len == loaded(tmp_path, seq_len=longest).seq_len == longest
    with pytest.raises(WorkloadError, match=f"more than the {longest} positions .* give --seq-len {longest} or less"):
        loaded(tmp_path, seq_len=longest + 1)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_a_model_without_a_table_of_positions_takes_samples_of_any_length(name, tmp_path):
    MODELS[name].architectures = [name]
    MODELS[name].save_pretrained(tmp_path)
    assert loaded(tmp_path, seq_len=5000).seq_len == 5000


def test_the_length_of_whisper_is_limited_by_its_decoder(tmp_path):
    MODELS["WhisperForConditionalGeneration"].architectures = ["WhisperForConditionalGeneration"]
    MODELS["WhisperForConditionalGeneration"].save_pretrained(tmp_path)
    assert loaded(tmp_path).batch["labels"].shape == (2, 40)


def test_a_function_builds_its_model_in_its_own_dtype():
    with pytest.raises(WorkloadError, match=r"convert the model there, as in model\.to\(torch\.bfloat16\)"):
        loaded("tests.fixtures.models:flat", dtype="bfloat16")
    with pytest.raises(WorkloadError, match="weights cannot have dtype 'int8': choose float32, bfloat16 or float16"):
        loaded("tests/fixtures/roberta", dtype="int8")


@pytest.mark.parametrize(
    ("kind", "config", "takes_mask"),
    [
        ("LlamaForCausalLM", MODELS["LlamaForCausalLM"], True),
        ("T5ForConditionalGeneration", MODELS["T5ForConditionalGeneration"], True),
        ("FNetForMaskedLM", transformers.FNetConfig(hidden_size=64, num_hidden_layers=1, vocab_size=100), False),
        ("ViTForImageClassification", MODELS["ViTForImageClassification"], False),
    ],
)
def test_the_batch_has_the_mask_of_a_collator_if_the_model_takes_one(kind, config, takes_mask, tmp_path):
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    assert "attention_mask" not in loaded(tmp_path, seq_len=6).batch
    masks = [
        loaded(tmp_path, seq_len=6, masking=each).batch.get("attention_mask") for each in (Masking.FULL, Masking.PADDED)
    ]
    assert [mask is not None for mask in masks] == [takes_mask, takes_mask]
    if takes_mask:
        assert [mask.tolist() for mask in masks] == [[[1] * 6] * 2, [[1, 1, 1, 1, 1, 0]] * 2]


@pytest.mark.parametrize(
    ("lengths", "samples", "multiple", "longest", "expected"),
    [
        ((), 4, 1, 32, Masking.NONE),
        ((7, 9), 4, 1, 9, Masking.PADDED),
        ((7, 9), 1, 1, 9, Masking.FULL),
        ((7, 9), 1, 8, 16, Masking.PADDED),
        ((8, 16), 1, 8, 16, Masking.FULL),
        ((20, 30), 4, 1, 16, Masking.FULL),
        ((9, 30), 4, 1, 16, Masking.PADDED),
        ((20,), 4, 8, 20, Masking.FULL),
    ],
)
def test_a_run_has_padding_if_a_batch_of_it_can_have_some(lengths, samples, multiple, longest, expected):
    assert masking_of(lengths, samples=samples, multiple=multiple, longest=longest) is expected
