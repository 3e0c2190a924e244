"""From values of the core to bodies of the API, and back. Only this file knows both vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from msgspec import Raw, UnsetType

from penstock import wire
from penstock.core.jobs import job as core
from penstock.core.jobs.explain import Explanation
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import outcome_of
from penstock.core.jobs.load import Host
from penstock.core.jobs.spending import Use
from penstock.core.jobs.states import JobState, allowed
from penstock.core.jobs.types import AddonId, Constraint, Moment, Money, priority_of, seconds
from penstock.scheduler.job_service import Answer
from penstock.stores.api import Addon

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
T = TypeVar("T")


def when(moment: Moment) -> datetime:
    return _EPOCH + timedelta(microseconds=moment)


def _maybe_when(moment: Moment | None) -> datetime | None:
    return None if moment is None else _EPOCH + timedelta(microseconds=moment)


def moment(when: datetime) -> Moment:
    return (when - _EPOCH) // _MICROSECOND


def _maybe_moment(when: datetime | None) -> Moment | None:
    return None if when is None else moment(when)


def money(amount: float) -> Money:
    return round(amount * 1_000_000)


def _amount(money: Money) -> float:
    return money / 1_000_000


def or_none(value: T | UnsetType) -> T | None:
    return None if isinstance(value, UnsetType) else value


def text_of(json: Raw | UnsetType) -> str:
    return "null" if isinstance(json, UnsetType) else bytes(json).decode()


def _json(text: str | None) -> Raw:
    return Raw(b"null" if text is None else text.encode())


ALL_CONSTRAINTS: Final = tuple(
    wire.Constraints(**{str(flag.name).lower(): bool(flag & Constraint(bits)) for flag in Constraint if flag})
    for bits in range(8)
)


_COMBINED: Final = {
    (flags.cpu_heavy, flags.disk_write_heavy, flags.network_heavy): Constraint(bits)
    for bits, flags in enumerate(ALL_CONSTRAINTS)
}


def _constraints(flags: wire.Constraints) -> Constraint:
    # Looked up: to combine flags costs more than to decode the rest of a submit.
    return _COMBINED[flags.cpu_heavy, flags.disk_write_heavy, flags.network_heavy]


def intent_from(submit: wire.SubmitBody) -> Intent:
    return Intent(
        addon_id=AddonId(submit.addon_id),
        job_type=submit.job_type,
        cost_units=submit.cost_units,
        priority=priority_of(submit.priority),
        constraints=_constraints(submit.constraints),
        run_when=submit.run_when,
        quiet_for_sec=submit.quiet_for_sec,
        expected_duration_sec=submit.expected_duration_sec,
        payload=text_of(submit.payload),
        tags=submit.tags,
        labels=submit.labels,
        time_sensitive=submit.time_sensitive,
        deadline_at=_maybe_moment(submit.deadline_at),
        earliest_start_at=_maybe_moment(submit.earliest_start_at),
        max_runtime_sec=submit.max_runtime_sec,
        max_active_sec=submit.max_active_sec,
        # A limit below a millionth is still a limit.
        cost_limit=None if submit.cost_limit is None else max(1, money(submit.cost_limit)),
        unit=submit.unit,
        idempotency_key=submit.idempotency_key,
        retry_delays_sec=submit.retry_delays_sec,
    )


def standalone_lease_from(request: wire.LeaseRequest, addon_id: str, job_type: str) -> Intent:
    """A lease without a job is weighed as a job of that kind would be, and has the same bounds."""
    return Intent(
        addon_id=AddonId(addon_id),
        job_type=job_type,
        cost_units=request.cost_units,
        priority=priority_of(request.priority),
        constraints=_constraints(request.constraints),
        run_when=request.run_when,
        quiet_for_sec=request.quiet_for_sec,
        expected_duration_sec=request.expected_duration_sec,
    )


_ALLOWED: Final = {state: tuple(str(move) for move in allowed(state)) for state in JobState}


def _summary(job: core.Job) -> dict[str, object]:
    intent = job.intent
    return {
        "job_id": job.job_id,
        "addon_id": intent.addon_id,
        "job_type": intent.job_type,
        "state": job.state,
        "cost_units": intent.cost_units,
        "priority": intent.priority,
        "constraints": ALL_CONSTRAINTS[int(intent.constraints)],
        "run_when": intent.run_when,
        "quiet_for_sec": intent.quiet_for_sec,
        "expected_duration_sec": intent.expected_duration_sec,
        "tags": intent.tags,
        "labels": intent.labels,
        "time_sensitive": intent.time_sensitive,
        "deadline_at": _maybe_when(intent.deadline_at),
        "earliest_start_at": _maybe_when(intent.earliest_start_at),
        "not_before": _maybe_when(job.not_before),
        "next_earliest_start_at": _maybe_when(job.next_earliest_start_at),
        "max_runtime_sec": intent.max_runtime_sec,
        "max_active_sec": intent.max_active_sec,
        "cost_limit": None if intent.cost_limit is None else _amount(intent.cost_limit),
        "unit": intent.unit,
        "idempotency_key": intent.idempotency_key,
        "retry_delays_sec": intent.retry_delays_sec,
        "attempts": job.fence,
        "fence": job.fence,
        "dispatch_id": job.dispatch_id,
        "lease_id": job.dispatch_id if job.state is JobState.RUNNING else None,
        "pid": job.pid,
        "progress": job.progress,
        "spent": _amount(job.spent),
        "created_at": when(job.created_at),
        "ready_at": when(job.ready_at),
        "ended_at": _maybe_when(job.ended_at),
        "denied": job.denied if job.state is JobState.QUEUED else "",
        "allowed": _ALLOWED[job.state],
    }


def summary_view(job: core.Job) -> wire.JobSummary:
    return wire.JobSummary(**_summary(job))  # type: ignore[arg-type]  # the names are checked by a test of the views


def job_view(job: core.Job, last: core.Dispatch | None, checkpoint: str | None) -> wire.JobInfo:
    end, error = outcome_of(job, last)
    return wire.JobInfo(
        **_summary(job),  # type: ignore[arg-type]  # as above
        payload=_json(job.intent.payload),
        checkpoint=_json(checkpoint),
        result=_json(None if last is None else last.result),
        error=error,
        end=end,
        worker="" if last is None else last.worker,
    )


def explained_view(explanation: Explanation) -> wire.Explained:
    return wire.Explained(
        job_id=explanation.job_id,
        state=explanation.state,
        text=explanation.text,
        waiting_sec=explanation.waiting_sec,
        reason=explanation.reason,
        reason_data=explanation.reason_data,
        retry_after_sec=explanation.retry_after_sec,
        recorded=explanation.recorded,
        ahead=[wire.AheadInfo(head.job_id, head.addon_id, head.why) for head in explanation.ahead],
        line_ahead=explanation.line_ahead,
        likely_start_at=_maybe_when(explanation.likely_start_at),
        allowed=explanation.allowed,
    )


def dispatchable_view(dispatch: core.Dispatch) -> wire.DispatchableJob:
    return wire.DispatchableJob(
        job_id=dispatch.job_id or "",
        dispatch_id=dispatch.dispatch_id,
        fence=dispatch.fence,
        addon_id=dispatch.addon_id,
        job_type=dispatch.admission_class.job_type,
        cost_units=dispatch.admission_class.cost_units,
        expires_at=when(dispatch.expires_at),
    )


def claimed_view(job: core.Job, dispatch: core.Dispatch, checkpoint: str | None) -> wire.ClaimedJob:
    intent = job.intent
    return wire.ClaimedJob(
        job_id=job.job_id,
        lease_id=dispatch.dispatch_id,
        fence=dispatch.fence,
        attempt=job.attempt,
        addon_id=intent.addon_id,
        job_type=intent.job_type,
        cost_units=intent.cost_units,
        priority=intent.priority,
        tags=intent.tags,
        expires_at=when(dispatch.expires_at),
        stop_at=_maybe_when(dispatch.stop_at),
        deadline_at=_maybe_when(intent.deadline_at),
        payload=_json(intent.payload),
        checkpoint=_json(checkpoint),
    )


def heartbeat_view(lease_id: str, answer: Answer, ttl: int) -> wire.HeartbeatAnswer:
    return wire.HeartbeatAnswer(
        lease_id=lease_id,
        expires_at=when(answer.expires_at),
        ttl_sec=seconds(ttl),
        stop=answer.stop,
        cancel=answer.stop is not None,
        yield_=answer.should_yield,
    )


def lease_view(dispatch: core.Dispatch) -> wire.Lease:
    return wire.Lease(
        lease_id=dispatch.dispatch_id,
        job_id=dispatch.job_id,
        addon_id=dispatch.addon_id,
        job_type=dispatch.admission_class.job_type,
        cost_units=dispatch.admission_class.cost_units,
        host=dispatch.host,
        phase=dispatch.phase,
        fence=dispatch.fence,
        worker=dispatch.worker,
        pid=dispatch.pid,
        admitted_at=when(dispatch.admitted_at),
        started_at=_maybe_when(dispatch.started_at),
        expires_at=when(dispatch.expires_at),
        ends_at=_maybe_when(dispatch.ends_at),
        stop_at=_maybe_when(dispatch.stop_at),
        reason=dispatch.reason,
        progress=dispatch.progress,
        spent=_amount(dispatch.spent),
    )


def event_view(event: core.Event) -> wire.EventInfo:
    return wire.EventInfo(
        seq=event.seq,
        at=when(event.at),
        kind=str(event.kind),
        job_id=event.job_id,
        n=event.n,
        state=event.state,
        reason=event.reason,
        dispatch_id=event.dispatch_id,
        data=dict(event.data),
    )


def addon_view(addon: Addon, budgets: Sequence[Use]) -> wire.AddonInfo:
    return wire.AddonInfo(
        addon_id=addon.addon_id,
        weight=addon.weight,
        paused=addon.paused,
        units=addon.units,
        average=addon.average,
        jobs=job_counts(addon),
        budgets=[_use_view(use) for use in budgets],
    )


def job_counts(addon: Addon) -> dict[str, int]:
    return {str(state): count for state, count in addon.jobs.items() if count}


def _use_view(use: Use) -> wire.BudgetUse:
    return wire.BudgetUse(
        window="day" if use.window.kind == "day" else "month",
        name=use.window.name,
        spent=_amount(use.spent),
        limit=None if use.limit is None else _amount(use.limit),
        mark=use.mark,
        ends_at=when(use.window.ends_at),
    )


def host_view(host: Host, now: Moment) -> wire.KnownHost:
    return wire.KnownHost(
        host=host.host,
        state="alive" if host.alive(now) else "lost",
        draining=host.draining,
        capacity=host.capacity,
        units=host.units,
        quiet=host.quiet,
        labels=list(host.labels),
        version=host.version,
        url=host.url or None,
        started_at=when(host.started_at),
        seen_at=when(host.seen_at),
    )
