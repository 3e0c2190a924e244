"""
This host's place among the others: it says again and again that it is there, with what it has, and hears whether it is to start nothing more.

Where nobody else can dispatch it is said seldom: the lock on the file knows the rest, and an idle scheduler need not write.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from penstock.core.jobs.load import Host
from penstock.core.jobs.types import SECOND, Moment, Span
from penstock.scheduler.clock import comes_later
from penstock.scheduler.host_load import HostLoad
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.version import VERSION
from penstock.stores.api import LOST_FOR, RegisterHost, RemoveHost, Store, committed

#: How long a drain that somebody asked for elsewhere may go unheard.
_LOOK: Final[Span] = 1 * SECOND


class Introduction(NamedTuple):
    """What a host says of itself. `instance`: the same for a restart in the same place; none: one that never comes again."""

    instance: str = ""
    url: str = ""


class HostRegistration:
    def __init__(
        self, store: Store, rules: SchedulerRules, machine: HostLoad, told: Introduction | None = None
    ) -> None:
        told = told or Introduction()
        self._store, self._rules, self._machine = store, rules, machine
        # Of a file there is one at a time, whatever it calls itself.
        instance = (told.instance or secrets.token_hex(8)) if store.shared else "only"
        self._told = told._replace(instance=instance)
        self._started_at: Moment = 0
        self._beat_at, self._look_at = 0, 0
        self._lasts = rules.lease_for if store.shared else LOST_FOR

    def join(self) -> None:
        """DispatcherHeld: another one that lives has this name. Nothing may be done with what runs under it before this is known."""
        self._started_at = self._store.now()
        self._greet(self._started_at)

    def tell(self, url: str) -> None:
        """Where it listens is known only when it does."""
        self._told = self._told._replace(url=url)
        self._greet(self._store.now())

    def step(self, now: Moment) -> Moment:
        if not comes_later(self._beat_at, now, self._lasts // 3):
            self._greet(now)
        elif not comes_later(self._look_at, now, _LOOK):
            self._look_at = now + _LOOK
            host = self._rules.host
            self._machine.drained = any(h.draining for h in self._store.hosts() if h.host == host)
        else:
            return self._look_at  # somebody rang, and it may have been for us
        return self._beat_at

    def prove(self) -> None:
        """Write this host's row now: a health check asks whether the store can be written to."""
        if self._started_at:
            self._greet(self._store.now())

    def leave(self) -> None:
        self._started_at = 0
        committed(self._store, RemoveHost(self._rules.host, self._told.instance))

    def _greet(self, now: Moment) -> None:
        conditions = self._machine.conditions(now)
        known = committed(
            self._store,
            RegisterHost(
                Host(
                    host=self._rules.host,
                    instance=self._told.instance,
                    capacity=conditions.capacity,
                    quiet=conditions.quiet,
                    labels=self._rules.labels,
                    version=VERSION,
                    url=self._told.url,
                    started_at=self._started_at,
                    seen_at=now,
                    until=now + self._lasts,
                )
            ),
        )
        self._machine.drained = known.draining
        self._beat_at = now + self._lasts // 3
        self._look_at = now + _LOOK
