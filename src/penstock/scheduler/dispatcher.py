"""
The dispatcher: runs the rounds of this host, and knows which workers are present. A round is one `Admit` of
the store; it decides which jobs start.

There are two kinds of workers. A claiming worker asks for a job and gets it with its lease, in one step. A
polling worker takes two steps: it lists the reserved jobs, then asks for the lease of one.

- A round leaves a job in the queue if a present worker claims such jobs: a reservation would only hold its
  units until the next claim.
- A round reserves every other job. Its addon learns of the reservation from the trail, or by a poll.
- Where workers of both kinds are present for a job, the narrower request decides, and the poll on a tie: a
  claim without filters must not hide every addon's jobs from the workers that poll for them. A claim takes
  reserved jobs as well, so a claiming worker loses nothing by it.

Order holds between all workers of a host (SPEC OR-7). Every round walks the heads of all ready queues, best
first. If a head is for another worker than the claiming one, and that worker is present and free, the round
sets the head's units aside and goes on with the rest of the units. The other worker gets the job with its own
claim, which waits already or comes soon. So a worker gains nothing by claiming often. The free places of a
worker count while its claim waits, and for one tick after the answer. Those of this process's runner count
for as long as it has room.

A worker whose places are all taken claims nothing. While it renews its leases it is present, and full: its
jobs wait in the queue, and no units are reserved for them.

Where hosts share a database, each host registers what its present workers ask for (`core/jobs/workers.py`). A
round leaves a job in the queue if no worker of this host is present for it, but one of another host is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from threading import Lock, get_ident
from typing import Final, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import Unavailable
from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionClass, Conditions
from penstock.core.jobs.load import Host
from penstock.core.jobs.reasons import Draining
from penstock.core.jobs.round import MOST_PICKS, AdmissionView, Placement, RoundInputs, RoundResult, run_round
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import OWN_TYPES, AddonId, DispatchId, EndReason, HostId, JobId, Moment, Span
from penstock.core.jobs.workers import WorkerKinds, hosts_with_worker
from penstock.core.text import error_text
from penstock.scheduler.driver import comes_later
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Admit, Apply, Grant, Receipt, Store, Submit, Terms, committed, with_jobs

log = logging.getLogger("penstock.scheduler")

_ALL: Final = 1_000_000


class IdleWorker(Protocol):
    """
    A worker of this process that waits for jobs. It claims in the same commit as the submit that brings them.
    """

    def claim(self) -> tuple[WorkerKinds, int, str] | None:
        """
        Return what the worker claims: the kinds of jobs, their number and the worker's name; None: nothing
        now. `take` is called once for every claim, before the next one.
        """
        ...

    def take(self, grants: list[Grant], *, comes: bool = False) -> None:
        """
        Take the grants of the claim, which are durable; may be none. `comes`: the calling thread calls `work`
        next.
        """
        ...

    def work(self) -> None:
        """Run the ready jobs in the calling thread, if a place is free."""
        ...


class Dispatcher:
    """Runs the rounds of this host, and makes the claims of workers part of them."""

    def __init__(
        self, store: Store, rules: SchedulerRules, machine: HostLoad, pulling_workers: PullingWorkers
    ) -> None:
        self._store, self._rules, self._machine = store, rules, machine
        self._pulling_workers = pulling_workers
        #: How often each head was refused for its present reason. The trail gets the count when the reason
        #: changes: writing each refusal would cost a write for each head and tick.
        self.refusals: dict[JobId, int] = {}
        #: On a shared store, the last reason for which this host refused each head.
        self._recorded: dict[JobId, str] = {}
        #: By class, when its last reservation ends. Readers need no lock: a change replaces the whole dict.
        self._reserved_until: dict[AdmissionClass, Moment] = {}
        self._alone, self._lock = False, Lock()
        self.idle_worker: IdleWorker | None = None
        self.others = OtherHosts(store, rules) if store.shared else None
        #: The classes with ready jobs, as the last round without a claim saw them; None: there was no such
        #: round.
        self._ready: list[AdmissionClass] | None = None

    def begin(self) -> None:
        """
        Remember the reservations of this host from now on. This process has the right to dispatch, so it
        makes all of them; then a claim need not read them, and such a read would nearly always find none.
        Claims must therefore come to this process: a claim in another process may reserve jobs that stand
        before its own, and this process would not learn of these reservations.
        """
        reserved = self._store.live(phases=[DispatchPhase.RESERVED], limit=_ALL)
        here = [(d.admission_class, d.expires_at) for d in reserved if d.host == self._rules.host]
        self._remember_reserved(here, self._store.now())
        self._alone = True

    def end(self) -> None:
        """Let claims read the reservations of this host: another process may dispatch from now on."""
        self._alone = False

    def _remember_reserved(self, reserved: Iterable[tuple[AdmissionClass, Moment]], now: Moment) -> None:
        with self._lock:
            until = {each: over for each, over in self._reserved_until.items() if over > now}
            for each, over in reserved:
                until[each] = max(over, until.get(each, 0))
            self._reserved_until = until

    def may_have_reserved(self, kinds: WorkerKinds) -> bool:
        """Whether jobs of these kinds may be reserved on this host."""
        until = self._reserved_until
        if not self._alone or not until:
            return not self._alone
        now = self._store.now()
        return any(over > now and kinds.fits(admission_class) for admission_class, over in until.items())

    def step(self, now: Moment) -> Moment:
        self._pulling_workers.at(now)  # forgets workers that have gone, also while no job waits
        self._give_back(now)
        while len(self._round(now)) >= MOST_PICKS:
            pass
        return now + self._rules.tick

    def claim(
        self,
        kinds: WorkerKinds,
        limit: int,
        worker: str,
        preview: Callable[[list[Grant]], None] | None = None,
        *,
        with_report: bool = False,
    ) -> Admit:
        """
        The operation of a round that leases jobs to a claiming worker. So that order holds, the round also
        reserves jobs that stand before the leased ones and for which no claiming worker is present: some
        grants may be reservations. `with_report`: the worker claims for the places of jobs whose end it
        reports in the same request; for its other places another claim may wait.
        """
        now = self._store.now()
        self._pulling_workers.came(kinds, now + self._rules.fetch_for)
        return self.admit(self._decider(now, kinds, limit, worker, with_report=with_report), worker, preview)

    def admit(
        self,
        decide: Callable[[AdmissionView], RoundResult],
        worker: str = "",
        preview: Callable[[list[Grant]], None] | None = None,
    ) -> Admit:
        rules = self._rules
        terms = Terms(rules.reserve_for, rules.lease_for, worker)
        return Admit(rules.host, decide, terms, preview, spending=bool(rules.limits.budgets))

    def relay(self, submits: Sequence[Submit], *, stays: bool) -> Callable[[], None] | None:
        """
        Commit submits of another process, as the store's `Relay`. If `stays`, the thread that took them can
        run their job itself, so that no other thread has to wake: it calls the function that this returns.
        """
        with_work: list[IdleWorker] = []
        self.commit_submits(submits, wait=True, with_work=with_work if stays else None)
        return with_work[0].work if with_work else None

    def commit_submits(
        self, submits: Sequence[Submit], *, wait: bool = False, with_work: list[IdleWorker] | None = None
    ) -> list[Future[list[Receipt]]]:
        """
        Commit submits together with the claim of the idle worker: one commit instead of two. A claim that
        fails does not affect the submits. `with_work`: gets the idle worker if it was granted jobs in the
        calling thread, which must then call its `work`.
        """
        worker = self.idle_worker
        claim = None if worker is None else worker.claim()
        if worker is None or claim is None:
            return self._store.commit(*submits, wait=wait)
        unanswered, caller = [worker], get_ident()

        def take(grants: list[Grant]) -> None:
            while unanswered:
                comes = with_work is not None and bool(grants) and get_ident() == caller
                unanswered.pop().take(grants, comes=comes)
                if with_work is not None and comes:
                    with_work.append(worker)

        admit = replace(self.claim(*claim), on_answer=lambda admitted: take(_grants(admitted)))
        try:
            *answers, _ = self._store.commit(*submits, admit, wait=wait)
        except BaseException:  # also Ctrl-C: the worker waits for an answer
            take([])
            raise
        return answers

    def offer_to(self, kinds: WorkerKinds, now: Moment) -> None:
        """
        Note that a worker polls for such jobs. Its first poll runs a round, which reserves the jobs for it
        that earlier rounds left in the queue.
        """
        until, others = now + self._rules.fetch_for, self.others is not None
        if self._pulling_workers.polled(kinds, now, until=until, others=others):
            self._round(now)

    def renewed(self, dispatch_id: DispatchId) -> None:
        """
        Count the worker of a renewed lease as present. The dispatch is read only if a worker has not claimed
        for a while: workers with short jobs claim often, so their heartbeats cost nothing here.
        """
        now, fetch_for = self._store.now(), self._rules.fetch_for
        if self._pulling_workers.fades(now + fetch_for // 2):
            dispatch = self._store.dispatch(dispatch_id)
            if dispatch is not None and dispatch.worker:
                self._pulling_workers.stays(dispatch.worker, now + fetch_for)

    def _give_back(self, now: Moment) -> None:
        """Release the reservations of this host for which only a worker of another host is present."""
        reserved, others = list(self._reserved_until), self.others
        if not reserved or others is None:
            return
        workers = RoundWorkers(self._pulling_workers, now, others=others)
        classes = {each for each in reserved if workers.offer(each) is Placement.ELSEWHERE}
        if not classes:
            return
        rules = self._rules
        given_back = [
            changes.end(
                job, dispatch, EndReason.RELEASED, now, schedules=rules.schedules, ordering=rules.ordering
            )
            for dispatch, job in with_jobs(
                self._store, self._store.live(phases=[DispatchPhase.RESERVED], limit=_ALL)
            )
            if job is not None and dispatch.host == rules.host and dispatch.admission_class in classes
        ]
        committed(self._store, Apply(given_back))

    def _round(self, now: Moment) -> list[Grant]:
        return committed(self._store, self.admit(self._decider(now)))

    def _decider(
        self,
        now: Moment,
        here: WorkerKinds | None = None,
        limit: int = 0,
        worker: str = "",
        *,
        with_report: bool = False,
    ) -> Callable[[AdmissionView], RoundResult]:
        """
        The decision of one round. `here`: the kinds of jobs that `worker` claims in it, at most `limit` of
        them; None: the round is for no claim.
        """

        def decide(view: AdmissionView) -> RoundResult:
            # Made for each call: a store may call this twice.
            workers = RoundWorkers(self._pulling_workers, now, here, worker, others=self.others)
            round_result = run_round(self.inputs(view, workers), most_leases=limit if here else None)
            if self._store.shared:
                self._drop_repeated(round_result)
            if len(round_result.picks) > round_result.leases:
                reserved = {p.admission_class for p in round_result.picks if p.offer is Placement.RESERVE}
                # Remember reservations before they are written: if the write fails, claims read in vain for a
                # while, but no claim misses a reservation.
                until = view.now + self._rules.reserve_for
                self._remember_reserved([(each, until) for each in reserved], view.now)
            if here is None:
                self._ready = workers.seen
                return self._counted(round_result)
            # The worker's waiting claim has set its number of free places; the claim of a report keeps it.
            if not (with_report and self._pulling_workers.claim_waits(worker, here)):
                room = limit - round_result.leases
                self._pulling_workers.has_room(worker, here, room, now + self._rules.tick)
            return round_result

        return decide

    def inputs(self, view: AdmissionView, workers: RoundWorkers | None = None) -> RoundInputs:
        """
        The data by which a round decides. Without `workers`: those of the next round, for explain and
        forecasts.
        """
        conditions, rules = self.conditions(view.now), self._rules
        workers = workers or RoundWorkers(self._pulling_workers, view.now, others=self.others)
        return RoundInputs(
            view,
            conditions,
            rules.limits,
            rules.ordering,
            workers.offer,
            workers.take_place,
            workers.elsewhere,
        )

    def awaits(self, kinds: WorkerKinds) -> bool:
        """
        Whether the last round saw ready jobs of these kinds. A part that claims with every tick asks here
        first, so that it need not read all ready queues to find no job of its own. Always True before the
        first round and where hosts share the database: then a round does not see every queue.
        """
        if self._ready is None or self._store.shared:
            return True
        return any(map(kinds.fits, self._ready))

    @property
    def drained_by_operator(self) -> bool:
        """
        Whether an operator drained this host. False also if it drains because its process is about to stop.
        """
        return self._machine.drained

    def conditions(self, now: Moment) -> Conditions:
        return self._machine.conditions(now)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(sorted(self._machine.labels))

    @property
    def workers(self) -> PullingWorkers:
        return self._pulling_workers

    def _drop_repeated(self, round_result: RoundResult) -> None:
        """
        Drop denials that this host has recorded before and another host has replaced. Each host may refuse a
        head for a reason of its own, and each record wakes the others: they would take turns for ever. A host
        that drains replaces no reason, because another host decides when the job starts.
        """
        reasons = {denial.waiting.job_id: denial.reason.code for denial in round_result.denials}
        with self._lock:
            mine = self._recorded
            round_result.denials = [
                denial
                for denial in round_result.denials
                if not denial.waiting.denied
                or (
                    mine.get(denial.waiting.job_id) != denial.reason.code
                    and not isinstance(denial.reason, Draining)
                )
            ]
            for waiting in round_result.refused:
                mine.pop(waiting.job_id, None)
                mine[waiting.job_id] = reasons.get(waiting.job_id, waiting.denied)
            while len(mine) > MOST_REMEMBERED:
                del mine[next(iter(mine))]

    def _counted(self, round_result: RoundResult) -> RoundResult:
        before = self.refusals
        changed = {denial.waiting.job_id for denial in round_result.denials}
        self.refusals = {
            w.job_id: 1 if w.job_id in changed else before.get(w.job_id, 0) + 1 for w in round_result.refused
        }
        round_result.denials = [
            replace(d, after=before.get(d.waiting.job_id, 0)) for d in round_result.denials
        ]
        return round_result


def _grants(admitted: Future[list[Grant]]) -> list[Grant]:
    try:
        return admitted.result()
    except Unavailable:
        pass  # the submit beside it failed as well, and raises to its caller
    except BaseException as error:  # noqa: BLE001 - only this claim failed
        log.error("a claim beside a submit failed: %s", error_text(error))  # noqa: TRY400 - one line is enough
    return []


class HostsWithWorkers(Protocol):
    """Finds the other hosts that have a worker for a job: `OtherHosts`, or in a play `WorkersOfOtherHosts`."""

    def with_worker(
        self, admission_class: AdmissionClass, now: Moment, *, anew: bool = False
    ) -> tuple[HostId, ...]:
        """The other hosts where a worker for such jobs is present. `anew`: read the registrations now."""
        ...


class OtherHosts:
    """
    The other hosts of a shared database, as they last registered: for which jobs their workers are present.
    The registrations are read at most once a tick, and once more in a round that is about to reserve jobs.
    """

    def __init__(self, store: Store, rules: SchedulerRules) -> None:
        self._store, self._rules = store, rules
        self._hosts: list[Host] = []
        self._read_again_at: Moment = 0

    def with_worker(
        self, admission_class: AdmissionClass, now: Moment, *, anew: bool = False
    ) -> tuple[HostId, ...]:
        if anew or not comes_later(self._read_again_at, now, self._rules.tick):
            self._hosts = [host for host in self._store.hosts() if host.workers]
            self._read_again_at = now + self._rules.tick
        return hosts_with_worker(self._hosts, self._rules.host, admission_class, now)


FOR_EVER: Final[Moment] = 1 << 62
#: The most kinds of jobs that a host registers for its workers. Other hosts reserve jobs of further kinds.
MOST_REGISTERED: Final = 500
#: The most absent workers that are remembered, for explain, and the most heads with the reason of a refusal.
MOST_REMEMBERED: Final = 1_000


#: The name of a worker. Workers without a name count as one worker for each set of kinds.
_WorkerKey: TypeAlias = str | WorkerKinds | None


def _key(name: str, kinds: WorkerKinds | None) -> _WorkerKey:
    return name or kinds


class PresentWorkers(NamedTuple):
    """The workers present at one moment."""

    claiming: list[WorkerKinds]
    polling: list[WorkerKinds]
    #: What each free worker can run, and how many jobs more.
    free: dict[_WorkerKey, tuple[WorkerKinds, int]]

    def claims(self, admission_class: AdmissionClass) -> bool:
        """Whether a round leaves such a job in the queue for a claim."""
        if not self.polling or admission_class.job_type.startswith(OWN_TYPES):  # the runner claims those
            return any(kinds.fits(admission_class) for kinds in self.claiming)
        return _narrowest(self.claiming, admission_class) > _narrowest(self.polling, admission_class)

    def polls(self, admission_class: AdmissionClass) -> bool:
        """Whether a polling worker is present for such a job."""
        return any(kinds.fits(admission_class) for kinds in self.polling)


def _narrowest(present: list[WorkerKinds], admission_class: AdmissionClass) -> int:
    return max((kinds.narrowness for kinds in present if kinds.fits(admission_class)), default=-1)


class RoundWorkers:
    """
    The workers as one round sees them: the one that claims in it, and the free places of the others. A full
    worker has no free place, so the round sets no units aside for it.
    """

    def __init__(
        self,
        workers: PullingWorkers,
        now: Moment,
        here: WorkerKinds | None = None,
        name: str = "",
        *,
        others: HostsWithWorkers | None = None,
    ) -> None:
        self._workers, self._now, self._here, self._name, self._others = workers, now, here, name, others
        self._read_others = False
        self._places: list[tuple[WorkerKinds, int]] = []
        #: The classes with ready jobs that the round has asked about.
        self.seen: list[AdmissionClass] = []

    def offer(self, admission_class: AdmissionClass) -> Placement:
        """What the round does with a job of this class if it may start."""
        self.seen.append(admission_class)
        if self._here is not None and self._here.fits(admission_class):
            return Placement.LEASE
        if not self._present.claims(admission_class):
            return Placement.ELSEWHERE if self._elsewhere(admission_class) else Placement.RESERVE
        return Placement.LEAVE if self._place_for(admission_class) is None else Placement.SET_ASIDE

    def elsewhere(self, admission_class: AdmissionClass) -> bool:
        """
        Whether only other hosts have a worker for the job. The first call of a round reads their
        registrations again, because the round is about to reserve the job.
        """
        anew, self._read_others = not self._read_others, True
        return self._elsewhere(admission_class, anew=anew)

    def _elsewhere(self, admission_class: AdmissionClass, *, anew: bool = False) -> bool:
        others = self._others
        return (
            others is not None
            and not self._present.polls(admission_class)
            and bool(others.with_worker(admission_class, self._now, anew=anew))
        )

    def take_place(self, admission_class: AdmissionClass) -> bool:
        """
        Take a place of a free worker that claims such jobs. For jobs that rounds reserve: whether a polling
        worker is present.
        """
        if not self._present.claims(admission_class):
            return self._present.polls(admission_class)
        place = self._place_for(admission_class)
        if place is None:
            return False
        kinds, room = self._places[place]
        self._places[place] = (kinds, room - 1)
        return True

    def _place_for(self, admission_class: AdmissionClass) -> int | None:
        """A free place of the narrowest worker that fits: a wider one may be the only one for another job."""
        fitting = [
            (kinds.narrowness, number)
            for number, (kinds, room) in enumerate(self._places)
            if room > 0 and kinds.fits(admission_class)
        ]
        return max(fitting)[1] if fitting else None

    @cached_property
    def _present(self) -> PresentWorkers:
        """The workers present now. Made on first use: a worker that claims every class needs none of it."""
        present = self._workers.at(self._now)
        mine = _key(self._name, self._here)
        # Sorted by name: the choice between equally narrow workers must not depend on which claimed last.
        names = sorted((key for key in present.free if key != mine), key=str)
        self._places = [present.free[key] for key in names]
        return present


class PullingWorkers:
    """The workers that ask this process for jobs: which are present, and how many jobs more each can run."""

    def __init__(self) -> None:
        #: Called when a worker asks for kinds of jobs that no present worker asked for.
        self.on_new: Callable[[], None] = lambda: None
        #: By kinds, the moment until which a worker that claims or polls for them counts as present.
        self._claiming: dict[WorkerKinds, Moment] = {}
        self._polling: dict[WorkerKinds, Moment] = {}
        #: By worker: what it can run, how many jobs more, and until when that counts if no claim of it waits.
        self._free: dict[_WorkerKey, tuple[WorkerKinds, int, Moment]] = {}
        #: By worker, the number of its waiting claims.
        self._waiting: Counter[_WorkerKey] = Counter()
        #: By kinds, the moment until which workers were present that are absent now.
        self._gone: dict[WorkerKinds, Moment] = {}
        #: By name of a worker, the kinds that it asked for last.
        self._named: dict[str, WorkerKinds] = {}
        self._lock = Lock()

    def came(self, kinds: WorkerKinds, until: Moment) -> None:
        """Count a worker that claims such jobs as present until then."""
        with self._lock:
            new = kinds not in self._claiming
            self._claiming[kinds] = max(until, self._claiming.get(kinds, until))
        if new:
            self.on_new()

    def fades(self, by: Moment) -> bool:
        """Whether a claiming worker counts as absent at that moment if it does not claim again."""
        with self._lock:
            return any(until < by for until in self._claiming.values())

    def stays(self, name: str, until: Moment) -> None:
        """Count the worker with this name as present until then, though it claims nothing now."""
        with self._lock:
            kinds = self._named.get(name)
            if kinds is not None:
                self._claiming[kinds] = max(until, self._claiming.get(kinds, until))

    def has_room(self, name: str, kinds: WorkerKinds, room: int, until: Moment) -> None:
        """
        Set how many jobs more a worker can run. The number counts until that moment at least, and while a
        claim of the worker waits.
        """
        key = _key(name, kinds)
        with self._lock:
            _, _, before = self._free.pop(key, (None, 0, until))
            if name and name not in self._named:
                self._remember_name(name, kinds)
            if room > 0:
                self._free[key] = (kinds, room, max(before, until))

    @contextmanager
    def waiting(self, name: str, kinds: WorkerKinds, room: int) -> Iterator[None]:
        """Mark, inside `with`, that a claim of this worker waits and takes a job as soon as one may start."""
        key = _key(name, kinds)
        with self._lock:
            self._free[key] = (kinds, room, 0)
            self._waiting[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]

    def claim_waits(self, name: str, kinds: WorkerKinds) -> bool:
        with self._lock:
            return _key(name, kinds) in self._waiting

    def polled(self, kinds: WorkerKinds, now: Moment = 0, *, until: Moment, others: bool = False) -> bool:
        """
        Count a worker that polls for such jobs as present. Returns True if it is new and rounds may have left
        its jobs in the queue for a claiming worker. `others`: that worker may be on another host.
        """
        with self._lock:
            new = self._polling.get(kinds, 0) <= now
            self._polling[kinds] = max(until, self._polling.get(kinds, until))
            hidden = others or any(over > now for over in self._claiming.values())
        if new:
            self.on_new()
        return new and hidden

    def at(self, now: Moment) -> PresentWorkers:
        """The workers that are present, and forget the others."""
        with self._lock:
            claiming = {kinds: until for kinds, until in self._claiming.items() if until > now}
            polling = {kinds: until for kinds, until in self._polling.items() if until > now}
            if len(claiming) < len(self._claiming) or len(polling) < len(self._polling):
                self._remember_gone(now)
            self._claiming, self._polling = claiming, polling
            self._free = {
                key: worker for key, worker in self._free.items() if worker[2] > now or key in self._waiting
            }
            free = {key: (kinds, room) for key, (kinds, room, _) in self._free.items()}
            claiming_kinds = {*claiming, *(kinds for kinds, _ in free.values())}
            return PresentWorkers(list(claiming_kinds), list(polling), free)

    def _remember_gone(self, now: Moment) -> None:
        for workers in (self._claiming, self._polling):
            self._gone |= {kinds: until for kinds, until in workers.items() if until <= now}
        while len(self._gone) > MOST_REMEMBERED:
            del self._gone[min(self._gone, key=self._gone.__getitem__)]

    def _remember_name(self, name: str, kinds: WorkerKinds) -> None:
        if len(self._named) >= MOST_REMEMBERED:
            del self._named[next(iter(self._named))]
        self._named[name] = kinds

    def registered(self, now: Moment) -> frozenset[WorkerKinds]:
        """
        The kinds that present workers ask for, for the rounds of other hosts. Kinds that count as present for
        ever are left out: only workers of this process claim them.
        """
        present = self.at(now)
        with self._lock:
            claiming = [kinds for kinds in present.claiming if self._claiming.get(kinds, now) < FOR_EVER]
        return frozenset([*claiming, *present.polling][:MOST_REGISTERED])

    # for explain

    def last_came_at(self, admission_class: AdmissionClass, now: Moment, fetch_for: Span) -> Moment | None:
        """When a worker last asked for such jobs, present or not; None: never."""
        with self._lock:
            requests = [*self._claiming.items(), *self._polling.items(), *self._gone.items()]
        fitting = [until - fetch_for for kinds, until in requests if kinds.fits(admission_class)]
        return min(max(fitting), now) if fitting else None

    def types_asked_for(self, addon_id: AddonId | None) -> set[str]:
        """The job types that workers asked for; with `addon_id`, only workers of this addon count."""
        with self._lock:
            requests = {*self._claiming, *self._polling, *self._gone}
        return {
            name
            for kinds in requests
            if addon_id is None or kinds.addon_id == addon_id
            for name in kinds.job_types
        }

    def names_for(self, admission_class: AdmissionClass) -> dict[str, WorkerKinds]:
        """The workers with a name that claimed such jobs before, and the kinds that each asks for."""
        with self._lock:
            return {name: kinds for name, kinds in self._named.items() if kinds.fits(admission_class)}
