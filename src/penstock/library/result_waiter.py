"""
Who waits for which job, and the one thread that looks for them.

It is woken by the store's change notice, of this process or of the one that dispatches, and looks only at jobs that somebody
waits for. Under load a notice comes with every commit, so it rests twice as long as each look took: waiting then costs a third of one core at
most, however many wait. The slow poll behind it is for notices that were lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

from penstock.core.errors import NotFound, Unavailable
from penstock.core.jobs.job import Dispatch, Job, dispatch_id_of
from penstock.core.jobs.states import SETTLED
from penstock.core.jobs.types import JobId
from penstock.stores.api import Store

log = logging.getLogger("penstock.library")

POLL_SEC: Final = 1.0


class Ending(NamedTuple):
    """`last`: the attempt that ended it; None if it ended in the queue."""

    job: Job
    last: Dispatch | None


class ResultWaiter:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[JobId, list[Future[Ending]]] = {}
        self._lock, self._wakeup = Lock(), Event()
        self._thread: Thread | None = None
        self._closed = False

    def ending(self, job_id: JobId) -> Ending | None:
        job = self._store.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        return self._ended(job)

    def watch(self, job_id: JobId) -> Future[Ending]:
        waiting: Future[Ending] = Future()
        with self._lock:
            self._waiting.setdefault(job_id, []).append(waiting)
            if self._thread is None:
                self._store.on_change(self.ring)
                self._thread = Thread(target=self._loop, name="penstock-waits", daemon=True)
                self._thread.start()
        self._wakeup.set()
        return waiting

    def forget(self, job_id: JobId, waiting: Future[Ending]) -> None:
        with self._lock:
            crowd = self._waiting.get(job_id, [])
            if waiting in crowd:
                crowd.remove(waiting)
            if not crowd:
                self._waiting.pop(job_id, None)

    def ring(self) -> None:
        if self._waiting:
            self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._closed:
            if self._waiting:
                self._store.listen()
            self._wakeup.wait(POLL_SEC if self._waiting else None)
            self._wakeup.clear()
            began = time.perf_counter()
            self._look(list(self._waiting))
            time.sleep(min(POLL_SEC, 2 * (time.perf_counter() - began)) if self._waiting else 0)

    def _look(self, job_ids: Sequence[JobId]) -> None:
        try:
            jobs = {job.job_id: job for job in self._store.jobs(job_ids)}
        except Unavailable as error:
            log.warning("cannot look for jobs that are waited for: %s", error)
            return  # the disk may come back; whoever cannot wait has a timeout
        for job_id in job_ids:
            if job_id not in jobs:
                self._settle(job_id, NotFound(f"job {job_id} has been forgotten", job_id=job_id))
            elif ending := self._ended(jobs[job_id]):
                self._settle(job_id, ending)

    def _ended(self, job: Job) -> Ending | None:
        if job.state not in SETTLED:
            return None
        last = self._store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
        # A job may end after its last attempt did: in the queue again, it was canceled, or its deadline passed.
        return Ending(job, last if last is not None and last.ended_at == job.ended_at else None)

    def _settle(self, job_id: JobId, ending: Ending | NotFound) -> None:
        with self._lock:
            crowd = self._waiting.pop(job_id, [])
        for waiting in crowd:
            if not waiting.set_running_or_notify_cancel():
                continue
            if isinstance(ending, Ending):
                waiting.set_result(ending)
            else:
                waiting.set_exception(ending)
