"""
The preempter: compares the heads of the ready queues with the running jobs, asks a victim to yield, and stops
it if it has not yielded after two requests. `core/jobs/preemption.py` decides.
"""

from __future__ import annotations

import logging
from typing import Final

from penstock.core.errors import Refused
from penstock.core.jobs import changes
from penstock.core.jobs.admission import admission_class_of
from penstock.core.jobs.changes import Note
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import urgent_from
from penstock.core.jobs.preemption import (
    Act,
    Candidate,
    Cycle,
    Want,
    advance,
    begin,
    choose,
    still_wanted,
    wanted,
)
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import EndReason, Moment
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.job_service import JobService, YieldRequests
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, Store, committed, with_jobs

log = logging.getLogger("penstock.preempter")

_BEGUN: Final = (DispatchPhase.LEASED, DispatchPhase.ENDING)


class Preempter:
    """Upkeep that carries out one preemption at a time; `cycle` is the one under way."""

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        dispatcher: Dispatcher,
        job_service: JobService,
        yields: YieldRequests,
    ) -> None:
        self._store, self._rules, self._dispatcher, self._job_service = store, rules, dispatcher, job_service
        self._preemption, self._yields = rules.preemption, yields
        self.cycle: Cycle | None = None

    def step(self, now: Moment) -> Moment:
        """
        Go on with the preemption under way, or look for one. Called once a tick, and when a request expires.
        """
        if self.cycle is not None:
            self._go_on(self.cycle, now)
        elif self._preemption.threshold is not None:
            self._look(now)
        tick = now + self._rules.tick
        return tick if self.cycle is None else min(tick, self.cycle.due)

    def _look(self, now: Moment) -> None:
        if not self._store.live(phases=_BEGUN, limit=1):
            return  # nothing runs, so nothing can yield: do not read the ready queues
        pair = self._store.read_view(self._rules.host, self._first_pair)
        if pair is not None:
            want, victim = pair
            log.info("%s should yield to %s", victim.job_id, want.waiting.job_id)
            self.cycle = begin(victim.dispatch_id, want.waiting.job_id, now, self._preemption)
            self.request(self.cycle, now)

    def _first_pair(self, view: AdmissionView) -> tuple[Want, Dispatch] | None:
        wants = wanted(self._dispatcher.inputs(view))
        running = self._running() if wants else []
        pairs = ((want, choose(want, running, self._preemption)) for want in wants)
        return next(((want, victim) for want, victim in pairs if victim is not None), None)

    def _running(self) -> list[Candidate]:
        """The running jobs on this host."""
        store, host = self._store, self._rules.host
        # Skip reservations: there may be a hundred that no worker leases.
        begun = store.live(phases=_BEGUN)
        here = [d for d in begun if d.host == host and d.job_id is not None]
        return [
            Candidate(job.intent.priority, dispatch, job.intent.preemptible)
            for dispatch, job in with_jobs(store, here)
            if job is not None
        ]

    def _go_on(self, cycle: Cycle, now: Moment) -> None:
        victim, wanted_by = self._store.dispatch(cycle.victim), self._store.job(cycle.wanted_by)
        self.cycle, act = advance(
            cycle,
            victim_runs=victim is not None and victim.phase is DispatchPhase.LEASED,
            still_wanted=self._is_still_wanted(cycle, victim, wanted_by, now),
            now=now,
            preemption=self._preemption,
        )
        if self.cycle is None:
            self._yields.withdraw(cycle.victim)
        elif act is Act.ASK:
            self.request(self.cycle, now)
        if act is Act.FORCE:
            try:
                self._job_service.stop(cycle.victim, EndReason.PREEMPTION_TIMEOUT)
            except Refused:
                log.debug("%s ended before it was told to stop", cycle.victim)

    def _is_still_wanted(
        self, cycle: Cycle, victim: Dispatch | None, wanted_by: Job | None, now: Moment
    ) -> bool:
        """Whether the waiting job, which may have been edited or paused, would start if the victim ended."""
        threshold = self._preemption.threshold
        if victim is None or wanted_by is None or wanted_by.state is not JobState.QUEUED or threshold is None:
            return False
        running = self._running()
        priority = next((run.priority for run in running if run.dispatch.dispatch_id == cycle.victim), None)
        if priority is None or wanted_by.intent.priority < priority + threshold:
            return False
        ending = [
            run.dispatch.admission_class for run in running if run.dispatch.phase is DispatchPhase.ENDING
        ]
        urgent_at = urgent_from(wanted_by.intent, self._rules.ordering)

        def decide(view: AdmissionView) -> bool:
            return still_wanted(
                self._dispatcher.inputs(view),
                admission_class_of(wanted_by.intent),
                victim.admission_class,
                ending,
                due=now >= cycle.due,
                urgent=urgent_at is not None and urgent_at <= now,
                ready_at=wanted_by.ready_at,
            )

        return self._store.read_view(self._rules.host, decide)

    def request(self, cycle: Cycle, now: Moment) -> None:
        """Ask the victim to yield, and write the request into the trail."""
        dispatch = self._store.dispatch(cycle.victim)
        job = None if dispatch is None or dispatch.job_id is None else self._store.job(dispatch.job_id)
        if job is not None and job.dispatch_id == cycle.victim:
            data = {"for": cycle.wanted_by, "asked": cycle.asked, "until": cycle.due}
            note = Note(EventKind.PREEMPT_REQUESTED, data=data)
            committed(self._store, Apply([changes.remark(job, note, now)]))
            self._yields.ask(cycle.victim)
