"""Converts a list of dataclass instances to columns, in which form the list is sent to another process.

Pickled one by one, each instance needs a dictionary of its fields while it is sent and while it is read. For recordings
these dictionaries take more memory than the instances.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Columns:
    """A list of instances of one dataclass that is not frozen, by field."""

    kind: type
    """The dataclass."""
    count: int
    """Number of instances."""
    values: dict[str, list[Any]]
    """For each field, its value in each instance. Equal values of a field that holds texts or tuples are one object."""

    @classmethod
    def of(cls, items: list[Any]) -> Columns:
        """Returns the columns of at least one instance."""
        kind = type(items[0])
        columns = {field.name: [getattr(item, field.name) for item in items] for field in dataclasses.fields(kind)}
        for name, values in columns.items():
            if isinstance(values[0], (str, tuple)):
                known: dict[Any, Any] = {}
                columns[name] = [known.setdefault(value, value) for value in values]
        return cls(kind, len(items), columns)

    def items(self) -> list[Any]:
        """Returns new instances with these values. Their `__init__` is not called."""
        items: list[Any] = [object.__new__(self.kind) for _ in range(self.count)]
        for name, values in self.values.items():
            for item, value in zip(items, values, strict=True):
                setattr(item, name, value)
        return items
