"""Train with a plan in Lightning by manual optimization: `rewritten.step` does the whole step.

pip install lightning
python examples/loops/lightning_module.py

Leave Lightning's `precision`, `accumulate_grad_batches` and `gradient_clip_val` at their defaults: the plan and
`rewrite.apply(..., max_grad_norm=...)` set them. Lightning does no optimizer step itself, so `trainer.global_step`
stays 0: give the length of the training in epochs.
"""

from __future__ import annotations

import lightning
import torch
from torch import nn

import planner
from planner import rewrite

BATCH_SIZE, WIDTH = 256, 128


def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[-1])


class Planned(lightning.LightningModule):
    def __init__(self, model: nn.Module, plan: planner.Plan) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.plan = model, plan

    def configure_optimizers(self):
        """Apply the plan. Lightning calls this after it has moved the model to its device."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.rewritten = rewrite.apply(self.plan, self.model, optimizer, loss_fn=loss_fn)
        return self.rewritten.optimizer

    def training_step(self, batch, _):
        self.log("loss", self.rewritten.step(tuple(batch)))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["planned_step"] = self.rewritten.step.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.saved_step = checkpoint["planned_step"]

    def on_train_start(self):
        if hasattr(self, "saved_step"):
            self.rewritten.step.load_state_dict(self.saved_step)


def main() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
    inputs = torch.randn(20 * BATCH_SIZE, WIDTH)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin())
    plan = planner.plan(model, data[:BATCH_SIZE], vram="4MB", gpu="bare", loss_fn=loss_fn, fidelity="exact")
    for decision in plan.decisions:
        print(f"- {decision.describe()}")

    loader = torch.utils.data.DataLoader(data, BATCH_SIZE, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Planned(model, plan), loader)
    print(f"loss {trainer.callback_metrics['loss'].item():.4f}")


if __name__ == "__main__":
    main()
