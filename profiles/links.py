"""Links by which cards exchange data: within a machine (NVLink or PCIe), and between machines.

The data is in `links.toml`, with the source of each number. A card without NVLink uses PCIe, at the rate of its own
copies to the host.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.profiles.device import DeviceProfile

CARDS_PER_NODE = 8
"""Number of cards in a machine, unless the user states it."""
_PCIE_LATENCY_NS = 30_000
"""Assumption, as in `links.toml`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between cards."""

    title: str
    bytes_per_s: int
    """Rate in one direction for each card."""
    latency_ns: int
    """Time of a collective of a few bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links by which the cards of a training exchange data."""

    within: Link
    """The link between the cards of one machine."""
    between: Link
    """The link between machines."""
    cards_per_node: int = CARDS_PER_NODE
    """Number of cards in a machine."""

    def of(self, span: int) -> Link:
        """Returns the slowest link that a collective uses.

        Args:
            span: distance between the first and the last rank that take part, plus 1.
        """
        return self.within if span <= self.cards_per_node else self.between


def with_links(
    card: DeviceProfile, *, within: str | None = None, cards_per_node: int = CARDS_PER_NODE
) -> DeviceProfile:
    """Returns the profile of a card that trains together with others.

    Args:
        within: a name of `known`, 'pcie', or None for the fastest link that the card has.

    Raises:
        KeyError: the name is not known.
    """
    table = _table()
    pcie = Link(title="PCIe", bytes_per_s=card.host_link_bytes_per_s, latency_ns=_PCIE_LATENCY_NS)
    if within is None:
        patterns = ((name, pattern) for name, row in table.items() for pattern in row["cards"])
        within = next((name for name, pattern in patterns if fnmatch.fnmatch(card.name, pattern)), "pcie")
    chosen = pcie if within == "pcie" else _link(table[within])
    links = Links(within=chosen, between=_link(table["network"]), cards_per_node=cards_per_node)
    return dataclasses.replace(card, links=links)


def known() -> tuple[str, ...]:
    """Returns the names of the links within a machine."""
    return (*(name for name in _table() if name != "network"), "pcie")


def _link(row: dict[str, Any]) -> Link:
    return Link(title=row["title"], bytes_per_s=row["bytes_per_s"], latency_ns=row["latency_ns"])


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("links.toml").read_text(encoding="utf-8"))
