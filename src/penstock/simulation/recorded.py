"""
The recorded load of a store: every job that it still has, how each attempt went by the trail, and the workers
and hosts that ran them.

A worker is known by its name. The play assumes that it can run the types that it ran, for one addon if it ran
jobs of one addon only, as many at once as it once ran, and that it claims as long after a change as it did in
the median. If workers of one kind followed each other, they are one worker that was restarted. A job that
never ran takes its expected duration, else the median of its type.

Arrays and schedules of the database submit their jobs in the play by their rules (`recorded_groups`). All
other jobs arrive when they were submitted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Final, NamedTuple

from penstock.core.jobs.dependencies import ParentCondition, batch_of
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import DEPENDENCY_UNMET, ENDS, Event, EventKind, Job
from penstock.core.jobs.load_hours import hour_of_week
from penstock.core.jobs.states import SETTLED
from penstock.core.jobs.types import (
    HOUR,
    OWN_TYPES,
    SECOND,
    AddonId,
    DispatchId,
    EndReason,
    HostId,
    JobId,
    Moment,
    Span,
)
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrivals import Arrival, Load, PlayedAttempt, PlayedWork, plain
from penstock.scheduler.job_service import feed
from penstock.scheduler.played_hosts import COMMANDS, FUNCTIONS
from penstock.scheduler.playing import PlayedHost, PlayedWorker, Player
from penstock.scheduler.rules import LOCAL
from penstock.simulation.play import Change
from penstock.simulation.recorded_groups import GroupTrail, RecordedGroups
from penstock.stores.api import Query, Store

RUNNER: Final = "runner"
_LIBRARY: Final = "library:"
_PAGE: Final = 1_000
_UNKNOWN: Final[Span] = 60 * SECOND
#: A longer delay between a change and a start is not that of a worker which had to learn of the change.
_SOON: Final[Span] = 1 * SECOND
#: Ends of attempts that completed, failed by themselves or were canceled.
_OWN_ENDS: Final = {
    EndReason.COMPLETED,
    EndReason.JOB_ERROR,
    EndReason.UNAVAILABLE,
    EndReason.WORKER_CRASHED,
    EndReason.CANCELED,
}
#: Ends by a limit: the attempt would have gone on for longer.
_CUT_OFF: Final = {
    EndReason.MAX_RUNTIME_EXCEEDED,
    EndReason.HARD_CAP_EXCEEDED,
    EndReason.COST_LIMIT_REACHED,
}


class Recording(NamedTuple):
    """A recorded load, with the hosts that ran it."""

    load: Load
    hosts: list[PlayedHost]
    #: Pauses, weights and drains, at their moments.
    changes: list[Change]
    #: Sentences about parts of the trail that a play leaves out.
    notes: list[str]


class _Attempt(NamedTuple):
    """An attempt, as the trail has it."""

    began: Moment
    ended: Moment
    end: EndReason
    worker: str


class _Trail:
    """
    Reads the events of a trail: the attempts and cancels of each job, the delays of workers, and changes.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.attempts: dict[JobId, list[_Attempt]] = defaultdict(list)
        self.canceled_at: dict[JobId, Moment] = {}
        self.saved: set[JobId] = set()
        self.changes: list[Change] = []
        self.unplayed: Counter[str] = Counter()
        self.last: Moment = 0
        self.groups = GroupTrail()
        #: By worker: how long after the last end or submit it claimed, for claims without a report of its
        #: own.
        self.delays: dict[str, list[Span]] = defaultdict(list)
        self._changed_at: Moment = 0
        #: When each worker last started a job or reported an end.
        self._acted_at: dict[str, Moment] = {}
        self._running: dict[DispatchId, tuple[JobId, Moment, str]] = {}
        for event in events:
            self.last = max(self.last, event.at)
            self.groups.read(event)
            self._read(event)

    def _read(self, event: Event) -> None:
        match event.kind:
            case EventKind.RUNNING if event.job_id is not None and event.dispatch_id is not None:
                worker = str(event.data.get("worker", ""))
                self._running[event.dispatch_id] = (event.job_id, event.at, worker)
                delay = event.at - max(self._changed_at, self._acted_at.get(worker, 0))
                if 0 < delay < _SOON:
                    self.delays[worker].append(delay)
                self._acted_at[worker] = event.at
            case EventKind.SUBMITTED:
                self._changed_at = event.at
            case EventKind.CHECKPOINT if event.job_id is not None:
                self.saved.add(event.job_id)
            case EventKind.ADDON_SET:
                data = event.data
                change = partial(_set_addon, AddonId(data["addon_id"]), data["weight"], data["paused"])
                self.changes.append((event.at, change))
            case EventKind.HOST_SET:
                self.changes.append(
                    (event.at, partial(_drain, HostId(event.data["host"]), event.data["draining"]))
                )
            case EventKind.EDITED | EventKind.RETRIED:
                self.unplayed[str(event.kind)] += 1
            case EventKind.ADMITTED if event.job_id is None:
                self.unplayed["lease"] += 1
            case EventKind.DENIED if event.reason in ("not_quiet", "not_quiet_long_enough"):
                self.unplayed["quiet"] += 1
            case kind if kind in ENDS:
                self._end(event)
            case _:
                pass

    def _end(self, event: Event) -> None:
        running = None if event.dispatch_id is None else self._running.pop(event.dispatch_id, None)
        self._changed_at = event.at
        if running is not None:
            job_id, began, worker = running
            self._acted_at[worker] = event.at
            self.attempts[job_id].append(_Attempt(began, event.at, EndReason(event.reason), worker))
        elif (
            event.kind is EventKind.CANCELED and event.job_id is not None and event.reason != DEPENDENCY_UNMET
        ):
            self.canceled_at[event.job_id] = event.at

    def unfinished(self) -> Iterator[tuple[JobId, Moment, str]]:
        yield from self._running.values()


def _set_addon(addon_id: AddonId, weight: int, paused: bool, player: Player) -> None:
    player.set_addon(addon_id, weight=weight, paused=paused)


def _drain(host: HostId, draining: bool, player: Player) -> None:
    if host in player.host_names:
        player.drain(host, draining)


def recorded(store: Store) -> Recording:
    """The recorded load of a store, with the hosts and workers that ran it."""
    trail = _Trail(feed(store))
    for job_id, began, worker in trail.unfinished():
        trail.attempts[job_id].append(_Attempt(began, trail.last, EndReason.RELEASED, worker))
    jobs = sorted(_jobs(store), key=lambda job: (job.created_at, job.no))
    works = _RecordedWorks(jobs, trail)
    groups = RecordedGroups(store, jobs, trail.groups)
    load = Load()
    parents = _parents(groups, load)
    for job in groups.others:
        work = works.of(job, ruled=job.job_id in trail.groups.overlapped)
        load.append(Arrival(job.created_at, plain(job.intent), *work, tuple(parents(job))))
    groups.add_batches(load)
    groups.add_arrays(load, works.of, works.usual_of)
    groups.add_schedules(load, works.of, works.usual_of)
    if not store.shared:
        load.away += trail.groups.away
    hosts = _hosts(store, jobs, trail)
    notes = [*_notes(trail, jobs, hosts), *groups.notes()]
    return Recording(load, hosts, trail.changes, notes)


def recorded_load(store: Store, began: Moment, ended: Moment, hosts: Iterable[PlayedHost]) -> list[Change]:
    """Changes that set the busy score of all hosts each hour, as the store has it by the hour of the week."""
    hours = store.load_hours()
    names = [host.name for host in hosts]
    return [
        (moment, partial(set_load, names, hours[hour_of_week(moment)]))
        for moment in range(began - began % HOUR, ended + HOUR, HOUR)
        if hour_of_week(moment) in hours
    ]


def set_load(hosts: list[HostId], score: float, player: Player) -> None:
    for host in hosts:
        player.set_load(host, score)


def _jobs(store: Store) -> Iterator[Job]:
    after = 0
    while page := store.find(Query(after=after, limit=_PAGE)):
        yield from page
        after = page[-1].no


def _parents(groups: RecordedGroups, load: Load) -> Callable[[Job], Iterator[tuple[int, ParentCondition]]]:
    """
    A function that returns the parents of a job by number. It leaves out parents that the database no longer
    has.
    """
    numbers = {job.job_id: number for number, job in enumerate(groups.others)}
    group_ids = groups.played | {
        batch for job in groups.others if (batch := batch_of(job.intent)) is not None
    }

    def parents(job: Job) -> Iterator[tuple[int, ParentCondition]]:
        for dependency in job.intent.after:
            if dependency.job_id in numbers:
                yield numbers[dependency.job_id], dependency.condition
            elif dependency.job_id in group_ids:
                yield load.group_of(dependency.job_id), dependency.condition

    return parents


class _RecordedWorks:
    """The work of each recorded job, and the usual work of a job without a record."""

    def __init__(self, jobs: Iterable[Job], trail: _Trail) -> None:
        self._trail = trail
        by_type: dict[str, list[Span]] = defaultdict(list)
        for job in jobs:
            attempts = trail.attempts.get(job.job_id, ())
            by_type[job.intent.job_type] += [
                attempt.ended - attempt.began for attempt in attempts if attempt.end is EndReason.COMPLETED
            ]
        self._usual = {job_type: round(median(spans)) for job_type, spans in by_type.items() if spans}

    def usual_of(self, intent: Intent) -> PlayedWork:
        return PlayedWork(self._usual_length(intent))

    def _usual_length(self, intent: Intent) -> Span:
        expected = intent.expected_duration_sec
        return round(expected * SECOND) if expected else self._usual.get(intent.job_type, _UNKNOWN)

    def of(self, job: Job, ruled: bool) -> PlayedWork:
        """
        The work of a recorded job. `ruled`: the play decides whether the job is canceled, so a canceled
        attempt counts as longer work that was cut off.
        """
        trail, saved = self._trail, job.job_id in self._trail.saved
        length = self._usual_length(job.intent)
        attempts: list[PlayedAttempt] = []
        done = 0  # the time of interrupted attempts, from which the next one continued
        for attempt in trail.attempts.get(job.job_id, ()):
            ran = attempt.ended - attempt.began
            if attempt.end in _CUT_OFF or (ruled and attempt.end is EndReason.CANCELED):
                attempts.append(PlayedAttempt(max(2 * (done + ran), length)))
                done = 0
            elif attempt.end in _OWN_ENDS:
                attempts.append(PlayedAttempt(done + ran, attempt.end))
                done = 0
            elif saved:
                done += ran
            else:
                length = max(length, ran)
        if attempts and attempts[-1].end is not EndReason.COMPLETED and job.state not in SETTLED:
            attempts.append(PlayedAttempt(done + length))
        if len(attempts) == 1 and attempts[0].end is EndReason.COMPLETED:
            length, attempts = attempts[0].runs_for, []
        return PlayedWork(
            length,
            tuple(attempts),
            None if ruled else trail.canceled_at.get(job.job_id),
            job.spent // max(1, len(attempts)),
            SECOND if saved else None,
            saved,
        )


# workers


class _SeenWorker:
    """A worker, as its attempts show it."""

    def __init__(self) -> None:
        self.addons: set[AddonId] = set()
        self.types: set[str] = set()
        self.spans: list[tuple[Moment, Moment]] = []

    @property
    def kinds(self) -> WorkerKinds:
        addon = next(iter(self.addons)) if len(self.addons) == 1 else None
        return WorkerKinds(addon, frozenset(self.types))

    def places(self) -> int:
        """The most that ran at once."""
        steps = sorted([(ended, -1) for _, ended in self.spans] + [(began, 1) for began, _ in self.spans])
        most = running = 0
        for _, step in steps:
            running += step
            most = max(most, running)
        return max(1, most)


def _hosts(store: Store, jobs: Iterable[Job], trail: _Trail) -> list[PlayedHost]:
    """The hosts of the recorded attempts and those of the store, with the workers that they had."""
    # A host that is no longer registered had at least the labels of the jobs that it ran.
    labels = {host.host: set(host.labels) for host in store.hosts()}
    seen: dict[tuple[HostId, str], _SeenWorker] = defaultdict(_SeenWorker)
    one = next(iter(labels), LOCAL)
    for job in jobs:
        attempts = trail.attempts.get(job.job_id)
        if not attempts:
            continue
        where = (
            _hosts_of_attempts(store, job, [a.worker for a in attempts])
            if store.shared
            else [one] * len(attempts)
        )
        for attempt, host in zip(attempts, where, strict=True):
            labels.setdefault(host, set()).update(job.intent.labels)
            worker = seen[host, attempt.worker]
            worker.addons.add(job.intent.addon_id)
            worker.types.add(job.intent.job_type)
            worker.spans.append((attempt.began, attempt.ended))
    by_host: dict[HostId, dict[str, _SeenWorker]] = defaultdict(dict)
    for (host, name), worker in seen.items():
        by_host[host][name] = worker
    for host in labels or [one]:
        by_host.setdefault(host, {})
    delays = {name: round(median(spans)) for name, spans in trail.delays.items()}
    return [_host(host, workers, labels.get(host, ()), delays) for host, workers in sorted(by_host.items())]


def _hosts_of_attempts(store: Store, job: Job, workers: list[str]) -> list[HostId]:
    dispatches = [d for d in store.attempts(job.job_id) if d.started_at is not None]
    hosts = [d.host for d in dispatches]
    return [hosts[min(number, len(hosts) - 1)] if hosts else LOCAL for number in range(len(workers))]


def _host(
    name: HostId, seen: dict[str, _SeenWorker], labels: Iterable[str], delays: Mapping[str, Span]
) -> PlayedHost:
    """
    The host with its workers. If all of them are an embedded library's, there is no daemon, so no
    reservations.
    """
    workers = list(_workers(seen, delays))
    embedded = bool(seen) and all(worker.startswith(_LIBRARY) for worker in seen)
    return PlayedHost(
        name, tuple(workers), tuple(sorted(labels)), None, preempts=not embedded, reserves=not embedded
    )


def _workers(seen: dict[str, _SeenWorker], delays: Mapping[str, Span]) -> Iterator[PlayedWorker]:
    """The workers of one host. One worker stands for those of one kind that followed each other."""
    restarted: dict[WorkerKinds, list[_SeenWorker]] = defaultdict(list)
    names: dict[int, str] = {}
    for name, worker in sorted(seen.items(), key=lambda each: min(each[1].spans)):
        if name == RUNNER:
            yield PlayedWorker(RUNNER, worker.kinds, worker.places(), delay=delays.get(RUNNER, 0))
            continue
        if name.startswith(_LIBRARY):
            worker.addons = set()  # an embedded program runs its functions for every addon
        for before in restarted[worker.kinds]:
            if max(before.spans)[1] <= min(worker.spans)[0]:
                before.spans += worker.spans
                break
        else:
            restarted[worker.kinds].append(worker)
            names[id(worker)] = name
    for kinds, alike in restarted.items():
        for worker in alike:
            name = names[id(worker)]
            # An embedded program claims in the commit of the submit or the report.
            delay = 0 if name.startswith(_LIBRARY) else delays.get(name, 0)
            yield PlayedWorker(name, kinds, worker.places(), delay=delay)


def with_runner(host: PlayedHost, slots: int, functions: int) -> PlayedHost:
    """
    The host with the daemon's runner: its places are those of the settings, its delay is the recorded one.
    """
    kinds = WorkerKinds(job_types=COMMANDS.job_types | FUNCTIONS.job_types)
    delay = max((worker.delay for worker in host.workers if worker.name == RUNNER), default=0)
    runner = PlayedWorker(RUNNER, kinds, slots, delay=delay, functions=functions)
    return host._replace(workers=(runner, *without_runner(host).workers))


def without_runner(host: PlayedHost) -> PlayedHost:
    return host._replace(workers=tuple(worker for worker in host.workers if worker.name != RUNNER))


# what is left out

_WORDS: Final[dict[str, str]] = {
    "EDITED": "edits of priorities, times or loads ({n}): each job is played with its last ones",
    "RETRIED": "retries by a person ({n}): the job is played as if it had ended before them",
    "lease": "leases without a job ({n}): their units count as free",
}


def _notes(trail: _Trail, jobs: Iterable[Job], hosts: list[PlayedHost]) -> Iterator[str]:
    for what, words in _WORDS.items():
        if trail.unplayed[what]:
            yield words.format(n=trail.unplayed[what])
    if trail.unplayed["quiet"]:
        yield (
            f"waits for a quieter machine ({trail.unplayed['quiet']}): every host counts as quiet "
            "without --host-load"
        )
    kinds = [worker.kinds for host in hosts for worker in host.workers]
    types = {job.intent.job_type for job in jobs if not job.intent.job_type.startswith(OWN_TYPES)}
    missing = sorted(each for each in types if not any(each in kind.job_types for kind in kinds))
    if missing:
        yield f"no worker was seen for {', '.join(missing)}: such jobs wait"
