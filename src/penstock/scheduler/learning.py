"""
The learner: reads the trail, and keeps what it learns about job types in the store.

It has a thread of its own, and reads every few seconds if something was committed: a bounded number of events
and a few columns of their jobs. So no submit, start or end waits for it. If there are more events than one
step reads, it skips to the newest, and counts each submit among these as several.

It also keeps predictions of starts in the store. When a job starts, the learner scores its prediction:
whether the start lay within the predicted range, and how far from its middle. Predictions come from explain,
from submits with a deadline, and from a small sample of the waiting jobs: without the sample, only jobs that
a client asks about would be scored.

Several hosts share one cursor in the store, changed by compare-and-set. A host that finds the cursor moved
reads what the other host learned, and reads no events itself, unless it has figures of its own to add. So one
host does the work, and another takes over when that one stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.core.jobs.job import ENDS, Event, EventKind
from penstock.core.jobs.learning import (
    PREDICTED,
    Knowledge,
    ObservedJob,
    Prediction,
    TypeStats,
    decode,
    decode_prediction,
    encode,
    encode_prediction,
    type_stats,
)
from penstock.core.jobs.types import HOUR, SECOND, DispatchId, JobId, Moment, Span
from penstock.scheduler.driver import comes_later
from penstock.stores.api import Learn, Store, committed

#: How often the trail is read.
EVERY: Final[Span] = 5 * SECOND
#: The most events of one step: some hundredths of a second of work.
MOST_EVENTS: Final = 1_000
#: The most predictions that wait for the start of their jobs.
MOST_OPEN: Final = 200
#: How often the starts of a sample of the waiting jobs are predicted, and of how many jobs.
SAMPLE_EVERY: Final[Span] = 30 * SECOND
SAMPLE_JOBS: Final = 8
#: The most jobs that are read ahead of a sampled job, to keep the sample cheap.
SAMPLE_AHEAD: Final = 200
_OLDEST: Final[Span] = 7 * 24 * HOUR
_STARTS_OR_ENDS: Final = ENDS | {EventKind.RUNNING}


class Learner:
    """Upkeep of a scheduler service with a driver of its own; each service has one learner."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        #: Set by each commit, and cleared by a step.
        self.changed = threading.Event()
        self.changed.set()
        self._upto: int | None = None  # the shared cursor as last read; None: read the store again
        self._read_at: Moment = 0
        self._working = Knowledge()
        self._peaks: deque[tuple[JobId, int]] = deque(maxlen=MOST_EVENTS)

        #: Predictions that are not in the store yet, and those that are.
        self._made: deque[Prediction] = deque(maxlen=MOST_OPEN)
        self._open: dict[str, Prediction] = {}
        #: Predicts the starts of some waiting jobs, and calls `predicted` with each.
        self.sample: Callable[[], object] | None = None
        self._sample_at: Moment = 0
        self._stats: tuple[Moment, int | None, list[TypeStats]] = (0, None, [])

    def predicted(self, prediction: Prediction) -> None:
        """Add a predicted start. The first prediction of an attempt counts. From any thread; never blocks."""
        self._made.append(prediction)

    def saw_peak(self, job_id: JobId, memory: int) -> None:
        """Add the peak memory of an attempt that has ended, in bytes. From any thread; never blocks."""
        self._peaks.append((job_id, memory))

    def step(self, now: Moment) -> Moment:
        with self._lock:
            changed = self.changed.is_set()
            self.changed.clear()
            if changed or self._pending():
                self._learn(now)
        if changed and self.sample is not None and not comes_later(self._sample_at, now, SAMPLE_EVERY):
            self._sample_at = now + SAMPLE_EVERY
            self.sample()
        return now + EVERY

    def _pending(self) -> bool:
        """Whether this process has figures to add that are not in the trail."""
        return bool(self._peaks or self._made)

    def knowledge(self) -> Knowledge:
        """What was learned, at most `EVERY` old, also in a process that learns nothing itself."""
        with self._lock:
            now = self._store.now()
            if self._upto is None or not 0 <= now - self._read_at < EVERY:
                self._take_over(now)
            return self._working

    def stats(self) -> list[TypeStats]:
        """The figures of each job type, sorted by addon, type and size."""
        knowledge, now = self.knowledge(), self._store.now()
        made_at, upto, stats = self._stats
        if upto != self._upto or not 0 <= now - made_at < EVERY:  # many clients may ask each second
            stats = [type_stats(name, record, now) for name, record in sorted(knowledge.records.items())]
            self._stats = (now, self._upto, stats)
        return stats

    def _take_over(self, now: Moment) -> bool:
        """
        Read what was learned, if the cursor moved. Returns whether another process moved it since the last
        read.
        """
        self._read_at = now
        if self._upto is not None and self._store.learned_upto() == self._upto:
            return False
        before, (self._upto, records) = self._upto, self._store.learned()
        decoded = {n: decode(text) for n, text in records.items() if not n.startswith(PREDICTED)}
        self._working = Knowledge({name: record for name, record in decoded.items() if record is not None})
        predictions = [decode_prediction(text) for n, text in records.items() if n.startswith(PREDICTED)]
        self._open = {each.job_id: each for each in predictions if each is not None}
        return before is not None

    def _learn(self, now: Moment) -> None:
        """
        Learn from the next events and the figures of this process, and store the result if the cursor has not
        moved.
        """
        if self._take_over(now) and not self._pending():
            self.changed.set()  # look again in the next step: the other host may stop
            return
        assert self._upto is not None
        newest = self._store.newest()
        # The cursor is ahead of the newest event if a backup was restored.
        behind = newest - self._upto if newest >= self._upto else newest
        if not behind and not self._pending():
            return
        start = newest - min(behind, MOST_EVENTS)
        events = self._store.events(start, MOST_EVENTS) if behind else []
        upto = events[-1].seq if events else newest
        if upto < newest:
            self.changed.set()
        self._observe(events, max(1.0, behind / MOST_EVENTS))
        peaks, made = len(self._peaks), len(self._made)
        self._observe_peaks(peaks, now)
        changed, gone = self._score(events, made, now, every=behind > MOST_EVENTS)
        gone += self._working.drop_oldest()
        changed |= {name: encode(self._working.records[name]) for name in sorted(self._working.changed)}
        if committed(self._store, Learn(self._upto, upto, changed, gone)):
            self._upto = upto
            self._working.changed.clear()
            for queue, count in ((self._peaks, peaks), (self._made, made)):
                for _ in range(count):
                    queue.popleft()
        else:  # another host was first: drop what this one learned from the same events
            self._upto = None
            self.changed.set()

    def _score(
        self, events: list[Event], made: int, now: Moment, *, every: bool
    ) -> tuple[dict[str, str], list[str]]:
        """
        Add the first `made` new predictions, and score those whose jobs have started. `every`: check all open
        predictions, because events were skipped. Returns the rows to write and the names of those to remove.
        """
        fresh = {}
        for prediction in (self._made[number] for number in range(made)):
            if prediction.job_id not in self._open and len(self._open) < MOST_OPEN:
                self._open[prediction.job_id] = fresh[prediction.job_id] = prediction
        moved = {event.job_id for event in events if event.kind in _STARTS_OR_ENDS}
        candidates = [job_id for job_id in self._open if every or job_id in fresh or job_id in moved]
        jobs = {
            job.job_id: job for job in self._store.observed_jobs([JobId(job_id) for job_id in candidates])
        }
        settled = []
        for job_id in candidates:
            prediction, job = self._open[job_id], jobs.get(JobId(job_id))
            started_at = None if job is None else job.started_at
            if job is not None and job.fence == prediction.fence + 1 and started_at is not None:
                if started_at >= prediction.made_at:  # a job that started during its prediction is not scored
                    self._working.saw_start(prediction, started_at)
            elif job is not None and not job.settled and job.fence <= prediction.fence + 1:
                continue  # the job waits, or its worker has not started
            settled.append(job_id)
        settled += [job_id for job_id, each in self._open.items() if each.made_at < now - _OLDEST]
        for job_id in dict.fromkeys(settled):
            del self._open[job_id]
        rows = {
            f"{PREDICTED}{job_id}": encode_prediction(each)
            for job_id, each in fresh.items()
            if job_id in self._open
        }
        return rows, [f"{PREDICTED}{job_id}" for job_id in dict.fromkeys(settled) if job_id not in fresh]

    def _observe(self, events: list[Event], weight: float) -> None:
        """
        Learn from the submits and ends among the events. `weight`: how many arrivals each one stands for.
        """
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
