"""How long a worker may believe that a lease is its own.

By its own clock alone, and counted from the moment it SENT the last request that was answered well: the scheduler counts from when
that request arrived, which was later, so a worker that keeps to this has always let go before its lease can go to another.

The leases that a worker holds: each knows until when it is safe, why it must end, and what its function said that nobody has been told yet.

Renews leases from beside the functions that run under them, and lets go of those that it could not renew in time.

It is a step that is told the time, like the loops of the scheduler itself, so that a lost network and an hour of silence are a test of a millisecond.
"""

#: Of the lease: after so much without a renewal the run is told to stop, so that it is gone when the lease is over.
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

from penstock.core.errors import JobStopped, NotFound, Refused, StaleDispatch, Unavailable, Unreachable
from penstock.core.jobs.types import Money
from penstock.wire import HeartbeatAnswer
from penstock.work.context import JobFacts
from penstock.work.executors import InvokedFunction

AT_RISK: Final = 0.66
#: Of the lease: so often it is renewed. One lost heartbeat does no harm.
BEAT: Final = 0.3


@dataclass(frozen=True, slots=True)
class LeaseTimer:
    sent_at: float
    ttl: float

    def renewed(self, sent_at: float, ttl: float) -> LeaseTimer:
        """Answers may overtake each other: the latest to be sent counts."""
        return LeaseTimer(sent_at, ttl) if sent_at > self.sent_at else self

    @property
    def beat_at(self) -> float:
        return self.sent_at + self.ttl * BEAT

    @property
    def at_risk_at(self) -> float:
        return self.sent_at + self.ttl * AT_RISK

    @property
    def over_at(self) -> float:
        return self.sent_at + self.ttl


def monotonic() -> float:
    """Counts through a suspended machine too: its leases went on expiring elsewhere."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class News(NamedTuple):
    """What rides on the next heartbeat."""

    progress: float | None
    spent: float | None
    checkpoint: bytes | None

    def __bool__(self) -> bool:
        return any(part is not None for part in self)


NO_NEWS = News(None, None, None)


class ActiveLease:
    """
    The channel of a function that runs in a thread of the worker. It looks at the clock itself: it does not depend on
    a heartbeat that comes in time.
    """

    given_up = False  # for an executor: a lost attempt in a thread keeps its thread

    def __init__(
        self,
        facts: JobFacts,
        timer: LeaseTimer,
        beat: Callable[[ActiveLease], None],
        function: InvokedFunction,
    ) -> None:
        self.facts, self.timer, self.function = facts, timer, function
        #: By which the executor can end it.
        self.ended_by: Any = None
        self.end_sent = False
        #: Why this run must end, if it must. The first reason stays.
        self.stop: str | None = None
        #: Whether a heartbeat told the process. A job of less than a second ends before.
        self.pid_told, self.began_at = False, monotonic()
        self._beat, self._yielding, self._news, self._lock = beat, False, NO_NEWS, Lock()

    @property
    def lease_id(self) -> str:
        return self.facts.dispatch_id

    @property
    def pid(self) -> int | None:
        """The process that runs the function: this one, or a worker process."""
        return self.ended_by.pid if hasattr(self.ended_by, "pid") else os.getpid()

    # what the function sees

    @property
    def canceled(self) -> bool:
        if self.stop is None and monotonic() >= self.timer.at_risk_at:
            self.end("its lease could not be renewed in time")
        return self.stop is not None

    @property
    def yielding(self) -> bool:
        return self._yielding

    def progress(self, fraction: float) -> None:
        with self._lock:
            self._news = self._news._replace(progress=fraction)

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        with self._lock:
            self._news = self._news._replace(spent=total / 1_000_000)

    def save_checkpoint(self, text: str) -> None:
        """Sent at once. If the scheduler does not answer, the next heartbeat carries it, for the attempt may go on."""
        if not self.canceled:
            with self._lock:
                self._news = self._news._replace(checkpoint=text.encode())
            self._beat(self)
        if self.lost:
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def log_handler(self) -> None:
        return None

    # what the worker does

    @property
    def over(self) -> bool:
        """The lease may be another's by now: nothing that this run did may be reported."""
        return monotonic() >= self.timer.over_at

    @property
    def lost(self) -> bool:
        """Ended by our own judgement rather than by the scheduler's word: its result does not count even if it comes."""
        return self.canceled and self._lost

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


log = logging.getLogger("penstock.worker")

#: News are worth a beat of their own, but not more often than this, in seconds.
NEWS_EVERY: Final = 1.0
#: Of the lease: so long a beat may take. Two can be lost before the lease is at risk.
PATIENCE: Final = 0.15


class HeartbeatCalls(Protocol):
    def heartbeat(
        self,
        lease_id: str,
        *,
        progress: float | None = None,
        spent: float | None = None,
        checkpoint: bytes | None = None,
        pid: int | None = None,
        timeout: float | None = None,
    ) -> HeartbeatAnswer: ...


class Heartbeater:
    def __init__(self, client: HeartbeatCalls, leases: ActiveLeases, clock: Callable[[], float]) -> None:
        self._client, self._leases, self._clock = client, leases, clock
        self._told_at: dict[str, float] = {}
        self._silent = False

    def step(self, now: float) -> float:
        """Beat what is due; answer when to be asked again."""
        held = list(self._leases)
        self._told_at = {lease.lease_id: self._told_at.get(lease.lease_id, 0.0) for lease in held}
        for lease in held:
            if lease.canceled and lease.lost:
                continue  # nobody may think that it goes on
            if self._due_at(lease) <= self._clock() and not self._beat_alone(lease):
                break  # nobody answers: the others would only wait for the same
        alive = [self._due_at(lease) for lease in held if lease.stop is None]
        soonest = min(alive, default=now + NEWS_EVERY)
        return max(soonest, now + (NEWS_EVERY / 5 if self._silent else 0.02))

    def beat_now(self, lease: ActiveLease) -> None:
        """What the function just saved is worth a request of its own."""
        if not lease.canceled:
            self._beat(lease)

    def confirm(self, lease: ActiveLease) -> bool:
        """Out of turn: before anything runs under a lease that is not quite new, and after the end, for what was not told yet."""
        return self._beat(lease)

    def _beat_alone(self, lease: ActiveLease) -> bool:
        try:
            return self._beat(lease)
        except Exception:  # the others keep their leases
            log.exception("the lease of job %s cannot be renewed", lease.facts.job_id)
            return True

    def _due_at(self, lease: ActiveLease) -> float:
        due, told_at = lease.timer.beat_at, self._told_at.get(lease.lease_id, 0.0)
        if lease.has_news:
            return min(due, told_at + NEWS_EVERY)
        return due if lease.pid_told else min(due, max(told_at, lease.began_at) + NEWS_EVERY)

    def _beat(self, lease: ActiveLease) -> bool:
        news, sent_at = lease.take_news(), self._clock()
        self._told_at[lease.lease_id] = sent_at
        try:
            answer = self._client.heartbeat(
                lease.lease_id,
                **news._asdict(),
                pid=None if lease.pid_told else lease.pid,
                timeout=max(0.2, lease.timer.ttl * PATIENCE),
            )
        except (StaleDispatch, NotFound) as error:
            log.warning("lease %s is no longer ours: %s", lease.lease_id, error)
            lease.end("its lease was refused")
        except (Unreachable, Unavailable) as error:
            lease.put_back(news)
            if not self._silent:
                log.warning("heartbeats are not answered: %s", error)
            self._silent = True
            return False
        except Refused as error:
            # Not about the lease but about the news: without them the lease goes on.
            log.error("the scheduler did not take what job %s told: %s", lease.facts.job_id, error)  # noqa: TRY400  # a line, not a crash
        else:
            lease.heard(answer, sent_at)
        lease.pid_told = True
        if self._silent:
            log.info("heartbeats are answered again")
        self._silent = False
        return True
