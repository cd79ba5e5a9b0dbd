"""Micro-batch sizes with which a model fails, for example because it needs groups of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from planner.errors import WorkloadError
from planner.plan_types.decision_base import Decision


class RefusedSizes:
    """Names the sizes of micro-batches in the errors of the model, and remembers these errors.

    An error is remembered only if the same configuration has run the whole batch: then the size is the reason. A
    remembered size is refused in all configurations.
    """

    def __init__(self) -> None:
        self._errors: dict[int, WorkloadError] = {}
        self._ran_whole: set[tuple[Decision, ...]] = set()

    def ran_whole(self, config: tuple[Decision, ...]) -> None:
        """Note that the model ran the whole batch in this configuration."""
        self._ran_whole.add(config)

    def check(self, *splits: tuple[int, ...]) -> None:
        """Raise the error of the first of these splits whose largest size is known to fail, if there is one."""
        for sizes in splits:
            if sizes[0] in self._errors:
                raise self._errors[sizes[0]]

    def are_refused(self, sizes: Iterable[int]) -> bool:
        """True if one of these sizes is known to fail."""
        return any(size in self._errors for size in sizes)

    @contextlib.contextmanager
    def named(self, config: tuple[Decision, ...], sizes: tuple[int, ...]) -> Iterator[None]:
        """Use this context to record a step with micro-batches of these sizes.

        Raises:
            WorkloadError: the model fails with so few samples. The message names the sizes.
        """
        self.check(sizes)
        size, *others = dict.fromkeys(sizes)
        try:
            yield
        except WorkloadError as error:
            refused = WorkloadError(
                f"the model fails with micro-batches of {' and '.join(map(str, (size, *others)))} samples: {error}"
            )
            if not others and config in self._ran_whole:
                self._errors[size] = refused
            raise refused from error

    def forget_whole(self) -> None:
        """Forget which configurations have run the whole batch."""
        self._ran_whole.clear()
