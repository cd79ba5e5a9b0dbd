"""Checkpoint: keep only the inputs of a module call, and perhaps some results; recompute the rest in backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, by `torch.utils.checkpoint` (non-reentrant); what is
kept beside the inputs are results of products (`planner.products`), by its selective contexts.
The recompute draws the same dropout masks. Batch and instance normalisation must not count a batch twice; other
modules that change buffers of their own in forward (spectral norm) would do so twice, and should not be named.
A cache of keys and values is turned off; without its copies attention reads another memory layout, and its last
bit may differ from the plain step that filled the cache.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types

import torch
import torch.utils.checkpoint

from planner import products
from planner.decisions import Checkpoint
from planner.errors import DecisionError
from planner.plan_file import Plan
from rewrite.fragment import Fragment, assignment
from rewrite.rewriting import Rewriting

PRODUCTS = {getattr(torch.ops.aten, name).default: place for name, place in products.PRODUCTS.items()}


def checkpoint(rewriting: Rewriting, decision: Checkpoint) -> None:
    """Wrap the forward of each named module, on the instance: classes, parameters and `state_dict` stay.

    Raises:
        DecisionError: for a module that does not exist or is never called, and for modules nested in each other.
    """
    chosen = _chosen(rewriting, decision)
    kept = decision.by_module
    for name, module in chosen.items():
        contexts = functools.partial(keeping, kept[name]) if kept[name] else keeping_nothing
        forward = types.MethodType(recomputed(_forward_function(module), contexts), module)
        rewriting.replace(module, "forward", forward, place=f"forward of '{name}'")
    rewriting.turn_cache_off()  # a recompute would append the same keys and values again


def _chosen(rewriting: Rewriting, decision: Checkpoint) -> dict[str, torch.nn.Module]:
    """Module by name; one that is shared under several names once."""
    chosen: dict[str, torch.nn.Module] = {}
    names: dict[int, str] = {}
    for name in decision.modules:
        module = rewriting.module(name, decision.kind)
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            raise DecisionError(
                f"checkpoint names '{name}', a {type(module).__name__} without a forward of its own: name its children"
            )
        if id(module) not in names:
            names[id(module)] = name
            chosen[name] = module
    for name, module in chosen.items():
        for part in module.modules():
            if part is not module and id(part) in names:
                raise DecisionError(
                    f"checkpoint names '{name}' and '{names[id(part)]}' inside it, which would be recomputed twice: "
                    "keep one of them"
                )
    return chosen


def _forward_function(module):
    """The module's forward as a function of the module, so that a deep copy of the module runs its own weights."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return own.__func__
    return functools.wraps(own)(lambda _module, /, *args, **kwargs: own(*args, **kwargs))


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
    return contextlib.nullcontext(), statistics_kept(module)


def keeping(numbers, module):
    """Contexts of the two runs: the second one takes the results of the products with these numbers from the first."""
    counters = {False: itertools.count(), True: itertools.count()}

    def policy(context, op, *args, **kwargs):
        if op in PRODUCTS and next(counters[context.is_recompute]) in numbers and not drops(op, args, kwargs):
            return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    first, again = torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    @contextlib.contextmanager
    def second_run():
        with again, statistics_kept(module):
            yield

    return first, second_run()


def drops(op, args, kwargs):
    """Whether attention drops out: were it not run again, what follows would draw other random numbers than before."""
    place = PRODUCTS[op]
    return place is not None and kwargs.get("dropout_p", args[place] if len(args) > place else 0.0) > 0.0


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


def checkpoint_source(plan: Plan, decision: Checkpoint) -> Fragment:
    keeps = any(decision.kept)
    if keeps:
        listed = "".join(f"    torch.ops.aten.{name}.default: {at},\n" for name, at in products.PRODUCTS.items())
        constants = (
            f"# With the position of attention's dropout_p.\nPRODUCTS = {{\n{listed}}}",
            "# Which results of these are kept, by module: numbered in the order in which a forward runs them.\n"
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
    functions = (recomputed, keeping_nothing, *((keeping, drops) if keeps else ()), statistics_kept)
    imports = ("contextlib", "functools", *(("itertools",) if keeps else ()), "types", "torch.utils.checkpoint")
    return Fragment(
        imports=tuple(f"import {name}" for name in imports),
        constants=constants,
        functions=tuple(map(inspect.getsource, functions)),
        rewriting=(rewriting,),
    )
