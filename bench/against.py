"""
Our own figures of two source trees, in turns: has a change made something slower?

    python -m bench.against BASE [--rounds N] [--quick] [--only NAME] [--json PATH]

BASE is a commit. It gets a worktree in a temporary directory and runs with its own sources and its own adapters
(`bench/queues`, `bench/peers`), because these use the names of its time. The modules that hold the clock are copied
from this tree, so that both trees are measured the same way.

Each figure is the median of the rounds. The ratio is above 1 where this tree is better; below 0.9 it is marked.
The CPU ratio compares the CPU time of whole turns, the PostgreSQL server included: other programs on the machine
disturb it less than the time on the clock, and starting the interpreter is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bench import graphs, jobs, pools
from bench.fresh import ROOT, TurnFailed
from bench.harness import Contestant, Measure, Table
from bench.servers import postgres

LEAST = 0.9
#: These hold the clock and import nothing of ours, so one version of them measures both trees.
CLOCKS = ("fresh.py", "gauges.py", "job_turns.py", "pool_turns.py", "turn.py", "work.py")
#: A turn of these takes minutes, so they run only when --only names them.
LONG = {"feeding", "depth", "backlog", "depth-postgres", "idle"}
CPU = "CPU seconds of the turn"


@dataclass
class Series:
    """One contestant's samples, round by round, for each of the two trees."""

    contestant: Contestant
    tables: list[Table]
    samples: dict[Path, list[dict[str, float]]] = field(default_factory=dict)
    failures: dict[Path, str] = field(default_factory=dict)

    def play(self, tree: Path) -> None:
        before = _cpu_seconds()
        try:
            sample = dict(self.contestant.turn(tree=tree))  # type: ignore[call-arg]  # a partial of `fresh`
        except TurnFailed as failed:
            self.failures[tree] = str(failed)[:200]
        else:
            self.samples.setdefault(tree, []).append(sample | {CPU: _cpu_seconds() - before})

    def median(self, tree: Path, figure: str) -> float | None:
        found = [sample[figure] for sample in self.samples.get(tree, ()) if figure in sample]
        return median(found) if found else None


def main() -> None:
    options = _options()
    with postgres() as server, _worktree(options.base) as base:
        all_measures = [
            *pools.measures(options.quick),
            *graphs.measures(options.quick),
            *jobs.measures({"postgres": server, "redis": "", "redis-synced": ""}, options.quick),
        ]
        series = _series(all_measures, options.only)
        for number in range(options.rounds):
            for one in series:
                for tree in (base, ROOT) if number % 2 else (ROOT, base):
                    one.play(tree)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(table(series, base, options.base, options.rounds))
    if options.json:
        trees = {"this tree": ROOT, options.base: base}
        record = {
            one.contestant.name: {name: one.samples.get(tree, []) for name, tree in trees.items()}
            for one in series
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def table(series: Sequence[Series], base: Path, commit: str, rounds: int) -> str:
    lines = [
        f"Median of {rounds} rounds in turns, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        f"| figure | unit | {commit} | this tree | ratio | CPU ratio | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in series:
        cpu = _ratio(one.median(base, CPU), one.median(ROOT, CPU))
        for row in one.tables:
            before, now = one.median(base, row.figure), one.median(ROOT, row.figure)
            ratio = _ratio(now, before) if row.better == "more" else _ratio(before, now)
            mark = "" if ratio is None or ratio >= LEAST else f"**below {LEAST}**"
            cells = (row.title, row.unit, _text(before), _text(now), _text(ratio), _text(cpu), mark)
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            f"| {one.contestant.name} failed in {'this tree' if tree == ROOT else commit} | {reason} | | | | | |"
            for tree, reason in one.failures.items()
        ]
    return "\n".join(lines)


def _series(measures: Sequence[Measure], only: Sequence[str] | None) -> list[Series]:
    chosen = [it for it in measures if (it.name in only if only else it.name not in LONG)]
    found = []
    for measure in chosen:
        for contestant in measure.contestants:
            tables = [it for it in measure.tables if it.ours == contestant.name]
            if contestant.ours and tables:
                found.append(Series(contestant, tables))
    return found


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-base-") as where:
        tree = Path(where) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            for name in CLOCKS:
                shutil.copy(ROOT / "bench" / name, tree / "bench" / name)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def _cpu_seconds() -> float:
    """CPU time of this process, of all its descendants, and of the descendants that have ended."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _ratio(more: float | None, less: float | None) -> float | None:
    return more / less if more and less else None


def _text(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our own figures of a commit and of this tree, in turns.")
    parser.add_argument("base", metavar="BASE", help="the commit to compare this tree with")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="5 unless given")
    parser.add_argument("--quick", action="store_true", help="few calls a turn: does it work?")
    parser.add_argument("--only", action="append", metavar="NAME", help="this measure alone; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
