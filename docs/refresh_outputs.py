"""Run the commands that the documentation shows, and put what they print in the place of the old output.

    python docs/refresh_outputs.py [FILE ...]

A command stands in a comment before a fenced block; the block after it holds what the command printed:

    <!-- run: plan examples/roberta_84m --vram 6GiB -->

`plan` and `python` are this interpreter's; commands run in the root of the repository and may be joined by `;`. A
command that ends with `| head -N` keeps its first N lines. Without FILE: README.md and every page in docs/.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- run: (?P<command>.+?) -->\n+```\w*\n)(?P<output>.*?)(\n```)", re.DOTALL)


def output_of(command: str) -> str:
    """Standard output of a shell command, without trailing spaces.

    Raises:
        RuntimeError: the command failed. Exit code 1 is an answer of `plan`: nothing fits.
    """
    functions = f'plan() {{ "{sys.executable}" -m planner.cli "$@"; }}; python() {{ "{sys.executable}" "$@"; }}; '
    run = subprocess.run(
        ["bash", "-c", functions + command], cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, stdout=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    if run.returncode not in (0, 1) or not run.stdout.strip():
        raise RuntimeError(f"'{command}' ended with exit code {run.returncode}: the old output stays")
    return "\n".join(line.rstrip() for line in run.stdout.strip("\n").splitlines())


def refresh(path: pathlib.Path) -> None:
    """Replace the output of every command in one page."""
    text = path.read_text()
    for match in list(BLOCK.finditer(text)):
        print(f"{path.relative_to(ROOT)}: {match['command']}", file=sys.stderr)
        text = text.replace(match[0], f"{match[1]}{output_of(match['command'])}{match[4]}", 1)
        path.write_text(text)


def main() -> None:
    pages = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
    for page in pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        refresh(page)


if __name__ == "__main__":
    main()
