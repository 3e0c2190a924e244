"""
The host as admission sees it: readings in, conditions out.

It is told readings by whoever takes them (the signals of this host, or an application over HTTP) and never takes one itself.
"""

from __future__ import annotations

from threading import Lock

from penstock.core.admission import Conditions
from penstock.core.quiet import Quiet, QuietState, Reading, busy, observe
from penstock.core.words import Moment
from penstock.engine.rules import Rules

__all__ = ["Machine"]


class Machine:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._readings: dict[str, Reading] = {}
        self._quiet: Quiet | None = None
        self._lock = Lock()
        self.draining = False

    def report(self, reading: Reading) -> None:
        with self._lock:
            self._readings[reading.name] = reading

    def readings(self) -> list[Reading]:
        with self._lock:
            return list(self._readings.values())

    def conditions(self, now: Moment) -> Conditions:
        capacity = self._rules.capacity
        if capacity.fixed is not None:
            # Nobody measures: always quiet, and quiet for as long as anybody could ask.
            return Conditions(capacity.fixed, QuietState.QUIET, streak=now, draining=self.draining)
        with self._lock:
            score = busy(self._readings.values(), now, self._rules.senses)
            self._quiet = quiet = observe(self._quiet, score, now, self._rules.thresholds)
        units = capacity.units(score.score)
        return Conditions(units, quiet.state, quiet.streak(now), score, draining=self.draining)
