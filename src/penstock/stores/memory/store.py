"""
Jobs in memory: for tests and simulation, and as the shortest statement of what a store does.

One lock and plain dictionaries (`memory_tables`, with the reads); here is the life of a job, and `memory_upkeep` has what is written beside it.
What the SQL stores keep as sums is computed from the dispatches that live, so the two can be held against each other. It forgets everything with
its process and promises nothing else less: the same contract suite runs against it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from penstock.core.jobs.admission import Account
from penstock.core.jobs.changes import (
    Change,
    Note,
    Renewal,
    completed,
    running,
    stop_moment,
)
from penstock.core.jobs.intent import AdmissionClass, Intent
from penstock.core.jobs.job import Dispatch, DispatchStep, EventKind, Job, JobStep, dispatch_id_of, place
from penstock.core.jobs.ordering import Ordering, Pick, Placement, RoundResult
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Span
from penstock.stores.api import (
    NOTHING_SPENT,
    Admit,
    Apply,
    Clock,
    Complete,
    Depth,
    Grant,
    NotesFor,
    Operation,
    Receipt,
    Renew,
    Standing,
    Submit,
    Terms,
    key_conflict,
)
from penstock.stores.common.group_commit import outcome_of
from penstock.stores.common.rows import uuid7
from penstock.stores.memory.maintenance import MemoryUpkeep


class MemoryStore(MemoryUpkeep):
    shared = False

    def __init__(
        self, clock: Clock, *, ordering: Ordering | None = None, new_id: Callable[[], str] = uuid7
    ) -> None:
        super().__init__(clock, ordering=ordering, new_id=new_id)

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:  # noqa: ARG002 - it never takes long
        with self._lock:
            before = self._seq
            answers = [outcome_of(partial(self._write, operation)) for operation in operations]
            has_news = self._seq != before
        if has_news:
            self._notify_listeners()
        return answers

    def _write(self, operation: Operation[Any]) -> Any:
        match operation:
            case Submit(intents, depth):
                return self._submit(intents, depth)
            case Admit():
                return self._admit(operation)
            case Apply(changes):
                return [self._apply(change) for change in changes]
            case Complete(done):
                now = self._clock()
                return [self._apply(completed(each.dispatch_id, now, each.result)) for each in done]
            case Renew(renewals, notes_for):
                return [self._renew(renewal, notes_for) for renewal in renewals]
        return self._keep_up(operation)

    # submit

    def _submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        fresh = [intent for intent in intents if self._known(intent) is None]
        depth.check(fresh, self._queued)
        made: dict[tuple[AddonId, str], Intent] = {}
        for intent in fresh:
            if intent.idempotency_key is not None:
                _same_body(made.setdefault((intent.addon_id, intent.idempotency_key), intent), intent)
        return [self._known(intent) or self._insert(intent) for intent in intents]

    def _known(self, intent: Intent) -> Receipt | None:
        if intent.idempotency_key is None or (intent.addon_id, intent.idempotency_key) not in self._keys:
            return None
        job_id, first = self._keys[intent.addon_id, intent.idempotency_key]
        _same_body(first, intent, job_id)
        return Receipt(job_id, self._jobs[job_id].state, created=False)

    def _queued(self, addon_id: AddonId | None) -> int:
        counted = self._tally.items()
        return sum(n for (a, state), n in counted if state is JobState.QUEUED and addon_id in (None, a))

    def _insert(self, intent: Intent) -> Receipt:
        now = self._clock()
        self._last_no += 1
        its_place = place(intent, now, None, self._ordering)
        job = Job(
            no=self._last_no,
            job_id=JobId(self._new_id()),
            intent=intent,
            state=JobState.QUEUED,
            created_at=now,
            ready_at=its_place.ready_at,
        )
        self._jobs[job.job_id] = job
        self._trails[job.job_id] = []
        self._tally[intent.addon_id, JobState.QUEUED] += 1
        self._lines.put(job, its_place, now)
        if intent.idempotency_key is not None:
            self._keys[intent.addon_id, intent.idempotency_key] = (job.job_id, intent)
        self._note(now, Note(EventKind.SUBMITTED), job)
        return Receipt(job.job_id, JobState.QUEUED, created=True)

    # admit

    def _admit(self, admit: Admit) -> list[Grant]:
        host, now, terms = admit.host, self._clock(), admit.terms
        self._lines.advance(now)
        round_result = admit.run_round(self._admission_view(host, now))
        self._deny(round_result, now)
        grants = [self._pick(pick, host, now, terms) for pick in round_result.picks]
        if round_result.loan is not None:
            grants.append(Grant(self._loan(round_result.loan, host, now, terms)))
        return grants

    def _deny(self, round_result: RoundResult, now: Moment) -> None:
        for waiting in round_result.passed:
            self._jobs[waiting.job_id] = replace(self._jobs[waiting.job_id], passed_at=now)
        for denial in round_result.denials:
            job_id, data = denial.waiting.job_id, denial.as_json()
            job = replace(
                self._jobs[job_id],
                denied=denial.reason.code,
                denied_data=json.dumps(data, separators=(",", ":")),
                denied_at=now,
            )
            self._jobs[job_id] = job
            self._note(now, Note(EventKind.DENIED, denial.reason.code, data), job)

    def _pick(self, pick: Pick, host: HostId, now: Moment, terms: Terms) -> Grant:
        job = self._jobs[pick.waiting.job_id]
        leased = pick.offer is Placement.LEASE
        dispatch_id = dispatch_id_of(job.job_id, job.fence + 1)
        job = replace(
            job,
            state=JobState.DISPATCHING,
            fence=job.fence + 1,
            dispatch_id=dispatch_id,
            denied="",
            denied_data="{}",
            denied_at=None,
            passed_at=None,
        )
        self._lines.drop(job)
        self._note(now, Note(EventKind.DISPATCHING, "admitted"), job, dispatch_id)
        stop_at, stop_for = None, None
        if leased:
            intent = job.intent
            stop_at, stop_for = stop_moment(intent.max_runtime_sec, intent.max_active_sec, job.active, now)
            job = replace(job, state=JobState.RUNNING, counters=replace(job.counters, start=0))
            self._note(now, running(terms.worker, now - job.ready_at), job, dispatch_id)
        self._moved(job, JobState.QUEUED)
        dispatch = Dispatch(
            dispatch_id=dispatch_id,
            job_id=job.job_id,
            addon_id=job.intent.addon_id,
            host=host,
            admission_class=pick.admission_class,
            fence=job.fence,
            phase=DispatchPhase.LEASED if leased else DispatchPhase.RESERVED,
            admitted_at=now,
            started_at=now if leased else None,
            expires_at=now + (terms.lease_for if leased else terms.reserve_for),
            ends_at=pick.ends_at,
            stop_at=stop_at,
            stop_for=stop_for,
            worker=terms.worker if leased else "",
        )
        return Grant(self._hold(dispatch, now), job if leased else None)

    def _loan(self, admission_class: AdmissionClass, host: HostId, now: Moment, terms: Terms) -> Dispatch:
        dispatch_id = DispatchId(f"{self._new_id()}.0")
        self._note(now, Note(EventKind.ADMITTED), None, dispatch_id)
        dispatch = Dispatch(
            dispatch_id=dispatch_id,
            job_id=None,
            addon_id=admission_class.addon_id,
            host=host,
            admission_class=admission_class,
            fence=0,
            phase=DispatchPhase.LEASED,
            admitted_at=now,
            started_at=now,
            expires_at=now + terms.lease_for,
            worker=terms.worker,
        )
        return self._hold(dispatch, now)

    def _hold(self, dispatch: Dispatch, now: Moment) -> Dispatch:
        self._dispatches[dispatch.dispatch_id] = self._live[dispatch.dispatch_id] = dispatch
        account = self._accounts.setdefault(dispatch.addon_id, Account())
        account.hold(dispatch.admission_class.cost_units, now, self._ordering.sharing)
        return dispatch

    # apply

    def _apply(self, change: Change) -> bool:
        now = self._clock()
        step, ending = change.job, change.dispatch
        if step is not None and not step.applies_to(self._jobs.get(step.job_id)):
            return False
        if ending is not None and not ending.applies_to(self._live.get(ending.dispatch_id), now):
            return False
        active = 0 if ending is None else self._move_dispatch(ending, now).active
        job = None if step is None else self._move_job(step, active, now)
        for note in change.notes:
            self._note(change.at, note, job, None if ending is None else ending.dispatch_id)
        return True

    def _move_dispatch(self, step: DispatchStep, now: Moment) -> Dispatch:
        dispatch = step.apply(self._live[step.dispatch_id], now)
        self._dispatches[step.dispatch_id] = self._live[step.dispatch_id] = dispatch
        if step.target is DispatchPhase.ENDED:
            del self._live[step.dispatch_id]
            account = self._accounts.setdefault(dispatch.addon_id, Account())
            account.hold(-dispatch.admission_class.cost_units, now, self._ordering.sharing)
        return dispatch

    def _move_job(self, step: JobStep, active: Span, now: Moment) -> Job:
        job = step.apply(self._jobs[step.job_id], active, now)
        if step.place is not None:
            self._lines.put(job, step.place, now)
        elif step.target is not JobState.QUEUED:
            self._lines.drop(job)
        self._moved(job, step.source)
        return job

    def _moved(self, job: Job, source: JobState) -> None:
        self._jobs[job.job_id] = job
        self._tally[job.intent.addon_id, source] -= 1
        self._tally[job.intent.addon_id, job.state] += 1

    # renew

    def _renew(self, renewal: Renewal, notes_for: NotesFor) -> Standing | None:
        now = self._clock()
        dispatch = self._live.get(renewal.dispatch_id)
        if dispatch is None or dispatch.phase is DispatchPhase.RESERVED or dispatch.expires_at <= now:
            return None
        more = max(0, (renewal.spent or 0) - dispatch.spent)
        dispatch = replace(
            dispatch,
            expires_at=renewal.expires_at if dispatch.phase is DispatchPhase.LEASED else dispatch.expires_at,
            progress=dispatch.progress if renewal.progress is None else renewal.progress,
            spent=dispatch.spent + more,
            pid=dispatch.pid if renewal.pid is None else renewal.pid,
        )
        self._dispatches[renewal.dispatch_id] = self._live[renewal.dispatch_id] = dispatch
        for window in windows(now) if more else ():
            self._spent[dispatch.addon_id, window.name] += more
        job = None if dispatch.job_id is None else self._jobs[dispatch.job_id]
        before = 0 if job is None else job.spent - job.spent_before
        if job is not None:
            progress = job.progress if renewal.progress is None else renewal.progress
            self._jobs[job.job_id] = replace(job, progress=progress, spent=job.spent + more, pid=dispatch.pid)
            if renewal.checkpoint is not None:
                self._checkpoints[job.job_id] = renewal.checkpoint
                self._note(now, Note(EventKind.CHECKPOINT), job, renewal.dispatch_id)
        standing = Standing(
            renewal.dispatch_id,
            dispatch.job_id,
            dispatch.addon_id,
            dispatch.phase,
            dispatch.reason,
            dispatch.expires_at,
            before,
            before + more,
            None if job is None else job.intent.cost_limit,
            {w.kind: self._spent[dispatch.addon_id, w.name] for w in windows(now)} if more else NOTHING_SPENT,
        )
        for note in notes_for(standing):
            self._note(now, note, job if note.of_job else None, renewal.dispatch_id)
        return standing


def _same_body(first: Intent, again: Intent, job_id: JobId | None = None) -> None:
    if first != again:
        raise key_conflict(again, job_id)
