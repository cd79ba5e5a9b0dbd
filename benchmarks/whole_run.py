"""Simulate whole training runs in the allocator: batches of many lengths, in random orders.

    python -m benchmarks.whole_run [--only NAME ...] [--gpu rtx-3090] [--steps 5000]
    python -m benchmarks.whole_run --predicted [--only NAME ...]
    python -m benchmarks.whole_run --masks [--only NAME ...]
    python -m benchmarks.whole_run --speed

The first form prints one row for each model: the memory of the process for the longest step alone, and for a run over
samples whose lengths are distributed log-normally (median 200 tokens, sigma 0.8, cut at the longest length), in two
random orders; and for the same run with a change. Batches have the mask of a batch with padding. The second form
predicts the training steps for batches of many shapes from those for others, rehearses them, too, and counts the steps
in which all requests to the allocator are equal: first for batches with one number of samples, then for batches with a
limit on their tokens. The third form prints the bytes of tensors at the peak of one step with 8 samples of 512 tokens:
without an attention mask, with a full one, and with one that has padding. The fourth form measures the CPU time to
simulate 10,000 steps of 40 lengths. No card is used, and models have no weights.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from planner import pipeline
from planner.allocator.options import settings_of
from planner.allocator.settings import PYTORCH_DEFAULTS
from planner.estimate.footprint import measure
from planner.plan_types.constraints import parse_constraints
from planner.plan_types.sizes import MIB
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.run_memory.batches import BatchShape
from planner.run_memory.simulation import simulate
from planner.whole_run.orders import random_orders
from planner.whole_run.planning import plan_run
from planner.whole_run.recordings import RunRecordings
from planner.whole_run.simulated_run import Run
from planner.workload.cards import resolve_card
from planner.workload.synthetic_batch import Masking, synthetic_batch
from planner.workload.workload import Workload, workload

# Class, samples in a batch, longest length, and changes of the default configuration of the class.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", 4, 1024, {}),
    "roberta": ("RobertaForMaskedLM", 16, 512, {"max_position_embeddings": 514}),
    "bert": ("BertForSequenceClassification", 32, 512, {}),
    "distilbert": ("DistilBertForMaskedLM", 16, 512, {}),
    "electra": ("ElectraForMaskedLM", 32, 512, {}),
    "opt_125m": ("OPTForCausalLM", 4, 1024, {}),
    "bloom": ("BloomForCausalLM", 8, 512, {}),
    "t5_small": ("T5ForConditionalGeneration", 16, 512, {"decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", 4, 1024, {}),
    "llama_300m": (
        "LlamaForCausalLM", 4, 1024,
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    ),
}  # fmt: skip
_SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 64}
# Further models of which only the predicted steps are compared. Two layers are enough to see whether formulas hold.
ONLY_PREDICTED: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", 8, 512, {"num_hidden_layers": 2}),
    "big_bird": ("BigBirdForMaskedLM", 4, 1024, {"num_hidden_layers": 2}),
    "codegen": ("CodeGenForCausalLM", 4, 1024, {"n_embd": 512, "n_layer": 2, "n_head": 8, "rotary_dim": 32}),
    "cohere": ("CohereForCausalLM", 4, 1024, _GROUPED),
    "ctrl": ("CTRLLMHeadModel", 4, 256, {"n_layer": 2, "vocab_size": 32000}),
    "deberta": ("DebertaForMaskedLM", 8, 512, {"num_hidden_layers": 2}),
    "deberta_v2": ("DebertaV2ForSequenceClassification", 8, 512, {"num_hidden_layers": 2, "hidden_size": 768,
                   "num_attention_heads": 12, "intermediate_size": 3072}),
    "falcon": ("FalconForCausalLM", 4, 1024, {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}),
    "fnet": ("FNetForMaskedLM", 8, 512, {"num_hidden_layers": 2}),
    "gemma": ("GemmaForCausalLM", 4, 1024, _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", 4, 1024, _GROUPED),
    "gemma3": ("Gemma3ForCausalLM", 4, 1024, _GROUPED),
    "glm": ("GlmForCausalLM", 4, 1024, _GROUPED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", 4, 1024, {"n_layer": 2}),
    "gpt_neo": ("GPTNeoForCausalLM", 4, 1024, {"hidden_size": 512, "num_layers": 2, "num_heads": 8,
                "attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("GPTNeoXForCausalLM", 4, 1024, _SMALL),
    "gptj": ("GPTJForCausalLM", 4, 1024, {"n_embd": 512, "n_layer": 2, "n_head": 8, "rotary_dim": 32}),
    "granite": ("GraniteForCausalLM", 4, 1024, _GROUPED),
    "m2m_100": ("M2M100ForConditionalGeneration", 4, 512, {"encoder_layers": 2, "decoder_layers": 2}),
    "mamba": ("MambaForCausalLM", 2, 256, {"hidden_size": 256, "num_hidden_layers": 2}),
    "mbart": ("MBartForConditionalGeneration", 4, 512, {"encoder_layers": 2, "decoder_layers": 2}),
    "mistral": ("MistralForCausalLM", 4, 1024, _GROUPED),
    "mixtral": ("MixtralForCausalLM", 4, 1024, {**_GROUPED, "num_local_experts": 4}),
    "modernbert": ("ModernBertForMaskedLM", 8, 512, {"num_hidden_layers": 4}),
    "olmo2": ("Olmo2ForCausalLM", 4, 1024, _GROUPED),
    "phi": ("PhiForCausalLM", 4, 1024, _SMALL),
    "qwen2": ("Qwen2ForCausalLM", 4, 1024, _GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", 4, 1024, {**_SMALL, "num_key_value_heads": 2}),
    "xlm_roberta": ("XLMRobertaForTokenClassification", 8, 512, {"num_hidden_layers": 2,
                    "max_position_embeddings": 514}),
}  # fmt: skip
EXPANDABLE = settings_of("expandable_segments:True")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**MODELS, **ONLY_PREDICTED}
    parser.add_argument("--only", nargs="*", default=[], choices=list(known), help="names of models (default all)")
    parser.add_argument("--gpu", default="rtx-3090", help="profile of the card (default rtx-3090)")
    parser.add_argument("--steps", type=int, default=5000, help="number of steps in each order (default 5000)")
    parser.add_argument("--predicted", action="store_true", help="compare predicted steps with rehearsed ones")
    parser.add_argument("--masks", action="store_true", help="compare steps without and with attention masks")
    parser.add_argument("--speed", action="store_true", help="measure the time of a simulation")
    options = parser.parse_args()
    card = resolve_card(options.gpu, None)
    if options.speed:
        _measure_speed(card)
    elif options.masks:
        _compare_masks(options.only or list(MODELS), card)
    elif options.predicted:
        _compare_predicted(options.only or list(known), card)
    else:
        _compare_runs(options.only or list(MODELS), card, options.steps)


def by_shape(name: str, masking: Masking = Masking.PADDED) -> Callable[[BatchShape], Workload]:
    """Returns a function that builds the workload for a shape, always with the same model on the meta device."""
    kind, _, _, changes = {**MODELS, **ONLY_PREDICTED}[name]
    with torch.device("meta"):
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**changes)).train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False

    @functools.cache
    def at(shape: BatchShape) -> Workload:
        batch = synthetic_batch(model, batch_size=shape.samples, seq_len=shape.length, masking=masking)
        return workload(model, batch, seq_len=shape.length, is_synthetic=True)

    return at


def sample_lengths(count: int, longest: int) -> list[int]:
    """Returns the lengths of samples."""
    source = random.Random(0)
    return [min(longest, max(16, int(source.lognormvariate(5.3, 0.8)))) for _ in range(count)]


def _compare_runs(names: list[str], card: DeviceProfile, steps: int) -> None:
    constraints = parse_constraints(fidelity="exact", force=(), forbid=())
    print("| model | batch | longest step (MiB) | run (MiB) | settled after | longest first | grouped by length |"
          " expandable segments |\n|---|---|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    for name in names:
        _, samples, longest, _ = MODELS[name]
        batches = random_orders(
            sample_lengths(steps * samples, longest), batch_size=samples, multiple=8, longest=longest
        )
        run = Run(at=by_shape(name), batches=batches)
        plan = plan_run(run, card, vram_bytes=None, constraints=constraints)
        assert plan.run is not None
        found = {change.change: change.total_bytes for change in plan.run.changes}
        cells = [
            next((f"{size // MIB:,}" for change, size in found.items() if word in change), "no less")
            for word in ("longest batch first", "grouped", "expandable")
        ]
        row = (f"{samples} x up to {longest}", f"{plan.peak.total_bytes // MIB:,}", f"{plan.run.total_bytes // MIB:,}")
        print(f"| {name} | {' | '.join((*row, f'{plan.run.settled:,}', *cells))} |", flush=True)


def _compare_predicted(names: list[str], card: DeviceProfile) -> None:
    print("| model | batches | shapes | rehearsed | predicted | equal |\n|---|---|---:|---:|---:|---:|")
    for name in names:
        _, samples, longest, _ = {**MODELS, **ONLY_PREDICTED}[name]
        source = random.Random(1)
        lengths = sorted({longest, *(source.randrange(16, longest) for _ in range(17))})
        same = [BatchShape(samples, length) for length in lengths]
        by_tokens = [BatchShape(2 * longest // length, length) for length in lengths]
        at = by_shape(name)
        predicted, rehearsed = (RunRecordings(at, (), card, Watch()) for _ in range(2))
        for words, shapes in ((f"{samples} samples", same), (f"{2 * longest:,} tokens", by_tokens)):
            is_known = predicted.add(shapes)
            guesses = [shape for shape in shapes if is_known and predicted.steps[shape].is_predicted]
            rehearsed.rehearse(guesses)
            equal = sum(
                [event.stream for event in predicted.steps[shape].moment.again]
                == [event.stream for event in rehearsed.steps[shape].moment.again]
                for shape in guesses
            )
            known = len(shapes) - len(guesses) if is_known else "-"
            print(f"| {name} | {words} | {len(shapes)} | {known} | {len(guesses)} | {equal} |", flush=True)


def _compare_masks(names: list[str], card: DeviceProfile) -> None:
    print("| model | without a mask | full mask | mask with padding | more than without |\n|---|---:|---:|---:|---:|")
    for name in names:
        graphs = [pipeline.record_step(by_shape(name, masking)(BatchShape(8, 512)), card) for masking in Masking]
        bare, *masked = [measure(graph, card, vram_bytes=None).footprint.allocated_bytes for graph in graphs]
        sizes = " | ".join(f"{size:,}" for size in (bare, *masked))
        print(f"| {name} | {sizes} | {masked[-1] / bare - 1:.1%} |", flush=True)


def _measure_speed(card: DeviceProfile) -> None:
    recordings = RunRecordings(by_shape("gpt2"), (), card, Watch())
    shapes = [BatchShape(4, 64 + 24 * number) for number in range(40)]
    began = time.perf_counter()
    recordings.add(shapes)
    print(f"40 lengths of GPT-2, 4 samples: {time.perf_counter() - began:.1f} s to rehearse 7 and to predict 33")
    order = random.Random(0).choices(shapes, k=10_000)
    steps = [recordings.steps[shape] for shape in order]
    run = [steps[0].setup, steps[0].moment.first, *(step.moment.again for step in steps[1:])]
    for setting, settings in (("default", PYTORCH_DEFAULTS), ("expandable segments", EXPANDABLE)):
        began = time.process_time()
        outcome = simulate(run, settings, card, None)
        seconds = time.process_time() - began
        print(
            f"10,000 steps, {setting}, {card.segment_addresses} order of addresses: {seconds:.1f} CPU s, "
            f"{outcome.peak_bytes // MIB:,} MiB reserved, settled after {outcome.settled:,} steps"
        )


if __name__ == "__main__":
    main()
