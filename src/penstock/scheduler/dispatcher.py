"""
Rounds: which jobs start on this host, and which workers are present. A round is one `Admit` of the store.

A round leaves a job in the queue if a present worker claims such jobs in one step: a reservation would only
hold its units until the next claim. It reserves all other jobs, and their addon learns it from the trail. A
worker that polls (two steps) sees reserved jobs only. Where workers of both kinds are present, the narrower
request decides, and the poll on a tie: a claim without filters must not hide every addon's jobs from the
workers that poll for them. A claim takes reserved jobs as well, so a claiming worker loses nothing by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from penstock.core.errors import Unavailable
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import (
    MOST_PICKS,
    AdmissionView,
    Placement,
    RoundInputs,
    RoundResult,
    run_round,
)
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import OWN_TYPES, AddonId, JobId, Moment, Span
from penstock.core.text import error_text
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Admit, Grant, Receipt, Store, Submit, committed

log = logging.getLogger("penstock.scheduler")


class ReservationCache:
    """
    Which kinds of jobs may be reserved on this host, so that a claim need not read where nothing can be: a read beside every claim would
    nearly always find nothing.

    The process with the right to dispatch makes all reservations of its host, so it knows them: those that it found when it began,
    and those that it made since. Each is over when its time is, taken up or not. A process without that right knows nothing, and reads.
    So jobs must be claimed where they are dispatched, as all of ours are: a claim elsewhere may reserve jobs that stand before its
    own, of which this cache would not know.
    """

    def __init__(self) -> None:
        #: By kind, the moment when the last of them is over. Replaced and never changed, so it is read without the lock.
        self._until: dict[AdmissionClass, Moment] = {}
        self._alone = False
        self._lock = Lock()

    def begin(self, found: Iterable[Dispatch], now: Moment) -> None:
        """From now on no other process reserves here; `found` is what others have left."""
        until: dict[AdmissionClass, Moment] = {}
        for dispatch in found:
            until[dispatch.admission_class] = max(dispatch.expires_at, until.get(dispatch.admission_class, 0))
        self.made(until, now)
        self._alone = True

    def end(self) -> None:
        self._alone = False

    def made(self, until: Mapping[AdmissionClass, Moment], now: Moment) -> None:
        """Called before the reservations are written: if that fails, claims read in vain for a while, and none misses a reservation."""
        with self._lock:
            kept = {admission_class: over for admission_class, over in self._until.items() if over > now}
            self._until = kept | {
                admission_class: max(over, kept.get(admission_class, 0))
                for admission_class, over in until.items()
            }

    def shift(self, by: Span) -> None:
        """The clock is about to be set, and the reservations move with it. Where it is set back, reading for longer is enough."""
        with self._lock:
            self._until = {
                admission_class: until + max(0, by) for admission_class, until in self._until.items()
            }

    def perhaps(self, fits: Callable[[AdmissionClass], bool], now: Callable[[], Moment]) -> bool:
        if not self._alone:
            return True
        until = self._until
        if not until:
            return False
        at = now()
        return any(over > at and fits(admission_class) for admission_class, over in until.items())


_ALL: Final = 1_000_000


class IdleWorker(Protocol):
    """A worker of this process that waits for jobs, and claims in the commit of the submit that brings them."""

    def claim(self) -> tuple[WorkerKinds, int, str] | None:
        """Kinds of jobs, how many of them, and its name; None: nothing now. `take` is called once for every claim, before the next."""
        ...

    def take(self, grants: list[Grant]) -> None:
        """What came of its claim, durable; perhaps nothing."""
        ...


class Dispatcher:
    def __init__(
        self, store: Store, rules: SchedulerRules, machine: HostLoad, fetchers: PullingWorkers
    ) -> None:
        self._store, self._rules, self._machine, self._fetchers = store, rules, machine, fetchers
        #: How often each head was refused for its present reason. Written when the reason changes, and not before: that would be
        #: a write per head and tick.
        self.refusals: dict[JobId, int] = {}
        self.reserved = ReservationCache()
        self.idle_worker: IdleWorker | None = None
        #: All that the last round of our own saw in line; None: there was none yet.
        self._in_line: list[AdmissionClass] | None = None

    def begin(self) -> None:
        """This process alone dispatches on this host from now on."""
        left = self._store.live(phases=[DispatchPhase.RESERVED], limit=_ALL)
        self.reserved.begin([d for d in left if d.host == self._rules.host], self._store.now())

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
        A round with a worker at hand. Jobs that stand before its own and are reserved by us are reserved first, so order
        holds: some grants may be reservations.
        """
        now = self._store.now()
        self._fetchers.came(kinds, now + self._rules.fetch_for)
        return Admit(self._rules.host, self._decider(now, kinds, limit), self._rules.terms(worker), preview)

    def commit_submits(self, submits: Sequence[Submit], *, wait: bool = False) -> list[Future[list[Receipt]]]:
        """
        The submits and, in the same commit, the claim of the worker that waits for work: one commit where there would be two. The
        claim cannot harm the submits.
        """
        worker = self.idle_worker
        claim = None if worker is None else worker.claim()
        if worker is None or claim is None:
            return self._store.commit(*submits, wait=wait)
        try:
            *answers, admitted = self._store.commit(*submits, self.claim(*claim), wait=wait)
        except BaseException:  # the worker waits for what it claimed, Ctrl-C or not
            worker.take([])
            raise
        admitted.add_done_callback(lambda admitted: worker.take(_grants(admitted)))
        return answers

    def offer_to(self, kinds: WorkerKinds, now: Moment) -> None:
        """A two-step worker polls for such jobs. Its first poll reserves those that were left in line for others."""
        if self._fetchers.polled(kinds, now, until=now + self._rules.fetch_for):
            self._round(now)

    def _round(self, now: Moment) -> list[Grant]:
        admit = Admit(self._rules.host, self._decider(now), self._rules.terms(""))
        return committed(self._store, admit)

    def _decider(
        self, now: Moment, here: WorkerKinds | None = None, limit: int | None = None
    ) -> Callable[[AdmissionView], RoundResult]:
        offer = self._offer(now, here)
        seen: list[AdmissionClass] = []

        def noting(admission_class: AdmissionClass) -> Placement:
            seen.append(admission_class)
            return offer(admission_class)

        def decide(admission_view: AdmissionView) -> RoundResult:
            conditions = self._machine.conditions(admission_view.now)
            rules = self._rules
            seen.clear()
            asked = noting if here is None else offer
            round_result = run_round(
                admission_view, conditions, rules.limits, rules.ordering, asked, most_leases=limit
            )
            if kinds := {
                pick.admission_class for pick in round_result.picks if pick.offer is Placement.RESERVE
            }:
                self.reserved.made(
                    dict.fromkeys(kinds, admission_view.now + rules.reserve_for), admission_view.now
                )
            if here is not None:
                return round_result
            self._in_line = list(seen)
            return self._counted(round_result)

        return decide

    def _offer(self, now: Moment, here: WorkerKinds | None = None) -> Callable[[AdmissionClass], Placement]:
        present: PresentWorker | None = None  # asked for when the first comes that is not for who is here

        def offer(admission_class: AdmissionClass) -> Placement:
            nonlocal present
            if here is not None and here.fits(admission_class):
                return Placement.LEASE
            if present is None:
                present = self._fetchers.at(now)
            return Placement.LEAVE if present.claims(admission_class) else Placement.RESERVE

        return offer

    def inputs(self, admission_view: AdmissionView) -> RoundInputs:
        """What the next round will go by: for explain, and for trying out."""
        rules, now = self._rules, admission_view.now
        conditions = self._machine.conditions(now)
        return RoundInputs(admission_view, conditions, rules.limits, rules.ordering, self._offer(now))

    def awaits(self, kinds: WorkerKinds) -> bool:
        """
        Whether a job may be in line for such a worker, by our last round: one who comes with every tick need not look at all lines again to find none of its own.
        Where others dispatch too a round does not see every line, and nothing can be said.
        """
        if self._in_line is None or self._store.shared:
            return True
        return any(map(kinds.fits, self._in_line))

    def last_fetched_at(self, admission_class: AdmissionClass, now: Moment) -> Moment | None:
        """When somebody last came for such jobs, if that is how they start."""
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


FOR_EVER: Final[Moment] = 1 << 62


class WorkerKinds(NamedTuple):
    """What a worker can run. No addon: any. No types: any but our own, which only who names them knows how to run."""

    addon_id: AddonId | None = None
    job_types: frozenset[str] = frozenset()
    own: bool = False  # ours as well

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


class PresentWorker(NamedTuple):
    """The workers present at one moment."""

    claiming: list[WorkerKinds]
    polling: list[WorkerKinds]

    def claims(self, admission_class: AdmissionClass) -> bool:
        """Whether such a job is left in line for a claim."""
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

    def at(self, now: Moment) -> PresentWorker:
        with self._lock:
            self._claiming = {kinds: until for kinds, until in self._claiming.items() if until > now}
            self._polling = {kinds: until for kinds, until in self._polling.items() if until > now}
            return PresentWorker(list(self._claiming), list(self._polling))

    def last_came_at(self, admission_class: AdmissionClass, fetch_for: Span) -> Moment | None:
        with self._lock:
            fitting = [until for kinds, until in self._claiming.items() if kinds.fits(admission_class)]
        return max(fitting) - fetch_for if fitting else None
