"""
The dictionaries of the memory store, its reads and its audit, and its ready queues (`MemoryQueues`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs.admission import (
    Account,
    AdmissionClass,
    Ledger,
    admission_class_of,
    keys_of,
    windows,
)
from penstock.core.jobs.arrays import ArrayRecord, IndexChunk
from penstock.core.jobs.changes import Note
from penstock.core.jobs.dependencies import (
    DependencyStatus,
    Fate,
    IfUnmet,
    ParentCondition,
    StoredDependency,
    fate,
)
from penstock.core.jobs.groups import FIRST_GROUP, JobGroup
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.learning import ObservedJob
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import WAITS_FOR_PARENTS, Ordering, Place, QueuedJob, shift_place
from penstock.core.jobs.round import AdmissionView, ReadyQueue, RunningJob
from penstock.core.jobs.schedules import ScheduleRecord
from penstock.core.jobs.states import IN_FLIGHT, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Money, Span, dispatch_id_of
from penstock.core.text import ascii_lower
from penstock.stores.api import (
    MOST_SEARCHED,
    Addon,
    Clock,
    Due,
    JobResults,
    Learned,
    Overdue,
    Query,
    Relay,
    WaitingWork,
    among_newest,
)
from penstock.stores.common.dependencies import StateMove
from penstock.stores.common.rows import uuid7

if TYPE_CHECKING:
    from penstock.stores.memory.groups import MemoryIndices

T = TypeVar("T")


class MemoryTables:
    """The dictionaries of the memory store, and everything that only reads them."""

    def __init__(
        self, clock: Clock, *, ordering: Ordering | None = None, new_id: Callable[[], str] = uuid7
    ) -> None:
        self._clock, self._ordering, self._new_id = clock, ordering or Ordering(), new_id
        self._lock = RLock()
        self._last_no = self._seq = 0
        self._jobs: dict[JobId, Job] = {}
        self._by_no: dict[int, JobId] = {}
        self._lines = MemoryQueues()
        self._dispatches: dict[DispatchId, Dispatch] = {}
        self._live: dict[DispatchId, Dispatch] = {}
        self._keys: dict[tuple[AddonId, str], tuple[JobId, bytes]] = {}
        self._events: list[Event] = []
        self._trails: dict[JobId, list[Event]] = {}
        self._tally: Counter[tuple[AddonId, JobState]] = Counter()
        self._accounts: dict[AddonId, Account] = {}
        self._checkpoints: dict[JobId, str] = {}
        self._spent: Counter[tuple[AddonId, str]] = Counter()
        self._hosts: dict[HostId, Host] = {}
        self._schedules: dict[str, ScheduleRecord] = {}
        self._arrays: dict[JobId, ArrayRecord] = {}
        self._indices: dict[JobId, MemoryIndices] = {}
        self._groups: dict[JobId, JobGroup] = {}
        self._group_nos: dict[JobId, int] = {}
        self._last_group = FIRST_GROUP
        self._learned: dict[str, str] = {}
        self._learned_upto = 0
        self._schedules_due: dict[str, Moment] = {}
        #: By child, then by parent; `_children` has the same rows by parent, then by child.
        self._dependencies: dict[JobId, dict[JobId, DependencyRow]] = {}
        self._children: dict[JobId, dict[JobId, DependencyRow]] = {}
        self._pending: dict[int, StateMove] = {}
        #: The jobs that the present operation ended or retried: `_resolve` then resolves dependencies and
        #: advances arrays.
        self._moves: list[StateMove] = []
        self._load_hours: dict[tuple[HostId, int], float] = {}
        self._holder: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> Moment:
        return self._clock()

    def read_view(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        with self._lock:
            return view(self._admission_view(host, self._clock()))

    def ledger(self, host: HostId) -> Ledger:
        with self._lock:
            return self._ledger(host, self._clock())

    def _admission_view(self, host: HostId, now: Moment) -> MemoryAdmissionView:
        """
        A view with copies of the accounts: a round may change them, and its result may never be written.
        """
        return MemoryAdmissionView(
            self._lines, self._jobs, self._ledger(host, now), self._live, host=host, now=now
        )

    def _ledger(self, host: HostId, now: Moment) -> Ledger:
        """
        Compute the ledger from the live dispatches. The SQL stores keep totals, so tests can compare the two.
        """
        accounts = {addon_id: replace(account) for addon_id, account in self._accounts.items()}
        spent: dict[AddonId, dict[str, Money]] = {}
        for window in windows(now):
            for (addon_id, name), amount in self._spent.items():
                if name == window.name:
                    spent.setdefault(addon_id, {})[window.kind] = amount
        ledger = Ledger(accounts=accounts, spent=spent)
        for dispatch in self._live.values():
            if dispatch.host == host:
                ledger.units += dispatch.admission_class.cost_units
                ledger.running += 1
            for key in keys_of(dispatch.admission_class):
                ledger.counts[key] = ledger.counts.get(key, 0) + 1
        return ledger

    def job(self, job_id: JobId) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        with self._lock:
            return [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]

    def jobs_before(self, nos: Sequence[int], most: int) -> dict[int, int]:
        numbers = set(nos)
        with self._lock:
            return {
                no: min(before, most)
                for _, _, jobs in self._lines.lines()
                for before, (_, no, _) in enumerate(jobs)
                if no in numbers
            }

    def count(self, query: Query) -> dict[JobState, int]:
        return dict(Counter(job.state for job in self.find(among_newest(query))))

    def find(self, query: Query) -> list[Job]:
        with self._lock:
            jobs = sorted(self._jobs.values(), key=lambda job: -job.no if query.newest_first else job.no)
            errors = self._errors() if query.text is not None else {}
        newest = max((job.no for job in jobs), default=0)
        matches = (
            job
            for job in jobs
            if (not query.states or job.state in query.states)
            and (query.addon_id is None or job.intent.addon_id == query.addon_id)
            and (query.job_type is None or job.intent.job_type == query.job_type)
            and (query.tag is None or query.tag in job.intent.tags)
            and (query.part is None or query.part in job.job_id)
            and (query.since is None or job.created_at >= query.since)
            and (query.before is None or job.created_at < query.before)
            and (
                query.text is None
                or (
                    job.no > newest - MOST_SEARCHED and _contains(job, errors.get(job.job_id, []), query.text)
                )
            )
            and (not query.after or (job.no < query.after if query.newest_first else job.no > query.after))
        )
        return list(islice(matches, query.limit))

    def _errors(self) -> dict[JobId | None, list[str]]:
        errors: dict[JobId | None, list[str]] = defaultdict(list)
        for dispatch in self._dispatches.values():
            if dispatch.error is not None:
                errors[dispatch.job_id].append(dispatch.error)
        return errors

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        with self._lock:
            return self._dispatches.get(dispatch_id)

    def dispatches(self, dispatch_ids: Sequence[DispatchId]) -> dict[DispatchId, Dispatch]:
        with self._lock:
            return {each: self._dispatches[each] for each in dispatch_ids if each in self._dispatches}

    def job_results(self, job_ids: Sequence[JobId]) -> JobResults:
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
            return {job.job_id: (job.state, self._result(job)) for job in jobs}

    def _result(self, job: Job) -> str | None:
        last = self._dispatches.get(dispatch_id_of(job.job_id, job.fence))
        return None if job.state is not JobState.DONE or last is None else last.result

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        with self._lock:
            attempts = [d for d in self._dispatches.values() if d.job_id == job_id]
        return sorted(attempts, key=lambda dispatch: dispatch.fence)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        with self._lock:
            dispatches = [
                d
                for d in self._live.values()
                if (addon_id is None or d.addon_id == addon_id) and (not phases or d.phase in phases)
            ]
        return sorted(dispatches, key=lambda d: (d.admitted_at, d.dispatch_id))[:limit]

    def observed_jobs(self, job_ids: Sequence[JobId]) -> list[ObservedJob]:
        with self._lock:
            return [self._observed(job) for job_id in job_ids if (job := self._jobs.get(job_id)) is not None]

    def _observed(self, job: Job) -> ObservedJob:
        intent, last = job.intent, self._dispatches.get(dispatch_id_of(job.job_id, job.fence))
        observed = ObservedJob(
            job.job_id,
            admission_class_of(intent),
            intent.priority,
            intent.tags,
            intent.expected_duration_sec,
            job.created_at,
            job.fence,
            settled=job.ended_at is not None,
        )
        if last is None:
            return observed
        end = None if last.end is None else str(last.end)
        return replace(
            observed, started_at=last.started_at, ended_at=last.ended_at, end=end, spent=last.spent
        )

    def learned(self) -> Learned:
        with self._lock:
            return Learned(self._learned_upto, dict(self._learned))

    def learned_upto(self) -> int:
        return self._learned_upto

    def checkpoint(self, job_id: JobId) -> str | None:
        with self._lock:
            return self._checkpoints.get(job_id)

    def dependencies(self, job_id: JobId, limit: int = 1_000) -> list[StoredDependency]:
        with self._lock:
            number = self._number_of
            parents = sorted(self._dependencies.get(job_id, {}).values(), key=lambda e: number(e.parent))
            children = sorted(self._children.get(job_id, {}).values(), key=lambda e: number(e.child))
            return [
                StoredDependency(e.parent, e.child, e.condition, e.status)
                for e in (*parents[:limit], *children[:limit])
            ]

    def _number_of(self, job_id: JobId) -> int:
        return self._jobs[job_id].no if job_id in self._jobs else self._group_nos[job_id]

    def _parent_state(self, dependency: DependencyRow) -> JobState:
        if dependency.parent in self._jobs:
            return self._jobs[dependency.parent].state
        group = self._groups[dependency.parent]
        early = dependency.condition is ParentCondition.FAILED and dependency.if_unmet is IfUnmet.ANY
        return group.state or (JobState.FAILED if early and group.is_failing else JobState.RUNNING)

    def group(self, group_id: JobId) -> JobGroup | None:
        return self._groups.get(group_id)

    def batches(self, limit: int, addon_id: AddonId | None = None) -> list[JobGroup]:
        with self._lock:
            batches = [
                group
                for group in self._groups.values()
                if group.is_batch and addon_id in (None, group.addon_id)
            ]
            batches.sort(key=lambda group: (group.created_at, self._group_nos[group.group_id]), reverse=True)
            return batches[:limit]

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        with self._lock:
            if job_id is not None:
                return [event for event in self._trails.get(job_id, []) if event.n > after][:limit]
            return list(islice((event for event in self._events if event.seq > after), limit))

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        with self._lock:
            events = (event for event in self._events if event.seq > after and event.kind in kinds)
            return list(islice(events, limit))

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

    def schedules(self, due_by: Moment | None = None) -> list[ScheduleRecord]:
        with self._lock:
            records = [record for _, record in sorted(self._schedules.items())]
        if due_by is None:
            return records
        return [record for record in records if self._schedules_due.get(record.name, due_by + 1) <= due_by]

    def schedule(self, name: str) -> ScheduleRecord | None:
        return self._schedules.get(name)

    def load_hours(self) -> dict[int, float]:
        hours: dict[int, list[float]] = {}
        with self._lock:
            for (_, hour), busy in self._load_hours.items():
                hours.setdefault(hour, []).append(busy)
        return {hour: sum(values) / len(values) for hour, values in hours.items()}

    def array(self, array_id: JobId) -> ArrayRecord | None:
        return self._arrays.get(array_id)

    def failed_indices(self, array_id: JobId) -> list[IndexChunk]:
        return self._indices[array_id].failed if array_id in self._indices else []

    def arrays(self, limit: int, *, only_open: bool = False) -> list[ArrayRecord]:
        with self._lock:
            newest = sorted(
                self._arrays.values(), key=lambda r: (r.array.created_at, r.array.array_id), reverse=True
            )
        return [r for r in newest if not only_open or r.progress.ended_at is None][:limit]

    def waiting_by_labels(self) -> dict[tuple[str, ...], WaitingWork]:
        waiting: dict[tuple[str, ...], WaitingWork] = {}
        with self._lock:
            for admission_class, _, jobs in self._lines.lines():
                before = waiting.get(admission_class.labels, WaitingWork(0, 0))
                units = before.units + len(jobs) * admission_class.cost_units
                waiting[admission_class.labels] = WaitingWork(before.jobs + len(jobs), units)
        return waiting

    def schedule_alarm(self) -> Moment | None:
        with self._lock:
            return min(self._schedules_due.values(), default=None)

    def overdue(self, limit: int) -> list[Overdue]:
        now = self._clock()
        with self._lock:
            overdue = [*self._overdue_dispatches(now), *self._past_deadline(now)]
        return overdue[:limit]

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
            moments = [0] * bool(self._pending)
            moments += [*self._lines.moments(), *(d.expires_at for d in self._live.values())]
            moments += [
                d.stop_at
                for d in self._live.values()
                if d.phase is DispatchPhase.LEASED and d.stop_at is not None
            ]
            deadlines = (self._jobs[job_id].intent.deadline_at for job_id in self._lines.queued())
            return min([*moments, *(d for d in deadlines if d is not None)], default=None)

    # the processes that share the store: only this one

    def hosts(self) -> list[Host]:
        with self._lock:
            return [replace(h, units=self.ledger(name).units) for name, h in sorted(self._hosts.items())]

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:  # noqa: ARG002 - there is no other process
        with self._lock:
            if self._holder is not None:
                raise DispatcherHeld(f"this store is dispatched by {self._holder}", holder=self._holder)
            self._holder = holder

    def release_dispatch(self) -> None:
        self._holder = None

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def listen(self) -> None:
        pass  # there is no other process

    def close(self) -> None:
        self._holder = None

    # the trail

    def _note(self, at: Moment, note: Note, job: Job | None, dispatch_id: DispatchId | None = None) -> None:
        self._seq += 1
        trail = [] if job is None else self._trails[job.job_id]
        event = Event(
            seq=self._seq,
            at=at,
            kind=note.kind,
            job_id=None if job is None else job.job_id,
            n=len(trail) + 1 if job is not None else 0,
            state=None if job is None else job.state,
            reason=note.reason,
            dispatch_id=dispatch_id,
            data=dict(note.data),
        )
        self._events.append(event)
        trail.append(event)

    # checks

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
            yield "the lines do not have exactly the jobs that are queued"
        for job_id in queued:
            dependencies = self._dependencies.get(job_id, {}).values()
            unmet = sum(dependency.status is DependencyStatus.OPEN for dependency in dependencies)
            if self._jobs[job_id].unmet != unmet or self._lines.waits_for_parents(job_id) != (unmet > 0):
                yield f"job {job_id} waits for other parents than its dependencies say"
            for dependency in dependencies:
                state = self._parent_state(dependency)
                if (
                    dependency.status is DependencyStatus.OPEN
                    and fate(dependency.condition, state, dependency.if_unmet) is not Fate.WAIT
                    and self._number_of(dependency.parent) not in self._pending
                ):
                    yield f"job {job_id} still waits for {dependency.parent}, which is {state}"
        for group in self._groups.values():
            members = self._dependencies.get(group.group_id, {}).values()
            live = sum(member.status is DependencyStatus.OPEN for member in members)
            if group.is_batch and (
                group.live != live or (group.state is None) != (group.is_open or group.live > 0)
            ):
                yield f"{group.group_id} counts other members than it has"

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


@dataclass(slots=True)
class DependencyRow:
    """A dependency of a child on a parent, each a job or a group."""

    parent: JobId
    child: JobId
    condition: ParentCondition
    if_unmet: IfUnmet
    status: DependencyStatus = DependencyStatus.OPEN


class MemoryQueues:
    """
    The queued jobs by admission class and line, each in order. Line 0: may not start yet; 1: ready; 2: ready
    and urgent; WAITS_FOR_PARENTS: has unmet dependencies. Only the lines 1 and 2 are ready queues.
    """

    def __init__(self) -> None:
        self._places: dict[JobId, tuple[int, Place, int]] = {}  # line, place, number
        self._sorted: dict[tuple[AdmissionClass, int], list[tuple[Moment, int, JobId]]] = {}
        self._not_yet: list[tuple[Moment, JobId]] = []  # by ready_at
        self._not_urgent: list[tuple[Moment, JobId]] = []  # by urgent_at

    def put(self, job: Job, place: Place, now: Moment) -> None:
        self.drop(job.job_id)
        self._enter(job.job_id, place, job.no, WAITS_FOR_PARENTS if job.unmet else place.line(now))

    def place(self, job_id: JobId) -> Place:
        return self._places[job_id][1]

    def waits_for_parents(self, job_id: JobId) -> bool:
        return self._places[job_id][0] == WAITS_FOR_PARENTS

    def _enter(self, job_id: JobId, place: Place, no: int, line: int) -> None:
        self._places[job_id] = (line, place, no)
        if line == WAITS_FOR_PARENTS:
            return
        if line == 0:
            insort(self._not_yet, (place.ready_at, job_id))
            return
        if line == 1 and place.urgent_at is not None:
            insort(self._not_urgent, (place.urgent_at, job_id))
        insort(self._sorted.setdefault((place.admission_class, line), []), (place.turn, no, job_id))

    def drop(self, job_id: JobId) -> None:
        if job_id not in self._places:
            return
        line, place, no = self._places.pop(job_id)
        if line == WAITS_FOR_PARENTS:
            return
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
        """
        Move jobs whose earliest start has come into their ready queue, and those that are urgent now into the
        urgent one.
        """
        for moments in (self._not_yet, self._not_urgent):
            while moments and moments[0][0] <= now:
                job_id = moments[0][1]
                _, place, no = self._places[job_id]
                self.drop(job_id)
                self._enter(job_id, place, no, place.line(now))

    def set_turn(self, job_id: JobId, turn: Moment) -> None:
        line, place, no = self._places[job_id]
        self.drop(job_id)
        self._enter(job_id, replace(place, turn=turn), no, line)

    def shift(self, by: Span, now: Moment) -> Iterator[tuple[JobId, Place]]:
        """
        Shift the moments of queued jobs, because the wall clock was set by `by`. Yield each job with its new
        place.
        """
        for job_id, (line, place, no) in list(self._places.items()):
            shifted = shift_place(place, by, in_line=line > 0)
            self.drop(job_id)
            self._enter(job_id, shifted, no, line if line == WAITS_FOR_PARENTS else shifted.line(now))
            yield job_id, shifted

    def lines(self) -> list[tuple[AdmissionClass, int, list[tuple[Moment, int, JobId]]]]:
        """Each ready queue: its admission class, its line, and its jobs in order (order key, number, id)."""
        return [(admission_class, line, jobs) for (admission_class, line), jobs in self._sorted.items()]

    def moments(self) -> Iterator[Moment]:
        """When the next job becomes ready, and when the next one becomes urgent."""
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
    """The `AdmissionView` of a round on the memory store."""

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

    def ready_queues(self) -> Iterator[ReadyQueue]:
        for admission_class, line, jobs in self._lines.lines():
            yield ReadyQueue(admission_class, line == 2, self._pull(jobs))

    def _pull(self, jobs: Sequence[tuple[Moment, int, JobId]]) -> Iterator[QueuedJob]:
        for turn, no, job_id in jobs:
            job = self._jobs[job_id]
            yield QueuedJob(
                no,
                job_id,
                job.intent.priority,
                turn,
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

    def start_timeouts(self, waiting: QueuedJob) -> int:
        return self._jobs[waiting.job_id].counters.start


def _contains(job: Job, errors: Sequence[str], text: str) -> bool:
    intent, part = job.intent, ascii_lower(text)
    texts = (intent.job_type, intent.payload, *intent.tags, *errors)
    return any(part in ascii_lower(each) for each in texts)
