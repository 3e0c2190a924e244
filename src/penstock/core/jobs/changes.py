"""
Changes: decisions about one job, ready for a store to write.

A change holds what the decider saw (state, fence, phase) and what it decided. The store writes it, with its
events, in one transaction, and only if the job is still as the decider saw it: if two deciders race, one of
them wins. The functions of this file make every change of a job after its submit, except its admission.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.errors import IllegalMove, StaleDispatch
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.dependencies import Fate, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import (
    DEADLINE_PASSED,
    DEPENDENCY_UNMET,
    Dispatch,
    DispatchStep,
    EventKind,
    Job,
    JobStep,
    editable,
)
from penstock.core.jobs.ordering import Ordering, place
from penstock.core.jobs.round import running_data, stop_moment
from penstock.core.jobs.states import (
    IN_FLIGHT,
    NONE_YET,
    DispatchPhase,
    EndResult,
    JobState,
    Move,
    Schedules,
    replaces,
    resolve_end,
    step,
)
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, HostId, JobId, Moment, Money, Span


class Note(Struct, frozen=True, gc=False):
    """
    An event to write. `of_job`: False for an event that a job caused, but that is not part of the job's
    trail.
    """

    kind: EventKind
    reason: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    of_job: bool = True


def principal_data(by: str) -> dict[str, str]:
    """
    The principal as event data: a token's id, `local` for the daemon's user, `process 123` for a program. No
    data if the principal is unknown.
    """
    return {"by": by} if by else {}


def addon_note(addon_id: AddonId, weight: int, paused: bool, by: str) -> Note:
    data = {"addon_id": addon_id, "weight": weight, "paused": paused, **principal_data(by)}
    return Note(EventKind.ADDON_SET, data=data)


def drain_note(host: HostId, draining: bool, by: str) -> Note:
    return Note(EventKind.HOST_SET, data={"host": host, "draining": draining, **principal_data(by)})


def admin_event(now: Moment, kind: EventKind, reason: str, by: str, data: Mapping[str, Any]) -> Change:
    """The event of an administrative act that changes nothing else in the store."""
    return Change(at=now, notes=(Note(kind, reason, {**data, **principal_data(by)}),))


def alert_note(alert: Alert) -> Note:
    return Note(EventKind.ALERT, alert.kind, alert.as_json(), of_job=alert.job_id is not None)


class Change(Struct, frozen=True, gc=False):
    """A decision for the store to write: the moves of a job and its dispatch, and the events."""

    at: Moment
    notes: tuple[Note, ...]
    job: JobStep | None = None
    dispatch: DispatchStep | None = None


class Renewal(Struct, frozen=True, kw_only=True, gc=False):
    """
    A heartbeat. `spent`: the total of this dispatch, so that a repeated heartbeat counts once. `pid`: of the
    process that runs the job.
    """

    dispatch_id: DispatchId
    expires_at: Moment
    progress: float | None = None
    spent: Money | None = None
    checkpoint: str | None = None
    pid: int | None = None


def _job_step(job: Job, move: Move | None, **more: Any) -> JobStep:
    """A step from the state that the decider saw. Without a move the state stays."""
    target = job.state if move is None else step(job.state, move)
    return JobStep(job.job_id, job.state, job.fence, target, **more)


def _dispatch_step(dispatch: Dispatch, target: DispatchPhase, **more: Any) -> DispatchStep:
    return DispatchStep(dispatch.dispatch_id, dispatch.phase, target, dispatch.reason, **more)


def start(job: Job, dispatch: Dispatch, now: Moment, *, ttl: Span, worker: str = "") -> Change:
    """Turn a reservation into a lease. The dispatch holds its units already, so this needs no admission."""
    stop_at, stop_for = stop_moment(job.intent.max_runtime_sec, job.intent.max_active_sec, job.active, now)
    return Change(
        at=now,
        notes=(Note(EventKind.RUNNING, data=running_data(worker, now - job.ready_at)),),
        job=_job_step(job, Move.START, counters=replace(job.counters, start=0)),
        dispatch=_dispatch_step(
            dispatch,
            DispatchPhase.LEASED,
            while_valid=True,
            expires_at=now + ttl,
            stop_at=stop_at,
            stop_for=stop_for,
            worker=worker,
        ),
    )


#: Ends of an attempt that yielded to a better job. The age of its job begins anew: with it, the job would start
#: again before the other one. Any other interruption leaves a job its age, and so its place.
PREEMPTED: Final = frozenset({EndReason.COOPERATIVE_PREEMPTION, EndReason.PREEMPTION_TIMEOUT})


def end(
    job: Job,
    dispatch: Dispatch,
    how: EndReason,
    now: Moment,
    *,
    schedules: Schedules,
    ordering: Ordering,
    result: str | None = None,
    error: str | None = None,
    reported: bool = False,
    by: str = "",
) -> Change:
    """
    End the dispatch: its units are returned, and `END_RULES` decide the job's next state. `reported`: the
    worker reported the end, so it counts only while the lease is valid.
    """
    end_result = resolve_end(
        how,
        dispatch.phase,
        first_reason=dispatch.reason,
        counters=job.counters,
        schedules=schedules,
        own_delays_sec=job.intent.retry_delays_sec,
    )
    delay, move = end_result.delay, end_result.move
    since, not_before = (now + delay, now + delay) if delay else (job.ready_at, job.not_before)
    if end_result.end in PREEMPTED:
        since = now
    requeued = place(job.intent, since, not_before, ordering) if move is Move.REQUEUE else None
    return Change(
        at=now,
        notes=_end_notes(end_result, job, now, error, by),
        job=_job_step(job, move, counters=end_result.counters, place=requeued),
        dispatch=_dispatch_step(
            dispatch,
            DispatchPhase.ENDED,
            while_valid=reported,
            end=end_result.end,
            result=result,
            error=error,
        ),
    )


_COMPLETED = (Note(EventKind.DONE, str(EndReason.COMPLETED)),)


def completed(dispatch_id: DispatchId, now: Moment, result: str | None = None) -> Change:
    """
    The change of `end` for a completion, made from the lease's id alone. The decider need not read the job,
    because the store applies the change only if the job runs under this lease.
    """
    job_id, _, number = dispatch_id.rpartition(".")
    fence = int(number) if number.isdecimal() else 0
    return Change(
        at=now,
        notes=_COMPLETED,
        job=JobStep(JobId(job_id), JobState.RUNNING, fence, JobState.DONE, NONE_YET),
        dispatch=DispatchStep(
            dispatch_id,
            DispatchPhase.LEASED,
            DispatchPhase.ENDED,
            while_valid=True,
            end=EndReason.COMPLETED,
            result=result,
        ),
    )


def _end_notes(end_result: EndResult, job: Job, now: Moment, error: str | None, by: str) -> tuple[Note, ...]:
    data: dict[str, Any] = {**principal_data(by)}
    if end_result.delay:
        data["not_before"] = now + end_result.delay
    if error is not None:
        data["error"] = error[:1_000]
    if end_result.end is EndReason.COST_LIMIT_REACHED:
        spent, limit = job.spent - job.spent_before, job.intent.cost_limit
        data["spent"] = spent
        if limit is not None:
            data |= {"limit": limit, "overshoot": max(0, spent - limit)}
    how = str(end_result.end)
    kind = EventKind.REQUEUED if end_result.target is JobState.QUEUED else EventKind(end_result.target)
    notes = [Note(kind, how, data)]
    if end_result.rule.mark is not None:
        notes.insert(0, Note(EventKind(end_result.rule.mark), how))
    if end_result.rule.alert:
        key, text = f"{how}/{job.job_id}/{job.fence}", f"job {job.job_id[-8:]} is {end_result.target}: {how}"
        alert = Alert(kind=how, addon_id=job.intent.addon_id, job_id=job.job_id, key=key, text=text)
        notes.append(alert_note(alert))
    return tuple(notes)


def stop(
    dispatch: Dispatch,
    job: Job | None,
    reason: EndReason,
    now: Moment,
    *,
    grace: Span,
    because: Mapping[str, Any] | None = None,
) -> Change | None:
    """
    Tell a leased dispatch to end. It holds its units until the attempt has ended, or until its lease and
    `grace` are over; heartbeats no longer renew the lease. It never ends before its lease, because a
    worker without contact may continue until then. None: the dispatch is ending already, and the first
    reason wins. A cancel replaces a reason that would requeue the job; the moment at which the lease ends
    then stays.
    """
    first, because = dispatch.reason, because or {}
    if dispatch.phase is DispatchPhase.ENDING and first is not None:
        if not replaces(reason, first):
            return None
        because = {**because, "instead_of": str(first)}
    elif dispatch.phase is not DispatchPhase.LEASED:
        raise IllegalMove(f"a {dispatch.phase} dispatch has nothing to stop", phase=str(dispatch.phase))
    return Change(
        at=now,
        notes=(Note(EventKind.STOP_REQUESTED, str(reason), because),),
        job=None if job is None else _job_step(job, None),
        dispatch=_dispatch_step(
            dispatch,
            DispatchPhase.ENDING,
            reason=reason,
            expires_at=max(dispatch.expires_at, now + grace) if first is None else None,
        ),
    )


def prolong(dispatch: Dispatch, until: Moment, now: Moment) -> Change:
    """Prolong a lease whose worker could not send a heartbeat. Like a heartbeat this makes no event."""
    until = max(dispatch.expires_at, until)
    return Change(at=now, notes=(), dispatch=_dispatch_step(dispatch, dispatch.phase, expires_at=until))


def cancel(
    job: Job,
    dispatch: Dispatch | None,
    now: Moment,
    *,
    schedules: Schedules,
    ordering: Ordering,
    grace: Span,
    by: str = "",
) -> Change | None:
    """
    Cancel the job at once if no attempt has begun; else tell the attempt to stop, and the job becomes
    CANCELED when it has ended. If the attempt is stopping for a reason that settles the job, that reason
    stays, and the trail records the cancel. None: the job is canceled already; this is no error, because
    the first answer may have been lost.
    """
    if job.state is JobState.CANCELED:
        return None
    because = principal_data(by)
    if job.state in IN_FLIGHT:
        if dispatch is None:
            raise StaleDispatch(
                "the job's dispatch ended while it was being canceled; ask again", job_id=job.job_id
            )
        if dispatch.phase is DispatchPhase.RESERVED:
            return end(job, dispatch, EndReason.CANCELED, now, schedules=schedules, ordering=ordering, by=by)
        stopping = stop(dispatch, job, EndReason.CANCELED, now, grace=grace, because=because)
        if stopping is None and dispatch.reason is not EndReason.CANCELED:
            late = {**because, "too_late_for": str(dispatch.reason)}
            return remark(job, Note(EventKind.STOP_REQUESTED, str(EndReason.CANCELED), late), now)
        return stopping
    note = Note(EventKind.CANCELED, "canceled", because)
    return Change(at=now, notes=(note,), job=_job_step(job, Move.CANCEL))


def release(dispatch: Dispatch, now: Moment, how: EndReason) -> Change:
    """End a lease without a job."""
    ended = _dispatch_step(dispatch, DispatchPhase.ENDED, end=how)
    return Change(at=now, notes=(Note(EventKind.RELEASED, str(how)),), dispatch=ended)


def retry(job: Job, now: Moment, ordering: Ordering, by: str = "") -> Change:
    """
    Retry a job at a user's request: the hard cap and the spending limit count anew, and the total spent
    stays. A deadline that has passed is removed, because the job would fail by it again at once.
    """
    intent = job.intent
    if intent.deadline_at is not None and intent.deadline_at <= now:
        intent = replace(intent, deadline_at=None)
    requeued = place(intent, now, None, ordering)
    return Change(
        at=now,
        notes=(Note(EventKind.RETRIED, data=principal_data(by)),),
        job=_job_step(
            job, Move.RETRY, counters=NONE_YET, place=requeued, fresh=True, denied=_no_longer_unmet(job)
        ),
    )


def _no_longer_unmet(job: Job) -> tuple[str, str] | None:
    """Clears the denial of an unmet dependency: the dependencies of a retried job are judged again."""
    return ("", "{}") if job.denied == DEPENDENCY_UNMET else None


def miss_dependency(
    job: Job,
    parent: JobId,
    state: JobState,
    condition: ParentCondition,
    *,
    fate: Fate,
    now: Moment,
    is_array: bool = False,
) -> Change:
    """
    End a job because a parent ended in `state`, so that the condition on it does not hold. `is_array`: the
    parent is an array.
    """
    move = Move.FAIL if fate is Fate.FAIL else Move.CANCEL
    data: dict[str, Any] = {"parent": str(parent), "condition": str(condition), "state": str(state)}
    if is_array:
        data["array"] = True
    ended = _job_step(job, move, denied=(DEPENDENCY_UNMET, json.dumps(data, separators=(",", ":"))))
    return Change(at=now, notes=(Note(EventKind(ended.target), DEPENDENCY_UNMET, data),), job=ended)


def miss_deadline(job: Job, now: Moment) -> Change:
    note = Note(EventKind.FAILED, DEADLINE_PASSED)
    return Change(at=now, notes=(note,), job=_job_step(job, Move.FAIL))


def edit(job: Job, intent: Intent, now: Moment, ordering: Ordering, by: str = "") -> Change:
    """
    Change priority, times and load of a queued job. The job keeps its age, so that an edit does not cost it
    its place.
    """
    if job.state is not JobState.QUEUED:
        raise IllegalMove(
            f"a {job.state} job cannot be edited, only a QUEUED one", state=str(job.state), move="edit"
        )
    since = min(job.ready_at, now)
    changed = {
        name: getattr(intent, name)
        for name in ("earliest_start_at", "deadline_at", "run_when", "quiet_for_sec")
        if getattr(intent, name) != getattr(job.intent, name)
    }
    return Change(
        at=now,
        notes=(Note(EventKind.EDITED, data={"priority": intent.priority, **changed, **principal_data(by)}),),
        job=_job_step(
            job,
            None,
            place=place(intent, since, job.not_before, ordering),
            seen=editable(job.intent),
        ),
    )


def remark(job: Job, note: Note, now: Moment) -> Change:
    """Add an event to the job's trail without a move. The store drops it if the job has moved since."""
    return Change(at=now, notes=(note,), job=_job_step(job, None))
