"""Writes the `main` of an emitted file that torchrun starts in one process for each card."""

from __future__ import annotations

from collections.abc import Sequence

from planner.rewrite.emitted_code import WIDTH, EmittedCode
from planner.rewrite.emitter.model_source import ModelSource


def receives_weights(model: ModelSource, fragments: Sequence[EmittedCode]) -> bool:
    """Return True if only rank 0 builds the model with its weights, and sends them to the other ranks."""
    return bool(model.structure) and any(fragment.receives for fragment in fragments)


def main_of_rank(
    model: ModelSource, fragments: Sequence[EmittedCode], arguments: Sequence[str], *, launcher: str
) -> str:
    """Return the source of `main`, which trains a few steps on random data in each of several processes.

    Args:
        model: the parts of the file that build the model.
        fragments: the code of the rules.
        arguments: further arguments of the training step, after model, optimizer and batch.
        launcher: the command that starts the file, without its name.
    """
    cards = max(fragment.cards for fragment in fragments)
    scaled = any(fragment.scaled for fragment in fragments)
    on_host = any(fragment.communicates_on_host for fragment in fragments)
    scaler = ", scaler=scaler" if scaled else ""
    lines = [
        "def main():",
        f'    parser = argparse.ArgumentParser(description="Train a few steps on random data, on {cards} cards.")',
        '    parser.add_argument("--steps", type=int, default=3)',
        '    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")',
        '    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of all gradients (default: no)")',
        '    parser.add_argument("--checkpoint", metavar="DIR", help="save the training there after the last step")',
        '    parser.add_argument("--resume", metavar="DIR", help="continue the training that was saved there")',
        *(f"    {line}" for line in _arguments(model, fragments)),
        "    arguments = parser.parse_args()",
        f'    if os.environ.get("WORLD_SIZE") != "{cards}":',
        f'        raise SystemExit("start this file with: {launcher} " + __file__)',
        '    if arguments.resume is not None and not os.path.isfile(os.path.join(arguments.resume, ".metadata")):',
        '        raise SystemExit(f"{arguments.resume} has no checkpoint: give the folder of a --checkpoint")',
        "    if arguments.checkpoint is not None:",
        "        refuse_to_replace(arguments.checkpoint, arguments.resume)",
        f'    backend = "{"cpu:gloo,cuda:nccl" if on_host else "nccl"}" if arguments.device == "cuda" else "gloo"',
        "    torch.distributed.init_process_group(backend)",
        '    if arguments.device == "cuda":',
        '        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        "    rank = torch.distributed.get_rank()",
        "    torch.manual_seed(0)  # the same weights in each process",
        *_model(model, fragments),
        "    optimizer = make_optimizer(model)",
        *(["    scaler = torch.amp.GradScaler(arguments.device)"] if scaled else []),
        "    done = 0",
        "    if arguments.resume is not None:",
        f"        done = load_checkpoint(arguments.resume, model, optimizer{scaler})",
        *_seed(next((fragment.part for fragment in fragments if fragment.part != "rank"), "rank")),
        "    batch = synthetic_batch(arguments.device)",
        "    for step in range(done + 1, done + arguments.steps + 1):",
        f"        loss = {_step(arguments)}",
        "        torch.distributed.all_reduce(loss)",
        "        if rank == 0:",
        f'            print(f"step {{step}}: loss {{loss.item() / {cards}:.4f}}")',
        "    if arguments.checkpoint is not None:",
        f"        save_checkpoint(arguments.checkpoint, model, optimizer, done + arguments.steps{scaler})",
        *(_LEAVE_GROUP if any(fragment.shards for fragment in fragments) else _LEAVE_GROUP_OF_COPIES),
    ]
    return "\n".join(lines) + "\n"


def _seed(part: str) -> list[str]:
    """Return the statement that seeds the random batch, given the expression for the number of its part."""
    if part == "rank":
        return ["    torch.manual_seed(1 + rank)  # each process has a batch of its own"]
    return [f"    torch.manual_seed(1 + {part})  # processes that divide one copy of the model have the same batch"]


_LEAVE_GROUP = ["    torch.distributed.destroy_process_group()"]
# If DistributedDataParallel has the last reference to the process group, it frees the group while it holds Python's
# GIL, and joins the threads of gloo. A thread that frees the tensors of the last collective needs the GIL, and both
# wait forever. A barrier before the group is destroyed would not exclude this. Python releases the GIL when it frees
# the last reference, so `group` keeps the process group until `model` is freed: local variables are freed in the order
# in which they were first assigned.
_LEAVE_GROUP_OF_COPIES = [
    "    group = torch.distributed.group.WORLD  # kept until `model` is freed, because gloo may hang otherwise",
    "    torch.distributed.destroy_process_group(group)",
]


def _arguments(model: ModelSource, fragments: Sequence[EmittedCode]) -> list[str]:
    """Return the statements that add arguments to `parser`."""
    meta = 'parser.add_argument("--meta", action="store_true", help="build the model with its weights on rank 0 only")'
    return [*model.arguments, *([meta] if receives_weights(model, fragments) and model.structure_is_asked_for else [])]


def _model(model: ModelSource, fragments: Sequence[EmittedCode]) -> list[str]:
    """Return the statements that build the model and rewrite it."""
    build = f"build({model.build_arguments})"
    if not any(fragment.shards for fragment in fragments):
        return [f"    {model.target} = {build}", "    model = rewrite(model.to(arguments.device).train())"]
    rewriting = "    model = rewrite(model.train(), arguments.device)"
    if not receives_weights(model, fragments):
        return [f"    {model.target} = {build}", rewriting]
    structure = f"build_structure({model.build_arguments})"
    send = "receive_from_rank_0(model, whole, arguments.device)"
    if model.structure_is_asked_for:
        return [
            f"    {model.target} = {structure} if arguments.meta and rank > 0 else {build}",
            "    whole = model.state_dict() if arguments.meta and rank == 0 else {}",
            rewriting,
            "    if arguments.meta:",
            f"        {send}",
            "    del whole",
        ]
    return [
        f"    {model.target} = {build} if rank == 0 else {structure}",
        "    whole = model.state_dict() if rank == 0 else {}",
        rewriting,
        f"    {send}",
        "    del whole",
    ]


def _step(arguments: Sequence[str]) -> str:
    """Return the call of the training step as `ruff format` writes it, in a line of its own if it is long."""
    listed = ", ".join(["model", "optimizer", "batch", *arguments])
    line = f"training_step({listed})"
    if len(line) + len("        loss = ") <= WIDTH:
        return line
    return f"training_step(\n            {listed}\n        )"
