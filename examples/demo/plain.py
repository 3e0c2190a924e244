"""The demo as lines of text, for pipes, logs and terminals without rich."""

from __future__ import annotations

import sys
from typing import Any

from examples.demo.lab import IN_PROGRESS, Lab
from examples.demo.ledger import equation
from examples.demo.story import ACTS, Story


class PlainDisplay:
    interval = 0.2

    def __init__(self, lab: Lab, story: Story) -> None:
        self._lab = lab
        self._story = story
        self._told = 0
        self._next = 0.0

    def __enter__(self) -> None:
        _write("Penstock: a photo lab of three worker pools. Ctrl-C ends it.\n")
        _write("Each stage: calls in flight + pending + callers waiting.\n")

    def __exit__(self, *_: object) -> None:
        self._tell()

    def draw(self, snapshots: list[Any]) -> None:
        self._tell()
        elapsed = self._lab.diary.elapsed
        if elapsed >= self._next:
            self._next = elapsed + 1
            by_name = {now.name: now for now in snapshots}
            stages = "  ".join(_stage(by_name[pool.name]) for pool in self._lab.pools)
            act = ACTS[self._story.act - 1]
            _write(f"{elapsed:5.1f} s  {stages}  analysed {self._lab.photos.analysed}  [{act}]\n")

    def _tell(self) -> None:
        diary = self._lab.diary
        new = diary.count - self._told
        self._told += new
        for entry in list(diary.entries)[-new:] if new else ():
            _write(f"{entry.at:5.1f} s  * {entry.text}\n")

    def summarize(self, *, interrupted: bool) -> None:
        head, *rows = summary(self._lab)
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        _write("\n")
        for row in (head, ["-" * width for width in widths], *rows):
            first, *others = (
                cell.ljust(w) if n == 0 else cell.rjust(w)
                for n, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            _write("  ".join([first, *others]).rstrip() + "\n")
        _write("\n" + "\n".join(proof(self._lab, interrupted=interrupted)) + "\n")


def _stage(now: Any) -> str:
    return f"{now.name} {now.in_flight}+{now.pending_queue_depth}+{now.waiting_queue_depth}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(lab: Lab) -> list[list[str]]:
    """A head and one row for each stage, for the plain and the live display."""
    rows = [["stage", "accepted", "done", "canceled", "shed", "requeued", "crashes", "wait", "run"]]
    for pool in lab.pools:
        book, totals = lab.ledger[pool.name], pool.snapshot().totals
        counts = (book.accepted, book.done, book.canceled, book.shed, book.requeued, totals["crashed"])
        wait, run = book.waited / max(book.dispatched, 1), book.ran / max(book.done + book.failed, 1)
        times = [f"{seconds * 1000:,.0f} ms" for seconds in (wait, run)]
        rows.append([pool.name, *(f"{count:,}" for count in counts), *times])
    return rows


def proof(lab: Lab, *, interrupted: bool) -> list[str]:
    photos, ledger = lab.photos, lab.ledger.values()
    accepted = sum(book.accepted for book in ledger)
    calls = {
        name: sum(getattr(book, name) for book in ledger) for name in ("done", "failed", "canceled", "shed")
    }
    ends = {
        "analysed": photos.analysed,
        "failed": photos.failed,
        "canceled": photos.canceled.total(),
        "shed": photos.shed,
    }
    holds = all(book.balanced for book in ledger)
    lines = [
        equation(f"{photos.taken:,} photos taken", ends, holds=photos.balanced),
        equation(f"{accepted:,} calls accepted", calls, holds=holds),
        f"{photos.most_negatives} negatives in memory at most: {IN_PROGRESS} photos in progress, {lab.places} places",
    ]
    if lab.balanced:
        lines.append("Proof: nothing lost, nothing counted twice." + " (Interrupted.)" * interrupted)
    else:
        lines.append("The books do not balance. That is a bug: please report it.")
    return lines
