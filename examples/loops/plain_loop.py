"""Your own training loop: plan the step, train with it, save its state and resume. Runs on a CPU in seconds:

python examples/loops/plain_loop.py
"""

from __future__ import annotations

import pathlib
import tempfile

import torch
from torch import nn

import planner
from planner import rewrite

BATCH_SIZE, WIDTH, DEPTH, CLASSES = 256, 128, 8, 10


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(DEPTH)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[-1])


def batches(count: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
        yield inputs, inputs[:, :CLASSES].argmax(1)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build()
    plan = planner.plan(model, next(batches(1)), vram="4MB", gpu="bare", loss_fn=loss_fn, fidelity="exact")
    for decision in plan.decisions:
        print(f"- {decision.describe()}")

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewritten = rewrite.apply(plan, model, optimizer, loss_fn=loss_fn)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rewritten.optimizer, T_max=100)
    for number, batch in enumerate(batches(30), start=1):
        loss = rewritten.step(tuple(tensor.to(device) for tensor in batch))
        schedule.step()
        if number % 10 == 0:
            print(f"step {number}: loss {loss.item():.4f}")

    with tempfile.TemporaryDirectory() as folder:  # another process could resume from here
        path = pathlib.Path(folder) / "last.pt"
        torch.save({"model": model.state_dict(), "step": rewritten.step.state_dict()}, path)
        saved = torch.load(path, map_location="cpu")
    model.load_state_dict(saved["model"])
    rewritten.step.load_state_dict(saved["step"])
    rewritten.undo()


if __name__ == "__main__":
    main()
