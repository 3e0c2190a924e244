"""
The learner: reads the trail with a cursor of its own, and keeps what it learns about job types in the store.

It runs beside the driver, every few seconds and only after a commit, and reads a bounded number of events and
narrow rows of jobs: a job that is submitted, started or completed waits for none of it. Where more happened
than it reads in one step, it skips to the newest events; those count for the skipped ones where it counts.

Several hosts share one cursor, by compare-and-set. A host that sees it moved takes over what was learned and
reads no events itself, unless it has something of its own to add. So one host does the work, and another goes
on when that one stops.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Final

from penstock.core.jobs.job import ENDS, Event, EventKind
from penstock.core.jobs.learning import Knowledge, ObservedJob, TypeStats, decode, encode, type_stats
from penstock.core.jobs.types import SECOND, DispatchId, JobId, Moment, Span
from penstock.stores.api import Learn, Store, committed

#: How often the trail is read.
EVERY: Final[Span] = 5 * SECOND
#: The most events of one step: some hundredths of a second of work.
MOST_EVENTS: Final = 1_000


class Learner:
    """One for each scheduler service. `step` alone changes what `knowledge` returns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed, self._lock = True, Lock()
        self._upto: int | None = None  # None: nothing was read from the store yet, or it is out of date
        self._read_at: Moment = 0
        self._working = Knowledge()
        self._peaks: deque[tuple[JobId, int]] = deque(maxlen=MOST_EVENTS)

    def notice(self) -> None:
        """Something was committed. From any thread; never blocks."""
        self._changed = True

    def saw_peak(self, job_id: JobId, memory: int) -> None:
        """The peak memory of a run that has ended, in bytes. From any thread; never blocks."""
        self._peaks.append((job_id, memory))

    def step(self, now: Moment) -> Moment:
        with self._lock:
            if self._changed or self._peaks:
                self._changed = False
                self._learn(now)
        return now + EVERY

    def knowledge(self) -> Knowledge:
        """What is known now: at most `EVERY` old also in a process that learns nothing itself."""
        with self._lock:
            now = self._store.now()
            if self._upto is None or not 0 <= now - self._read_at < EVERY:
                self._take_over(now)
            return self._working

    def stats(self) -> list[TypeStats]:
        """By addon, type and size."""
        knowledge, now = self.knowledge(), self._store.now()
        return [type_stats(name, record, now) for name, record in sorted(knowledge.records.items())]

    def _take_over(self, now: Moment) -> bool:
        """Read what was learned, if another process has learned since. Returns whether that was so."""
        self._read_at = now
        if self._upto is not None and self._store.learned_upto() == self._upto:
            return False
        before, (self._upto, records) = self._upto, self._store.learned()
        decoded = {name: decode(text) for name, text in records.items()}
        self._working = Knowledge({name: record for name, record in decoded.items() if record is not None})
        return before is not None

    def _learn(self, now: Moment) -> None:
        if self._take_over(now) and not self._peaks:
            self._changed = True  # perhaps that host stops: look again
            return
        assert self._upto is not None
        newest = self._store.newest()
        behind = newest - self._upto if newest >= self._upto else newest  # below: a backup was restored
        if not behind and not self._peaks:
            return
        start = newest - min(behind, MOST_EVENTS)
        events = self._store.events(start, MOST_EVENTS)
        upto = events[-1].seq if events else newest
        self._observe(events, max(1.0, behind / MOST_EVENTS))
        self._changed |= upto < newest
        peaks = len(self._peaks)
        self._observe_peaks(peaks, now)
        gone = self._working.drop_oldest()
        changed = {name: encode(self._working.records[name]) for name in sorted(self._working.changed)}
        if committed(self._store, Learn(self._upto, upto, changed, gone)):
            self._upto = upto
            self._working.changed.clear()
            for _ in range(peaks):
                self._peaks.popleft()
        else:  # another host was first: what this one learned from the same events is dropped
            self._upto, self._changed = None, True

    def _observe(self, events: list[Event], weight: float) -> None:
        """`weight`: how many events each of them stands for."""
        arrived = {e.job_id for e in events if e.kind is EventKind.SUBMITTED and e.job_id is not None}
        ended = {e.dispatch_id for e in events if e.kind in ENDS and e.dispatch_id is not None}
        wanted = arrived | {JobId(dispatch_id.rpartition(".")[0]) for dispatch_id in ended}
        for job in sorted(self._store.observed_jobs(sorted(wanted)), key=_order):
            if job.job_id in arrived:
                self._working.saw_arrival(job, weight)
            if DispatchId(f"{job.job_id}.{job.fence}") in ended:
                self._working.saw_end(job)

    def _observe_peaks(self, count: int, now: Moment) -> None:
        peaks = [self._peaks[number] for number in range(count)]
        jobs = {job.job_id: job for job in self._store.observed_jobs(sorted({job_id for job_id, _ in peaks}))}
        for job_id, memory in peaks:
            if job_id in jobs:
                self._working.saw_memory(jobs[job_id].names, memory, now)


def _order(job: ObservedJob) -> tuple[Moment, str]:
    return (job.ended_at or job.created_at, job.job_id)
