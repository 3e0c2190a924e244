"""
Heartbeats, from beside the threads that work: a function that computes for an hour without looking up keeps its lease.

Also the way by which a cancel, a limit or a lost lease reaches the function. A notice of the store makes it look for runs that were told
to stop; functions shorter than `QUICK_SEC` end before anybody could tell them, and cost nothing here.
"""

from __future__ import annotations

import logging
import time
from threading import Event, Thread
from typing import Final

from penstock.core.errors import Unavailable
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND, Span
from penstock.library.attempt import JobAttempt
from penstock.library.job_runner import JobRunner
from penstock.stores.api import Store

log = logging.getLogger("penstock.library")

QUICK_SEC: Final = 0.1
PROGRESS_SEC: Final = 1.0


class Heartbeats:
    def __init__(self, store: Store, job_runner: JobRunner, lease_for: Span) -> None:
        self._store, self._job_runner, self._lease_for = store, job_runner, lease_for
        self._pause_sec = min(PROGRESS_SEC, lease_for / SECOND / 6)
        self._wakeup, self._stopping = Event(), Event()
        self._changed = False  # since somebody last looked for runs that were told to stop
        self._thread = Thread(target=self._loop, name="penstock-beats", daemon=True)

    def start(self) -> None:
        self._store.on_change(self.ring)
        self._thread.start()

    def ring(self) -> None:
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():  # a Ctrl-C may have come before its start
            self._thread.join()

    def _loop(self) -> None:
        quick = min(QUICK_SEC, self._pause_sec)
        while not self._stopping.is_set():
            self._changed |= self._wakeup.wait(quick if self._changed else self._pause_sec)
            self._wakeup.clear()
            try:
                self._round()
            except Unavailable as error:
                log.warning("leases cannot be renewed now: %s", error)
            except Exception:  # without heartbeats every run here is lost
                log.exception("a round of heartbeats failed; the next one comes")
            # However many notices come, a look every so often is enough.
            self._stopping.wait(quick)

    def _round(self) -> None:
        running = list(self._job_runner.running.values())
        since = time.monotonic() - QUICK_SEC
        long = [attempt for attempt in running if attempt.began < since]
        if self._changed and long:
            self._look(long)
        # Those that have just begun may have been told as well: they are looked at next time.
        self._changed = self._changed and len(long) < len(running)
        for attempt in long:
            try:
                self._renew(attempt)
            except Unavailable:
                raise
            except Exception:  # the others keep their leases
                log.exception("the lease of job %s cannot be renewed", attempt.facts.job_id)

    def _look(self, attempts: list[JobAttempt]) -> None:
        told = {d.dispatch_id: d.reason for d in self._store.live(phases=[DispatchPhase.ENDING])}
        for attempt in attempts:
            reason = told.get(attempt.facts.dispatch_id)
            if reason is not None and attempt.stop is None:
                attempt.stop = reason
                self._job_runner.executors.end(attempt)

    def _renew(self, attempt: JobAttempt) -> None:
        left = attempt.expires_at - self._store.now()
        # More than a whole lease: the clock was set back, and the store has moved the lease with it.
        due = left < self._lease_for * 2 // 3 or left > self._lease_for
        news = attempt.fresh_progress is not None or not attempt.pid_told
        fresh = news and left <= self._lease_for - PROGRESS_SEC * SECOND
        # One that was told to stop is not prolonged: it is asked about only when its time is over.
        if not attempt.lost and not (left <= 0 if attempt.stop is not None else due or fresh):
            return
        told = attempt.stop
        if attempt.lost or not attempt.beat():
            log.warning("%s of job %s has lost its lease", attempt.function.name, attempt.facts.job_id)
            self._job_runner.give_up(attempt)
        elif attempt.stop is not None and told is None:
            self._job_runner.executors.end(attempt)
