"""
The registration of this host among the other hosts of its store.

`HostRegistration` renews the host's row with what the host has, and reads whether an operator drained it. A
store that no other host shares gets the row seldom: the lock on the file shows that this process lives, and
an idle scheduler need not write.
"""

from __future__ import annotations

import secrets
from importlib import metadata
from typing import Final, NamedTuple

from penstock.core.jobs.load import Host
from penstock.core.jobs.types import Moment
from penstock.scheduler.dispatcher import HostLoad
from penstock.scheduler.driver import comes_later
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import LOST_FOR, RegisterHost, RemoveHost, Store, committed


def _installed() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+source"


VERSION: Final = _installed()


class Introduction(NamedTuple):
    """
    How a host registers. `instance`: the same after a restart in the same place; empty: it never comes again.
    """

    instance: str = ""
    url: str = ""


class HostRegistration:
    def __init__(
        self, store: Store, rules: SchedulerRules, machine: HostLoad, introduction: Introduction | None = None
    ) -> None:
        introduction = introduction or Introduction()
        self._store, self._rules, self._machine = store, rules, machine
        # A file has one scheduler at a time, whatever name it uses.
        instance = (introduction.instance or secrets.token_hex(8)) if store.shared else "only"
        self._introduction = introduction._replace(instance=instance)
        self._started_at: Moment = 0
        self._beat_at: Moment = 0
        self._lasts = rules.lease_for if store.shared else LOST_FOR

    def join(self) -> None:
        """
        Register before anything is done with the runs of this host name. DispatcherHeld: a living host has
        the name.
        """
        self._started_at = self._store.now()
        self._register(self._started_at)

    def set_url(self, url: str) -> None:
        """The daemon knows its address only when it listens."""
        self._introduction = self._introduction._replace(url=url)
        self._register(self._store.now())

    def step(self, now: Moment) -> Moment:
        if comes_later(self._beat_at, now, self._lasts // 3):
            host = self._rules.host
            self._machine.drained = any(h.draining for h in self._store.hosts() if h.host == host)
        else:
            self._register(now)
        return self._beat_at

    def prove(self) -> None:
        """Write this host's row now: a health check asks whether the store can be written to."""
        if self._started_at:
            self._register(self._store.now())

    def leave(self) -> None:
        self._started_at = 0
        committed(self._store, RemoveHost(self._rules.host, self._introduction.instance))

    def _register(self, now: Moment) -> None:
        conditions = self._machine.conditions(now)
        registered = committed(
            self._store,
            RegisterHost(
                Host(
                    host=self._rules.host,
                    instance=self._introduction.instance,
                    capacity=conditions.capacity,
                    quiet=conditions.quiet,
                    labels=self._rules.labels,
                    version=VERSION,
                    url=self._introduction.url,
                    started_at=self._started_at,
                    seen_at=now,
                    until=now + self._lasts,
                )
            ),
        )
        self._machine.drained = registered.draining
        self._beat_at = now + self._lasts // 3
