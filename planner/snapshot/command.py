"""The command `python -m planner.snapshot FILE`, which checks the simulated allocator against a real card.

To record the snapshot, call `torch.cuda.memory._record_memory_history()` on the machine with the card before the
program, and `torch.cuda.memory._dump_snapshot("snapshot.pickle")` after it. The command needs neither a card nor torch.
It runs the recorded requests through the simulated allocator, and compares the addresses and the segments with those in
the record.

Exit code 0 means that everything is equal, 1 that something differs, 2 that the snapshot could not be replayed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from planner.allocator.blocks import Segment
from planner.errors import PlannerError, SnapshotError, broken_import, first_line, plain_line
from planner.plan_types.sizes import format_size, parse_size
from planner.plan_types.words import counted
from planner.progress import streams
from planner.snapshot.file import load
from planner.snapshot.history import History
from planner.snapshot.replay import replay_history
from planner.snapshot.result import ReplayResult, SegmentPair

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EQUAL, DIFFERENT, COULD_NOT_RUN = 0, 1, 2
"""Exit codes of the command."""
_MOST_SHOWN = 5
"""Maximum number of differences that are printed, separately for addresses and for exchanges with the driver."""


class _Arguments(argparse.ArgumentParser):
    """A parser that raises `SnapshotError` for a wrong argument, so that `main` prints it on one line."""

    def error(self, message: str) -> NoReturn:
        raise SnapshotError(f"{message}; see python -m planner.snapshot --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the text of --help. argparse's own method ignores an `OSError`."""
        print(message, end="", file=file or sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        arguments: Arguments of the command line, without the name of the program. None means `sys.argv[1:]`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return streams.answered("snapshot", lambda out: _run(words, out), COULD_NOT_RUN)


def _run(words: Sequence[str], out: TextIO) -> int:
    try:
        options = _parser().parse_args(words)
        capacity_bytes = None if options.capacity is None else parse_size(options.capacity, device_bytes=None)
        history = load(options.file, device=options.device)
        result = replay_history(history, capacity_bytes=capacity_bytes)
        from planner.progress.terminal import console

        _print(console(file=out, highlight=False, soft_wrap=True), options.file, history, result)
    except OSError:
        raise  # the answer cannot be written: `load` raises its own errors
    except (PlannerError, KeyboardInterrupt) as error:
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else plain_line(str(error))
        print(f"snapshot: {message}", file=sys.stderr)
        return COULD_NOT_RUN
    except Exception as error:
        message = broken_import(error) or ""
        if not message:  # a bug of the planner, shown with its traceback
            traceback.print_exc()
            message = f"{first_line(error)}; this is a bug of the planner, please report it with the text above"
        print(f"snapshot: {message}", file=sys.stderr)
        return COULD_NOT_RUN
    return EQUAL if result.is_equal else DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = _Arguments(
        prog="python -m planner.snapshot",
        description="Replays a snapshot of torch.cuda.memory._dump_snapshot through the simulated caching allocator.",
        epilog="Exit code 0: all is equal, 1: something differs, 2: the snapshot could not be replayed.",
    )
    parser.add_argument("file", metavar="FILE", help="a snapshot (.pickle) or a history (.json), perhaps with .gz")
    parser.add_argument(
        "--device", type=int, metavar="N", help="number of the device (default: the first one with events)"
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="memory that segments could take on the card, such as 24GiB (default: the most that was ever reserved if "
        "the card was full, else no limit)",
    )
    return parser


def _print(console: Console, name: str, history: History, result: ReplayResult) -> None:
    counts = result.counts
    start = "an empty allocator" if result.starts_empty else "the middle of a run"
    limit = "no limit" if result.capacity_bytes is None else f"{format_size(result.capacity_bytes)} for segments"
    segments = "expandable segments" if history.settings.expandable_segments else "segments of fixed size"
    for line in (
        f"{name}, device {history.device}: {counted(len(history.events), 'event')} from {start}, {segments}, {limit}",
        f"{counted(counts.allocations, 'allocation')}, {counted(counts.failed_requests, 'failed request')}; "
        "memory was taken from the driver "
        f"{counted(counts.taken, 'time')} and released {counted(counts.given_back, 'time')}",
        *(f"Note: {note}" for note in history.notes),
    ):
        console.print(line, markup=False)
    console.print(_levels(result, _marks(console)))
    for line in _differences(result):
        console.print(line, markup=False)
    console.print(_segments(result.segments, _marks(console)))
    differing = sum(not pair.is_equal for pair in result.segments)
    console.print(f"segments that differ: {differing} of {len(result.segments)}")
    console.print("all equal" if result.is_equal else "the simulation differs from the record")


def _marks(console: Console) -> dict[bool, str]:
    """Returns the texts that mark equal values (key True) and different values (key False).

    They are words if the encoding of the output cannot show a check mark.
    """
    return {True: "✓", False: "✗"} if console.encoding.startswith("utf") else {True: "yes", False: "NO"}


def _table(*headers: str, **settings: Any) -> Table:
    """Returns an empty table. rich is imported here, so that an error of its import is shown in one line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(*headers, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **settings)


def _levels(result: ReplayResult, marks: dict[bool, str]) -> Table:
    """Returns the table that compares peaks of memory, and memory at the end."""
    table = _table("", "recorded", "simulated", "equal")
    recorded, simulated = result.recorded, result.simulated
    for title, recorded_bytes, simulated_bytes in (
        ("peak requested", recorded.peak_requested_bytes, simulated.peak_requested_bytes),
        ("peak allocated", recorded.peak_allocated_bytes, simulated.peak_allocated_bytes),
        ("peak reserved", recorded.peak_reserved_bytes, simulated.peak_reserved_bytes),
        ("allocated at the end", recorded.final_allocated_bytes, simulated.final_allocated_bytes),
        ("reserved at the end", recorded.final_reserved_bytes, simulated.final_reserved_bytes),
    ):
        assert simulated_bytes is not None  # Only a record may lack a level.
        simulated_text = format_size(simulated_bytes)
        if recorded_bytes is None:
            table.add_row(title, "not in a snapshot", simulated_text, "")
        else:
            table.add_row(title, format_size(recorded_bytes), simulated_text, marks[recorded_bytes == simulated_bytes])
    return table


def _differences(result: ReplayResult) -> Iterator[str]:
    """Yields lines that state how many addresses and exchanges with the driver differ, and describe the first few."""
    requests = result.counts.allocations + result.counts.failed_requests
    yield f"addresses that differ: {len(result.addresses)} of {requests}"
    for address in result.addresses[:_MOST_SHOWN]:
        yield (
            f"  event {address.at_event}, {format_size(address.size_bytes)} on stream {address.stream}: "
            f"recorded {_address(address.recorded_address)}, simulated {_address(address.simulated_address)}"
        )
    yield f"exchanges with the driver that differ: {len(result.driver)}"
    for exchange in result.driver[:_MOST_SHOWN]:
        only = "".join(
            f"; only {who} releases {', '.join(map(_address, addresses[:_MOST_SHOWN]))}"
            for who, addresses in (("the record", exchange.only_recorded), ("the simulation", exchange.only_simulated))
            if addresses
        )
        yield (
            f"  event {exchange.at_event}: reserved memory changed by {format_size(exchange.recorded_change_bytes)} "
            f"recorded, {format_size(exchange.simulated_change_bytes)} simulated{only}"
        )


def _segments(pairs: Sequence[SegmentPair], marks: dict[bool, str]) -> Table:
    """Returns the table that compares the segments at the end."""
    table = _table(title="segments at the end", title_justify="left")
    table.add_column("address", no_wrap=True)
    table.add_column("size", justify="right")
    for title in ("pool", "stream", "recorded blocks", "simulated blocks", "equal"):
        table.add_column(title)
    for pair in pairs:
        shown = [segment for segment in (pair.recorded, pair.simulated) if segment is not None]
        table.add_row(
            _address(shown[0].address),
            _either(format_size(segment.size_bytes) for segment in shown),
            _either("small" if segment.is_small else "large" for segment in shown),
            _either(str(segment.stream) for segment in shown),
            _blocks(pair.recorded, with_sizes=not pair.is_equal),
            _blocks(pair.simulated, with_sizes=not pair.is_equal),
            marks[pair.is_equal],
        )
    return table


def _either(texts: Iterator[str]) -> str:
    """Joins the recorded and the simulated text with a slash; returns one text if the two are equal."""
    return " / ".join(dict.fromkeys(texts))


def _blocks(segment: Segment | None, *, with_sizes: bool) -> str:
    """Returns the number of blocks of a segment and of its live blocks, with the total size of the live blocks."""
    if segment is None:
        return "missing"
    live = [block for block in segment.blocks if block.is_allocated]
    counts = f"{len(segment.blocks)}, {len(live)} live"
    return f"{counts}: {format_size(sum(block.size_bytes for block in live))}" if with_sizes else counts


def _address(address: int | None) -> str:
    """Returns the text for the address that a request got. None means that the request ran out of memory."""
    return "out of memory" if address is None else f"{address:#x}"
