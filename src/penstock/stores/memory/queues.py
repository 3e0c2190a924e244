"""The lines of the memory store: who is queued, where, in which order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, Job, Place, shift_place
from penstock.core.jobs.ledger import Account, Ledger, keys_of
from penstock.core.jobs.ordering import QueuedJob, ReadyQueue, RunningJob
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Span

__all__ = ["MemoryAdmissionView", "MemoryQueues", "ledger_of"]


class MemoryQueues:
    def __init__(self) -> None:
        self._places: dict[JobId, tuple[int, Place, int]] = {}  # line, place, number
        self._sorted: dict[tuple[AdmissionClass, int], list[tuple[Moment, int, JobId]]] = {}
        self._not_yet: list[tuple[Moment, JobId]] = []  # by ready_at
        self._not_urgent: list[tuple[Moment, JobId]] = []  # by urgent_at

    def put(self, job: Job, place: Place, now: Moment) -> None:
        self.drop(job)
        self._enter(job.job_id, place, job.no, place.line(now))

    def _enter(self, job_id: JobId, place: Place, no: int, line: int) -> None:
        self._places[job_id] = (line, place, no)
        if line == 0:
            insort(self._not_yet, (place.ready_at, job_id))
            return
        if line == 1 and place.urgent_at is not None:
            insort(self._not_urgent, (place.urgent_at, job_id))
        insort(self._sorted.setdefault((place.admission_class, line), []), (place.turn, no, job_id))

    def drop(self, job: Job) -> None:
        self._leave(job.job_id)

    def _leave(self, job_id: JobId) -> None:
        found = self._places.pop(job_id, None)
        if found is None:
            return
        line, place, no = found
        if line == 0:
            _remove(self._not_yet, (place.ready_at, job_id))
            return
        if line == 1 and place.urgent_at is not None:
            _remove(self._not_urgent, (place.urgent_at, job_id))
        waiting = self._sorted[place.admission_class, line]
        _remove(waiting, (place.turn, no, job_id))
        if not waiting:
            del self._sorted[place.admission_class, line]

    def advance(self, now: Moment) -> None:
        """Those whose moment has come step into line, or from there into the urgent one."""
        for moments in (self._not_yet, self._not_urgent):
            while moments and moments[0][0] <= now:
                job_id = moments[0][1]
                _, place, no = self._places[job_id]
                self._leave(job_id)
                self._enter(job_id, place, no, place.line(now))

    def set_turn(self, job_id: JobId, turn: Moment) -> None:
        line, place, no = self._places[job_id]
        self._leave(job_id)
        self._enter(job_id, replace(place, turn=turn), no, line)

    def shift(self, by: Span, now: Moment) -> Iterator[tuple[JobId, Place]]:
        """The wall clock was set by `by`. Yields each queued job with its place from now on."""
        for job_id, (line, place, no) in list(self._places.items()):
            moved = shift_place(place, by, in_line=line > 0)
            self._leave(job_id)
            self._enter(job_id, moved, no, moved.line(now))
            yield job_id, moved

    def active(self) -> list[tuple[AdmissionClass, int]]:
        return list(self._sorted)

    def queue(self, admission_class: AdmissionClass, line: int) -> list[tuple[Moment, int, JobId]]:
        return self._sorted[admission_class, line]

    def moments(self) -> Iterator[Moment]:
        for moments in (self._not_yet, self._not_urgent):
            if moments:
                yield moments[0][0]

    def queued(self) -> Iterable[JobId]:
        return self._places.keys()


def _remove(
    items: list[tuple[Moment, JobId]] | list[tuple[Moment, int, JobId]], item: tuple[object, ...]
) -> None:
    del items[bisect_left(items, item)]


class MemoryAdmissionView:
    def __init__(
        self,
        lines: MemoryQueues,
        jobs: Mapping[JobId, Job],
        ledger: Ledger,
        live: Mapping[DispatchId, Dispatch],
        *,
        host: HostId,
        now: Moment,
    ) -> None:
        self.now, self.ledger = now, ledger
        self._lines, self._jobs, self._live, self._host = lines, jobs, live, host

    def lines(self) -> Iterator[ReadyQueue]:
        for admission_class, line in self._lines.active():
            yield ReadyQueue(admission_class, line == 2, self._pull(admission_class, line))

    def _pull(self, admission_class: AdmissionClass, line: int) -> Iterator[QueuedJob]:
        for its_turn, no, job_id in self._lines.queue(admission_class, line):
            job = self._jobs[job_id]
            yield QueuedJob(
                no,
                job_id,
                job.intent.priority,
                its_turn,
                job.fence,
                job.intent.expected_duration_sec,
                job.passed_at,
                job.denied,
            )

    def running(self) -> Sequence[RunningJob]:
        return [
            RunningJob(d.admission_class.cost_units, d.admitted_at, d.ends_at)
            for d in self._live.values()
            if d.host == self._host
        ]


def ledger_of(
    host: HostId,
    live: Iterable[Dispatch],
    accounts: Mapping[AddonId, Account],
    spent: Mapping[AddonId, Mapping[str, int]],
) -> Ledger:
    ledger = Ledger(
        accounts={addon_id: replace(account) for addon_id, account in accounts.items()}, spent=spent
    )
    for dispatch in live:
        if dispatch.host == host:
            ledger.units += dispatch.admission_class.cost_units
            ledger.running += 1
        for key in keys_of(dispatch.admission_class):
            ledger.counts[key] = ledger.counts.get(key, 0) + 1
    return ledger
