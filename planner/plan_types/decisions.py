"""The decisions a plan is made of: small frozen values, in the order in which they are applied.

A decision says *what*; the rule of the same name in `rewrite/rules/` does it. `kind` is the word that
users, plan files and the command line (`--force`, `--forbid`) know it by.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable
from typing import ClassVar

from planner.errors import DecisionError


class Fidelity(enum.IntEnum):
    """How close the rewritten step is to the original one. Ordered: exact < rounded < partial."""

    EXACT = 0
    """The same mathematics; only the order of a sum may differ."""
    ROUNDED = 1
    """The same mathematics at a lower precision."""
    PARTIAL = 2
    """Some parameters are not trained."""

    @classmethod
    def parse(cls, text: str) -> Fidelity:
        try:
            return cls[str(text).upper()]
        except KeyError:
            names = ", ".join(member.name.lower() for member in cls)
            raise DecisionError(f"fidelity '{text}' is unknown: choose one of {names}") from None


class Decision:
    """Base of all decisions. Final subclasses are frozen dataclasses with JSON-able fields."""

    kind: ClassVar[str]
    fidelity: ClassVar[Fidelity]

    def describe(self) -> str:
        """One line for people: what is done, without units of memory or time."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    def to_json(self) -> dict[str, object]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **{name: _as_lists(value) for name, value in fields.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Freeze(Decision):
    """Do not train these modules' parameters (a prefix of the model, from the input up)."""

    kind: ClassVar[str] = "freeze"
    fidelity: ClassVar[Fidelity] = Fidelity.PARTIAL
    modules: tuple[str, ...]

    def describe(self) -> str:
        return f"freeze {_counted(len(self.modules), 'module')}: {_listing(self.modules)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(Decision):
    """Forward and loss under autocast; fp32 master weights; a GradScaler when `dtype` is fp16."""

    kind: ClassVar[str] = "precision"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED
    dtype: str
    """'bf16' or 'fp16'."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp16"):
            raise DecisionError(f"precision '{self.dtype}' is unknown: choose bf16 or fp16")

    def describe(self) -> str:
        scaler = " with a gradient scaler" if self.dtype == "fp16" else ""
        return f"{self.dtype} autocast{scaler}, fp32 weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Decision):
    """Hold the optimizer's state in 8 bits (bitsandbytes AdamW8bit; small tensors and embeddings stay 32-bit)."""

    kind: ClassVar[str] = "optimizer"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED
    name: str = "adamw8bit"

    def __post_init__(self) -> None:
        if self.name != "adamw8bit":
            raise DecisionError(f"optimizer '{self.name}' is no decision: the only one is adamw8bit")

    def describe(self) -> str:
        return "8-bit AdamW state (bitsandbytes); embeddings and small tensors stay 32-bit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKernel(Decision):
    """Step by another implementation of torch's than the default on a card, whose temporaries are those of all at once.

    'fused' is one kernel that writes in place; 'for-loop' takes one parameter after the other. The default is foreach.
    """

    kind: ClassVar[str] = "optimizer-kernel"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    kernel: str

    def __post_init__(self) -> None:
        if self.kernel not in ("fused", "for-loop"):
            raise DecisionError(f"optimizer-kernel '{self.kernel}' is unknown: choose fused or for-loop")

    def describe(self) -> str:
        if self.kernel == "fused":
            return "fused optimizer step: in place, without temporaries"
        return "optimizer step in a loop: temporaries of one parameter at a time"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Decision):
    """Never hold the logits of the whole batch: head, cross entropy and their gradients, a chunk of rows at a time."""

    kind: ClassVar[str] = "chunked-loss"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    module: str
    """The head: the linear layer that makes the logits."""
    chunks: int

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or self.chunks < 2:
            raise DecisionError(f"chunked-loss in {self.chunks} chunks: needs at least 2")

    def describe(self) -> str:
        return f"loss in {self.chunks} chunks: the logits of {self.module} are never held whole"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation(Decision):
    """Split the batch into micro-batches of `micro_batch_size` samples; the last one may be smaller."""

    kind: ClassVar[str] = "accumulation"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    micro_batch_size: int
    micro_batches: int

    def __post_init__(self) -> None:
        whole = type(self.micro_batch_size) is int and type(self.micro_batches) is int
        if not whole or self.micro_batch_size < 1 or self.micro_batches < 2:
            raise DecisionError(
                f"accumulation over {self.micro_batches} micro-batches of {self.micro_batch_size} samples: "
                "needs at least 2 micro-batches of at least 1 sample"
            )

    def describe(self) -> str:
        return f"{self.micro_batches} micro-batches of {_counted(self.micro_batch_size, 'sample')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInBackward(Decision):
    """Let the optimizer step on each parameter as soon as its gradient is whole, and drop the gradient then."""

    kind: ClassVar[str] = "step-in-backward"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT

    def describe(self) -> str:
        return "optimizer step inside backward: each gradient is used and dropped (no clipping by their common norm)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Decision):
    """Recompute these module calls in backward instead of keeping their activations, all of it or all but some."""

    kind: ClassVar[str] = "checkpoint"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    modules: tuple[str, ...]
    kept: tuple[tuple[int, ...], ...] = ()
    """For each module: the products (`recompute.kept_products`) whose results are kept, numbered as one call runs them.

    Empty where no module keeps any.
    """

    def __post_init__(self) -> None:
        if not self.modules:
            raise DecisionError("checkpoint without modules: leave the decision out")
        if not isinstance(self.kept, tuple) or (self.kept and len(self.kept) != len(self.modules)):
            raise DecisionError(
                f"checkpoint of {_counted(len(self.modules), 'module')} keeps {self.kept!r}: "
                "give the products of each module, or of none"
            )
        for numbers in self.kept:
            whole = isinstance(numbers, tuple) and all(type(number) is int and number >= 0 for number in numbers)
            if not whole or any(one >= other for one, other in itertools.pairwise(numbers)):
                raise DecisionError(f"checkpoint keeps products {numbers!r}: give numbers from 0 on in rising order")

    @property
    def by_module(self) -> dict[str, tuple[int, ...]]:
        """Products that are kept, by module."""
        return dict(zip(self.modules, self.kept or ((),) * len(self.modules), strict=True))

    def describe(self) -> str:
        by_kept: dict[tuple[int, ...], list[str]] = {}
        for module, kept in self.by_module.items():
            by_kept.setdefault(kept, []).append(module)
        parts = [
            f"{_counted(len(modules), 'module')}{but} in backward: {_listing(tuple(modules))}"
            for kept, modules in sorted(by_kept.items())
            for but in [f" but for {_counted(len(kept), 'product')} each" if kept else ""]
        ]
        return f"recompute {'; '.join(parts)}"


Stretch = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Of a forward: the first op, the one after the last, ops whose results are kept, ops that divide it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay(Decision):
    """Run stretches of long forwards again in backward, op by op, instead of keeping their activations."""

    kind: ClassVar[str] = "replay"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    modules: tuple[str, ...]
    """Whose forward it is, for each stretch; stretches of one module follow each other."""
    stretches: tuple[tuple[int, int], ...]
    """The first op and the one after the last: numbered, in each call of the module, as they run, counting those that
    make a tensor on the module's device or change one."""
    kept: tuple[tuple[int, ...], ...]
    """For each stretch: numbers of ops whose results are kept."""
    stops: tuple[tuple[int, ...], ...] = ()
    """For each stretch: numbers of ops that divide it into parts, each of which runs again by itself. The tensors that
    a part starts from are made on the way to it: few of them are there at a time. Empty where none is divided."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise DecisionError("replay without stretches: leave the decision out")
        if not len(self.modules) == len(self.stretches) == len(self.kept) == len(self.stops or self.kept):
            raise DecisionError(
                f"replay of {len(self.stretches)} stretches names {len(self.modules)} modules, what is kept of "
                f"{len(self.kept)} and stops of {len(self.stops)}: give one of each"
            )
        for stretches in self.by_module.values():
            ranges = [number for start, stop, _, _ in stretches for number in (start, stop)]
            inside = [(start, n, stop - 1) for start, stop, kept, stops in stretches for n in (*kept, *stops)]
            numbers = [*ranges, *(number for numbers in inside for number in numbers)]
            whole = all(type(number) is int and number >= 0 for number in numbers)
            lists = [list(numbers) for _, _, kept, stops in stretches for numbers in (kept, stops)]
            lists += [ranges, *map(list, inside)]
            empty = any(start >= stop or start in stops for start, stop, _, stops in stretches)
            if not whole or empty or any(numbers != sorted(numbers) for numbers in lists):
                raise DecisionError(f"replay of stretches {stretches!r}: give ranges of ops in rising order")

    @property
    def by_module(self) -> dict[str, tuple[Stretch, ...]]:
        """Stretches by module."""
        found: dict[str, tuple[Stretch, ...]] = {}
        each = zip(self.modules, self.stretches, self.kept, self.stops or ((),) * len(self.modules), strict=True)
        for module, (start, stop), kept, stops in each:
            found[module] = (*found.get(module, ()), (start, stop, kept, stops))
        return found

    def describe(self) -> str:
        alike: dict[tuple[Stretch, ...], list[str]] = {}
        for module, stretches in self.by_module.items():
            alike.setdefault(stretches, []).append(module)
        parts = []
        for stretches, modules in alike.items():
            kept = sum(len(kept) for _, _, kept, _ in stretches)
            but = f" but for {_counted(kept, 'result')}" if kept else ""
            whose = _listing(tuple(modules)) if all(modules) else "the model's forward"
            divided = sum(len(stops) + 1 for *_, stops in stretches if stops)
            each = f", in {divided} parts that start from each other" if divided else ""
            parts.append(f"ops {_ranges_of_ops(stretches)} of {whose}{but}{each}")
        return f"replay in backward: {'; '.join(parts)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload(Decision):
    """Hold in the host's memory, from forward to backward, what these module calls keep for backward."""

    kind: ClassVar[str] = "offload"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    modules: tuple[str, ...]
    inputs_of: tuple[str, ...]
    """Those of them that run again in backward: of these it is the inputs. Of the others, what they made and save."""
    from_bytes: int
    """Smaller storages stay where they are."""

    def __post_init__(self) -> None:
        if not self.modules or not set(self.inputs_of) <= set(self.modules):
            raise DecisionError(
                f"offload names {_counted(len(self.modules), 'module')} and inputs of {list(self.inputs_of)}: "
                "name at least one, and those whose inputs are meant among them"
            )
        if type(self.from_bytes) is not int or self.from_bytes < 1:
            raise DecisionError(f"offload from {self.from_bytes!r} bytes on: give a whole number from 1 on")

    def describe(self) -> str:
        saved = tuple(module for module in self.modules if module not in self.inputs_of)
        parts = [
            f"{what} {_counted(len(modules), 'module')}: {_listing(modules)}"
            for what, modules in (("what is saved in", saved), ("the inputs of", self.inputs_of))
            if modules
        ]
        return f"hold in pinned host memory {'; '.join(parts)}"


KINDS: dict[str, type[Decision]] = {
    decision.kind: decision
    for decision in (
        Freeze,
        Precision,
        Optimizer,
        OptimizerKernel,
        ChunkedLoss,
        Accumulation,
        StepInBackward,
        Checkpoint,
        Replay,
        Offload,
    )
}
"""Every kind of decision, in the order in which their rules are applied."""


def decision_from_json(data: dict[str, object]) -> Decision:
    """Inverse of `Decision.to_json`. Raises `DecisionError` for an unknown kind or field."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise DecisionError(f"decision kind {kind!r} is unknown: known are {', '.join(KINDS)}")
    known = {field.name for field in dataclasses.fields(KINDS[kind])}
    if unknown := sorted(set(fields) - known):
        raise DecisionError(f"decision {kind!r} has no field {unknown[0]!r}: known are {', '.join(sorted(known))}")
    return KINDS[kind](**{name: _as_tuples(value) for name, value in fields.items()})


def conflict(decisions: Iterable[Decision]) -> str | None:
    """What cannot be done together, and why; None if all of it can."""
    by_kind = {type(decision): decision for decision in decisions}
    if StepInBackward in by_kind and Accumulation in by_kind:
        return "step-in-backward drops each gradient at once, and accumulation adds them up over micro-batches"
    if StepInBackward in by_kind and (precision := by_kind.get(Precision)) and precision.dtype == "fp16":
        return "step-in-backward has no moment at which fp16's gradient scaler could look at all gradients"
    if OptimizerKernel in by_kind and Optimizer in by_kind:
        return "optimizer-kernel is about torch's own optimizer, and 8-bit state is kept by another one"
    if StepInBackward in by_kind and (kernel := by_kind.get(OptimizerKernel)) and kernel.kernel == "for-loop":
        return "step-in-backward takes one parameter at a time as it is: optimizer-kernel's loop changes nothing"
    return None


def micro_batches_of(decisions: tuple[Decision, ...]) -> int:
    """Into how many micro-batches these decisions split the batch."""
    return next((decision.micro_batches for decision in decisions if isinstance(decision, Accumulation)), 1)


def _as_lists(value: object) -> object:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: object) -> object:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listing(names: tuple[str, ...], most: int = 6) -> str:
    """Module names, those that differ in one number written as one: 'encoder.layer.{0-3,7}.attention'."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = name.split(".")
        place = next((position for position, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            numbers.setdefault((name, ""), [])
        else:
            before, after = ".".join([*parts[:place], ""]), ".".join(["", *parts[place + 1 :]])
            numbers.setdefault((before, after), []).append(int(parts[place]))
    shown = [before + (_ranges(found) + after if found else "") for (before, after), found in numbers.items()]
    return ", ".join(shown) if len(shown) <= most else f"{', '.join(shown[:most])} and {len(shown) - most} kinds more"


def _ranges_of_ops(stretches: tuple[Stretch, ...], most: int = 4) -> str:
    shown = [f"{start}-{stop - 1}" for start, stop, _, _ in stretches]
    return ", ".join(shown) if len(shown) <= most else f"{', '.join(shown[:most])} and {len(shown) - most} more ranges"


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
