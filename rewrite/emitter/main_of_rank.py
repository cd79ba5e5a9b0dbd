"""Writes the `main` of an emitted file that torchrun starts in one process for each card."""

from __future__ import annotations

from planner.rewrite.emitter.model_source import ModelSource


def main_of_rank(model: ModelSource, call: str, *, scaled: bool, cards: int, is_sharded: bool) -> str:
    """Return the source of `main`, which trains a few steps on random data in each of several processes.

    Args:
        call: the expression that calls the training step.
        cards: number of processes.
        is_sharded: True if `rewrite` takes the device, to which it moves the shards of this process.
    """
    lines = [
        "def main():",
        f'    parser = argparse.ArgumentParser(description="Train a few steps on random data, on {cards} cards.")',
        '    parser.add_argument("--steps", type=int, default=3)',
        '    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")',
        *(f"    {line}" for line in model.arguments),
        "    arguments = parser.parse_args()",
        '    if "RANK" not in os.environ:',
        f'        raise SystemExit("start this file with: torchrun --nproc-per-node {cards} " + __file__)',
        '    torch.distributed.init_process_group("nccl" if arguments.device == "cuda" else "gloo")',
        '    if arguments.device == "cuda":',
        '        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        "    torch.manual_seed(0)  # the same weights in each process",
        f"    {model.target} = build({model.build_arguments})",
        *(
            ["    model = rewrite(model.train(), arguments.device)"]
            if is_sharded
            else ["    model = rewrite(model.to(arguments.device).train())"]
        ),
        "    optimizer = make_optimizer(model)",
        "    rank = torch.distributed.get_rank()",
        "    torch.manual_seed(1 + rank)  # each process has a batch of its own",
        "    batch = synthetic_batch(arguments.device)",
        *(["    scaler = torch.amp.GradScaler(arguments.device)"] if scaled else []),
        "    for step in range(1, arguments.steps + 1):",
        f"        loss = {call}",
        "        torch.distributed.all_reduce(loss)",
        "        if rank == 0:",
        f'            print(f"step {{step}}: loss {{loss.item() / {cards}:.4f}}")',
        "    torch.distributed.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"
