"""The part that carries preemption out: it looks at the lines and at what runs, asks, and after two deadlines tells the victim to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.core import changes
from penstock.core.changes import Note
from penstock.core.job import Kind
from penstock.core.landing import End, Phase
from penstock.core.preempt import Act, Cycle, InFlight, Preemption, Want, advance, begin, choose, wanted
from penstock.core.refusals import Refused
from penstock.core.states import State
from penstock.core.words import DispatchId, Moment
from penstock.engine.house import House

__all__ = ["Preempter"]

log = logging.getLogger("penstock.preempter")


class Preempter:
    """`ask`: tells a run of ours that it should yield. A worker of an add-on hears of it by the trail."""

    def __init__(self, house: House, preemption: Preemption, ask: Callable[[DispatchId], None]) -> None:
        self._house, self._preemption, self._ask = house, preemption, ask
        self._cycle: Cycle | None = None

    def step(self, now: Moment) -> Moment:
        if self._cycle is not None:
            self._go_on(self._cycle, now)
        elif self._preemption.threshold is not None:
            self._look(now)
        tick = now + self._house.rules.tick
        return tick if self._cycle is None else min(tick, self._cycle.due)

    def _look(self, now: Moment) -> None:
        house = self._house
        running: list[InFlight] | None = None

        def pairs(want: Want) -> InFlight | None:
            nonlocal running
            running = self._running() if running is None else running
            return choose(want, running, self._preemption)

        found = house.store.look(
            house.rules.host,
            lambda floor: next(
                ((want, victim) for want in wanted(house.dispatcher.view(floor)) if (victim := pairs(want))),
                None,
            ),
        )
        if found is not None:
            want, victim = found
            log.info("%s should make room for %s", victim.job_id, want.job_id)
            self._cycle = begin(victim.dispatch_id, want.job_id, now, self._preemption)
            self._request(self._cycle, now)

    def _running(self) -> list[InFlight]:
        store, host = self._house.store, self._house.rules.host
        live = [
            d for d in store.live() if d.host == host and d.job_id is not None and d.started_at is not None
        ]
        jobs = {job.job_id: job for job in store.jobs([d.job_id for d in live if d.job_id is not None])}
        return [
            InFlight(
                d.dispatch_id,
                d.job_id,
                jobs[d.job_id].intent.priority,
                d.started_at or d.admitted_at,
                d.demand,
                d.phase is Phase.ENDING,
            )
            for d in live
            if d.job_id is not None and d.job_id in jobs
        ]

    def _go_on(self, cycle: Cycle, now: Moment) -> None:
        store = self._house.store
        victim, wanted_by = store.dispatch(cycle.victim), store.job(cycle.wanted_by)
        self._cycle, act = advance(
            cycle,
            victim_runs=victim is not None and victim.phase is Phase.LEASED,
            still_wanted=wanted_by is not None and wanted_by.state is State.QUEUED,
            now=now,
            preemption=self._preemption,
        )
        if act is Act.ASK and self._cycle is not None:
            self._request(self._cycle, now)
        elif act is Act.FORCE:
            try:
                self._house.desk.stop(cycle.victim, End.PREEMPTION_TIMEOUT)
            except Refused:
                log.debug("%s ended before it was made to", cycle.victim)

    def _request(self, cycle: Cycle, now: Moment) -> None:
        store = self._house.store
        dispatch = store.dispatch(cycle.victim)
        job = None if dispatch is None or dispatch.job_id is None else store.job(dispatch.job_id)
        if job is not None and job.dispatch_id == cycle.victim:
            told = {"for": cycle.wanted_by, "asked": cycle.asked, "until": cycle.due}
            store.apply([changes.remark(job, Note(Kind.PREEMPT_REQUESTED, data=told), now)])
            self._ask(cycle.victim)
