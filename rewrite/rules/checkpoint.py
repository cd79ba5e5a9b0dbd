"""Checkpoint: keep only the inputs of a module call, and perhaps some results; recompute the rest in backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, by `torch.utils.checkpoint` (non-reentrant); what is
kept beside the inputs are results of products (`planner.recompute.kept_products`), by its selective contexts.
The recompute draws the same dropout masks. Batch and instance normalisation must not count a batch twice; other
modules that change buffers of their own in forward (spectral norm) would do so twice, and those that draw from a
generator of their own would draw other numbers: they should not be named, and the planner does not.
A cache of keys and values is turned off; without its copies attention reads another memory layout, and its last
bit may differ from the plain step that filled the cache.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.plan_types.decisions import Checkpoint
from planner.plan_types.plan import Plan
from planner.recompute import kept_products
from planner.rewrite.emitted_code import EmittedCode, assignment
from planner.rewrite.portable.module_forward import detached, forward_function, written_by
from planner.rewrite.recomputed_modules import modules_to_run_again
from planner.rewrite.rewriting import Rewriting

PRODUCTS = {getattr(torch.ops.aten, name).default: place for name, place in kept_products.PRODUCTS.items()}


def checkpoint(rewriting: Rewriting, decision: Checkpoint) -> None:
    """Wrap the forward of each named module, on the instance: classes, parameters and `state_dict` stay.

    Raises:
        DecisionError: for a module that does not exist or is never called, and for modules nested in each other.
    """
    kept = decision.by_module
    for name, module in modules_to_run_again(rewriting, decision.modules, decision.kind, nested=False).items():
        contexts = functools.partial(keeping, kept[name]) if kept[name] else keeping_nothing
        forward = types.MethodType(recomputed(forward_function(module), contexts), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")
    rewriting.turn_cache_off()  # a recompute would append the same keys and values again


# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def recomputed(forward, contexts):
    """A forward that runs again in backward, each time in its context; unchanged where no gradient is wanted."""

    @functools.wraps(forward)
    def wrapper(module, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        positional, names = len(args), tuple(kwargs)

        def run(*inputs):
            return forward(module, *inputs[:positional], **dict(zip(names, inputs[positional:], strict=True)))

        return torch.utils.checkpoint.checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: contexts(module),
        )

    return wrapper


def keeping_nothing(module):
    """Contexts of the two runs: only the inputs are kept."""
    return contextlib.nullcontext(), Again(statistics_kept, module)


def keeping(numbers, module):
    """Contexts of the two runs: the second one takes the results of the products with these numbers from the first."""
    first = KeepingResults(numbers)
    return first, Again(statistics_kept, module, TakingResults(first.results))


class Again(contextlib.ExitStack):
    """The context of the second run, and of a third: a backward may be run twice."""

    def __init__(self, statistics, module, *modes):
        super().__init__()
        self.statistics, self.module, self.modes = statistics, module, modes

    def __enter__(self):
        for context in (self.statistics(self.module), *self.modes):
            self.enter_context(context)
        return self


class KeepingResults(TorchDispatchMode):
    """Keeps the results of products by number: not of those that draw random numbers, nor what is written to later.

    Which op a number means may differ between devices, and between batches. So all of this is looked at while it runs.
    """

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count, self.results = frozenset(numbers), 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if op in PRODUCTS:
            if self.count in self.numbers and not drops_out(op, args, kwargs):
                kept = tree_map_only(torch.Tensor, detached, result)
                self.results[self.count] = op, kept, versions(kept)
            self.count += 1
        elif op._schema.is_mutable and self.results:
            written = storages(written_by(op, args, kwargs))
            for number in [n for n, (_, kept, _) in self.results.items() if not written.isdisjoint(storages(kept))]:
                del self.results[number]
        return result


class TakingResults(TorchDispatchMode):
    """Takes each kept result once, where the same product has the same number and nothing was written to the result."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in PRODUCTS:
            product, kept, before = self.results.pop(self.count, (None, None, None))
            self.count += 1
            if product is op and versions(kept) == before:
                return kept
        return op(*args, **(kwargs or {}))


def drops_out(op, args, kwargs):
    """Whether attention draws random numbers: were it not run again, what follows would draw others than before."""
    place = PRODUCTS[op]
    return place is not None and kwargs.get("dropout_p", args[place] if len(args) > place else 0.0) > 0.0


def storages(tree):
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def versions(tree):
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def statistics_kept(module):
    """Normalisation layers leave their running statistics alone: the first forward has already updated them."""
    with contextlib.ExitStack() as restore:
        for norm in module.modules():
            if not isinstance(norm, torch.nn.modules.batchnorm._NormBase) or not norm.track_running_stats:
                continue
            hidden = {"momentum": 0.0, "num_batches_tracked": None}
            if isinstance(norm, torch.nn.modules.instancenorm._InstanceNorm):  # rounds them even with momentum 0
                hidden |= {"running_mean": norm.running_mean.clone(), "running_var": norm.running_var.clone()}
            for name, value in hidden.items():
                restore.callback(setattr, norm, name, getattr(norm, name))
                setattr(norm, name, value)
        yield


def checkpoint_source(plan: Plan, decision: Checkpoint) -> EmittedCode:
    keeps = any(decision.kept)
    if keeps:
        listed = "".join(f"    torch.ops.aten.{name}.default: {at},\n" for name, at in kept_products.PRODUCTS.items())
        constants = (
            "# Ops whose results may be kept: products, and attention with the position of its dropout_p.\n"
            f"PRODUCTS = {{\n{listed}}}",
            "# Modules that run again in backward, but for results of these ops: numbered as a forward runs them.\n"
            + assignment("RECOMPUTED", decision.by_module),
        )
        rewriting = """\
for name, numbers in RECOMPUTED.items():
    module = model.get_submodule(name)
    contexts = functools.partial(keeping, numbers) if numbers else keeping_nothing
    module.forward = types.MethodType(recomputed(type(module).forward, contexts), module)
"""
    else:
        constants = (assignment("RECOMPUTED", decision.modules),)
        rewriting = """\
for name in RECOMPUTED:
    module = model.get_submodule(name)
    module.forward = types.MethodType(recomputed(type(module).forward, keeping_nothing), module)
"""
    imports = ["import contextlib", "import functools", "import types", "import torch.utils.checkpoint"]
    functions: list[Callable] = [recomputed, keeping_nothing, Again, statistics_kept]
    if keeps:
        imports += [
            "from torch.utils._python_dispatch import TorchDispatchMode",
            "from torch.utils._pytree import tree_leaves, tree_map_only",
        ]
        functions[2:2] = [keeping, KeepingResults, TakingResults, drops_out, detached, written_by, storages, versions]
    return EmittedCode(
        imports=tuple(imports),
        constants=constants,
        functions=tuple(map(inspect.getsource, functions)),
        rewriting=(rewriting,),
    )
