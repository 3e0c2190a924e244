"""
The workers of this process as one part of the scheduler: `step` settles what has ended and claims what may start.

One step is one settlement of all that ended since the last and one claim of all that there is room for, so under load each commit
carries many jobs, while the functions of the last batch run. Where functions are short, some more are claimed than threads are free (`_ahead`):
else the threads would stand still during every commit. What then waits too long for a thread goes back to the queue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Condition
from typing import Any, Final

from penstock.core.landing import End
from penstock.core.refusals import NotFound, StaleDispatch
from penstock.core.words import SECOND, DispatchId, Moment, Span
from penstock.engine.desk import Desk
from penstock.engine.dispatcher import Kinds
from penstock.jobs.attempt import Attempt
from penstock.jobs.function import JobFunction
from penstock.jobs.hands import Hands
from penstock.jobs.outcomes import Outcome

__all__ = ["Crew"]

log = logging.getLogger("penstock.jobs")

#: So much work may wait for a thread; longer than a commit takes, shorter than anybody notices.
AHEAD_SEC: Final = 0.02
MOST_AHEAD: Final = 200
STALE_SEC: Final = 1.0


class Crew:
    def __init__(
        self,
        functions: Mapping[str, JobFunction[..., Any, Any]],
        hands: Callable[[Callable[[Attempt], bool], Callable[[Attempt, Outcome], None]], Hands],
        *,
        workers: int,
        name: str,
        now: Callable[[], Moment],
        tick: Span = 2 * SECOND,
    ) -> None:
        self._functions, self._workers, self._name, self._now, self._tick = (
            functions,
            workers,
            name,
            now,
            tick,
        )
        self._desk: Desk | None = None
        self._ring: Callable[[], None] = lambda: None
        #: Claimed, and not begun. Whoever pops one has it: the thread that runs it, or the one that gives it back.
        self._waiting: dict[DispatchId, Attempt] = {}
        self.running: dict[DispatchId, Attempt] = {}
        self._over: deque[tuple[Attempt, Outcome]] = deque()
        self._mean_sec = AHEAD_SEC  # of a run, lately
        self._closing = False
        self._rung = False
        self._idle = Condition()
        self.hands = hands(self._begin, self._finish)

    def join(self, desk: Desk, ring: Callable[[], None]) -> None:
        self._desk, self._ring = desk, ring

    # what the driver asks

    def step(self, now: Moment) -> Moment:
        self._rung = False
        self.settle()
        self._give_back_stale()
        if not self._closing:
            self._claim()
        return now + self._tick

    def settle(self) -> None:
        """All that has ended. If the store fails they stay, and are told with the next step."""
        assert self._desk is not None
        while self._over:
            attempt, outcome = self._over[0]
            try:
                self._desk.end(
                    attempt.facts.dispatch_id, outcome.end, result=outcome.result, error=outcome.error
                )
            except (StaleDispatch, NotFound) as error:
                log.warning(
                    "what %s of job %s came to is refused: %s",
                    attempt.function.name,
                    attempt.facts.job_id,
                    error,
                )
            self._over.popleft()
            self._gone(attempt)

    def _gone(self, attempt: Attempt) -> None:
        self.running.pop(attempt.facts.dispatch_id, None)
        if self._closing:
            with self._idle:
                self._idle.notify_all()

    def _claim(self) -> None:
        assert self._desk is not None
        kinds = Kinds(job_types=frozenset(self._functions))
        room = self._workers - len(self.running) - len(self._waiting) + self._ahead()
        if room <= 0 or not kinds.job_types:
            return
        for claimed in self._desk.claim(kinds, room, self._name):
            function = self._functions[claimed.job.intent.job_type]
            attempt = Attempt(claimed, function, self._desk, self._now)
            self._waiting[attempt.facts.dispatch_id] = attempt
            self.hands.start(attempt)

    def _ahead(self) -> int:
        if self._mean_sec >= AHEAD_SEC:
            return 0
        return min(MOST_AHEAD, int(self.hands.ahead * self._workers * AHEAD_SEC / max(self._mean_sec, 1e-6)))

    def _give_back_stale(self) -> None:
        if self._waiting:
            since = self._now() - int(STALE_SEC * SECOND)
            self._give_back([a for a in list(self._waiting.values()) if a.claimed_at < since])

    def _give_back(self, attempts: list[Attempt]) -> None:
        assert self._desk is not None
        for attempt in attempts:
            if self._waiting.pop(attempt.facts.dispatch_id, None) is not None:
                try:
                    self._desk.end(attempt.facts.dispatch_id, End.RELEASED)
                except (StaleDispatch, NotFound):
                    continue

    # what the hands tell, from their own threads

    def _begin(self, attempt: Attempt) -> bool:
        if self._waiting.pop(attempt.facts.dispatch_id, None) is None:
            return False
        attempt.began = time.monotonic()
        self.running[attempt.facts.dispatch_id] = attempt
        return True

    def give_up(self, attempt: Attempt) -> None:
        """Its lease is over. What it does now counts for nothing, and its units are somebody else's."""
        self.running.pop(attempt.facts.dispatch_id, None)
        self.hands.end(attempt)
        self.hands.give_up(attempt)

    def _finish(self, attempt: Attempt, outcome: Outcome) -> None:
        ran = time.monotonic() - attempt.began
        self._mean_sec += (ran - self._mean_sec) / 16
        self._over.append((attempt, outcome))
        if not self._rung:
            self._rung = True
            self._ring()

    # stopping

    def drain(self, timeout: float) -> None:
        """Take nothing more, ask what runs to yield, and wait for it, while the driver goes on settling."""
        self._closing = True
        until = time.monotonic() + timeout
        while True:
            # Again and again: a claim that was under way brings more.
            self._give_back(list(self._waiting.values()))
            for attempt in list(self.running.values()):
                attempt.yielding = True
            self.hands.ask_to_yield()
            left = until - time.monotonic()
            if left <= 0 or not (self.running or self._waiting):
                return
            with self._idle:
                self._idle.wait(min(left, 0.05))

    def close(self, wait: float) -> None:
        """With the driver gone. What has ended is settled; what has not is ended where that is possible, and put back in any case."""
        assert self._desk is not None
        self._give_back(list(self._waiting.values()))
        self.settle()
        for attempt in list(self.running.values()):
            attempt.lost = True
        self.hands.close(wait=wait)
        self.settle()
        for attempt in list(self.running.values()):
            try:
                self._desk.end(attempt.facts.dispatch_id, End.GRACEFUL_SHUTDOWN)
            except (StaleDispatch, NotFound):
                continue
            log.warning(
                "%s did not stop in time; job %s is back in the queue",
                attempt.function.name,
                attempt.facts.job_id,
            )
