"""The base class of decisions, and functions that compute a property of several decisions.

Planner and rewriter read these properties and do not name decision classes. So a new technique needs only a class in
`decisions.py`, a rule in `rewrite/rules/` and an entry in the search space (docs/add-a-technique.md).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

from planner.errors import DecisionError


class Fidelity(enum.IntEnum):
    """How close the rewritten step is to the original one. Ordered: exact < rounded < adapted < partial."""

    EXACT = 0
    """The same mathematics; only the order of a sum may differ."""
    ROUNDED = 1
    """The same mathematics at a lower precision."""
    ADAPTED = 2
    """LoRA adapters are trained instead of the weights. No decision has this fidelity: see `planner.adapted`."""
    PARTIAL = 3
    """Some parameters are not trained."""

    @classmethod
    def parse(cls, text: str) -> Fidelity:
        """Return the fidelity of a name such as 'exact'. Raises `DecisionError` for an unknown name."""
        try:
            return cls[str(text).upper()]
        except KeyError:
            names = ", ".join(member.name.lower() for member in cls)
            raise DecisionError(f"fidelity '{text}' is unknown: choose one of {names}") from None


ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""The environment variable from which PyTorch reads the options of its caching allocator."""
FORMER_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The former name of the variable. If it is set, even to an empty text, PyTorch does not read `ALLOCATOR_VARIABLE`."""


class Role(enum.Enum):
    """The part of the training step that a decision changes. Decisions with the same role are usually alternatives."""

    FREEZING = "freezing"
    """The decision sets which parameters are trained."""
    PRECISION = "precision"
    """The decision sets the dtype of the forward and the loss."""
    OPTIMIZER = "optimizer"
    """The decision sets how the optimizer stores its state and computes its update."""
    LOSS = "loss"
    """The decision sets how the loss is computed from the last hidden states."""
    MICRO_BATCHING = "micro-batching"
    """The decision sets how the batch is split."""
    UPDATE_TIME = "update time"
    """The decision sets when the optimizer updates a parameter: after the backward, or inside it."""
    RECOMPUTE = "recompute"
    """The decision sets how the backward gets its saved tensors: recomputed, or copied back from host memory."""
    SHARDING = "sharding"
    """The decision sets how several cards train together."""
    ALLOCATOR = "allocator"
    """The decision sets options of CUDA's caching allocator. The step is the same with and without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Base class of all decisions: one use of a technique, with its parameters.

    Subclasses are frozen dataclasses whose fields can be written as JSON. The class attributes and properties below
    describe effects of a decision on the step; a default value means that the decision has no such effect.
    """

    kind: ClassVar[str]
    """The name of the technique: on the command line (`--force`, `--forbid`), in Python and in plan files."""
    former_kind: ClassVar[str | None] = None
    """The `kind` in older versions. Users and plan files may still use it; `plan_fingerprint` is computed with it."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that users may write for the technique."""
    rule: ClassVar[str | None] = None
    """Name of the module in `rewrite/rules/` that applies the decision. If None, it is `kind` with underscores."""
    fidelity: ClassVar[Fidelity]
    role: ClassVar[Role]
    needs_host_memory: ClassVar[bool] = False
    """True if the step keeps tensors in pinned host memory."""
    eight_bit_state: ClassVar[bool] = False
    """True if the optimizer keeps its state in 8 bits."""
    steps_in_backward: ClassVar[bool] = False
    """True if the optimizer updates each parameter during the backward, and then frees its gradient."""
    disables_kv_cache: ClassVar[bool] = False
    """True if the model must not keep a cache of keys and values (`config.use_cache`)."""
    left_out_if_empty: ClassVar[tuple[str, ...]] = ()
    """Fields that JSON has only if they are not empty: fields that older versions did not have."""
    needs_plain_tensors: ClassVar[bool] = False
    """True if the technique cannot be used where a forward computes with DTensors."""
    module_fields: ClassVar[tuple[str, ...]] = ()
    """Fields with paths of modules that a shortened model may lack."""
    required_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the rewritten step imports, beyond torch."""

    @property
    def micro_batch_count(self) -> int:
        """Number of micro-batches per optimizer step; 1 if the batch is not split."""
        return 1

    @property
    def samples_per_micro_batch(self) -> int | None:
        """Maximum number of samples in a micro-batch; None if the batch is not split."""
        return None

    @property
    def autocast_dtype(self) -> str | None:
        """'bf16' or 'fp16' if the forward runs under autocast, else None."""
        return None

    @property
    def forward_dtype(self) -> str | None:
        """'bf16' or 'fp16' if the forward runs in it, under autocast or on parameters and inputs in it, else None."""
        return self.autocast_dtype

    @property
    def needs_gradient_scaler(self) -> bool:
        """True if the loss is scaled, since fp16 gradients could underflow."""
        return self.autocast_dtype == "fp16"

    @property
    def optimizer_kernel(self) -> str | None:
        """Implementation of the update by torch's optimizer ('fused', 'for-loop'); None if torch chooses it."""
        return None

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        """Names of the optimizers that the decision applies to if the step has several, else empty."""
        return getattr(self, "optimizers", ())

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        """Names of the modules whose parameters are not trained."""
        return ()

    @property
    def allocator_options(self) -> dict[str, str]:
        """Options of the caching allocator by their names in PYTORCH_ALLOC_CONF; empty for its defaults."""
        return {}

    @property
    def cards(self) -> int:
        """Number of cards that train together."""
        return 1

    @property
    def divides_batch_by(self) -> int:
        """Number of parts of the batch; cards that hold one copy of the model together may have the same samples."""
        return 1

    @property
    def dividing_function(self) -> str:
        """File and name of the user's own function that divides the model; '' if there is none or it has no name."""
        return ""

    @property
    def gathers_parameters(self) -> bool:
        """True if the planner lets FSDP2 gather the parameters, so that it chooses the dtype in which that happens."""
        return False

    @property
    def divides_parameters_by(self) -> int:
        """Number of cards among which the parameters and gradients of one model are divided; 1 if each has all."""
        return 1

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators that each process has; 0 on one card."""
        return 0

    @property
    def keeps_parameters_on_host(self) -> bool:
        """True if parameters are in host memory, and on the card only while they are used."""
        return False

    @property
    def preparing_library(self) -> str:
        """Name of the library that prepares the model for several cards ('accelerate'); '' if the planner does it."""
        return ""

    @property
    def classes_of_units(self) -> tuple[str, ...]:
        """Names of the classes whose modules the library that prepares the model makes units."""
        return ()

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if the gradients of micro-batches stay whole on each card, and the cards reduce them once in a step."""
        return False

    def without_modules(self, is_left_out: Callable[[str], bool]) -> Decision:
        """Returns the decision for a model that lacks the modules with these paths."""
        paths = {name: getattr(self, name) for name in self.module_fields}
        present = {name: tuple(path for path in value if not is_left_out(path)) for name, value in paths.items()}
        return self if present == paths else dataclasses.replace(self, **present)

    def reducing_once(self) -> Decision:
        """Returns the decision with gradients reduced once in a step; unchanged if that cannot be chosen."""
        return self

    @property
    def units_gathered_again(self) -> tuple[str, ...]:
        """Paths of the units whose parameters are freed between forward and backward, and gathered again."""
        return ()

    def gathering_again(self, units: Collection[str]) -> Decision:
        """Returns the decision with these units gathered again, and the other ones kept."""
        return self

    @property
    def reorders_sums(self) -> bool:
        """True if the step adds the same numbers in another order, so that its results differ by rounding errors."""
        return False

    @classmethod
    def rule_name(cls) -> str:
        """Name of the module in `rewrite/rules/` that applies the decision, and of the function in this module."""
        return cls.rule or cls.kind.replace("-", "_")

    def with_micro_batches(self, count: int) -> Decision:
        """The same decision with `count` micro-batches of the same size; unchanged if it does not split the batch."""
        return self

    def excludes(self, other: Decision) -> str | None:
        """The reason why this decision cannot be combined with `other`; None if this decision knows none.

        It is sufficient that one of two decisions states the reason, since `conflict` asks both of them.
        """
        return None

    def describe(self) -> str:
        """Describes the decision in one line, without units of memory or time."""
        raise TypeError(f"{type(self).__name__} does not implement describe()")

    def to_json(self) -> dict[str, object]:
        """The decision as a dict for JSON: the kind and all fields, with lists instead of tuples."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        written = {name: value for name, value in fields.items() if value or name not in self.left_out_if_empty}
        return {"kind": self.kind, **{name: _as_lists(value) for name, value in written.items()}}


class HasRole(Protocol):
    """A decision or a decision class."""

    role: ClassVar[Role]


def has_role(decisions: Iterable[HasRole], *roles: Role) -> bool:
    """True if at least one of the decisions has one of these roles."""
    return any(decision.role in roles for decision in decisions)


def with_roles(decisions: Iterable[Decision], *roles: Role) -> tuple[Decision, ...]:
    """The decisions that have one of these roles."""
    return tuple(decision for decision in decisions if decision.role in roles)


def with_sharding(sharding: Sequence[Decision], decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions with the one by which several cards train together, unless they have one already."""
    return (*(() if has_role(decisions, Role.SHARDING) else sharding), *decisions)


def without_roles(decisions: Iterable[Decision], *roles: Role) -> tuple[Decision, ...]:
    """The decisions that have none of these roles."""
    return tuple(decision for decision in decisions if decision.role not in roles)


def conflict(decisions: Iterable[Decision]) -> str | None:
    """The reason why these decisions cannot be combined; None if they can."""
    pairs = itertools.permutations(decisions, 2)
    return next((why for one, other in pairs if (why := one.excludes(other)) is not None), None)


def fidelity_of(decisions: Iterable[Decision]) -> int:
    """The fidelity of a step with these decisions: that of the least faithful decision, or exact without decisions."""
    return max((decision.fidelity for decision in decisions), default=0)


def communicators_of(decisions: Iterable[Decision]) -> int:
    """Returns the number of NCCL communicators that each process has; 0 on one card."""
    return sum(decision.communicators for decision in decisions)


def micro_batches_of(decisions: Iterable[Decision]) -> int:
    """Number of micro-batches that the batch is split into; 1 if the batch is not split."""
    return max((decision.micro_batch_count for decision in decisions), default=1)


def micro_batch_size_of(decisions: Iterable[Decision]) -> int | None:
    """Maximum number of samples in a micro-batch; None if the batch is not split."""
    return next((size for d in decisions if (size := d.samples_per_micro_batch) is not None), None)


def forward_dtype_of(decisions: Iterable[Decision]) -> str | None:
    """'bf16' or 'fp16' if the forward runs in it, under autocast or not, else None."""
    return next((dtype for decision in decisions if (dtype := decision.forward_dtype) is not None), None)


def autocast_dtype_of(decisions: Iterable[Decision]) -> str | None:
    """'bf16' or 'fp16' if the forward runs under autocast, else None."""
    return next((dtype for decision in decisions if (dtype := decision.autocast_dtype) is not None), None)


def optimizer_kernel_of(decisions: Iterable[Decision]) -> str | None:
    """Implementation of the update by torch's optimizer ('fused', 'for-loop'); None if no decision sets it."""
    return next((kernel for decision in decisions if (kernel := decision.optimizer_kernel) is not None), None)


def frozen_modules_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Names of the modules whose parameters are not trained."""
    return tuple(name for decision in decisions for name in decision.frozen_modules)


def cards_of(decisions: Iterable[Decision]) -> int:
    """Number of cards that train together."""
    return max((decision.cards for decision in decisions), default=1)


def parts_of_batch(decisions: Iterable[Decision]) -> int:
    """Returns the number of parts into which several cards divide the batch; 1 for one card."""
    return max((decision.divides_batch_by for decision in decisions), default=1)


def allocator_options_of(decisions: Iterable[Decision]) -> dict[str, str]:
    """Options of the caching allocator by their names in PYTORCH_ALLOC_CONF; empty for its defaults."""
    return {name: value for decision in decisions for name, value in decision.allocator_options.items()}


def allocator_conf(decisions: Iterable[Decision], given: str = "") -> str:
    """The value of `ALLOCATOR_VARIABLE`, such as 'expandable_segments:True'; empty for the defaults of PyTorch.

    Args:
        given: the value that the user has set. Its options stay, except for those that a decision changes.
    """
    options = options_in(given) | allocator_options_of(decisions)
    return ",".join(f"{name}:{value}" for name, value in options.items())


def changed_options(decisions: Iterable[Decision], given: str) -> dict[str, str]:
    """The options of the allocator that the user has set to another value than these decisions."""
    present = options_in(given)
    return {name: value for name, value in allocator_options_of(decisions).items() if present.get(name, value) != value}


def allocator_variable_in(environment: Mapping[str, str]) -> tuple[str, str]:
    """The variable from which PyTorch reads the options in this environment, and its value; empty if it is not set.

    The first variable that is set counts, even if it is empty (torch 2.11 to 2.14).
    """
    variables = (FORMER_ALLOCATOR_VARIABLE, "PYTORCH_HIP_ALLOC_CONF", ALLOCATOR_VARIABLE)
    name = next((name for name in variables if name in environment), ALLOCATOR_VARIABLE)
    return name, environment.get(name, "")


def options_in(conf: str) -> dict[str, str]:
    """The options in a value of `ALLOCATOR_VARIABLE` by their names. As in PyTorch, the last value of a name counts.

    White space does not count, and a value may be a list in brackets. Neither names nor values are checked.
    """
    options: dict[str, str] = {}
    for part in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", "".join(conf.split())):
        name, _, value = part.partition(":")
        options.pop(name, None)
        options[name] = value
    return options


def of_optimizers(names: tuple[str, ...]) -> str:
    """Words that name the optimizers that a decision applies to; empty if the step has only one optimizer."""
    return f" of {' and '.join(map(repr, names))}" if names else ""


def _as_lists(value: object) -> object:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


# ---- words for the descriptions of decisions ----------------------------------------------------------------------


def divides_batch(dimension: str) -> bool:
    """True if the batch is divided along a dimension of a mesh: 'dp', 'dp_shard', 'dp_replicate' (torchtitan) ..."""
    return dimension.startswith("dp")
