"""Converts lists of dataclass instances to columns, which are pickled for another process or to save memory.

Pickled one by one, each instance needs a dictionary of its fields while it is sent and while it is read. For recordings
these dictionaries take more memory than the instances.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any


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


class Packable:
    """Base class of a dataclass with attributes that are long lists of dataclass instances.

    The lists are pickled as columns. `pack` replaces each list in memory by such a pickle. A list is unpacked when it
    is read, and the other lists stay packed.
    """

    def pack(self) -> None:
        """Keep each list as a pickle of its columns until it is read, in less than a third of its memory.

        Reading a packed list creates a new list with new instances. Call this method only if nothing else refers to
        the old list or its instances: they would stay in memory, and changes to them would be lost.
        """
        lists = {name: value for name, value in vars(self).items() if isinstance(value, list) and value}
        while lists:
            name, value = lists.popitem()
            packed = pickle.dumps(Columns.of(value), pickle.HIGHEST_PROTOCOL)
            vars(self)[_PACKED] = {**vars(self).get(_PACKED, {}), name: packed}  # copies may share the old dictionary
            del vars(self)[name]  # last, so that Ctrl-C at any line loses nothing

    if not TYPE_CHECKING:  # with this method, a type checker would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            """Unpacks a list. Python calls this method only for missing attributes, that is, while a list is packed."""
            packed = vars(self).get(_PACKED, {})
            if name not in packed:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            vars(self)[name] = pickle.loads(packed[name]).items()
            vars(self)[_PACKED] = {other: value for other, value in packed.items() if other != name}
            return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).items()
        return {name: Columns.of(value) if isinstance(value, list) and value else value for name, value in state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            vars(self)[name] = value.items() if isinstance(value, Columns) else value


_PACKED = "_packed"
"""Attribute of a `Packable` with its packed lists by name, each as a pickle."""
