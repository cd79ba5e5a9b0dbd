"""The ways in which several cards can train one model, and the units that FSDP2 gathers together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch

from planner.errors import WorkloadError
from planner.plan_types.decisions import Shard
from planner.plan_types.quantized import is_quantized
from planner.plan_types.words import (
    FEWEST,
    MOST_CARDS,
    SHARDINGS,
    counted,
    not_a_number_of_cards,
    unknown_sharding,
)
from planner.profiles.links import CARDS_PER_NODE
from planner.space import accelerate_units
from planner.space.own_sharding import named_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cards:
    """The cards that train together, as the user describes them."""

    count: int
    fewest: bool = False
    """True to find the smallest number of cards with which a plan fits; `count` is then 2, and not used."""
    mesh: tuple[int, ...] | None = None
    """Number of copies of the model, and of the cards that hold one copy together; None for a single copy."""
    own: Shard | None = None
    """The decision that a function of the user's own divides the model; None if the planner does it."""
    way: str | None = None
    """One of `SHARDINGS`; None to let the planner choose. With 'fsdp' the planner chooses the units of FSDP2 that stay
    gathered between forward and backward; with 'zero2' all of them do."""
    offload: bool = False
    """True if shards are in host memory."""
    per_node: int = CARDS_PER_NODE
    """Number of cards in a machine."""
    prepared_by: str = ""
    """'accelerate' if accelerate prepares the model, alone or for transformers' `Trainer`; else ''."""
    checkpoints: bool | None = None
    """True if the library that prepares the model must checkpoint all blocks, False if it must not; None if it may."""
    link: str | None = None
    """Name of the link within a machine (`planner.profiles.links.known`); None for the fastest one of the card."""

    @property
    def parts(self) -> int:
        """Number of parts into which the batch is divided."""
        return self.count if self.own is None else self.own.divides_batch_by

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 2 <= self.count <= MOST_CARDS:
            raise WorkloadError(not_a_number_of_cards(self.count))
        if self.way is not None and self.way not in SHARDINGS:
            raise WorkloadError(unknown_sharding(self.way))
        if self.mesh is not None and self.fewest:
            raise WorkloadError(
                "a mesh states the number of cards: give that number instead of 'fewest', or leave the mesh out"
            )
        if self.mesh is not None:
            copies_and_shards = len(self.mesh) == 2 and all(size > 1 for size in self.mesh)
            if not copies_and_shards or self.mesh[0] * self.mesh[1] != self.count:
                raise WorkloadError(
                    f"a mesh of {' x '.join(map(str, self.mesh))} cannot be used with {self.count} cards: it needs at "
                    f"least two copies of the model, two cards for each copy, and {self.count} cards in all; "
                    f"{_mesh_advice(self.count)}"
                )
            if self.way in ("ddp", "zero1"):
                raise WorkloadError(
                    f"a mesh is for sharded models, and '{self.way}' does not shard: leave the mesh out"
                )
        if self.prepared_by:
            self._refuse_what_is_not_prepared()
        if self.offload and self.way in ("ddp", "zero1"):
            raise WorkloadError(f"offloading is for sharded models, and '{self.way}' does not shard: use fsdp")

    def _refuse_what_is_not_prepared(self) -> None:
        """Raises `WorkloadError` for what cannot be planned if accelerate prepares the model."""
        if self.way == "zero1":
            raise WorkloadError(
                f"{self.prepared_by} offers ZeRO-1 only by DeepSpeed, whose memory cannot be certified: choose ddp, "
                "zero2 or fsdp, or leave the sharding out"
            )
        for is_given, what in ((self.mesh is not None, "a mesh"), (self.offload, "shards in host memory")):
            if is_given:
                raise WorkloadError(
                    f"{what} cannot be planned for a model that {self.prepared_by} prepares: leave it out, or plan "
                    "without --for"
                )


def _mesh_advice(count: int) -> str:
    """Returns what to give instead of a mesh that does not have this number of cards."""
    sizes = [size for size in range(2, min(count // 2, CARDS_PER_NODE) + 1) if not count % size]
    if not sizes:
        return (
            f"leave the mesh out: {count} cards cannot be divided evenly into two or more copies of 2 to "
            f"{CARDS_PER_NODE} cards"
        )
    return f"give the number of copies and the cards for each copy, such as {count // sizes[-1]}x{sizes[-1]}"


def several_cards(
    count: int | str | None,
    *,
    mesh: tuple[int, ...] | Mapping[str, int] | None = None,
    parallelize: str | None = None,
    way: str | None = None,
    offload: bool = False,
    per_node: int | None = None,
    link: str | None = None,
    prepared_by: str = "",
    checkpoints: bool | None = None,
) -> Cards | None:
    """Returns the cards that the user describes; None for one card.

    Args:
        parallelize: file and name of the user's own function that divides the model; '' for a function that cannot be
            imported; None if there is none.

    Raises:
        WorkloadError: the description contradicts itself, or describes several cards without their number.
    """
    if count is None or count == 1:
        described = {
            "mesh": mesh,
            "sharding": way,
            "offload_shards": offload,
            "cards_per_node": per_node,
            "link": link,
            "parallelize": parallelize is not None,
        }
        if given := [name for name, value in described.items() if value]:
            raise WorkloadError(
                f"{given[0]} is for two or more cards, and the number of cards is 1: give a larger number with cards "
                f"(--cards), or leave {given[0]} out"
            )
        return None
    is_number = type(count) is int
    if count != FEWEST and not (type(count) is int and 1 < count <= MOST_CARDS):
        raise WorkloadError(not_a_number_of_cards(count))
    if per_node and is_number and int(count) > per_node and int(count) % per_node:
        fitting = [each for each in range(1, CARDS_PER_NODE + 1) if not int(count) % each]
        raise WorkloadError(
            f"{count} cards cannot be divided evenly among machines of {counted(per_node, 'card')}: give "
            f"{counted(fitting[-1], 'card')} for each machine, or another number of cards"
        )
    own = None
    if parallelize is not None:
        if way or offload or prepared_by or not is_number:
            raise WorkloadError(
                "your function divides the model itself, so leave sharding, offload-shards and --for out, and give the "
                "number of cards"
            )
        names, sizes = named_mesh(int(count), mesh)
        own, mesh = Shard(way="own", mesh=sizes, dimensions=names, function=parallelize), None
    elif isinstance(mesh, Mapping):
        raise WorkloadError(
            "a mesh whose dimensions have names is for a function of yours, which divides the model by tensor "
            "parallelism, for example: give that function with parallelize (--parallelize FILE.py:FUNCTION), or give "
            "the mesh as numbers of copies and of cards for each copy, such as 2x4"
        )
    return Cards(
        count=int(count) if is_number else 2,
        own=own,
        fewest=not is_number,
        mesh=mesh,
        way=way,
        offload=offload,
        per_node=per_node or CARDS_PER_NODE,
        link=link,
        prepared_by=prepared_by,
        checkpoints=checkpoints,
    )


def shardings(model: torch.nn.Module, cards: Cards) -> tuple[Shard, ...]:
    """Returns the ways to train on these cards, from the one that divides the least to that which divides the most.

    Raises:
        WorkloadError: 4-bit weights cannot be divided as the user asks for, or accelerate cannot prepare the model.
    """
    units, shard_mesh = repeated_blocks(model), cards.mesh or (cards.count,)
    quantized = next((name for name, parameter in model.named_parameters() if is_quantized(parameter)), None)
    if quantized is not None:
        cards = _without_division(cards, quantized)
    if cards.own is not None:
        return (cards.own,)
    if cards.prepared_by:
        return _as_accelerate_prepares(model, cards)
    by_way = {
        "ddp": Shard(way="ddp", mesh=(cards.count,)),
        "zero1": Shard(way="zero1", mesh=(cards.count,)),
        "zero2": Shard(way="fsdp", mesh=shard_mesh, units=units, kept=units, offload=cards.offload),
        "fsdp": Shard(way="fsdp", mesh=shard_mesh, units=units, offload=cards.offload),
    }
    if cards.way is not None:
        return (by_way[cards.way],)
    if cards.mesh is not None or cards.offload:
        return (by_way["fsdp"],)
    return tuple(by_way[way] for way in ("ddp", "zero1", "fsdp") if quantized is None or way != "fsdp")


def asks_for_divided_parameters(cards: Cards) -> bool:
    """True if the user has chosen a way that divides parameters, or may do so."""
    return cards.way in ("fsdp", "zero2") or cards.mesh is not None or cards.offload or cards.own is not None


def _without_division(cards: Cards, quantized: str) -> Cards:
    """Returns the cards, with the only way that accelerate has if parameters cannot be divided.

    Args:
        quantized: name of a parameter with 4-bit weights.

    Raises:
        WorkloadError: the user asks for a way that divides parameters.
    """
    if asks_for_divided_parameters(cards):
        raise WorkloadError(
            f"'{quantized}' has 4-bit weights, which FSDP2 cannot divide: choose --sharding ddp"
            f"{'' if cards.prepared_by else ' or zero1'}, with which each card has all of them, or train adapters on "
            "weights that are not quantized (--lora)"
        )
    return dataclasses.replace(cards, way="ddp") if cards.prepared_by else cards


def _as_accelerate_prepares(model: torch.nn.Module, cards: Cards) -> tuple[Shard, ...]:
    """Returns the ways in which accelerate trains on these cards.

    Raises:
        WorkloadError: accelerate cannot prepare this model for FSDP2.
    """
    mesh, library, ways = (cards.count,), cards.prepared_by, []
    if cards.way in (None, "ddp"):
        ways.append(Shard(way="ddp", mesh=mesh, prepared_by=library, reduces_once=True))
    if cards.way != "ddp":
        classes = accelerate_units.classes_of(repeated_blocks(model), model)
        units, tail = accelerate_units.units_of(model, classes)
        shard = Shard(way="fsdp", mesh=mesh, units=units, tail=tail, prepared_by=library, classes=classes)
        if cards.way != "fsdp":
            ways.append(dataclasses.replace(shard, kept=units))
        if cards.way != "zero2":
            ways.append(shard)
    return tuple(ways)


def repeated_blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the paths of the blocks that a model repeats, such as 'model.layers.0': the outermost ones.

    Blocks are modules of one class in the same container, at least two, which have parameters and modules of their
    own. A block that shares a parameter with a module outside of it is left out: FSDP2 would divide the parameter
    twice.
    """
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    blocks: list[str] = []
    for path, container in model.named_modules():
        if any(path == block or path.startswith(f"{block}.") for block in blocks):
            continue
        composite = {
            name: child
            for name, child in container.named_children()
            if any(True for _ in child.children()) and any(True for _ in child.parameters())
        }
        kinds = Counter(map(type, composite.values()))
        if not isinstance(container, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
            continue
        for name, child in composite.items():
            if kinds[type(child)] > 1 and _is_alone(child, owners):
                blocks.append(f"{path}.{name}".lstrip("."))
    return tuple(blocks)


def _is_alone(block: torch.nn.Module, owners: Counter[int]) -> bool:
    """True if no module outside of the block has one of its parameters."""
    inside = Counter(
        id(parameter)
        for module in block.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return all(owners[number] == count for number, count in inside.items())
