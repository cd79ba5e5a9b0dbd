"""Finds modules that write to a list or dict that they are given, which FSDP2 does not pass on.

FSDP2 replaces tensors among the arguments of each unit, and builds the lists and dicts that hold them anew. So a unit
gets copies, and what its forward writes there is lost: a model that collects a loss of each block in a list would train
without these losses.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `FSDPParamGroup._register_post_backward_hook`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from planner.errors import StepError

_MOST_CONTAINERS = 1000
"""Maximum number of containers that are compared in one call."""


class GivenContainers:
    """The lists and dicts among the arguments of one call, with their contents at its beginning."""

    def __init__(self, *arguments: Any) -> None:
        self._before: list[tuple[Any, list[Any]]] = []
        upcoming = deque(arguments)
        while upcoming and len(self._before) < _MOST_CONTAINERS:
            given = upcoming.popleft()
            if isinstance(given, (list, dict, deque)):
                self._before.append((given, _contents(given)))
            if isinstance(given, (list, tuple, dict, deque)):
                upcoming.extend(given.values() if isinstance(given, dict) else given)

    def refuse_changes(self, module: str) -> None:
        """Raises StepError if the call has changed what one of them contains."""
        for given, before in self._before:
            after = _contents(given)
            if len(after) != len(before) or any(one is not other for one, other in zip(before, after, strict=True)):
                raise StepError(
                    f"the forward of '{module or 'the model itself'}' writes to a {type(given).__name__} that it is "
                    "given. FSDP2 gives it a copy, so that training would lose what it writes: return the value "
                    "instead, or divide the model in another way (--sharding ddp)"
                )


def _contents(given: Any) -> list[Any]:
    return [*given.keys(), *given.values()] if isinstance(given, dict) else [*given]
