"""The dictionaries of the memory store, and everything that only reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from threading import RLock
from typing import TypeVar

from penstock.core.jobs.end_rules import DispatchPhase
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.ledger import Account, Ledger
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import AdmissionView, Ordering
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import IN_FLIGHT, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Money
from penstock.stores.api import Addon, Clock, Due, Overdue, Query
from penstock.stores.memory.queues import MemoryAdmissionView, MemoryQueues, ledger_of

__all__ = ["MemoryTables"]

T = TypeVar("T")


class MemoryTables:
    def __init__(self, clock: Clock, *, ordering: Ordering | None = None, new_id: Callable[[], str]) -> None:
        self._clock, self._ordering, self._new_id = clock, ordering or Ordering(), new_id
        self._lock = RLock()
        self._last_no = self._seq = 0
        self._jobs: dict[JobId, Job] = {}
        self._lines = MemoryQueues()
        self._dispatches: dict[DispatchId, Dispatch] = {}
        self._live: dict[DispatchId, Dispatch] = {}
        self._keys: dict[tuple[AddonId, str], tuple[JobId, Intent]] = {}
        self._events: list[Event] = []
        self._trails: dict[JobId, list[Event]] = {}
        self._tally: Counter[tuple[AddonId, JobState]] = Counter()
        self._accounts: dict[AddonId, Account] = {}
        self._checkpoints: dict[JobId, str] = {}
        self._spent: Counter[tuple[AddonId, str]] = Counter()
        self._hosts: dict[HostId, Host] = {}
        self._holder: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> Moment:
        return self._clock()

    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        with self._lock:
            return view(self._admission_view(host, self._clock()))

    def ledger(self, host: HostId) -> Ledger:
        with self._lock:
            return self._ledger(host, self._clock())

    def _admission_view(self, host: HostId, now: Moment) -> MemoryAdmissionView:
        """On copies: a verdict that is never written must leave no trace in the accounts."""
        return MemoryAdmissionView(
            self._lines, self._jobs, self._ledger(host, now), self._live, host=host, now=now
        )

    def _ledger(self, host: HostId, now: Moment) -> Ledger:
        spent: dict[AddonId, dict[str, Money]] = {}
        for window in windows(now):
            for (addon_id, name), amount in self._spent.items():
                if name == window.name:
                    spent.setdefault(addon_id, {})[window.kind] = amount
        return ledger_of(host, self._live.values(), self._accounts, spent)

    def job(self, job_id: JobId) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        with self._lock:
            return [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]

    def find(self, query: Query) -> list[Job]:
        with self._lock:
            found = sorted(self._jobs.values(), key=lambda job: -job.no if query.newest_first else job.no)
        wanted = (
            job
            for job in found
            if (not query.states or job.state in query.states)
            and (query.addon_id is None or job.intent.addon_id == query.addon_id)
            and (query.job_type is None or job.intent.job_type == query.job_type)
            and (query.tag is None or query.tag in job.intent.tags)
            and (query.part is None or query.part in job.job_id)
            and (not query.after or (job.no < query.after if query.newest_first else job.no > query.after))
        )
        return list(islice(wanted, query.limit))

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        with self._lock:
            return self._dispatches.get(dispatch_id)

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        with self._lock:
            found = [d for d in self._dispatches.values() if d.job_id == job_id]
        return sorted(found, key=lambda dispatch: dispatch.fence)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        with self._lock:
            found = [
                d
                for d in self._live.values()
                if (addon_id is None or d.addon_id == addon_id) and (not phases or d.phase in phases)
            ]
        return sorted(found, key=lambda d: (d.admitted_at, d.dispatch_id))[:limit]

    def checkpoint(self, job_id: JobId) -> str | None:
        with self._lock:
            return self._checkpoints.get(job_id)

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        with self._lock:
            if job_id is not None:
                return [event for event in self._trails.get(job_id, []) if event.n > after][:limit]
            return list(islice((event for event in self._events if event.seq > after), limit))

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        with self._lock:
            wanted = (event for event in self._events if event.seq > after and event.kind in kinds)
            return list(islice(wanted, limit))

    def newest(self) -> int:
        with self._lock:
            return self._events[-1].seq if self._events else 0

    def addons(self) -> list[Addon]:
        with self._lock:
            jobs: dict[AddonId, dict[JobState, int]] = {}
            for (addon_id, state), n in self._tally.items():
                if n:
                    jobs.setdefault(addon_id, {})[state] = n
            names = sorted(self._accounts.keys() | jobs.keys())
            accounts = [(name, self._accounts.get(name, Account())) for name in names]
            return [Addon(n, a.weight, a.paused, a.average, a.units, jobs.get(n, {})) for n, a in accounts]

    def overdue(self, limit: int) -> list[Overdue]:
        now = self._clock()
        with self._lock:
            found = [*self._overdue_dispatches(now), *self._past_deadline(now)]
        return found[:limit]

    def _overdue_dispatches(self, now: Moment) -> Iterator[Overdue]:
        live = self._live.values()
        expired = sorted((d for d in live if d.expires_at <= now), key=lambda d: d.expires_at)
        to_stop = [
            d for d in live if d.phase is DispatchPhase.LEASED and d.stop_at is not None and d.stop_at <= now
        ]
        for due, dispatches in ((Due.EXPIRED, expired), (Due.STOP, to_stop)):
            for dispatch in dispatches:
                job = None if dispatch.job_id is None else self._jobs[dispatch.job_id]
                yield Overdue(due, job, dispatch)

    def _past_deadline(self, now: Moment) -> Iterator[Overdue]:
        for job_id in self._lines.queued():
            job = self._jobs[job_id]
            if job.intent.deadline_at is not None and job.intent.deadline_at <= now:
                yield Overdue(Due.DEADLINE, job, None)

    def alarm(self) -> Moment | None:
        with self._lock:
            moments = [*self._lines.moments(), *(d.expires_at for d in self._live.values())]
            moments += [
                d.stop_at
                for d in self._live.values()
                if d.phase is DispatchPhase.LEASED and d.stop_at is not None
            ]
            deadlines = (self._jobs[job_id].intent.deadline_at for job_id in self._lines.queued())
            return min([*moments, *(d for d in deadlines if d is not None)], default=None)

    def trouble(self) -> str | None:
        return None

    def audit(self) -> list[str]:
        with self._lock:
            return list(self._problems())

    def _problems(self) -> Iterator[str]:
        holders = Counter(d.job_id for d in self._live.values() if d.job_id is not None)
        held = Counter[AddonId]()
        for dispatch in self._live.values():
            held[dispatch.addon_id] += dispatch.admission_class.cost_units
        for addon_id, account in self._accounts.items():
            if account.units != held[addon_id]:
                yield f"account {addon_id} holds {account.units}, its dispatches hold {held[addon_id]}"
        for job in self._jobs.values():
            yield from self._job_problems(job, holders[job.job_id])
        counted = Counter((job.intent.addon_id, job.state) for job in self._jobs.values())
        if counted != +self._tally:
            yield f"the tally says {+self._tally}, the jobs are {counted}"
        queued = {job.job_id for job in self._jobs.values() if job.state is JobState.QUEUED}
        if queued != set(self._lines.queued()):
            yield "the lines do not hold exactly what is queued"

    def _job_problems(self, job: Job, holders: int) -> Iterator[str]:
        if holders != (job.state in IN_FLIGHT):
            yield f"job {job.job_id} is {job.state} with {holders} live dispatches"
        if job.dispatch_id is not None:
            dispatch = self._live.get(job.dispatch_id)
            expected = (
                JobState.DISPATCHING
                if dispatch and dispatch.phase is DispatchPhase.RESERVED
                else JobState.RUNNING
            )
            if dispatch is None or dispatch.fence != job.fence or job.state is not expected:
                yield f"job {job.job_id} is {job.state}, its dispatch is {dispatch and dispatch.phase}"
        trail = self._trails[job.job_id]
        if [event.n for event in trail] != list(range(1, len(trail) + 1)):
            yield f"job {job.job_id} has a gap in its events"
        if trail[-1].state is not job.state:
            yield f"job {job.job_id} is not in the state its last event tells"
