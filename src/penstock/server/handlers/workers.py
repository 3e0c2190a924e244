"""
Handlers for workers: dispatchable, lease, claim, heartbeat, outcome; and the requests of running jobs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final

from msgspec import UNSET, Raw, UnsetType, json, structs

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
from penstock.server.request import Request, as_answer, json_text, or_none, raw_json

_ENDS: Final = {failure: EndReason(failure.value) for failure in wire.Failure}


async def dispatchable(request: Request[wire.DispatchableQuery, None]) -> wire.Dispatchable:
    app_state, query = request.app_state, request.query
    addon_id = request.addon(or_none(query.addon_id))
    kinds = WorkerKinds(
        addon_id, frozenset() if query.job_type is UNSET else frozenset({str(query.job_type)})
    )

    dispatches = await request.poll(
        query.wait_sec,
        lambda: request.run(app_state.job_service.poll, kinds, query.limit),
        bool,
        lambda event: event.kind is EventKind.DISPATCHING,
    )
    return wire.Dispatchable(
        [
            as_answer(wire.DispatchableJob, dispatch, dispatch.admission_class, job_id=dispatch.job_id or "")
            for dispatch in dispatches
        ]
    )


async def claim(request: Request[None, wire.ClaimRequest]) -> wire.ClaimAnswer:
    app_state, body = request.app_state, request.body
    kinds = WorkerKinds(request.addon(body.addon_id), frozenset(body.job_types))
    if not body.wait_sec:
        claimed = await request.run(app_state.job_service.claim, kinds, body.limit, body.worker)
        return await _claimed_soon(request, claimed)

    def take() -> Awaitable[list[GrantedJob]]:
        return app_state.claims.take(request.run, kinds, body.limit, body.worker)

    with app_state.service.pulling_workers.waiting(body.worker, kinds, body.limit):
        claimed = await request.poll(body.wait_sec, take, bool, lambda event: event.kind in STARTABLE)
    if request.watch().done():
        # The client has gone: give its jobs back at once, not when their leases end.
        await request.run(_give_back, app_state, claimed)
        claimed = []
    return await _claimed_soon(request, claimed)


def _give_back(app_state: AppState, claimed: list[GrantedJob]) -> None:
    for taken in claimed:
        try:
            app_state.job_service.release(taken.dispatch.dispatch_id)
        except Refused:  # the job was canceled in between
            continue


async def _claimed_soon(request: Request[Any, Any], claimed: list[GrantedJob]) -> wire.ClaimAnswer:
    """The answer to a claim, made in a thread if it must read the addons of parents."""
    if request.viewer is not None and any(granted.parents for granted in claimed):
        return await request.run(_claimed, request, claimed)
    return _claimed(request, claimed)


def _claimed(request: Request[Any, Any], claimed: list[GrantedJob]) -> wire.ClaimAnswer:
    jobs = [
        as_answer(
            wire.ClaimedJob,
            granted.dispatch,
            granted.job.intent,
            job_id=granted.job.job_id,
            attempt=granted.attempt,
            lease_id=granted.dispatch.dispatch_id,
            payload=raw_json(granted.job.intent.payload),
            checkpoint=raw_json(granted.checkpoint),
            parents=raw_json(_parents(request, granted.parents)),
        )
        for granted in claimed
    ]
    return wire.ClaimAnswer(jobs, seconds(request.app_state.service.rules.lease_for))


def _parents(request: Request[Any, Any], parents: str | None) -> str:
    """Id, state and result of each parent; without the ids that the token may not know."""
    viewer = request.viewer
    if viewer is None or parents is None:
        return parents or "[]"
    entries = json.decode(parents, type=list[tuple[JobId, str, Raw]])
    request.app_state.event_addons.learn_jobs(job_id for job_id, *_ in entries)
    shown = [(viewer.job(job_id) or "another addon", *rest) for job_id, *rest in entries]
    return json.encode(shown).decode()


def lease_request(request: Request[None, wire.LeaseRequest]) -> wire.LeaseGranted:
    if request.body.job_id is not None:
        return _lease_of_job(request, JobId(request.body.job_id))
    return _standalone_lease(request)


def _lease_of_job(request: Request[None, wire.LeaseRequest], job_id: JobId) -> wire.LeaseGranted:
    job_service = request.app_state.job_service
    job = request.own_job(job_id)
    if job.state is JobState.QUEUED:
        explanation = job_service.explain(job_id, request.viewer)
        if explanation.state is JobState.QUEUED:
            return wire.LeaseGranted(
                approved=False,
                job_id=job_id,
                reason=explanation.reason or "not_dispatched",
                reason_data=explanation.reason_data,
                message=explanation.text,
                retry_after_sec=explanation.retry_after_sec or 1.0,
            )
    return _granted(request, job_service.lease(job_id, request.body.worker))


def _standalone_lease(request: Request[None, wire.LeaseRequest]) -> wire.LeaseGranted:
    body, app_state = request.body, request.app_state
    missing = [name for name in ("addon_id", "job_type") if getattr(body, name) is None]
    if body.addon_id is None and request.principal.addon_id is not None:
        missing.remove("addon_id")
    if missing:
        raise naming_fields(BadIntent, *((name, "is needed when there is no job_id") for name in missing))
    # A standalone lease is admitted like a job of that type, with the same limits.
    intent = intent_from(
        wire.SubmitBody(
            addon_id=str(request.addon(body.addon_id)),
            job_type=str(body.job_type),
            cost_units=body.cost_units,
            priority=body.priority,
            constraints=body.constraints,
            run_when=body.run_when,
            quiet_for_sec=body.quiet_for_sec,
            expected_duration_sec=body.expected_duration_sec,
        )
    )
    check(intent, request.store.now(), most_units=app_state.service.rules.capacity.most)
    request.check_limits(intent.cost_units, intent.priority)
    lease, denied = app_state.job_service.ask(admission_class_of(intent), intent.priority, body.worker)
    if lease is not None:
        return _granted(request, lease)
    if denied is None:
        raise StaleDispatch("another job took the units meanwhile; ask again")
    reason, now = denied if request.viewer is None else request.viewer.reason(denied), request.store.now()
    return wire.LeaseGranted(
        approved=False,
        reason=reason.code,
        reason_data=structs.asdict(reason),
        message=words(reason, now),
        retry_after_sec=retry_after_sec(reason, now),
    )


def _granted(request: Request[Any, Any], lease: Dispatch) -> wire.LeaseGranted:
    return wire.LeaseGranted(
        approved=True,
        lease_id=lease.dispatch_id,
        job_id=lease.job_id,
        fence=lease.fence,
        expires_at=when(lease.expires_at),
        ttl_sec=seconds(request.app_state.service.rules.lease_for),
    )


def ack(request: Request[None, wire.Ack]) -> wire.HeartbeatAnswer:
    """
    Report the start of a job. A worker with a reservation gets its lease here, which saves a round trip.
    """
    _check_pair(request, request.body.lease_id)
    lease = request.own_lease(request.body.lease_id)
    if lease.phase is DispatchPhase.RESERVED:
        request.app_state.job_service.lease(request.job_id, request.body.worker)
    return _renew(request, wire.Heartbeat(lease_id=request.body.lease_id, pid=request.body.pid))


def _check_pair(request: Request[Any, Any], lease_id: str) -> None:
    if _job_of(lease_id) != request.job_id:
        request.own_job(request.job_id)
        raise StaleDispatch("this lease belongs to another job", lease_id=lease_id)


def _job_of(lease_id: str) -> JobId | None:
    """
    The job of a lease, from the lease's id, which is the job's id and the fence. A standalone lease has the
    fence 0; None: it has no job.
    """
    job_id, _, fence = lease_id.rpartition(".")
    return None if fence == "0" else JobId(job_id)


def heartbeat(request: Request[None, wire.Heartbeat]) -> wire.HeartbeatAnswer:
    _check_lease(request, request.body.lease_id)
    return _renew(request, request.body)


def _check_lease(request: Request[Any, Any], lease_id: str) -> None:
    """Refuse a lease of another addon. A token that is bound to no addon may use all leases."""
    if request.principal.addon_id is not None:
        request.own_lease(lease_id)


def _renew(request: Request[Any, Any], report: wire.Heartbeat) -> wire.HeartbeatAnswer:
    answer = request.app_state.job_service.heartbeat(
        DispatchId(report.lease_id),
        progress=report.progress,
        spent=None if report.spent is None else money_of(report.spent),
        checkpoint=None if isinstance(report.checkpoint, UnsetType) else json_text(report.checkpoint),
        pid=report.pid,
    )
    return wire.HeartbeatAnswer(
        lease_id=report.lease_id,
        expires_at=when(answer.expires_at),
        ttl_sec=seconds(request.app_state.service.rules.lease_for),
        stop=answer.stop,
        cancel=answer.stop is not None,
        yield_=answer.should_yield,
    )


def complete(request: Request[None, wire.OutcomeReport]) -> wire.Completed:
    _check_pair(request, request.body.lease_id)
    return _end(request, request.body)


def _end(request: Request[Any, Any], outcome: wire.OutcomeReport | wire.LeaseReport) -> wire.Completed:
    _check_lease(request, outcome.lease_id)
    report = _report(outcome)
    [answer] = request.app_state.job_service.end_many([report])
    return _completed(request, report, answer)


def complete_bulk(request: Request[None, wire.Outcomes]) -> wire.OutcomeAnswers:
    """
    Report outcomes in one commit. Each one is decided alone: one that is too late does not affect the others.
    """
    reports = [_report(outcome) for outcome in request.body.outcomes]
    for report in reports:
        _check_lease(request, report.dispatch_id)
    return wire.OutcomeAnswers(_answers(request, reports, request.app_state.job_service.end_many(reports)))


def exchange(request: Request[None, wire.ExchangeRequest]) -> wire.ExchangeAnswerBody:
    """
    Report outcomes and claim jobs, in one request and one commit: the ended jobs make room for the claimed
    ones.
    """
    app_state, body = request.app_state, request.body
    kinds = WorkerKinds(request.addon(body.addon_id), frozenset(body.job_types))
    reports = [_report(outcome) for outcome in body.outcomes]
    for report in reports:
        _check_lease(request, report.dispatch_id)
    answers, claimed = app_state.job_service.exchange(reports, kinds, body.limit, body.worker)
    claims = _claimed(request, claimed)
    return wire.ExchangeAnswerBody(claims.jobs, claims.ttl_sec, _answers(request, reports, answers))


def _report(outcome: wire.OutcomeReport | wire.LeaseReport) -> EndReport:
    lease_id = DispatchId(outcome.lease_id)
    if outcome.state == "FAILED":
        return EndReport(lease_id, _ENDS[outcome.failure], error=outcome.error or "no reason was given")
    return EndReport(lease_id, result=json_text(outcome.result))


def _answers(
    request: Request[Any, Any], reports: Sequence[EndReport], answers: Sequence[JobState | Refused | None]
) -> list[wire.OutcomeAnswer]:
    ended = []
    for report, answer in zip(reports, answers, strict=True):
        try:
            completed = _completed(request, report, answer)
            ended.append(wire.OutcomeAnswer(report.dispatch_id, completed.job_id, completed.state))
        except Refused as refused:
            ended.append(wire.OutcomeAnswer(report.dispatch_id, problem=problem_of(refused)))
    return ended


def _completed(
    request: Request[Any, Any], report: EndReport, answer: JobState | Refused | None
) -> wire.Completed:
    if not isinstance(answer, Refused):
        return wire.Completed(_job_of(report.dispatch_id), answer)
    if isinstance(answer, StaleDispatch):
        lease = request.own_lease(report.dispatch_id)
        if _is_repeated(lease, report):
            return _current_state(request, lease)
    raise answer


def _is_repeated(lease: Dispatch, report: EndReport) -> bool:
    """
    Whether this outcome was reported before: the answer was lost, and the worker repeats its request.
    """
    return (lease.end, lease.result, lease.error) == (report.how, report.result, report.error)


def _current_state(request: Request[Any, Any], lease: Dispatch) -> wire.Completed:
    job = None if lease.job_id is None else request.store.job(lease.job_id)
    return wire.Completed(lease.job_id, None if job is None else job.state)


#: Ends that the worker itself reported. Releasing the lease afterwards is allowed and does nothing.
_OWN_ENDS: Final = frozenset({EndReason.COMPLETED, EndReason.RELEASED, *_ENDS.values()})


def release(request: Request[None, wire.Release]) -> wire.Completed:
    lease = request.own_lease(request.body.lease_id)
    if lease.end in _OWN_ENDS:
        return _current_state(request, lease)
    return wire.Completed(lease.job_id, request.app_state.job_service.release(lease.dispatch_id))


def report(request: Request[None, wire.LeaseReport]) -> wire.LeaseReported:
    """Report progress and spending, then the outcome. In this order the spending counts for this attempt."""
    body = request.body
    lease = request.own_lease(body.lease_id)
    answer = wire.LeaseReported(body.lease_id, when(lease.expires_at), 0.0)
    if body.state is None or lease.phase is not DispatchPhase.ENDED:
        answer = wire.LeaseReported(**structs.asdict(_renew(request, body)))
    if body.state is not None:
        answer.state = _end(request, body).state
    return answer


def job_request(request: Request[None, wire.JobRequest]) -> wire.JobAnswer:
    """Answer a request of a running job. Its token identifies the attempt."""
    runner, token = request.app_state.runner, request.token
    if runner is None or token is None or runner.dispatch_of(token) is None:
        raise Forbidden("only a running job may do this, with its own token (PENSTOCK_JOB_TOKEN)")
    body = request.body
    frame = {
        "op": body.op,
        "checkpoint": None if isinstance(body.checkpoint, UnsetType) else json_text(body.checkpoint),
        "progress": body.progress,
        "amount": None if body.amount is None else str(body.amount),
        "message": body.message,
    }
    reply = runner.call(token, frame)
    if "error" in reply:
        raise BadIntent(reply["error"], problems=[{"field": body.op, "message": reply["error"]}])
    return wire.JobAnswer(raw_json(reply.get("checkpoint") or None), reply.get("yield"))
