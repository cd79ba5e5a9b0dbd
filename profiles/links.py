"""Links by which cards exchange data: within a machine (NVLink or PCIe), and between machines.

The data is in `links.toml`, with the source of each number. A card without NVLink uses PCIe, at the rate of its own
copies to the host.

NCCL allocates buffers on the card, outside of PyTorch's allocator: each communicator has buffers for each channel and
each peer of a channel. The number of channels and peers depends on the links, on NCCL's version and on the collectives.
So `nccl_bytes` is not rehearsed: others reported it, or it follows from NCCL's source, or it is an assumption.
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
_PCIE = "pcie"
_NETWORK = "network"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between cards."""

    name: str
    """Its name in `links.toml`, and the value of `--link`."""
    title: str
    bytes_per_s: int
    """Rate in one direction for each card."""
    latency_ns: int
    """Time of a collective of a few bytes."""
    nccl_bytes: int
    """Memory in bytes that one communicator takes on each card for this link."""
    nccl_most_bytes: int
    """The largest figure for `nccl_bytes` that was reported, that follows from NCCL's source, or that is assumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links by which the cards of a training exchange data."""

    within: Link
    """The link between the cards of one machine."""
    between: Link
    """The link between machines."""
    cards_per_node: int = CARDS_PER_NODE
    """Number of cards in a machine."""
    cards: int = 0
    """Number of cards that train together."""
    communicators: int = 0
    """Number of NCCL communicators of each process."""

    @property
    def nccl_bytes(self) -> int:
        """Memory in bytes that NCCL takes on each card."""
        return self.communicators * sum(link.nccl_bytes for link in self._used)

    @property
    def nccl_most_bytes(self) -> int:
        """The most memory in bytes that NCCL may take on each card, as far as is known."""
        return self.communicators * sum(link.nccl_most_bytes for link in self._used)

    @property
    def _used(self) -> tuple[Link, ...]:
        return (self.within,) if self.cards <= self.cards_per_node else (self.within, self.between)

    def of(self, span: int) -> Link:
        """Returns the slowest link that a collective uses.

        Args:
            span: number of ranks from the first to the last one that takes part, with those in between.
        """
        return self.within if span <= self.cards_per_node else self.between


def with_links(
    card: DeviceProfile,
    *,
    cards: int = 0,
    communicators: int = 0,
    within: str | None = None,
    cards_per_node: int = CARDS_PER_NODE,
) -> DeviceProfile:
    """Returns the profile of a card that trains together with others.

    Args:
        cards: number of cards that train together.
        communicators: number of NCCL communicators of each process.
        within: one of the names that `known` returns; None for the fastest link that the card has.

    Raises:
        KeyError: there is no link of that name.
    """
    table = _table()
    if within is None:
        within = link_of(card)
    row = table[within]
    if within == _PCIE:
        row = {**row, "bytes_per_s": card.host_link_bytes_per_s, "latency_ns": _PCIE_LATENCY_NS}
    links = Links(
        within=_link(within, row),
        between=_link(_NETWORK, table[_NETWORK]),
        cards_per_node=cards_per_node,
        cards=cards,
        communicators=communicators,
    )
    return dataclasses.replace(card, links=links)


def link_of(card: DeviceProfile) -> str:
    """Returns the name of the link that `links.toml` lists for a card; PCIe if it lists none."""
    patterns = ((name, pattern) for name, row in _table().items() for pattern in row["cards"])
    return next((name for name, pattern in patterns if fnmatch.fnmatch(card.name, pattern)), _PCIE)


def foreign_link_note(card: DeviceProfile) -> tuple[str, ...]:
    """Returns a note if the card trains with others over a link that `links.toml` lists for other cards only.

    A card without a file in `devices/` may have any link.
    """
    is_listed = (Path(__file__).with_name("devices") / f"{card.name}.toml").is_file()
    if card.links is None or not is_listed or card.links.within.name in (_PCIE, link_of(card)):
        return ()
    return (
        f"{card.title} is not known to have {card.links.within.title}: the step time and NCCL's memory are those of "
        f"cards that have it; leave --link out to plan with {link_of(card)}",
    )


def known() -> tuple[str, ...]:
    """Returns the names of the links within a machine."""
    return tuple(name for name in _table() if name != _NETWORK)


def _link(name: str, row: dict[str, Any]) -> Link:
    return Link(name=name, **{key: value for key, value in row.items() if key != "cards"})


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("links.toml").read_text(encoding="utf-8"))
