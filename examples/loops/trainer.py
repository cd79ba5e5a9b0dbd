"""Train with a plan in transformers' Trainer: three more lines than without. Runs on a CPU in seconds:

python examples/loops/trainer.py
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import planner
from planner import rewrite

BATCH_SIZE, SEQ_LEN, VOCABULARY = 8, 32, 3000


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=SEQ_LEN + 2, pad_token_id=0,
    )  # fmt: skip
    return transformers.RobertaForMaskedLM(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns texts of different lengths. Padding is ignored by the loss."""
    found = []
    for number in range(count):
        tokens = (torch.arange(SEQ_LEN) * 7 + number) % 50 + 3
        mask = (torch.arange(SEQ_LEN) < SEQ_LEN // 4 + number % SEQ_LEN).long()
        found.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.where(mask == 1, -100)})
    return found


def main() -> None:
    model, data = build(), samples(20 * BATCH_SIZE)
    batch = transformers.default_data_collator(data[:BATCH_SIZE])
    plan = planner.plan(
        model, batch, vram="3.1MB", gpu="bare", fidelity="exact", forbid=("step-in-backward", "segment-checkpoint")
    )
    for decision in plan.decisions:
        print(f"- {decision.describe()}")

    rewritten = rewrite.apply_for_trainer(plan, model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = rewrite.training_arguments(
            plan, output_dir=folder, learning_rate=1e-3, num_train_epochs=1, logging_steps=5, save_strategy="no",
            report_to="none", use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            train_dataset=data,
            callbacks=[rewrite.trainer_callback(rewritten)],
        )
        trainer.train()
    rewritten.undo()


if __name__ == "__main__":
    main()
