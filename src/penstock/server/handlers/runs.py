"""
Jobs that the scheduler runs itself: who may submit one, and what it printed.

To submit a command is to have a shell on the host, so it takes a scope of its own, and a script for the shell another. A payload that the runner
would refuse is refused here, while somebody is there to hear it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Raw, UnsetType

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.end_rules import DispatchPhase
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Job, dispatch_id_of
from penstock.core.jobs.states import SETTLED
from penstock.runner.output import Piece
from penstock.runner.payload import COMMAND, FUNCTION, JOB_TYPES, SHELL, read
from penstock.server.app_state import Request, bearer
from penstock.server.problems import Forbidden
from penstock.server.views import when
from penstock.wire import Scope

__all__ = ["check_runner", "logs", "say"]

_SCOPES: Final = {
    COMMAND: Scope.JOBS_SUBMIT_COMMAND,
    SHELL: Scope.JOBS_SUBMIT_SHELL,
    FUNCTION: Scope.JOBS_SUBMIT,
}
_MOST_BYTES: Final = 262_144
#: Output is written by another process, and rings no bell.
_LOOK_AGAIN: Final = 0.1


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
    asked = call.body
    frame = {
        "op": asked.op,
        "checkpoint": None if isinstance(asked.checkpoint, UnsetType) else bytes(asked.checkpoint).decode(),
        "progress": asked.progress,
        "amount": None if asked.amount is None else str(asked.amount),
        "message": asked.message,
    }
    told = runs.call(token, frame)
    if "error" in told:
        raise BadIntent(told["error"], problems=[{"field": asked.op, "message": told["error"]}])
    return wire.Said(Raw((told.get("checkpoint") or "null").encode()), told.get("yield"))


async def logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    app_state, asked = call.app_state, call.query
    until = app_state.loop.time() + asked.wait_sec
    gone = call.watch() if asked.wait_sec else None
    while True:
        told = await call.run(_logs, call)
        left = until - app_state.loop.time()
        if (
            told.pieces
            or told.over
            or left <= 0
            or app_state.trail.closed
            or (gone is not None and gone.done())
        ):
            return told
        await asyncio.sleep(min(left, _LOOK_AGAIN))


def _logs(call: Request[wire.LogsQuery, None]) -> wire.Logs:
    asked, job = call.query, call.own_job(call.job_id)
    attempt = job.fence if isinstance(asked.attempt, UnsetType) else asked.attempt
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
        next=pieces[-1].end if pieces else asked.offset,
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
