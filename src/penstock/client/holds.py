"""
The leases that a worker holds: each knows until when it is safe, why it must end, and what its function said that nobody has been told yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from threading import Lock
from typing import NamedTuple

from penstock.client.context import LeaseFacts
from penstock.client.tenure import LeaseTimer, monotonic
from penstock.http.wire import HeartbeatAnswer

__all__ = ["ActiveLease", "ActiveLeases", "News"]


class News(NamedTuple):
    """What rides on the next heartbeat."""

    progress: float | None
    spent: float | None
    checkpoint: bytes | None

    def __bool__(self) -> bool:
        return any(part is not None for part in self)


NO_NEWS = News(None, None, None)


class ActiveLease:
    """The ties of a function that runs in a thread beside us. It looks at the clock itself: no thread of ours has to be in time for it."""

    def __init__(self, facts: LeaseFacts, timer: LeaseTimer, beat: Callable[[ActiveLease], None]) -> None:
        self.facts, self.timer = facts, timer
        #: Why this run must end, if it must. The first reason stays.
        self.stop: str | None = None
        #: The process that runs the function, and whether a heartbeat told it. A job of less than a second ends before.
        self.pid: int | None = os.getpid()
        self.pid_told, self.began_at = False, monotonic()
        self._beat, self._yielding, self._news, self._lock = beat, False, NO_NEWS, Lock()

    @property
    def lease_id(self) -> str:
        return self.facts.lease_id

    # what the function sees

    @property
    def cancelled(self) -> bool:
        if self.stop is None and monotonic() >= self.timer.at_risk_at:
            self.end("its lease could not be renewed in time")
        return self.stop is not None

    @property
    def yielding(self) -> bool:
        return self._yielding

    def progress(self, fraction: float) -> None:
        with self._lock:
            self._news = self._news._replace(progress=fraction)

    def spend(self, total: float) -> None:
        with self._lock:
            self._news = self._news._replace(spent=total)

    def save(self, checkpoint: bytes) -> None:
        """Told at once. If nobody answers it rides on the next heartbeat, for the run may well go on."""
        with self._lock:
            self._news = self._news._replace(checkpoint=checkpoint)
        self._beat(self)

    # what the worker does

    @property
    def over(self) -> bool:
        """The lease may be another's by now: nothing that this run did may be reported."""
        return monotonic() >= self.timer.over_at

    @property
    def lost(self) -> bool:
        """Ended by our own judgement rather than by the scheduler's word: its result does not count even if it comes."""
        return self.cancelled and self._lost

    _lost = False

    def end(self, reason: str, *, told: bool = False) -> None:
        if self.stop is None:
            self.stop, self._lost = reason, not told

    def ask_to_yield(self) -> None:
        self._yielding = True

    def take_news(self) -> News:
        with self._lock:
            news, self._news = self._news, NO_NEWS
        return news

    def put_back(self, news: News) -> None:
        """It was not heard. What has been said since is newer."""
        with self._lock:
            newer = {name: value for name, value in self._news._asdict().items() if value is not None}
            self._news = news._replace(**newer)

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    @property
    def owes_news(self) -> bool:
        """What must be told even if the run is over. How far it came is of no interest then."""
        return self.stop is None and (self._news.spent is not None or self._news.checkpoint is not None)

    def heard(self, answer: HeartbeatAnswer, sent_at: float) -> None:
        self.timer = self.timer.renewed(sent_at, answer.ttl_sec)
        if answer.yield_:
            self.ask_to_yield()
        if answer.cancel or (answer.stop is not None and not answer.yield_):
            self.end(f"the scheduler said {answer.stop or 'cancel'}", told=True)


class ActiveLeases:
    """All of them. Threads add, beat, report and remove."""

    def __init__(self) -> None:
        self._all: dict[str, ActiveLease] = {}
        self._lock = Lock()

    def add(self, lease: ActiveLease) -> None:
        with self._lock:
            self._all[lease.lease_id] = lease

    def remove(self, lease: ActiveLease) -> None:
        with self._lock:
            self._all.pop(lease.lease_id, None)

    def __iter__(self) -> Iterator[ActiveLease]:
        with self._lock:
            return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)
