"""
Which workers are present: those that claim in one step, and those that poll for reserved jobs (two steps).

A round leaves a job in line for a worker that claims it: a reservation would only hold its units until the next claim. A worker that polls
sees reserved jobs only, so where both kinds of workers are present the narrower request decides, and the poll on a tie: a claim without
filters must not hide every addon's jobs from the workers that poll for them. A claim takes reserved jobs as well, so a claiming worker
loses nothing by it.
"""

from __future__ import annotations

from threading import Lock
from typing import Final, NamedTuple

from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.types import OWN_TYPES, AddonId, Moment, Span

__all__ = ["FOR_EVER", "PresentWorker", "PullingWorkers", "WorkerKinds"]

FOR_EVER: Final[Moment] = 1 << 62


class WorkerKinds(NamedTuple):
    """What a worker can run. No addon: any. No types: any but our own, which only who names them knows how to run."""

    addon_id: AddonId | None = None
    job_types: frozenset[str] = frozenset()
    own: bool = False  # ours as well

    def fits(self, admission_class: AdmissionClass) -> bool:
        if self.addon_id not in (None, admission_class.addon_id):
            return False
        if self.job_types:
            return admission_class.job_type in self.job_types
        return self.own or not admission_class.job_type.startswith(OWN_TYPES)

    @property
    def narrowness(self) -> int:
        """How many filters the worker names."""
        return (self.addon_id is not None) + bool(self.job_types)


class PresentWorker(NamedTuple):
    """The workers present at one moment."""

    claiming: list[WorkerKinds]
    polling: list[WorkerKinds]

    def claims(self, admission_class: AdmissionClass) -> bool:
        """Whether such a job is left in line for a claim."""
        if not self.polling or admission_class.job_type.startswith(OWN_TYPES):  # the runner claims those
            return any(kinds.fits(admission_class) for kinds in self.claiming)
        return _narrowest(self.claiming, admission_class) > _narrowest(self.polling, admission_class)


def _narrowest(present: list[WorkerKinds], admission_class: AdmissionClass) -> int:
    return max((kinds.narrowness for kinds in present if kinds.fits(admission_class)), default=-1)


class PullingWorkers:
    def __init__(self) -> None:
        #: By request, until when its worker is expected to come again.
        self._claiming: dict[WorkerKinds, Moment] = {}
        self._polling: dict[WorkerKinds, Moment] = {}
        self._lock = Lock()

    def came(self, kinds: WorkerKinds, until: Moment) -> None:
        """A worker claims such jobs in one step."""
        with self._lock:
            self._claiming[kinds] = max(until, self._claiming.get(kinds, until))

    def polled(self, kinds: WorkerKinds, now: Moment = 0, *, until: Moment) -> bool:
        """A worker polls for such jobs. True: it is new, and a claiming worker may have kept jobs from it."""
        with self._lock:
            new = self._polling.get(kinds, 0) <= now
            self._polling[kinds] = max(until, self._polling.get(kinds, until))
            return new and any(over > now for over in self._claiming.values())

    def at(self, now: Moment) -> PresentWorker:
        with self._lock:
            self._claiming = {kinds: until for kinds, until in self._claiming.items() if until > now}
            self._polling = {kinds: until for kinds, until in self._polling.items() if until > now}
            return PresentWorker(list(self._claiming), list(self._polling))

    def last_came_at(self, admission_class: AdmissionClass, fetch_for: Span) -> Moment | None:
        with self._lock:
            fitting = [until for kinds, until in self._claiming.items() if kinds.fits(admission_class)]
        return max(fitting) - fetch_for if fitting else None
