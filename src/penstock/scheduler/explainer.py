"""The explainer: why a job waits, when it will likely start, and whether its deadline can be kept."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.core.errors import NotFound
from penstock.core.jobs.admission import AdmissionClass, admission_class_of
from penstock.core.jobs.explain import Explanation, Viewer, explain
from penstock.core.jobs.forecast import Outlook, likely_starts, outlook, reachable
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import dispatch_id_of
from penstock.core.jobs.reasons import (
    AwaitsWorker,
    CapReached,
    LabelMissing,
    NotEnoughUnits,
    QueuedAhead,
    UnitsKept,
)
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, Moment
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.forecaster import Forecaster
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Receipt, Store


class Explainer:
    def __init__(
        self, store: Store, rules: SchedulerRules, dispatcher: Dispatcher, forecaster: Forecaster
    ) -> None:
        self._store, self._rules, self._dispatcher = store, rules, dispatcher
        self._forecaster = forecaster

    def explain(self, job_id: JobId, viewer: Viewer | None = None) -> Explanation:
        """From the recorded decision where a round has made one; else the same decision, made now."""
        job = self._store.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        now, rules = self._store.now(), self._rules
        last = self._store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
        if job.state is not JobState.QUEUED:
            return explain(job, now, last)

        admission_class = admission_class_of(job.intent)
        seen = self._store.look(
            rules.host,
            lambda view: outlook(self._dispatcher.inputs(view), job_id, admission_class, job.ready_at),
        )
        match seen.reason:
            case LabelMissing() as missing:
                missing = replace(missing, hosts=self._hosts_with(admission_class, now))
                seen = replace(seen, reason=missing)
            case NotEnoughUnits():
                seen = replace(seen, next_when_ends=self._run_that_ends_at(seen.likely_start_at))
            case None if (came := self._dispatcher.last_fetched_at(admission_class, now)) is not None:
                seen = replace(seen, reason=AwaitsWorker(came), likely_start_at=None)
            case _:
                pass
        return explain(job, now, last, self._with_range(job_id, seen), viewer)

    def _with_range(self, job_id: JobId, seen: Outlook) -> Outlook:
        """With a range for its start, if the order and ends of runs decide it."""
        playable = isinstance(seen.reason, NotEnoughUnits | UnitsKept | QueuedAhead | CapReached)
        if not playable and not (seen.reason is None and seen.line_ahead):
            return seen
        start = self._forecaster.ranges([job_id]).get(job_id)
        return seen if start is None else replace(seen, likely_start_at=start.middle_at, start_range=start)

    def _hosts_with(self, admission_class: AdmissionClass, now: Moment) -> tuple[str, ...]:
        return tuple(
            h.host
            for h in self._store.hosts()
            if h.until > now and set(admission_class.labels) <= set(h.labels)
        )

    def _run_that_ends_at(self, moment: Moment | None) -> JobId | None:
        if moment is None:
            return None
        return next((d.job_id for d in self._store.live() if d.ends_at == moment), None)

    def with_forecasts(self, intents: Sequence[Intent], receipts: list[Receipt]) -> list[Receipt]:
        """The receipts with a forecast for each deadline (SPEC OR-4). Jobs without one cost nothing here."""
        intents_of = {
            receipt.job_id: intent
            for intent, receipt in zip(intents, receipts, strict=True)
            if intent.deadline_at is not None and receipt.state is JobState.QUEUED
        }
        if not intents_of:
            return receipts
        now = self._store.now()
        jobs = [
            (job_id, admission_class_of(i), max(now, i.earliest_start_at or 0))
            for job_id, i in intents_of.items()
        ]
        starts = self._store.look(
            self._rules.host, lambda view: likely_starts(self._dispatcher.inputs(view), jobs)
        )
        return [
            replace(
                receipt,
                deadline_reachable=reachable(intents_of[receipt.job_id], starts[receipt.job_id]),
                likely_start_at=starts[receipt.job_id],
            )
            if receipt.job_id in intents_of
            else receipt
            for receipt in receipts
        ]
