"""
The host as admission sees it: readings in, conditions out.

It is told readings by whoever takes them (the signals of this host, or an application over HTTP) and never takes one itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Final

from penstock.core.admission import Conditions
from penstock.core.quiet import TOLD, Quiet, QuietState, Reading, busy, is_fresh, observe
from penstock.core.refusals import BadIntent
from penstock.core.words import HOUR, SECOND, AddonId, Moment, Span
from penstock.engine.rules import SchedulerRules

__all__ = ["HostLoad"]

#: Readings are kept in memory and looked at in every round.
MOST_SOURCES: Final = 200


class HostLoad:
    def __init__(self, rules: SchedulerRules) -> None:
        self._rules = rules
        self._labels = frozenset(rules.labels)
        self._readings: dict[tuple[str, str], Reading] = {}
        self._quiet: Quiet | None = None
        self._lock = Lock()
        #: It is about to stop.
        self.draining = False
        #: Somebody wants nothing more to start on this host, until they say the opposite.
        self.drained = False

    def report(self, reading: Reading) -> None:
        with self._lock:
            self._readings[reading.source, reading.name] = reading

    def hear(
        self,
        source: AddonId,
        values: Mapping[str, float],
        now: Moment,
        ttl: Span | None = None,
        *,
        bound: bool = False,
    ) -> None:
        """
        An application's own figures. It counts as long as it goes on telling them, and is forgotten when it stops. `bound`: told with a token
        of that addon alone. Such figures make the machine NORMAL at worst: other addons keep half of the units and what needs no quiet.
        """
        problems = [*_problems(values), *_ttl_problems(ttl)]
        if problems:
            first = problems[0]
            raise BadIntent(f"{first['field']} {first['message']}", problems=problems)
        with self._lock:
            senses = self._rules.senses
            kept = {k: r for k, r in self._readings.items() if not r.source or is_fresh(r, now, senses)}
            if len({r.source for r in kept.values()} | {source}) > MOST_SOURCES:
                raise BadIntent(
                    f"source must be one of the {MOST_SOURCES} that report already",
                    problems=[{"field": "source", "message": "too many applications report at once"}],
                )
            told = {
                (source, name): Reading(name, value, now, source, ttl, bound)
                for name, value in values.items()
            }
            self._readings = kept | told

    def readings(self) -> list[Reading]:
        with self._lock:
            return list(self._readings.values())

    def conditions(self, now: Moment) -> Conditions:
        capacity = self._rules.capacity
        if capacity.fixed is not None:
            # Nobody measures: always quiet, and quiet for as long as anybody could ask.
            return Conditions(
                capacity.fixed,
                QuietState.QUIET,
                streak=now,
                draining=self.draining or self.drained,
                labels=self._labels,
            )
        with self._lock:
            thresholds = self._rules.thresholds
            score = busy(self._readings.values(), now, self._rules.senses, thresholds.clearly_normal)
            self._quiet = quiet = observe(self._quiet, score, now, thresholds)
        units = capacity.units(score.score)
        return Conditions(
            units,
            quiet.state,
            quiet.streak(now),
            score,
            draining=self.draining or self.drained,
            labels=self._labels,
        )


def _problems(values: Mapping[str, float]) -> Iterator[dict[str, str]]:
    for name, value in values.items():
        if name not in TOLD:
            yield {"field": name, "message": f"is not a signal that applications report: {', '.join(TOLD)}"}
        elif not (math.isfinite(value) and value >= 0):
            yield {"field": name, "message": "must be a number of 0 or more"}
    if not values:
        yield {"field": "values", "message": f"must name at least one of {', '.join(TOLD)}"}


def _ttl_problems(ttl: Span | None) -> Iterator[dict[str, str]]:
    if ttl is not None and not SECOND <= ttl <= HOUR:
        yield {"field": "ttl_sec", "message": "must be 1..3600"}
