"""The searches of a planning session: what they have found and tried, and what they left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import torch

from planner.choose.choice import Choice, simplest_in_tie
from planner.choose.chooser import Chooser
from planner.errors import StepError
from planner.plan_types.constraints import Constraints
from planner.plan_types.decision_base import Decision, Role, without_roles
from planner.plan_types.recompute_decisions import Recomputing
from planner.plan_types.words import module_listing
from planner.recompute.failing import Excluded, Setting, setting_of
from planner.space.configurations import Config
from planner.space.search_space import SearchSpace


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
    """A technique with which the step fails."""

    kind: type[Decision]
    setting: Setting = ((), False)
    """The setting of the step that failed."""
    modules: tuple[str, ...] = ()
    """Paths of the modules for which it is left out in this setting; empty if it is left out everywhere."""

    def may_occur(self, constraints: Constraints) -> bool:
        """True if the constraints allow the technique and the setting."""
        precision, is_split = self.setting
        kinds = (self.kind, *map(type, precision))
        return all(map(constraints.allow, kinds)) and (not is_split or constraints.allow(Role.MICRO_BATCHING))

    def described(self) -> str:
        if not self.modules:
            return self.kind.kind
        precision, is_split = self.setting
        under = [decision.describe() for decision in precision] + ["micro-batches"] * is_split
        listed = module_listing(self.modules) if all(self.modules) else "the whole model"
        return f"{self.kind.kind} of {listed}{', with ' * bool(under)}{' and '.join(under)}"


class Searches:
    """The choosers of a planning session, in the order in which they were made, each with its constraints."""

    def __init__(self) -> None:
        self._made: list[tuple[Constraints, Chooser]] = []
        self._failed: dict[_Failure, StepError] = {}
        self._guesses: list[Searches] = []

    def add_guesses(self) -> Searches:
        """Returns the new searches of a session whose choices are only guesses.

        The time that they spend in the solver is part of `solve_seconds`. Nothing else of them counts in this object.
        """
        self._guesses.append(Searches())
        return self._guesses[-1]

    def add(self, constraints: Constraints, chooser: Chooser) -> None:
        """Add a chooser that searches under these constraints."""
        self._made.append((constraints, chooser))

    def leave_out(self, failed: Mapping[Recomputing, StepError], setting: Setting, model: torch.nn.Module) -> None:
        """Leave decisions out of later searches, because a step with them has failed with these errors.

        A decision with one module is left out, in this setting, for all modules of its class. Other decisions are left
        out for all modules. If this was not enough, the technique is left out everywhere.
        """
        for decision, error in failed.items():
            choices = [tuple(path for path, _ in model.named_modules()), ()]
            if len(set(decision.modules)) == 1:
                choices.insert(0, _alike(decision.modules[0], model))
            failures = [
                _Failure(kind=type(decision), setting=setting, modules=modules)
                if modules
                else _Failure(kind=type(decision))
                for modules in choices
            ]
            self._failed[next((one for one in failures if one not in self._failed), failures[-1])] = error

    def is_left_out(self, kind: type[Decision]) -> bool:
        """True if the technique is left out for all modules."""
        return _Failure(kind=kind) in self._failed

    @property
    def number_left_out(self) -> int:
        """Number of times that something was left out."""
        return len(self._failed)

    def leaves_out(self, decisions: Sequence[Decision]) -> bool:
        """True if one of the decisions of a plan is left out of later searches, for at least one of its modules."""
        setting, used = setting_of(decisions), [d for d in decisions if isinstance(d, Recomputing)]
        return any(
            isinstance(decision, one.kind) and (not one.modules or (one.setting == setting and path in one.modules))
            for one in self._failed
            for decision in used
            for path in decision.modules
        )

    def without_failed(self, space: SearchSpace, constraints: Constraints) -> SearchSpace:
        """Returns a search space without the techniques that are left out as a whole, unless the user forces them."""
        recompute = tuple(kind for kind in space.recompute if not self.is_left_out(kind) or constraints.force(kind))
        return dataclasses.replace(space, recompute=recompute)

    def excluded(self) -> frozenset[Excluded]:
        """Returns the modules for which techniques are left out."""
        return frozenset((one.setting, one.kind, module) for one in self._failed for module in one.modules)

    def error_of(self, kinds: Container[type[Decision]]) -> StepError | None:
        """Returns the first error because of which one of these techniques is left out; None if there is none."""
        return next((error for one, error in self._failed.items() if one.kind in kinds), None)

    def _under(self, constraints: Constraints) -> list[Chooser]:
        return [chooser for used, chooser in self._made if used == constraints]

    @property
    def solve_seconds(self) -> float:
        """Time in seconds that all choosers spent in the solver."""
        guessing = sum(searches.solve_seconds for searches in self._guesses)
        return guessing + sum(chooser.solve_seconds for _, chooser in self._made)

    def undecided(self, constraints: Constraints) -> int:
        """Returns the number of integer programs that hit their time limit without an answer.

        Searches without a limit on the slowdown count, too: their plans are reported if no plan is fast enough.
        """
        used_for = constraints, dataclasses.replace(constraints, max_slowdown=None)
        return sum(chooser.undecided for used, chooser in self._made if used in used_for)

    def promised(self, constraints: Constraints) -> tuple[Choice, ...]:
        """Returns the best and the smallest choice of the latest search, which may not have been certified yet."""
        found = [chooser.promised for chooser in self._under(constraints)[-1:]]
        if not any(found):
            return ()
        return tuple(dict.fromkeys((simplest_in_tie(found[0]), min(found[0], key=lambda choice: choice.peak_bytes))))

    def untried(self, constraints: Constraints) -> tuple[Config, ...]:
        """Returns the configurations of the latest search that no search under these constraints has come to."""
        choosers = self._under(constraints)
        tried = {config for chooser in choosers for config in chooser.tried}
        return tuple(config for chooser in choosers[-1:] for config in chooser.configurations if config not in tried)

    def dropped(self, constraints: Constraints) -> tuple[str, ...]:
        """Returns notes on what these constraints allow but what could not be rehearsed."""
        errors = {config: error for chooser in self._under(constraints) for config, error in chooser.dropped.items()}
        failed = ((one, error) for one, error in self._failed.items() if one.may_occur(constraints))
        notes = [f"left out ({one.described()}): {error}" for one, error in failed]
        # One note for all micro-batch sizes of a configuration: a model that needs groups of samples fails with many.
        by_config: dict[Config, list[tuple[Config, StepError]]] = {}
        for decisions, error in errors.items():
            by_config.setdefault(without_roles(decisions, Role.MICRO_BATCHING), []).append((decisions, error))
        for (decisions, error), *others in by_config.values():
            names = ", ".join(decision.describe() for decision in decisions) or "the step without decisions"
            more = f", and {len(others)} other numbers of micro-batches" if others else ""
            notes.append(f"left out ({names}{more}): {error}")
        return tuple(notes)


def _alike(path: str, model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the paths of the modules of the same class as that at `path`; only `path` for a container of torch.

    Containers such as `Sequential` have different submodules.
    """
    kind = type(model.get_submodule(path))
    if kind.__module__ == torch.nn.Sequential.__module__:
        return (path,)
    return tuple(other for other, module in model.named_modules() if type(module) is kind)
