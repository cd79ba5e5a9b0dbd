"""Compare rehearsals with real training steps for the models of many libraries.

    python -m benchmarks.zoo [--library NAME ...] [--only TEXT ...] [--shard i/n] [--sample N] [--out FILE]
    python -m benchmarks.zoo --out FILE --page docs/zoo.md

For each model, the command builds a small version with random weights, trains two steps on the CPU, and rehearses
them (`benchmarks.zoo.judge`). A seeded part of the models is also planned under a budget. Each model gets one line of
JSON in FILE, and models that FILE has already are left out. With `--against OLD`, the exit code is 1 if a model that
is exact in OLD is not exact any more, or if planning ends with an error of the planner.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from benchmarks.zoo import judge, libraries, page
from benchmarks.zoo.case import ERROR, EXACT, FITS, NOT_BUILT, PLANS, REFUSED, RESULTS, SLOW, Case, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="*", help="libraries to judge; all by default")
    parser.add_argument("--only", nargs="*", help="text in the names of the models to judge")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th model, from the i-th on")
    parser.add_argument("--sample", type=int, help="judge only this many models, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample and of the models that are planned")
    parser.add_argument(
        "--planned", type=float, default=0.25, help="share of the models that are planned (default 0.25)"
    )
    parser.add_argument("--limit", type=float, default=60, help="time limit of a model in seconds (default 60)")
    parser.add_argument("--out", type=pathlib.Path, help="file of JSON lines for the results")
    parser.add_argument("--jobs", type=int, default=1, help="number of models that are judged at the same time")
    parser.add_argument("--against", type=pathlib.Path, help="file of results that must not become worse")
    parser.add_argument("--page", type=pathlib.Path, help="write the results in FILE to this page, and do nothing else")
    parser.add_argument("--list", action="store_true", help="list the models")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases, absent = libraries.cases(options.library)
    cases = [case for case in cases if not options.only or any(text in case.name for text in options.only)]
    if options.sample is not None:
        cases = random.Random(options.seed).sample(cases, min(options.sample, len(cases)))
    first, step = map(int, options.shard.split("/"))
    cases = cases[first - 1 :: step]
    if options.list:
        print("\n".join(f"{case.library}: {case.name}" for case in cases))
        return 0
    if options.page is not None:
        options.page.write_text(page.text(read(options.out)))
        return 0
    done = {verdict.key for verdict in (read(options.out) if options.out else [])}
    cases = [case for case in cases if (case.library, case.name) not in done]
    began, verdicts = time.perf_counter(), []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        for verdict in threads.map(lambda case: _judged(case, options), cases):
            verdicts.append(verdict)
            print(line(verdict), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
    print(totals(verdicts))
    for reason in absent:
        print(f"skipped: {reason}")
    print(f"{len(verdicts)} models, {time.perf_counter() - began:.0f} s")
    worse = [] if options.against is None else list(regressions(verdicts, read(options.against)))
    for text in worse:
        print(f"worse than in {options.against}: {text}")
    return int(bool(worse))


def _judged(case: Case, options: argparse.Namespace) -> Verdict:
    with_plan = random.Random(f"{options.seed} {case.library} {case.name}").random() < options.planned
    return judge.judged(case, with_plan=with_plan, limit_s=options.limit)


def regressions(verdicts: Iterable[Verdict], before: Iterable[Verdict]) -> Iterator[str]:
    """Yields text for each model that was exact before and is not now, and for each that was planned and is not now."""
    known = {verdict.key: verdict for verdict in before}
    for verdict in verdicts:
        old = known.get(verdict.key)
        if old is not None and old.result == EXACT and verdict.result not in (EXACT, SLOW):
            yield f"{verdict.library}: {verdict.name} is not exact: {verdict.result}: {verdict.note}"
        if verdict.plan == ERROR or (old is not None and old.plan == FITS and verdict.plan == REFUSED):
            yield f"{verdict.library}: {verdict.name} is not planned: {verdict.plan}: {verdict.plan_note}"


def read(path: pathlib.Path) -> list[Verdict]:
    """Returns the results in a file of JSON lines; none if there is no such file."""
    return [Verdict(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def line(verdict: Verdict) -> str:
    """Returns a result as one line of text."""
    plan = f" | plan: {verdict.plan} ({verdict.plan_note[:150]})" if verdict.plan else ""
    note = f" | {verdict.note[:300]}" if verdict.note else ""
    how = f" | {verdict.how}" if verdict.result != NOT_BUILT else ""
    return f"{verdict.result:8} {verdict.library}: {verdict.name}{how}{note}{plan} | {verdict.seconds} s"


def totals(verdicts: list[Verdict]) -> str:
    """Returns the numbers of models by library and result, and of plans by how they ended."""
    lines = []
    for library in dict.fromkeys(verdict.library for verdict in verdicts):
        counts = collections.Counter(verdict.result for verdict in verdicts if verdict.library == library)
        plans = collections.Counter(verdict.plan for verdict in verdicts if verdict.library == library)
        parts = [f"{counts[result]} {result}" for result in RESULTS if counts[result]]
        parts += [f"plans: {plans[plan]} {plan}" for plan in PLANS if plans[plan]]
        lines.append(f"{library}: " + ", ".join(parts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
