"""
Ours and the peers, measured in turns.

A shared machine drifts by tens of percent within minutes, so two things measured one after the other cannot be
compared.  Here every contestant takes one short turn in every round, the first of one round is the last of the next,
and a figure is the median of its rounds.  `Measure` says who takes turns; `Table` says how one of the figures that
come back is shown and what is wanted of ours; `main` is the command line around both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from bench.fresh import TurnFailed, fresh

__all__ = ["Contestant", "Measure", "Table", "TurnFailed", "fresh", "main"]

Sample = Mapping[str, float]  # what one turn found out: figures by name
Grade = Literal["PASS", "MISS", "n/a"]


@dataclass(frozen=True)
class Contestant:
    name: str
    turn: Callable[[], Sample]
    size: str = ""  # what one turn does, for people: "50,000 calls"; slow peers do less, figures are per call
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """One figure of a measure: one of ours against every peer that has it."""

    title: str
    figure: str
    unit: str
    better: Literal["more", "less"]
    ours: str
    wanted: Mapping[str, float] = field(default_factory=dict)  # peer: how many times better ours must be
    below: float | None = None  # what ours must stay below, whatever the peers do
    note: str = ""


@dataclass(frozen=True)
class Measure:
    name: str
    contestants: Sequence[Contestant]
    tables: Sequence[Table]


@dataclass
class Score:
    """What one contestant showed, round by round.  Who fails once is out, and the reason stands in for figures."""

    contestant: Contestant
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""

    def rounds(self, figure: str) -> list[float]:
        return [] if self.failure else [sample[figure] for sample in self.samples if figure in sample]

    def median(self, figure: str) -> float | None:
        rounds = self.rounds(figure)
        return median(rounds) if rounds else None


@dataclass(frozen=True)
class Verdict:
    table: str
    ours: str
    peer: str  # empty: ours by itself
    wanted: str
    got: str
    grade: Grade


def main(title: str, measures: Callable[[bool], Sequence[Measure]]) -> None:
    """The command line that every bench shares; `measures` is told whether the run is a quick one."""
    options = _options(title)
    chosen = _choose(measures(options.quick), options.only)
    rounds = options.rounds or (1 if options.quick else 5)
    conditions = _conditions(rounds)
    console = Console(width=None if sys.stdout.isatty() else 130)  # a log file has room for whole rows
    console.print(f"[bold]{title}[/]: {conditions}")
    began, verdicts, record = monotonic(), [], {}
    for measure in chosen:
        try:
            scores = play(measure, rounds, console)
        except KeyboardInterrupt:
            console.print(f"interrupted at {measure.name}")
            break
        for table in measure.tables:
            judged = judge(table, scores)
            console.print(_grid(table, scores, judged), "")
            verdicts += judged
        record[measure.name] = {score.contestant.name: _as_json(score) for score in scores}
    console.print(_summary(verdicts), f"{monotonic() - began:.0f} s in all")
    if options.json:
        document = {
            "title": title,
            "conditions": conditions,
            "measures": record,
            "verdicts": [*map(asdict, verdicts)],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def play(measure: Measure, rounds: int, console: Console) -> list[Score]:
    scores = [Score(contestant) for contestant in measure.contestants]
    with console.status("") as status:
        for number in range(rounds):
            first = number % len(scores)
            for score in scores[first:] + scores[:first]:
                if score.failure:
                    continue
                status.update(f"{measure.name}, round {number + 1} of {rounds}: {score.contestant.name}")
                try:
                    score.samples.append(score.contestant.turn())
                except TurnFailed as failed:
                    score.failure = str(failed)
    return scores


def judge(table: Table, scores: Sequence[Score]) -> list[Verdict]:
    found = {score.contestant.name: score.median(table.figure) for score in scores}
    ours = found[table.ours]
    verdicts = []
    for peer, factor in table.wanted.items():
        ratio = times_better(table, ours, found[peer])
        grade: Grade = "n/a" if ratio is None else "PASS" if ratio >= factor else "MISS"
        verdicts.append(Verdict(table.title, table.ours, peer, _times_wanted(factor), _times(ratio), grade))
    if table.below is not None:
        grade = "n/a" if ours is None else "PASS" if ours < table.below else "MISS"
        wanted = f"below {table.below:g} {table.unit}"
        verdicts.append(Verdict(table.title, table.ours, "", wanted, f"{_number(ours)} {table.unit}", grade))
    return verdicts


def times_better(table: Table, ours: float | None, peer: float | None) -> float | None:
    """Above 1 ours is ahead, whichever direction is the good one."""
    if not ours or not peer:
        return None
    return ours / peer if table.better == "more" else peer / ours


def _grid(table: Table, scores: Sequence[Score], verdicts: Sequence[Verdict]) -> Grid:
    """Losses stay in: the best is on top, whoever that is."""
    judged = {verdict.peer: verdict for verdict in verdicts}
    shown = [score for score in scores if score.contestant.name == table.ours or not score.contestant.ours]
    shown.sort(key=lambda score: _rank(table, score.median(table.figure)))
    ours = next(score.median(table.figure) for score in shown if score.contestant.ours)
    reasons = [f"n/a: {score.contestant.name}: {score.failure}" for score in shown if score.failure]
    grid = _plain_grid(table.title, "\n".join(filter(None, [table.note, *reasons])))
    for heading in ("", "one turn", table.unit, "range", "ours is", "wanted", ""):
        grid.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for score in shown:
        mine, rounds = score.contestant.ours, score.rounds(table.figure)
        verdict = judged.get("" if mine else score.contestant.name)
        grid.add_row(
            score.contestant.name,
            score.contestant.size,
            _number(median(rounds)) if rounds else "n/a",
            f"{_number(min(rounds))} to {_number(max(rounds))}" if rounds else "",
            "" if mine else _times(times_better(table, ours, score.median(table.figure))),
            verdict.wanted if verdict else "",
            _colored(verdict.grade) if verdict else "",
            style="bold" if mine else "",
        )
    return grid


def _rank(table: Table, value: float | None) -> float:
    if value is None:
        return float("inf")
    return -value if table.better == "more" else value


def _summary(verdicts: Sequence[Verdict]) -> Grid:
    counts = Counter(verdict.grade for verdict in verdicts)
    grid = _plain_grid(", ".join(f"{counts[grade]} {grade}" for grade in ("PASS", "MISS", "n/a")))
    for heading in ("what was wanted", "against", "wanted", "got", ""):
        grid.add_column(heading, no_wrap=True)
    for it in verdicts:
        grid.add_row(it.table, it.peer, it.wanted, it.got, _colored(it.grade))
    return grid


def _plain_grid(title: str, caption: str = "") -> Grid:
    return Grid(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD
    )


def _colored(grade: Grade) -> str:
    color = {"PASS": "green", "MISS": "red", "n/a": "yellow"}[grade]
    return f"[{color}]{grade}[/]"


def _number(value: float | None) -> str:
    """Three digits are what the noise leaves."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{_number(ratio)} x"


def _times_wanted(factor: float) -> str:
    if factor < 1:
        return f"within {1 / factor:g} x"
    return "ahead" if factor == 1 else f"{factor:g} x"


def _options(title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{title}: ours and the peers, in turns.")
    parser.add_argument("--rounds", type=int, metavar="N", help="5 unless told, 1 when quick")
    parser.add_argument("--quick", action="store_true", help="one round of few calls: does it work?")
    parser.add_argument("--only", action="append", metavar="NAME", help="this measure alone; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample and verdict there")
    return parser.parse_args()


def _choose(measures: Sequence[Measure], only: Sequence[str] | None) -> Sequence[Measure]:
    names = [measure.name for measure in measures]
    if unknown := set(only or ()) - set(names):
        sys.exit(f"no measure named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [measure for measure in measures if not only or measure.name in only]


def _conditions(rounds: int) -> str:
    return (
        f"median of {rounds} round{'s' if rounds > 1 else ''}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f} before we began, {platform.system()}, Python {platform.python_version()}"
    )


def _as_json(score: Score) -> dict[str, object]:
    if score.failure:
        return {"failure": score.failure}
    medians = {figure: score.median(figure) for figure in score.samples[0]}
    return {"size": score.contestant.size, "median": medians, "rounds": score.samples}
