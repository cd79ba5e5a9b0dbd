"""Small training steps that run both as a rehearsal and for real on the CPU, and the comparison of both."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from planner.plan_types.decisions import Accumulation, Decision, Precision
from planner.plan_types.recompute_decisions import Checkpoint
from planner.recording.recorder import Recorder
from planner.recording.rehearsal import Between, make_virtual, record_steps
from planner.recording.step_graph import StepGraph
from planner.recording.virtual_batch import learn_batch, virtual_batch
from planner.rewrite.application import apply_decisions
from planner.virtual_gpu.backend import VirtualGpuMode
from planner.virtual_gpu.forked_process import run_in_child
from planner.virtual_gpu.library_patches import let_libraries_take_fakes_for_real
from planner.workload.call_convention import LossFn, StepFn
from planner.workload.optimizer_choice import Optimizers, for_copies
from planner.workload.workload import Workload, tensors_of, workload
from tests.support.workloads import example

STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compare."""

    build: Callable[[], tuple[torch.nn.Module, object, LossFn | None]]
    """Returns the model, the batch and the loss function, with real tensors on the CPU."""
    optimizer: Optimizers = "adamw"
    decisions: tuple[Decision, ...] = ()
    max_grad_norm: float | None = None
    step: StepFn | None = None
    between: tuple[Callable[[torch.nn.Module], object], ...] = ()
    """Functions of the model that run after the steps, each of them twice."""

    def workload(self) -> Workload:
        model, batch, loss_fn = self.build()
        return workload(model.train(), batch, loss_fn=loss_fn, optimizer=self.optimizer, step=self.step)


def truth(case: Case) -> StepGraph:
    """Returns the record of two steps that really run on the CPU."""

    work = case.workload()
    optimizers = for_copies(work.optimizer, work.model)
    return _in_child(lambda: _recorded(case, work, work.batch, optimizers, virtual=False))


def rehearsal(case: Case) -> StepGraph:
    """Returns the record of the same two steps, rehearsed on fake tensors whose device is the CPU.

    Their dispatch keys are the CPU's, so that PyTorch itself chooses as it does there (attention, dropout, autocast,
    loops in optimizers). A rule of which kernels a CPU takes would be one more thing to get wrong.
    """

    work = case.workload()
    optimizers = for_copies(work.optimizer, work.model)

    def run() -> StepGraph:
        mode = VirtualGpuMode()
        let_libraries_take_fakes_for_real("cpu")
        with mode:
            make_virtual(work.model, "cpu")
            batch = virtual_batch(work.batch, work.batch_size, work.batch_size, "cpu")
            return _recorded(case, work, batch, optimizers, virtual=True)

    return _in_child(run)


def _recorded(
    case: Case, work: Workload, batch: object, optimizers: Callable[[torch.nn.Module], Optimizers], *, virtual: bool
) -> StepGraph:
    made: list[torch.nn.Module] = []

    def prepare(model: torch.nn.Module):
        made.append(model)
        rewritten = apply_decisions(
            case.decisions,
            model,
            optimizer=optimizers(model),
            calling=work.calling,
            batch_size=work.batch_size,
            loss_fn=work.loss_fn,
            step=work.step,
            max_grad_norm=case.max_grad_norm,
        )
        rewritten.step.observers = ()  # on the CPU their copies to the host would be counted as the device's
        return rewritten.step, rewritten.optimizers

    # Under any dispatch mode the engine adds gradients out of place, real ones too (`isTensorSubclassLike`).
    recorder = Recorder("cpu", virtual=virtual, what_if=False, in_place=None)
    if virtual:
        recorder.data_dependence.install("AutogradCPU")
        for (path, fake), (_, given) in zip(tensors_of(batch), tensors_of(work.batch), strict=True):
            learn_batch(recorder.data_dependence.known, path, fake, given)
    return record_steps(
        recorder,
        work.model,
        batch,
        prepare,
        runs_own_code=not virtual,  # rehearsed second steps get copied gradients; real steps compute them
        steps=STEPS,
        primed=False,
        micro_batch_sizes=(work.batch_size,),
        own_step=work.step,
        between=[Between(name=each.__name__, run=lambda _, each=each: each(made[0])) for each in case.between],
        make_batch=lambda samples: batch,
    )


def _in_child(run: Callable[[], StepGraph]) -> StepGraph:
    """Run in a child process without oneDNN, whose own recurrent layers no other device uses."""

    def without_collector() -> StepGraph:
        gc.freeze()
        gc.disable()
        with torch.backends.mkldnn.flags(enabled=False):
            return run()

    return run_in_child(without_collector)


# ---- models -------------------------------------------------------------------------------------------------------


def hugging_face(
    kind: str, head: str, *, batch_size: int = 2, seq_len: int = 8, attention: str | None = None, **settings: object
) -> Callable:
    """A small transformers model with random weights, and random inputs that it accepts."""

    def build():
        import transformers

        from planner.workload.synthetic_batch import synthetic_batch

        torch.manual_seed(0)
        attention = settings.get("attn_implementation")
        config = transformers.AutoConfig.for_model(
            kind, **{k: v for k, v in settings.items() if k != "attn_implementation"}
        )
        config.use_cache = False
        if attention:
            config._attn_implementation = attention
        model = getattr(transformers, head)(config)
        shapes = synthetic_batch(model, batch_size=batch_size, seq_len=seq_len)
        return model, {name: _like(tensor) for name, tensor in shapes.items()}, None

    return build


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape) if tensor.is_floating_point() else torch.randint(2, tensor.shape)


def with_loss(make: Callable[[], torch.nn.Module], *shape: int, outputs: int = 8) -> Callable:
    """Returns a model with `outputs` numbers per sample, random targets, and the mean squared error as its loss."""

    def build():
        torch.manual_seed(0)
        return make(), (torch.randn(shape), torch.randn(shape[0], outputs)), mean_square

    return build


def mean_square(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, batch[-1])


def deep(width: int = 24) -> torch.nn.Sequential:
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(3)
    ]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 8))


def unet():
    module = sys.modules[example("unet.py:build").model.__class__.__module__]
    torch.manual_seed(0)
    return module.build(batch_size=2, image_size=16, channels=16, multipliers=(1, 2))


def convolutions_with_batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.BatchNorm2d(16),
        torch.nn.SiLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 8),
    )


class Recurrent(torch.nn.Module):
    """An LSTM over a sequence, read out at its end."""

    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(12, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.out = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0][:, -1])


class InPlace(torch.nn.Module):
    """Writes into its activations, and uses one of its layers twice."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.sliced = sliced
        self.first, self.shared = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
        self.out = torch.nn.Linear(24, 8)
        self.register_buffer("seen", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu_()
        self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        z = self.shared(y).mul_(2).add_(x)
        z = self.shared(torch.sigmoid(z))
        if self.sliced:
            z[:, :4] = 0
        return self.out(z.tanh_())


class Square(torch.autograd.Function):
    """Saves one tensor by `save_for_backward` and one as an attribute of its context."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.doubled = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.doubled + 0 * x


class CustomFunction(torch.nn.Module):
    """Uses an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = torch.nn.Linear(24, 24), torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(Square.apply(self.first(x)))


LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "l1_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "kl_div",
    "poisson_nll_loss",
    "hinge_embedding_loss",
    "cosine_embedding_loss",
    "cross_entropy",
)


def all_losses(output: torch.Tensor, batch: tuple) -> torch.Tensor:
    """The mean of every loss in `LOSSES`, and the sum and the elements of some."""
    output, target = output.sigmoid(), batch[-1].sigmoid()
    functional = torch.nn.functional
    total = functional.mse_loss(output, target, reduction="none").mean()
    for name in LOSSES:
        loss = getattr(functional, name)
        if name == "cosine_embedding_loss":
            total = total + loss(output, target, target[:, 0])
        else:
            total = total + loss(output, target)
            total = total + loss(output, target, reduction="sum")
    return total


def with_all_losses():
    model, batch, _ = with_loss(deep, 6, 24)()
    return model, batch, all_losses


class Tied(torch.nn.Module):
    """A model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = torch.nn.Embedding(40, 24), torch.nn.Linear(24, 24)
        self.out = torch.nn.Linear(24, 40, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.mix(self.words(tokens)).tanh())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tied():
    torch.manual_seed(0)
    return Tied(), torch.randint(40, (4, 6)), None


class Checkpointed(torch.nn.Module):
    """Calls torch.utils.checkpoint itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = deep()[:3]
        self.out = torch.nn.Linear(24, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class Frozen(torch.nn.Module):
    """A model of which half is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = deep()
        self.model[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def with_hooks_on_parameters() -> torch.nn.Module:
    """A model that changes one gradient, and frees another as soon as autograd has computed it."""
    model = deep()
    model[0][0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1) * 2)
    model[1][0].weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return model


def transformer_of_torch() -> torch.nn.Module:
    """PyTorch's own encoder layers: multi-head attention calls the fused kernel from Python and C++."""
    layer = torch.nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.nn.Flatten(), torch.nn.Linear(120, 8)
    )


def loop(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def foreach(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def momentum_foreach(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.1, foreach=True)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LANGUAGE = {**SMALL, "vocab_size": 60, "max_position_embeddings": 32}
TEXT_TO_TEXT = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

CASES = {
    "bert": Case(build=hugging_face("bert", "BertForMaskedLM", **LANGUAGE)),
    "roberta, attention by hand": Case(
        build=hugging_face("roberta", "RobertaForMaskedLM", **LANGUAGE, attention="eager")
    ),
    "gpt2": Case(build=hugging_face("gpt2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=60)),
    "llama, grouped heads": Case(
        build=hugging_face("llama", "LlamaForCausalLM", **LANGUAGE, num_key_value_heads=2), optimizer=foreach
    ),
    "t5": Case(build=hugging_face("t5", "T5ForConditionalGeneration", **TEXT_TO_TEXT, decoder_start_token_id=0)),
    "vit": Case(
        build=hugging_face("vit", "ViTForImageClassification", **SMALL, image_size=16, patch_size=8), optimizer=loop
    ),
    "u-net": Case(build=unet),
    "convolutions with batch norm": Case(
        build=with_loss(convolutions_with_batch_norm, 4, 3, 16, 16), optimizer=momentum
    ),
    "lstm": Case(build=with_loss(lambda: Recurrent(torch.nn.LSTM), 4, 5, 12)),
    "gru": Case(build=with_loss(lambda: Recurrent(torch.nn.GRU), 4, 5, 12)),
    "torch's transformer": Case(build=with_loss(transformer_of_torch, 4, 5, 24), optimizer=momentum_foreach),
    "in-place": Case(build=with_loss(lambda: InPlace(sliced=False), 6, 24)),
    "in-place, sliced": Case(build=with_loss(lambda: InPlace(sliced=True), 6, 24), optimizer="sgd"),
    "tied weights": Case(build=tied),
    "custom function": Case(build=with_loss(CustomFunction, 6, 24)),
    "hooks on parameters": Case(build=with_loss(with_hooks_on_parameters, 6, 24)),
    "all losses": Case(build=with_all_losses, optimizer="sgd"),
    "frozen half": Case(build=with_loss(Frozen, 6, 24)),
    "dropout": Case(build=with_loss(deep, 6, 24)),
    "clipping": Case(build=with_loss(deep, 6, 24), max_grad_norm=1.0),
    "sgd": Case(build=with_loss(deep, 6, 24), optimizer="sgd"),
    "sgd with momentum": Case(build=with_loss(deep, 6, 24), optimizer=momentum),
    "adamw as a loop": Case(build=with_loss(deep, 6, 24), optimizer=loop),
    "adamw foreach": Case(build=with_loss(deep, 6, 24), optimizer=foreach),
    "adamw fused": Case(build=with_loss(deep, 6, 24), optimizer=fused),
    "checkpointed by the planner": Case(build=with_loss(deep, 6, 24), decisions=(Checkpoint(modules=("0", "1")),)),
    "checkpoint, reentrant": Case(build=with_loss(lambda: Checkpointed(use_reentrant=True), 6, 24)),
    "checkpoint, not reentrant": Case(build=with_loss(lambda: Checkpointed(use_reentrant=False), 6, 24)),
    "accumulation": Case(build=with_loss(deep, 6, 24), decisions=(Accumulation(micro_batch_size=2, micro_batches=3),)),
    "accumulation, uneven, tied": Case(build=tied, decisions=(Accumulation(micro_batch_size=3, micro_batches=2),)),
    "bf16 autocast": Case(
        build=hugging_face("bert", "BertForMaskedLM", **LANGUAGE), decisions=(Precision(dtype="bf16"),)
    ),
}
