"""The loss that a model computes from its `labels`: what it is a mean over, read from the model's own code."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator

import torch

from planner.plan_types.plan import OwnLoss
from planner.workload.call_convention import Calling, LossFn


def takes_the_loss(model: torch.nn.Module) -> torch.nn.Module:
    """The model whose forward takes the loss: that inside of PEFT's, which pass labels on to it."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def own_loss(model: torch.nn.Module, calling: Calling, loss_fn: LossFn | None) -> OwnLoss | None:
    """What a loss that the model takes of its `labels` is a mean over; None where it is no mean over labels."""
    if loss_fn is not None or calling is not Calling.KEYWORDS or _regresses(model) or _aligns(model):
        return None
    return OwnLoss(
        shifted=shifts_labels(model),
        ignored=ignored_label(model),
        divides=divides_by_count(type(takes_the_loss(model))),
    )


def shifts_labels(model: torch.nn.Module) -> bool:
    """Whether the model's own loss leaves out each sample's first label, as next-token losses do.

    Read from the forward that makes the loss: class names do not tell (`XLNetLMHeadModel` and `BartForCausalLM` do
    not shift, `GPT2LMHeadModel` does).
    """
    model = takes_the_loss(model)
    return _class_shifts_labels(type(model), lambda: getattr(getattr(model, "loss_function", None), "__name__", ""))


def ignored_label(model: torch.nn.Module) -> int:
    """The label that the model's own loss leaves out."""
    model = takes_the_loss(model)
    if "SemanticSegmentation" in type(model).__name__:
        return getattr(getattr(model, "config", None), "semantic_loss_ignore_index", 255)
    losses = (module for module in model.modules() if isinstance(module, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)))
    stated = {loss.ignore_index for loss in losses} or set(_stated(type(model), "ignore_index"))
    return stated.pop() if len(stated) == 1 else -100


def _aligns(model: torch.nn.Module) -> bool:
    """Whether labels are aligned with what is heard (CTC): a mean then is over samples."""
    return any("ctc_loss(" in text for text in _forwards(type(takes_the_loss(model))))


def _regresses(model: torch.nn.Module) -> bool:
    """Whether whole numbers among the labels are no classes: -100 is one like others then."""
    model = takes_the_loss(model)
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    one = getattr(config, "num_labels", None) == 1 and "SequenceClassification" in type(model).__name__
    return problem == "regression" or (problem is None and one)


def divides_by_count(kind: type) -> bool:
    """Whether the loss is a sum over `num_items_in_batch` where a batch has that (transformers' loss functions)."""
    for text in _forwards(kind):
        if "self.loss_function(" in text:
            if (calls := _calls(text)) is None:
                return "num_items_in_batch" in text
            losses = [call for call in calls if getattr(call.func, "attr", "") == "loss_function"]
            return any(keyword.arg in (None, "num_items_in_batch") for call in losses for keyword in call.keywords)
        if "num_items_in_batch" in text:
            return True
    return False


def _stated(kind: type, name: str) -> Iterator[int]:
    """Whole numbers that forwards of a class give by this keyword, as far as they are written out."""
    for call in itertools.chain.from_iterable(_calls(text) or () for text in _forwards(kind)):
        for keyword in call.keywords:
            if keyword.arg == name:
                with contextlib.suppress(ValueError):  # no literal
                    value = ast.literal_eval(keyword.value)
                    if isinstance(value, int):
                        yield value


def _calls(text: str) -> list[ast.Call] | None:
    """None for a text at another column than its code, or that is no whole statement."""
    try:
        parsed = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None
    return [node for node in ast.walk(parsed) if isinstance(node, ast.Call)]


def _forwards(kind: type) -> Iterator[str]:
    """Sources of the forwards of a class and of those that it inherits from."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            try:
                yield inspect.getsource(vars(base)["forward"])
            except (OSError, TypeError):
                continue


def _class_shifts_labels(kind: type, loss_function_name: Callable[[], str]) -> bool:
    for text in _forwards(kind):
        if "labels[..., 1:]" in text or "labels[:, 1:]" in text:
            return True
        if "self.loss_function(" in text:
            return "CausalLM" in loss_function_name()
    return False
