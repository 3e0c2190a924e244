"""
Handlers for submitters and people: submit, look, cancel, retry, edit, explain, and the output of jobs that the scheduler runs itself.

Who may submit a command has a shell on the host, so a command takes a scope of its own, and a script for the shell another. A payload that
the runner would refuse is refused at the submit, while its client waits for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import Raw, UnsetType

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.job import Job, dispatch_id_of
from penstock.core.jobs.states import SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import priority_of
from penstock.runner.output import Piece
from penstock.runner.payload import COMMAND, FUNCTION, JOB_TYPES, SHELL, read
from penstock.server.app_state import Request, bearer
from penstock.server.problems import Forbidden, OverLimit, TooSlow
from penstock.server.views import explained_view, intent_from, job_view, moment, or_none, summary_view, when
from penstock.stores.api import Query, Receipt
from penstock.wire import Scope

#: Behind the wake-ups, for what rings no bell here.
_LOOK_AGAIN: Final = 2.0


async def submit(call: Request[None, wire.SubmitBody]) -> wire.Submitted:
    body = call.body
    intent = intent_from(body)
    _may_submit(call, intent)
    [receipt] = await _submit(call, [intent], body.wait_sec)
    return _submitted(receipt)


async def submit_bulk(call: Request[None, wire.SubmitMany]) -> wire.BulkSubmitted:
    intents = [intent_from(job) for job in call.body.jobs]
    for i, intent in enumerate(intents):
        _may_submit(call, intent, f"jobs[{i}].")
    wait_sec = max(call.body.wait_sec, *(job.wait_sec for job in call.body.jobs), 0)
    try:
        receipts = await _submit(call, intents, wait_sec)
    except BadIntent:
        raise _every_problem(call, intents) from None
    return wire.BulkSubmitted([_submitted(receipt) for receipt in receipts])


def _every_problem(call: Request[Any, Any], intents: list[Intent]) -> BadIntent:
    """Of all the jobs, each with its place in the list."""
    now, most = call.store.now(), call.app_state.service.rules.capacity.most
    problems: list[dict[str, str]] = []
    for i, intent in enumerate(intents):
        try:
            check(intent, now, most_units=most)
        except BadIntent as bad:
            problems += [{**problem, "field": f"jobs[{i}].{problem['field']}"} for problem in bad.problems]
    return BadIntent(f"{problems[0]['field']} {problems[0]['message']}", problems=problems[:100])


def _may_submit(call: Request[Any, Any], intent: Intent, at: str = "") -> None:
    check_runner(call, intent, at)
    if not call.owns(intent.addon_id):
        problem = {"field": f"{at}addon_id", "message": f"must be {call.principal.addon_id} with this token"}
        raise OverLimit(f"{problem['field']} {problem['message']}", problems=[problem])
    call.check_limits(intent.cost_units, intent.priority, at)


async def _submit(call: Request[Any, Any], intents: list[Intent], wait_sec: float) -> Sequence[Receipt]:
    """
    The writer answers, and no thread waits for it: sixty-four submits at once share a commit. One that waits for room leaves
    the line when its client goes away.
    """
    app_state = call.app_state
    answer = asyncio.wrap_future(app_state.job_service.submit_soon(intents, wait_sec), loop=app_state.loop)
    if wait_sec:
        await asyncio.wait((answer, call.watch()), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise TooSlow("the client went away")
    return await answer


def _submitted(receipt: Receipt) -> wire.Submitted:
    start = receipt.likely_start_at
    return wire.Submitted(
        job_id=receipt.job_id,
        state=receipt.state,
        created=receipt.created,
        deadline_reachable=receipt.deadline_reachable,
        likely_start_at=None if start is None else when(start),
    )


async def get(call: Request[wire.WaitQuery, None]) -> wire.JobInfo:
    app_state, job_id = call.app_state, call.job_id
    if not call.query.wait_sec:
        return await call.run(_get, call)
    until = app_state.loop.time() + call.query.wait_sec
    gone = call.watch()
    async with app_state.trail as trail:
        while True:
            seen = trail.position
            view = await call.run(_get, call)
            remaining = until - app_state.loop.time()
            if view.state in SETTLED or remaining <= 0 or gone.done() or trail.closed:
                return view
            await call.sooner(
                trail.wait(seen, min(remaining, _LOOK_AGAIN), lambda event: event.job_id == job_id)
            )


def _get(call: Request[Any, None]) -> wire.JobInfo:
    return _view(call, call.own_job(call.job_id))


def _view(call: Request[Any, Any], job: Job) -> wire.JobInfo:
    if not job.fence:
        return job_view(job, None, None)
    last = call.store.dispatch(dispatch_id_of(job.job_id, job.fence))
    return job_view(job, last, call.store.checkpoint(job.job_id))


def listing(call: Request[wire.JobsQuery, None]) -> wire.Jobs:
    query = call.query
    states = or_none(query.state)
    search = Query(
        states=[JobState(name) for name in states.split(",")] if states else (),
        addon_id=call.addon(or_none(query.addon_id)),
        job_type=or_none(query.job_type),
        tag=or_none(query.tag),
        after=query.after,
        newest_first=query.newest_first,
        limit=query.limit,
    )
    jobs = call.store.find(search)
    return wire.Jobs([summary_view(job) for job in jobs], jobs[-1].no if len(jobs) == query.limit else None)


def find(call: Request[wire.FindQuery, None]) -> wire.Found:
    query = call.query
    search = Query(addon_id=call.addon(None), part=query.part, newest_first=True, limit=query.limit)
    return wire.Found([job.job_id for job in call.store.find(search)])


def cancel(call: Request[None, wire.Cancel]) -> wire.JobInfo:
    call.own_job(call.job_id)
    job = call.app_state.job_service.cancel(call.job_id, by=call.principal.name)
    runs = call.app_state.runs
    if call.body.now and runs is not None and job.dispatch_id is not None:
        runs.kill(job.dispatch_id)
    return _view(call, job)


def retry(call: Request[None, None]) -> wire.JobInfo:
    check_runner(call, call.own_job(call.job_id).intent)
    return _view(call, call.app_state.job_service.retry(call.job_id, by=call.principal.name))


def edit(call: Request[None, wire.Edit]) -> wire.JobInfo:
    job, body = call.own_job(call.job_id), call.body
    fields: dict[str, Any] = {}
    if not isinstance(body.priority, UnsetType):
        fields["priority"] = priority_of(body.priority)
        call.check_limits(job.intent.cost_units, fields["priority"])
    for name in ("earliest_start_at", "deadline_at"):
        given = getattr(body, name)
        if not isinstance(given, UnsetType):
            fields[name] = None if given is None else moment(given)
    if not fields:
        names = "priority, earliest_start_at, deadline_at"
        problem = {"field": "body", "message": f"must have one of {names}"}
        raise BadIntent(f"body {problem['message']}", problems=[problem])
    return _view(call, call.app_state.job_service.edit(call.job_id, by=call.principal.name, **fields))


def explain(call: Request[None, None]) -> wire.Explained:
    call.own_job(call.job_id)
    return explained_view(call.app_state.job_service.explain(call.job_id, call.viewer))


_SCOPES: Final = {
    COMMAND: Scope.JOBS_SUBMIT_COMMAND,
    SHELL: Scope.JOBS_SUBMIT_SHELL,
    FUNCTION: Scope.JOBS_SUBMIT,
}
_MOST_BYTES: Final = 262_144
#: Output is written by another process, and rings no bell.
_READ_AGAIN: Final = 0.1


def check_runner(call: Request[Any, Any], intent: Intent, at: str = "") -> None:
    if intent.job_type not in JOB_TYPES:
        return
    scope = _SCOPES[intent.job_type]
    if scope not in call.principal.scopes:
        raise Forbidden(
            f"{at}job_type {intent.job_type} needs a token with the scope {scope}", scope=str(scope)
        )
    try:
        read(intent.job_type, intent.payload, call.app_state.functions)
    except BadIntent as bad:
        problems = [{**problem, "field": f"{at}{problem['field']}"} for problem in bad.problems]
        raise BadIntent(f"{at}{bad}", problems=problems) from None


def say(call: Request[None, wire.Say]) -> wire.Said:
    """By the run itself: its token says which one it is, so there is no id to get wrong."""
    runs, token = call.app_state.runs, bearer(call.headers)
    if runs is None or token is None or runs.dispatch_of(token) is None:
        raise Forbidden("only a run's own token (PENSTOCK_JOB_TOKEN) may do this")
    body = call.body
    frame = {
        "op": body.op,
        "checkpoint": None if isinstance(body.checkpoint, UnsetType) else bytes(body.checkpoint).decode(),
        "progress": body.progress,
        "amount": None if body.amount is None else str(body.amount),
        "message": body.message,
    }
    reply = runs.call(token, frame)
    if "error" in reply:
        raise BadIntent(reply["error"], problems=[{"field": body.op, "message": reply["error"]}])
    return wire.Said(Raw((reply.get("checkpoint") or "null").encode()), reply.get("yield"))


async def logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    app_state, query = call.app_state, call.query
    until = app_state.loop.time() + query.wait_sec
    gone = call.watch() if query.wait_sec else None
    while True:
        answer = await call.run(_logs, call)
        remaining = until - app_state.loop.time()
        if (
            answer.pieces
            or answer.over
            or remaining <= 0
            or app_state.trail.closed
            or (gone is not None and gone.done())
        ):
            return answer
        await asyncio.sleep(min(remaining, _READ_AGAIN))


def _logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    query, job = call.query, call.own_job(call.job_id)
    attempt = job.fence if isinstance(query.attempt, UnsetType) else query.attempt
    if attempt > job.fence:
        raise NotFound(f"there is no attempt {attempt} of job {job.job_id}", job_id=job.job_id)
    # Before the last look at the output: whatever was written by the end of the run is then in it.
    over = _is_over(call, job, attempt)
    pieces = [] if not attempt else list(_pieces(call, job, attempt))
    return wire.Logs(
        job_id=job.job_id,
        attempt=attempt,
        pieces=[
            wire.LogPiece(p.stream, when(p.at), p.data.decode(errors="replace"), p.skipped) for p in pieces
        ],
        next=pieces[-1].end if pieces else query.offset,
        over=over,
    )


def _is_over(call: Request[Any, Any], job: Job, attempt: int) -> bool:
    if not attempt:
        return job.state in SETTLED
    lease = call.store.dispatch(dispatch_id_of(job.job_id, attempt))
    return lease is None or lease.phase is DispatchPhase.ENDED


def _pieces(call: Request[wire.LogsQuery, None], job: Job, attempt: int) -> Iterable[Piece]:
    if call.app_state.output is None:
        return ()
    output = call.app_state.output(dispatch_id_of(job.job_id, attempt))
    return output.read(call.query.offset, _MOST_BYTES)
