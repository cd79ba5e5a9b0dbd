"""The functions by which an emitted file compares a step by the plan with a plain step (`--check`).

The bounds are those of `planner.rewrite.verify` (comparisons 'in double' and '8-bit state'). `verify` compares more:
several steps, lower precision and the state of the optimizer. Only emitted files call these functions.
"""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def result_of(step, model, optimizer):
    """Run a training step without its update. Return its loss, its gradients and the buffers after it, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients = {}

    def note(*_):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            gradients[names[parameter]] = parameter.grad.to_dense().cpu().clone()

    optimizer.step = note
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = step(model, optimizer)
    buffers = {name: buffer.to_dense().cpu() for name, buffer in model.named_buffers()}
    return {"loss": {"the batch": loss.detach().cpu()}, "gradient": gradients, "buffer": buffers}


def compare(plain, planned, eps, remark=""):
    """Print how far two results differ, and raise RuntimeError if 4096 rounding errors of size `eps` do not explain it.

    A difference is divided by the largest entry in its module, because some gradients are zero except for rounding.
    """
    if eps > 1e-6:
        raise RuntimeError(
            "check cannot compare the steps, because an op of the plain step rounds to a lower precision than float32 "
            f"(eps {eps:.2g}): run that op in float32 for the check"
        )
    for kind, expected in plain.items():
        for name in expected.keys() ^ planned[kind].keys():
            which = "plain" if name in expected else "planned"
            raise RuntimeError(f"the steps differ: only the {which} step has the {kind} of {name}")
        sizes, worst, where = {}, 0.0, "all are equal"
        for name, value in expected.items():
            module = name.rpartition(".")[0]
            sizes[module] = max(sizes.get(module, 1e-300), largest(value))
        smallest = max(sizes.values(), default=0.0) / 4096
        for name, value in expected.items():
            difference = largest(planned[kind][name].double() - value.double())
            relative = difference / max(sizes[name.rpartition(".")[0]], smallest)
            if not relative <= worst:  # also if it is not a number
                worst, where = relative, name
        print(f"{kind}: largest relative difference {worst:.2g} ({where}), allowed {4096 * eps:.2g}")
        if not worst <= 4096 * eps:
            raise RuntimeError(f"the step by the plan differs from a plain step in the {kind} of {where}{remark}")


def largest(tensor):
    """Return the largest absolute value of a tensor; 0.0 if it is empty."""
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


class Rounding(TorchDispatchMode):
    """Records in `eps` the largest machine epsilon of the dtypes to which ops round float64 inputs."""

    eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(v) if isinstance(t, torch.Tensor)] for v in ((args, kwargs), result))
        if any(tensor.dtype is torch.float64 for tensor in given):
            self.eps = max([self.eps, *(torch.finfo(t.dtype).eps for t in made if t.is_floating_point())])
        return result


def in_single(model):
    """Let the 4-bit layers of bitsandbytes compute in float32."""
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            module.compute_dtype = state.dtype = torch.float32


def without_dropout(model):
    """Switch dropout off, and let batch normalization use its running statistics: both depend on the micro-batches."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.eval()
        for settings in (module, getattr(module, "config", None)):
            for name, value in list(getattr(settings, "__dict__", {}).items()):
                is_rate = "drop" in name or (name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd))
                if is_rate and isinstance(value, float):
                    setattr(settings, name, 0.0)
    return model


def compare_updates(model, gradients, make_optimizer):
    """Compare the first update by 8-bit AdamW, which does not use quantized state yet, with that by torch's AdamW."""
    updates = []
    for is_plain in (True, False):
        trained = copy.deepcopy(model)
        for name, parameter in trained.named_parameters():
            parameter.requires_grad_(name in gradients)
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        optimizer = make_optimizer(trained)
        if is_plain:
            settings = {name: optimizer.defaults[name] for name in ("betas", "eps", "weight_decay")}
            optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], **settings)
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # after small updates, the rounding of the parameters would hide a difference
        before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
        optimizer.step()
        updates.append({"update": {name: (p.detach() - before[name]).cpu() for name, p in trained.named_parameters()}})
    compare(*updates, torch.finfo(torch.float32).eps)
