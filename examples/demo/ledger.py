"""The counts of the demo: calls accepted, calls ended, and whether the two are equal."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock import Call, QueueHooks
from penstock.core.calls.ticket import CancelPhase
from penstock.pools.timers import clock


class Entry(NamedTuple):
    at: float
    mood: str  # "plain", "good", "warn" or "bad"
    text: str


class Diary:
    """The messages of the demo. Hooks of three pools write them, each from its own thread."""

    def __init__(self) -> None:
        self.began = clock()
        self.entries: deque[Entry] = deque(maxlen=500)
        self.count = 0  # of all entries ever, also of those that `entries` has forgotten

    @property
    def elapsed(self) -> float:
        return clock() - self.began

    def say(self, text: str, mood: str = "plain") -> None:
        self.entries.append(Entry(self.elapsed, mood, text))
        self.count += 1


class StageBook(QueueHooks):
    """
    Counts the calls of one pool from its hooks. The pool counts as well (`snapshot().totals`); these counts check it
    independently.
    """

    def __init__(self, name: str, diary: Diary) -> None:
        self.name = name
        self._diary = diary
        self.accepted = self.done = self.failed = self.canceled = self.shed = 0
        self.turned_away = 0  # never accepted: their callers were canceled while they waited
        self.requeued = 0
        self.dispatched = 0
        self.waited = self.ran = 0.0

    def on_queued(self, _: Call[Any]) -> None:
        self.accepted += 1

    def on_dispatch(self, call: Call[Any]) -> None:
        self.dispatched += 1
        self.waited += call.last_wait

    def on_settle(self, call: Call[Any]) -> None:
        self.ran += call.ran_for
        if call.exception() is None:
            self.done += 1
        else:
            self.failed += 1

    def on_cancel(self, _: Call[Any], phase: CancelPhase) -> None:
        if phase is CancelPhase.WAITING:
            self.turned_away += 1
        else:
            self.canceled += 1

    def on_reject(self, _: Call[Any]) -> None:
        self.shed += 1

    def on_requeue(self, _: Call[Any]) -> None:
        self.requeued += 1
        self._diary.say(f"{self.name}: a call is back at the queue's front", "warn")

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.canceled + self.shed

    @property
    def balanced(self) -> bool:
        return self.accepted == self.ended


@dataclass
class PhotoBook:
    """Counts whole photos, in the code that makes the calls."""

    taken: int = 0
    analysed: int = 0
    shed: int = 0
    failed: int = 0
    retried: int = 0
    canceled: Counter[str] = field(default_factory=Counter)  # by phase
    negatives: int = 0  # made so far
    most_negatives: int = 0  # in memory at once

    @property
    def balanced(self) -> bool:
        return self.taken == self.analysed + self.shed + self.failed + self.canceled.total()


def equation(total: str, parts: dict[str, int], *, holds: bool) -> str:
    """`7 calls accepted = 5 done + 2 canceled`; failed calls are shown only if there are any."""
    terms = [f"{number:,} {name}" for name, number in parts.items() if number or name != "failed"]
    return f"{total} {'=' if holds else '≠'} {' + '.join(terms)}"
