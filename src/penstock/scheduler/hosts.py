"""
This host: its load, and its registration among the other hosts of its store.

`HostLoad` turns readings of the machine into the capacity and the quiet state by which rounds decide.
`HostRegistration` renews the host's row and reads whether an operator drained the host. In a store that no
other host shares it writes the row seldom: the lock on the file shows that this process lives, and an idle
scheduler need not write.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from importlib import metadata
from threading import Lock
from typing import Final, NamedTuple

from penstock.core.errors import BadIntent
from penstock.core.jobs.admission import Conditions
from penstock.core.jobs.load import Host, Quiet, Reading, busy, is_fresh, observe, reading_problems
from penstock.core.jobs.types import AddonId, Moment, Span
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import comes_later
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import LOST_FOR, RegisterHost, RemoveHost, Store, committed

MOST_SOURCES: Final = 200


class HostLoad:
    """
    The load of this host, as admission sees it. Readings come from the load sampler of this host or from an
    application over HTTP. They are kept in memory, and every round uses them.
    """

    def __init__(self, rules: SchedulerRules) -> None:
        self._rules = rules
        self.labels = frozenset(rules.labels)
        self._readings: dict[tuple[str, str], Reading] = {}
        self._quiet: Quiet | None = None
        self._lock = Lock()
        #: Whether the process is about to stop.
        self.draining = False
        #: Whether an operator drained this host.
        self.drained = False

    def report(self, reading: Reading) -> None:
        with self._lock:
            self._readings[reading.source, reading.name] = reading

    def report_application(
        self,
        source: AddonId,
        values: Mapping[str, float],
        now: Moment,
        ttl: Span | None = None,
        *,
        bound: bool = False,
    ) -> None:
        """
        Take an application's own readings. They count for `ttl`; None: as long as a measurement. `bound`: the
        token of the report is bound to that addon. Such readings make the machine NORMAL at worst: other
        addons keep half of the units, and jobs that need no quiet machine still start.
        """
        problems = list(reading_problems(values, ttl))
        if problems:
            raise BadIntent.of(*problems)
        with self._lock:
            senses = self._rules.senses
            kept = {k: r for k, r in self._readings.items() if not r.source or is_fresh(r, now, senses)}
            if len({r.source for r in kept.values()} | {source}) > MOST_SOURCES:
                raise BadIntent.of(("source", f"must be one of the {MOST_SOURCES} that report already"))
            reported = {
                (source, name): Reading(name, value, now, source, ttl, bound)
                for name, value in values.items()
            }
            self._readings = kept | reported

    def readings(self) -> list[Reading]:
        with self._lock:
            return list(self._readings.values())

    def in_state_for(self, now: Moment) -> Span | None:
        """For how long the host has been in its quiet state; None: the load is not measured."""
        if self._rules.capacity.fixed is not None:
            return None
        self.conditions(now)
        with self._lock:
            return 0 if self._quiet is None else max(0, now - self._quiet.since)

    def conditions(self, now: Moment) -> Conditions:
        """The capacity and the quiet state at a moment, by the fresh readings."""
        rules, draining = self._rules, self.draining or self.drained
        if rules.capacity.fixed is not None:
            # With a fixed capacity the load is not measured: the host counts as quiet for longer than a job
            # can ask.
            return Conditions(rules.capacity.fixed, streak=now, draining=draining, labels=self.labels)
        with self._lock:
            thresholds = rules.thresholds
            score = busy(self._readings.values(), now, rules.senses, thresholds)
            self._quiet = quiet = observe(self._quiet, score, now, thresholds)
        units, streak = rules.capacity.units(score.score), quiet.streak(now)
        return Conditions(units, quiet.state, streak, score, draining=draining, labels=self.labels)


def _installed() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+source"


VERSION: Final = _installed()


class Introduction(NamedTuple):
    """
    The facts with which a host registers. `instance`: an id that stays the same after a restart in the same
    place; empty: a random one for this process.
    """

    instance: str = ""
    url: str = ""


class HostRegistration:
    """
    Keeps this host's row in the store. `workers`: the kinds of jobs that present workers of this host ask
    for. New kinds are registered at once, so that other hosts leave such jobs to this one.
    """

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        machine: HostLoad,
        introduction: Introduction | None = None,
        *,
        workers: Callable[[Moment], frozenset[WorkerKinds]] = lambda _: frozenset(),
    ) -> None:
        introduction = introduction or Introduction()
        self._store, self._rules, self._machine, self._workers = store, rules, machine, workers
        self._registered: frozenset[WorkerKinds] = frozenset()
        # A SQLite file has one dispatching scheduler at a time, so all its schedulers are one instance.
        instance = (introduction.instance or secrets.token_hex(8)) if store.shared else "only"
        self._introduction = introduction._replace(instance=instance)
        self._started_at: Moment = 0
        self._beat_at: Moment = 0
        self._lasts = rules.lease_for if store.shared else LOST_FOR

    def join(self) -> None:
        """
        Register this host, before recovery touches dispatches of its name. DispatcherHeld: a host of this
        name is alive.
        """
        self._started_at = self._store.now()
        self._register(self._started_at)

    def set_url(self, url: str) -> None:
        """Register the URL, which the daemon knows only when it listens."""
        self._introduction = self._introduction._replace(url=url)
        self._register(self._store.now())

    def step(self, now: Moment) -> Moment:
        is_known = not self._store.shared or self._workers(now) <= self._registered
        if is_known and comes_later(self._beat_at, now, self._lasts // 3):
            host = self._rules.host
            self._machine.drained = any(h.draining for h in self._store.hosts() if h.host == host)
        else:
            self._register(now)
        return self._beat_at

    def prove(self) -> None:
        """Write this host's row now, for a health check: raises if the store cannot be written to."""
        if self._started_at:
            self._register(self._store.now())

    def leave(self) -> None:
        self._started_at = 0
        committed(self._store, RemoveHost(self._rules.host, self._introduction.instance))

    def _register(self, now: Moment) -> None:
        conditions, workers = self._machine.conditions(now), self._workers(now)
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
                    workers=tuple(workers),
                )
            ),
        )
        self._registered = workers
        self._machine.drained = registered.draining
        self._beat_at = now + self._lasts // 3
