"""Compares the runs that peft published, one for each of its methods, with predictions.

    python -m benchmarks.published.peft_runs FOLDER [NAME ...]

FOLDER holds the results of Llama-3.2-3B on MetaMathQA (github.com/huggingface/peft,
`method_comparison/MetaMathQA/results/*.json`): an NVIDIA L40S, torch 2.13.0, transformers 5.13.1, bf16 weights, batches
of 4 samples in buckets of similar lengths, AdamW. Each result holds the settings of peft and two figures:

- `mem allocated avg`: bytes of tensors after a step, with the last output alive; the mean over 250 steps. It grows with
  the mean length of the batches, which is not published.
- `accelerator_memory_max`: the largest number of bytes that the allocator reserved. It grows with the length of the
  longest batch, which is not published, and depends on the order of the lengths and on the generation between steps.

The lengths do not depend on the method. So both are taken from one run (`REFERENCE`), and all others are predicted.

The stream of events of a run (`run.py`, `utils.py`, `data.py`; commit 5d602fdbf), of which two steps are rehearsed:

1. Weights are loaded to the card in bf16, and adapters are added (in fp32, unless `autocast_adapter_dtype` is false).
2. Without the adapter, in inference mode: 25 forwards of 4 Wikipedia texts, truncated to 768 tokens and padded on the
   left, without labels: bf16 logits of [4, up to 768, vocabulary], then a cross-entropy of one text after the other.
   The last outputs stay alive until the function returns.
3. 5,000 steps. MetaMathQA in its own order, without shuffling: only pairs of at most 1,300 characters (query, a space,
   response), as "Question: {query} Think step by step.\nAnswer:" and the response, cut to 768 tokens. Buckets of 80
   samples are sorted by length, longest first, and cut into 20 batches of 4, so that the lengths fall 20 times and then
   start again. A batch is padded on the right to its longest sample. A step is `zero_grad()` (the gradients of the step
   before are alive until then), forward, backward, clipping of gradients to a norm of 1.0, `step()`, and
   `loss.item()`. The outputs and the batch of a step stay alive until the next ones replace them.
4. After every 250th step: `generate()` in inference mode on 50 questions of GSM8K in one batch, padded
   on the left, with a cache of keys and values, until 300 new tokens or 800 in all. The last outputs of the
   training step stay alive meanwhile.
5. After every 10th step, and after the generation of that step: `empty_cache()`.
6. At the end: `generate()` on the 1,319 questions of GSM8K's test set in batches of 50, and the forwards of 2 again,
   with the adapter. `accelerator_memory_max` is `max_memory_reserved()` of all of this, except before 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published.rehearsing import graph_of, outcome_of
from planner.assemble import versions
from planner.errors import PlannerError

REFERENCE = "lora--llama-3.2-3B-rank32"
CARD, TORCH = "l40s", "2.13.0"
SAMPLES, STEPS = 4, 2
LLAMA_3B = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
MEAN_TOKENS, MOST_TOKENS = range(150, 400), range(400, 769)
"""Lengths of a batch that are tried for the reference: the mean of all batches, and the longest batch."""


def program(device: torch.device, result: dict[str, Any], tokens: int) -> None:
    """Train two steps as `method_comparison/MetaMathQA/run.py` does. One sample is shorter than the others."""
    import peft
    import transformers

    settings, train = result["run_info"]["peft_config"], result["run_info"]["train_config"]
    with warnings.catch_warnings(), device:
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(**LLAMA_3B)
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        if settings is not None:
            chosen = peft.PeftConfig.from_peft_type(**settings)
            model = peft.get_peft_model(model, chosen, autocast_adapter_dtype=train["autocast_adapter_dtype"])
    if train["optimizer_type"] == "lora-fa":
        optimizer = peft.optimizers.create_lorafa_optimizer(model, **train["optimizer_kwargs"])
    else:
        optimizer = getattr(torch.optim, train["optimizer_type"])(model.parameters(), **train["optimizer_kwargs"])
    model.train()
    for _ in range(STEPS):
        mask = torch.ones(SAMPLES, tokens, dtype=torch.int64)
        mask[0, -1] = 0
        batch = {"input_ids": torch.zeros(SAMPLES, tokens, dtype=torch.int64), "attention_mask": mask}
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        output = model(**batch, num_items_in_batch=SAMPLES * tokens - 1)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train["grad_norm_clip"])
        optimizer.step()
    torch.zeros(1, device=device)  # the moment at which the memory is read


def predicted(result: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Returns the bytes that tensors take after the step, and the reserved bytes at the peak."""
    graph = graph_of(functools.partial(program, result=result, tokens=tokens), CARD)
    after = graph.live_bytes(granularity_bytes=512)[graph.ops[-1].tick]
    return int(after), outcome_of(graph, CARD, TORCH).peak_reserved_bytes


def measured(result: dict[str, Any]) -> tuple[float, int]:
    """Returns the published bytes of tensors after a step (mean over the run), and the maximum of reserved bytes."""
    steps = [step["mem allocated avg"] for step in result["train_info"]["metrics"] if "mem allocated avg" in step]
    return sum(steps) / len(steps), result["train_info"]["accelerator_memory_max"]


def tokens_at(result: dict[str, Any], lengths: range, published: float, which: int) -> int:
    """Returns the length with which the prediction is nearest to a published figure, by bisection."""
    low, high = lengths[0], lengths[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if predicted(result, middle)[which] > published else (middle, high)
    return min((low, high), key=lambda tokens: abs(predicted(result, tokens)[which] - published))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names of results (default: all)")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*.json"))}
    reference = results[REFERENCE]
    after, reserved = measured(reference)
    mean = tokens_at(reference, MEAN_TOKENS, after, 0)
    longest = tokens_at(reference, MOST_TOKENS, reserved, 1)
    rest = after - predicted(reference, mean)[0]  # less than what one token takes
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    table = Table(title=f"lengths from {REFERENCE}: mean {mean}, longest {longest} tokens; GB of 1e9 bytes")
    for column in ("run", "after a step", "predicted", "error", "reserved", "predicted", "error"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, result in track(results.items(), console=Console(stderr=True)):
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        try:
            found = predicted(result, mean)[0] + rest, predicted(result, longest)[1]
        except PlannerError as error:
            table.add_row(name, "not rehearsed:", str(error)[:60])
            continue
        cells = [
            text
            for published, value in zip(measured(result), found, strict=True)
            for text in (f"{published / 1e9:.3f}", f"{value / 1e9:.3f}", f"{value / published - 1:+.2%}")
        ]
        table.add_row(name.replace("--llama-3.2-3B", ""), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
