"""
Handlers for workers: dispatchable, lease, claim, heartbeat, outcome; and what a running job reports of
itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final

from msgspec import UNSET, UnsetType, structs

from penstock import wire
from penstock.core.errors import BadIntent, Refused, StaleDispatch
from penstock.core.jobs.admission import admission_class_of
from penstock.core.jobs.intent import check
from penstock.core.jobs.job import Dispatch, EventKind
from penstock.core.jobs.reasons import retry_after_sec, words
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import DispatchId, EndReason, JobId, money_of, seconds, when
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import EndReport, GrantedJob
from penstock.server.app_state import AppState
from penstock.server.event_hub import STARTABLE
from penstock.server.handlers.jobs import intent_from
from penstock.server.problems import Forbidden, naming_fields, problem_of
from penstock.server.request import Request, as_answer, as_json, or_none, text_of

_ENDS: Final = {failure: EndReason(failure.value) for failure in wire.Failure}


async def dispatchable(call: Request[wire.DispatchableQuery, None]) -> wire.Dispatchable:
    app_state, query = call.app_state, call.query
    addon_id = call.addon(or_none(query.addon_id))
    kinds = WorkerKinds(
        addon_id, frozenset() if query.job_type is UNSET else frozenset({str(query.job_type)})
    )

    dispatches = await call.poll(
        query.wait_sec,
        lambda: call.run(app_state.job_service.poll, kinds, query.limit),
        bool,
        lambda event: event.kind is EventKind.DISPATCHING,
    )
    return wire.Dispatchable(
        [
            as_answer(wire.DispatchableJob, dispatch, dispatch.admission_class, job_id=dispatch.job_id or "")
            for dispatch in dispatches
        ]
    )


async def claim(call: Request[None, wire.ClaimRequest]) -> wire.ClaimAnswer:
    app_state, body = call.app_state, call.body
    kinds = WorkerKinds(call.addon(body.addon_id), frozenset(body.job_types))
    if not body.wait_sec:
        claimed = await call.run(app_state.job_service.claim, kinds, body.limit, body.worker)
        return _claimed(app_state, claimed)

    def take() -> Awaitable[list[GrantedJob]]:
        return app_state.claims.take(call.run, kinds, body.limit, body.worker)

    with app_state.service.fetchers.waiting(body.worker, kinds, body.limit):
        claimed = await call.poll(body.wait_sec, take, bool, lambda event: event.kind in STARTABLE)
    if call.watch().done():
        # The client has gone: its claim goes back at once, not when its lease is over.
        await call.run(_give_back, app_state, claimed)
        claimed = []
    return _claimed(app_state, claimed)


def _give_back(app_state: AppState, claimed: list[GrantedJob]) -> None:
    for taken in claimed:
        try:
            app_state.job_service.release(taken.dispatch.dispatch_id)
        except Refused:  # it was canceled in between: there is nothing to give back
            continue


def _claimed(app_state: AppState, claimed: list[GrantedJob]) -> wire.ClaimAnswer:
    jobs = [
        as_answer(
            wire.ClaimedJob,
            granted.dispatch,
            granted.job.intent,
            job_id=granted.job.job_id,
            attempt=granted.attempt,
            lease_id=granted.dispatch.dispatch_id,
            payload=as_json(granted.job.intent.payload),
            checkpoint=as_json(granted.checkpoint),
            parents=as_json(granted.parents or "[]"),
        )
        for granted in claimed
    ]
    return wire.ClaimAnswer(jobs, seconds(app_state.service.rules.lease_for))


def lease_request(call: Request[None, wire.LeaseRequest]) -> wire.LeaseGranted:
    if call.body.job_id is not None:
        return _lease_of_job(call, JobId(call.body.job_id))
    return _standalone_lease(call)


def _lease_of_job(call: Request[None, wire.LeaseRequest], job_id: JobId) -> wire.LeaseGranted:
    job_service = call.app_state.job_service
    job = call.own_job(job_id)
    if job.state is JobState.QUEUED:
        explanation = job_service.explain(job_id, call.viewer)
        if explanation.state is JobState.QUEUED:
            return wire.LeaseGranted(
                approved=False,
                job_id=job_id,
                reason=explanation.reason or "not_dispatched",
                reason_data=explanation.reason_data,
                message=explanation.text,
                retry_after_sec=explanation.retry_after_sec or 1.0,
            )
    return _granted(call, job_service.lease(job_id, call.body.worker))


def _standalone_lease(call: Request[None, wire.LeaseRequest]) -> wire.LeaseGranted:
    body, app_state = call.body, call.app_state
    missing = [name for name in ("addon_id", "job_type") if getattr(body, name) is None]
    if body.addon_id is None and call.principal.addon_id is not None:
        missing.remove("addon_id")
    if missing:
        raise naming_fields(BadIntent, *((name, "is needed when there is no job_id") for name in missing))
    # A lease without a job is weighed as a job of that kind would be, and has the same bounds.
    intent = intent_from(
        wire.SubmitBody(
            addon_id=str(call.addon(body.addon_id)),
            job_type=str(body.job_type),
            cost_units=body.cost_units,
            priority=body.priority,
            constraints=body.constraints,
            run_when=body.run_when,
            quiet_for_sec=body.quiet_for_sec,
            expected_duration_sec=body.expected_duration_sec,
        )
    )
    check(intent, call.store.now(), most_units=app_state.service.rules.capacity.most)
    call.check_limits(intent.cost_units, intent.priority)
    lease, denied = app_state.job_service.ask(admission_class_of(intent), intent.priority, body.worker)
    if lease is not None:
        return _granted(call, lease)
    if denied is None:
        raise StaleDispatch("another job took the units meanwhile; ask again")
    reason, now = denied if call.viewer is None else call.viewer.reason(denied), call.store.now()
    return wire.LeaseGranted(
        approved=False,
        reason=reason.code,
        reason_data=structs.asdict(reason),
        message=words(reason, now),
        retry_after_sec=retry_after_sec(reason, now),
    )


def _granted(call: Request[Any, Any], lease: Dispatch) -> wire.LeaseGranted:
    return wire.LeaseGranted(
        approved=True,
        lease_id=lease.dispatch_id,
        job_id=lease.job_id,
        fence=lease.fence,
        expires_at=when(lease.expires_at),
        ttl_sec=seconds(call.app_state.service.rules.lease_for),
    )


def ack(call: Request[None, wire.Ack]) -> wire.HeartbeatAnswer:
    """
    Started. A worker that comes with its reservation gets the lease for it here: one round trip less than
    asking first.
    """
    _check_pair(call, call.body.lease_id)
    lease = call.own_lease(call.body.lease_id)
    if lease.phase is DispatchPhase.RESERVED:
        call.app_state.job_service.lease(call.job_id, call.body.worker)
    return _beat(call, wire.Heartbeat(lease_id=call.body.lease_id, pid=call.body.pid))


def _check_pair(call: Request[Any, Any], lease_id: str) -> None:
    if _job_of(lease_id) != call.job_id:
        call.own_job(call.job_id)
        raise StaleDispatch("this lease belongs to another job", lease_id=lease_id)


def _job_of(lease_id: str) -> JobId | None:
    """
    The name of a lease is its job's and the fence (`dispatch_id_of`); 0 is the fence of a lease without a
    job.
    """
    job_id, _, fence = lease_id.rpartition(".")
    return None if fence == "0" else JobId(job_id)


def heartbeat(call: Request[None, wire.Heartbeat]) -> wire.HeartbeatAnswer:
    _check_lease(call, call.body.lease_id)
    return _beat(call, call.body)


def _check_lease(call: Request[Any, Any], lease_id: str) -> None:
    """Only a bound token can name a lease of another addon, so only its requests pay for this check."""
    if call.principal.addon_id is not None:
        call.own_lease(lease_id)


def _beat(call: Request[Any, Any], beat: wire.Heartbeat) -> wire.HeartbeatAnswer:
    answer = call.app_state.job_service.heartbeat(
        DispatchId(beat.lease_id),
        progress=beat.progress,
        spent=None if beat.spent is None else money_of(beat.spent),
        checkpoint=None if isinstance(beat.checkpoint, UnsetType) else text_of(beat.checkpoint),
        pid=beat.pid,
    )
    return wire.HeartbeatAnswer(
        lease_id=beat.lease_id,
        expires_at=when(answer.expires_at),
        ttl_sec=seconds(call.app_state.service.rules.lease_for),
        stop=answer.stop,
        cancel=answer.stop is not None,
        yield_=answer.should_yield,
    )


def complete(call: Request[None, wire.OutcomeReport]) -> wire.Completed:
    _check_pair(call, call.body.lease_id)
    return _end(call, call.body)


def _end(call: Request[Any, Any], outcome: wire.OutcomeReport | wire.LoadReport) -> wire.Completed:
    _check_lease(call, outcome.lease_id)
    report = _report(outcome)
    [answer] = call.app_state.job_service.end_many([report])
    return _completed(call, report, answer)


def complete_bulk(call: Request[None, wire.Outcomes]) -> wire.SettledJob:
    """
    Report outcomes in one commit. Each is judged on its own: one that comes too late does not take away the
    others.
    """
    reports = [_report(outcome) for outcome in call.body.outcomes]
    for report in reports:
        _check_lease(call, report.dispatch_id)
    return wire.SettledJob(_answers(call, reports, call.app_state.job_service.end_many(reports)))


def exchange(call: Request[None, wire.ExchangeRequest]) -> wire.ExchangeAnswerBody:
    """
    What has ended makes room for what is claimed: the usual turn of a worker, in one round trip and one
    commit.
    """
    app_state, body = call.app_state, call.body
    kinds = WorkerKinds(call.addon(body.addon_id), frozenset(body.job_types))
    reports = [_report(outcome) for outcome in body.outcomes]
    for report in reports:
        _check_lease(call, report.dispatch_id)
    answers, claimed = app_state.job_service.exchange(reports, kinds, body.limit, body.worker)
    claims = _claimed(app_state, claimed)
    return wire.ExchangeAnswerBody(claims.jobs, claims.ttl_sec, _answers(call, reports, answers))


def _report(outcome: wire.OutcomeReport | wire.LoadReport) -> EndReport:
    lease_id = DispatchId(outcome.lease_id)
    if outcome.state == "FAILED":
        return EndReport(lease_id, _ENDS[outcome.failure], error=outcome.error or "no reason was given")
    return EndReport(lease_id, result=text_of(outcome.result))


def _answers(
    call: Request[Any, Any], reports: Sequence[EndReport], answers: Sequence[JobState | Refused | None]
) -> list[wire.Ended]:
    ended = []
    for report, answer in zip(reports, answers, strict=True):
        try:
            completed = _completed(call, report, answer)
            ended.append(wire.Ended(report.dispatch_id, completed.job_id, completed.state))
        except Refused as refused:
            ended.append(wire.Ended(report.dispatch_id, problem=problem_of(refused)))
    return ended


def _completed(
    call: Request[Any, Any], report: EndReport, answer: JobState | Refused | None
) -> wire.Completed:
    if not isinstance(answer, Refused):
        return wire.Completed(_job_of(report.dispatch_id), answer)
    if isinstance(answer, StaleDispatch):
        lease = call.own_lease(report.dispatch_id)
        if _reported_before(lease, report):
            return _where_it_is(call, lease)
    raise answer


def _reported_before(lease: Dispatch, report: EndReport) -> bool:
    """
    The same outcome of the same lease: its answer was lost on the way, and the worker asks again. Nothing
    changes.
    """
    return (lease.end, lease.result, lease.error) == (report.how, report.result, report.error)


def _where_it_is(call: Request[Any, Any], lease: Dispatch) -> wire.Completed:
    job = None if lease.job_id is None else call.store.job(lease.job_id)
    return wire.Completed(lease.job_id, None if job is None else job.state)


#: How a worker ends its lease itself. To release it then is polite, late, and no mistake.
_OWN_ENDS: Final = frozenset({EndReason.COMPLETED, EndReason.RELEASED, *_ENDS.values()})


def release(call: Request[None, wire.Release]) -> wire.Completed:
    lease = call.own_lease(call.body.lease_id)
    if lease.end in _OWN_ENDS:
        return _where_it_is(call, lease)
    return wire.Completed(lease.job_id, call.app_state.job_service.release(lease.dispatch_id))


def report(call: Request[None, wire.LoadReport]) -> wire.LoadReported:
    """With an outcome the beat comes first: what was spent belongs to the run that spent it."""
    body = call.body
    lease = call.own_lease(body.lease_id)
    answer = wire.LoadReported(body.lease_id, when(lease.expires_at), 0.0)
    if body.state is None or lease.phase is not DispatchPhase.ENDED:
        answer = wire.LoadReported(**structs.asdict(_beat(call, body)))
    if body.state is not None:
        answer.state = _end(call, body).state
    return answer


def say(call: Request[None, wire.Say]) -> wire.Said:
    """Called by the attempt itself: its token identifies it, so there is no id to get wrong."""
    runs, token = call.app_state.runs, call.token
    if runs is None or token is None or runs.dispatch_of(token) is None:
        raise Forbidden("only a running job may do this, with its own token (PENSTOCK_JOB_TOKEN)")
    body = call.body
    frame = {
        "op": body.op,
        "checkpoint": None if isinstance(body.checkpoint, UnsetType) else text_of(body.checkpoint),
        "progress": body.progress,
        "amount": None if body.amount is None else str(body.amount),
        "message": body.message,
    }
    reply = runs.call(token, frame)
    if "error" in reply:
        raise BadIntent(reply["error"], problems=[{"field": body.op, "message": reply["error"]}])
    return wire.Said(as_json(reply.get("checkpoint") or None), reply.get("yield"))
