"""
Renews leases from beside the functions that run under them, and lets go of those that it could not renew in time.

It is a step that is told the time, like the loops of the scheduler itself, so that a lost network and an hour of silence are a test of a millisecond.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from penstock.client.failures import Unreachable
from penstock.client.holds import ActiveLease, ActiveLeases
from penstock.core.refusals import NotFound, Refused, StaleDispatch, Unavailable
from penstock.http.wire import HeartbeatAnswer

__all__ = ["HeartbeatCalls", "Heartbeater"]

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
            if lease.cancelled and lease.lost:
                continue  # nobody may think that it goes on
            if self._due_at(lease) <= self._clock() and not self._beat_alone(lease):
                break  # nobody answers: the others would only wait for the same
        alive = [self._due_at(lease) for lease in held if lease.stop is None]
        soonest = min(alive, default=now + NEWS_EVERY)
        return max(soonest, now + (NEWS_EVERY / 5 if self._silent else 0.02))

    def beat_now(self, lease: ActiveLease) -> None:
        """What the function just saved is worth a request of its own."""
        if not lease.cancelled:
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
