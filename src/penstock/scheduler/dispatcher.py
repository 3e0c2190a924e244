"""
Rounds: which jobs start on this host, and what a round goes by: the load of the host and the workers that are
present. A round is one `Admit` of the store.

A round leaves a job in the queue if a present worker claims such jobs in one step: a reservation would only
hold its units until the next claim. It reserves all other jobs, and their addon learns it from the trail. A
worker that polls (two steps) sees reserved jobs only. Where workers of both kinds are present, the narrower
request decides, and the poll on a tie: a claim without filters must not hide every addon's jobs from the
workers that poll for them. A claim takes reserved jobs as well, so a claiming worker loses nothing by it.

One `Admit` answers one claim today: `Dispatcher.claim` makes the round that a single worker waits for. The
shape for many is prepared. All that a claim brings to a round is its `offer` (which classes become leases)
and its limit; a round over a list of claims needs an `offer` that names the claim, a limit per claim in place
of `most_leases`, and the claim's number on each `Pick`. The order of heads, the gates and the stores' writing
do not depend on the claim, so `Admit(host, claims)` changes `_offer`, `_Round.run` and the grouping of
grants alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from penstock.core.errors import BadIntent, Unavailable
from penstock.core.jobs.admission import AdmissionClass, Conditions
from penstock.core.jobs.load import Quiet, Reading, busy, is_fresh, observe, reading_problems
from penstock.core.jobs.round import MOST_PICKS, AdmissionView, Placement, RoundInputs, RoundResult, run_round
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import OWN_TYPES, AddonId, JobId, Moment, Span
from penstock.core.text import error_text
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Admit, Grant, Receipt, Store, Submit, Terms, committed

log = logging.getLogger("penstock.scheduler")

_ALL: Final = 1_000_000


class IdleWorker(Protocol):
    """
    A worker of this process that waits for jobs, and claims in the commit of the submit that brings them.
    """

    def claim(self) -> tuple[WorkerKinds, int, str] | None:
        """
        Kinds of jobs, how many of them, and the worker's name; None: it claims nothing now. `take` is called
        once for every claim, before the next one.
        """
        ...

    def take(self, grants: list[Grant]) -> None:
        """The grants of its claim, durable; perhaps none."""
        ...


class Dispatcher:
    def __init__(
        self, store: Store, rules: SchedulerRules, machine: HostLoad, fetchers: PullingWorkers
    ) -> None:
        self._store, self._rules, self._machine, self._fetchers = store, rules, machine, fetchers
        #: How often each head was refused for its present reason. The trail gets the count when the reason
        #: changes: a write with each refusal would be one per head and tick.
        self.refusals: dict[JobId, int] = {}
        #: When the last reservation of a class ends. Replaced and never changed, so readers need no lock.
        self._reserved_until: dict[AdmissionClass, Moment] = {}
        self._alone, self._lock = False, Lock()
        self.idle_worker: IdleWorker | None = None
        #: The classes with ready jobs in the last round that no worker claimed in; None: there was none yet.
        self._ready: list[AdmissionClass] | None = None

    def begin(self) -> None:
        """
        This process alone dispatches on this host from now on, so it makes all reservations of the host. It
        remembers their classes, so that a claim need not read them: a read beside every claim would nearly
        always find none. Jobs must therefore be claimed where they are dispatched: a claim in another process
        may reserve jobs that stand before its own, and this process would miss them.
        """
        reserved = self._store.live(phases=[DispatchPhase.RESERVED], limit=_ALL)
        here = [(d.admission_class, d.expires_at) for d in reserved if d.host == self._rules.host]
        self._remember_reserved(here, self._store.now())
        self._alone = True

    def end(self) -> None:
        """Another process may dispatch on this host: claims read its reservations."""
        self._alone = False

    def _remember_reserved(self, reserved: Iterable[tuple[AdmissionClass, Moment]], now: Moment) -> None:
        with self._lock:
            until = {each: over for each, over in self._reserved_until.items() if over > now}
            for each, over in reserved:
                until[each] = max(over, until.get(each, 0))
            self._reserved_until = until

    def may_have_reserved(self, kinds: WorkerKinds) -> bool:
        """Whether jobs of these kinds may be reserved."""
        until = self._reserved_until
        if not self._alone or not until:
            return not self._alone
        now = self._store.now()
        return any(over > now and kinds.fits(admission_class) for admission_class, over in until.items())

    def step(self, now: Moment) -> Moment:
        while len(self._round(now)) >= MOST_PICKS:
            pass
        return now + self._rules.tick

    def claim(
        self,
        kinds: WorkerKinds,
        limit: int,
        worker: str,
        preview: Callable[[list[Grant]], None] | None = None,
    ) -> Admit:
        """
        A round for a worker that waits. It also reserves the jobs that stand before the worker's own and that
        rounds reserve, so order holds: some grants may be reservations.
        """
        now = self._store.now()
        self._fetchers.came(kinds, now + self._rules.fetch_for)
        return self.admit(self._decider(now, kinds, limit), worker, preview)

    def admit(
        self,
        decide: Callable[[AdmissionView], RoundResult],
        worker: str = "",
        preview: Callable[[list[Grant]], None] | None = None,
    ) -> Admit:
        rules = self._rules
        return Admit(rules.host, decide, Terms(rules.reserve_for, rules.lease_for, worker), preview)

    def commit_submits(self, submits: Sequence[Submit], *, wait: bool = False) -> list[Future[list[Receipt]]]:
        """
        The submits and, in the same commit, the claim of the idle worker: one commit instead of two. A claim
        that fails leaves the submits as they are.
        """
        worker = self.idle_worker
        claim = None if worker is None else worker.claim()
        if worker is None or claim is None:
            return self._store.commit(*submits, wait=wait)
        try:
            *answers, admitted = self._store.commit(*submits, self.claim(*claim), wait=wait)
        except BaseException:  # the worker waits for an answer, also after a Ctrl-C
            worker.take([])
            raise
        admitted.add_done_callback(lambda admitted: worker.take(_grants(admitted)))
        return answers

    def offer_to(self, kinds: WorkerKinds, now: Moment) -> None:
        """
        A two-step worker polls for such jobs. Its first poll reserves jobs that rounds left in the queue.
        """
        if self._fetchers.polled(kinds, now, until=now + self._rules.fetch_for):
            self._round(now)

    def _round(self, now: Moment) -> list[Grant]:
        return committed(self._store, self.admit(self._decider(now)))

    def _decider(
        self, now: Moment, here: WorkerKinds | None = None, limit: int | None = None
    ) -> Callable[[AdmissionView], RoundResult]:
        offer = self._offer(now, here)

        def decide(view: AdmissionView) -> RoundResult:
            ready: list[AdmissionClass] = []

            def noting(admission_class: AdmissionClass) -> Placement:
                ready.append(admission_class)
                return offer(admission_class)

            round_result = run_round(self.inputs(view, noting if here is None else offer), most_leases=limit)
            reserved = {p.admission_class for p in round_result.picks if p.offer is Placement.RESERVE}
            if reserved:
                # Before they are written: if that fails, claims read in vain for a while, and none misses one.
                until = view.now + self._rules.reserve_for
                self._remember_reserved([(each, until) for each in reserved], view.now)
            if here is not None:
                return round_result
            self._ready = ready
            return self._counted(round_result)

        return decide

    def _offer(self, now: Moment, here: WorkerKinds | None = None) -> Callable[[AdmissionClass], Placement]:
        present: PresentWorkers | None = None  # read only if the claiming worker does not take every class

        def offer(admission_class: AdmissionClass) -> Placement:
            nonlocal present
            if here is not None and here.fits(admission_class):
                return Placement.LEASE
            if present is None:
                present = self._fetchers.at(now)
            return Placement.LEAVE if present.claims(admission_class) else Placement.RESERVE

        return offer

    def inputs(
        self, view: AdmissionView, offer: Callable[[AdmissionClass], Placement] | None = None
    ) -> RoundInputs:
        """
        What a round goes by. Without an `offer`: what the next round will go by, for explain and for trials.
        """
        conditions, rules = self._machine.conditions(view.now), self._rules
        return RoundInputs(view, conditions, rules.limits, rules.ordering, offer or self._offer(view.now))

    def awaits(self, kinds: WorkerKinds) -> bool:
        """
        Whether a job may be ready for such a worker, by the last round: a worker that comes with every tick
        need not read all ready queues to find none of its own. True where other hosts dispatch too: then a
        round does not see every queue.
        """
        if self._ready is None or self._store.shared:
            return True
        return any(map(kinds.fits, self._ready))

    def last_fetched_at(self, admission_class: AdmissionClass, now: Moment) -> Moment | None:
        """When a worker last claimed such jobs, if pulling workers start them."""
        if self._offer(now)(admission_class) is not Placement.LEAVE:
            return None
        return self._fetchers.last_came_at(admission_class, self._rules.fetch_for)

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
    error = admitted.exception()
    if error is None:
        return admitted.result()
    if not isinstance(error, Unavailable):
        log.error("a claim beside a submit failed: %s", error_text(error))
    return []


MOST_SOURCES: Final = 200


class HostLoad:
    """
    The load of this host, as admission sees it. Readings come from the load sampler of this host or from an
    application over HTTP; they are kept in memory, and every round looks at them.
    """

    def __init__(self, rules: SchedulerRules) -> None:
        self._rules = rules
        self._labels = frozenset(rules.labels)
        self._readings: dict[tuple[str, str], Reading] = {}
        self._quiet: Quiet | None = None
        self._lock = Lock()
        #: The process is about to stop.
        self.draining = False
        #: An operator drained this host.
        self.drained = False

    def report(self, reading: Reading) -> None:
        with self._lock:
            self._readings[reading.source, reading.name] = reading

    def report_application(
        self,
        source: AddonId,
        values: Mapping[str, float],
        now: Moment,
        ttl: Span | None = None,
        *,
        bound: bool = False,
    ) -> None:
        """
        An application's own figures. They count until their time is over, and are forgotten if the
        application stops reporting. `bound`: reported with a token of that addon alone. Such figures make the
        machine NORMAL at worst: other addons keep half of the units, and jobs that need no quiet start.
        """
        problems = list(reading_problems(values, ttl))
        if problems:
            raise BadIntent.of(*problems)
        with self._lock:
            senses = self._rules.senses
            kept = {k: r for k, r in self._readings.items() if not r.source or is_fresh(r, now, senses)}
            if len({r.source for r in kept.values()} | {source}) > MOST_SOURCES:
                raise BadIntent.of(("source", f"must be one of the {MOST_SOURCES} that report already"))
            reported = {
                (source, name): Reading(name, value, now, source, ttl, bound)
                for name, value in values.items()
            }
            self._readings = kept | reported

    def readings(self) -> list[Reading]:
        with self._lock:
            return list(self._readings.values())

    def conditions(self, now: Moment) -> Conditions:
        rules, draining = self._rules, self.draining or self.drained
        if rules.capacity.fixed is not None:
            # Nothing is measured: always quiet, for longer than a job can ask.
            return Conditions(rules.capacity.fixed, streak=now, draining=draining, labels=self._labels)
        with self._lock:
            thresholds = rules.thresholds
            score = busy(self._readings.values(), now, rules.senses, thresholds.clearly_normal)
            self._quiet = quiet = observe(self._quiet, score, now, thresholds)
        units, streak = rules.capacity.units(score.score), quiet.streak(now)
        return Conditions(units, quiet.state, streak, score, draining=draining, labels=self._labels)


FOR_EVER: Final[Moment] = 1 << 62


class WorkerKinds(NamedTuple):
    """What a worker can run. No addon: any. No types: any but those of the runner, unless `own`."""

    addon_id: AddonId | None = None
    job_types: frozenset[str] = frozenset()
    own: bool = False

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


class PresentWorkers(NamedTuple):
    """The workers present at one moment."""

    claiming: list[WorkerKinds]
    polling: list[WorkerKinds]

    def claims(self, admission_class: AdmissionClass) -> bool:
        """Whether such a job is left in the queue for a claim."""
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

    def at(self, now: Moment) -> PresentWorkers:
        with self._lock:
            self._claiming = {kinds: until for kinds, until in self._claiming.items() if until > now}
            self._polling = {kinds: until for kinds, until in self._polling.items() if until > now}
            return PresentWorkers(list(self._claiming), list(self._polling))

    def last_came_at(self, admission_class: AdmissionClass, fetch_for: Span) -> Moment | None:
        with self._lock:
            fitting = [until for kinds, until in self._claiming.items() if kinds.fits(admission_class)]
        return max(fitting) - fetch_for if fitting else None
