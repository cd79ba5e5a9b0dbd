"""Compare predicted memory with figures that others measured and published.

python -m benchmarks.published
"""

from __future__ import annotations

from rich.console import Console

from benchmarks.published import language, vision
from planner.assemble import versions


def main() -> None:
    console = Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for table in vision.tables():
        console.print(table)
    console.print(language.table())


if __name__ == "__main__":
    main()
