"""
The typed client of the HTTP API, one method per route, answers as the types of `penstock.wire`.

A request is sent again only where that is safe: when it certainly did not arrive, when it only reads, or when what it does twice is what it
does once (a submit with an idempotency key). Refusals are raised as the errors of the library (`penstock.core.errors`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from penstock import wire
from penstock.client.transport import EventStream, Transport, from_answer, local_url, token_of
from penstock.core.errors import BadIntent
from penstock.core.jobs.states import JobState
from penstock.core.text import refuse_not_finite, safe_str
from penstock.work.context import json_of

Answer = TypeVar("Answer", bound=Struct)

_encode = msgspec.json.Encoder().encode


class Client:
    """
    Threads may share one. Without a url: PENSTOCK_URL, else the Unix socket in the data directory of this user's daemon. Without a
    token: PENSTOCK_TOKEN, else the file that PENSTOCK_TOKEN_FILE names, else the one in that data directory.

    `retry_for`: for so many seconds, what may be sent again is, before Unreachable is raised.

    For example:

        with penstock.Client() as client:  # this user's own daemon
            job = client.submit("photos", "thumbnail", {"path": "a.jpg"})
            print(client.wait(job.job_id, 60).state)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        retry_for: float = 5.0,
    ) -> None:
        self.url = (url or os.environ.get("PENSTOCK_URL") or local_url(os.environ)).rstrip("/")
        self.token = token_of(os.environ) if token is None else token
        self._timeout, self.retry_for = timeout, retry_for
        self.transport = Transport(self.url, self.token, timeout=timeout)

    def hang_up(self) -> None:
        """Let go of requests that wait, from any thread. They raise Unreachable, unless their answer is on its way already."""
        self.transport.hang_up()

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # submitters and people

    def submit(self, addon_id: str, job_type: str, payload: Any = None, **fields: Any) -> wire.Submitted:
        """`fields`: any of `wire.SubmitBody`. Durable when it returns."""
        return self.submit_job(job_of(addon_id, job_type, payload, **fields))

    def submit_job(self, job: wire.SubmitBody) -> wire.Submitted:
        again = job.idempotency_key is not None
        return self._post("queue/jobs/submit", job, wire.Submitted, again=again, wait_sec=job.wait_sec)

    def submit_many(self, jobs: Sequence[wire.SubmitBody], *, wait_sec: float = 0) -> list[wire.Submitted]:
        """All or none, in one transaction."""
        again = all(job.idempotency_key is not None for job in jobs)
        body = wire.SubmitMany(jobs=list(jobs), wait_sec=wait_sec)
        return self._post(
            "queue/jobs/submit/bulk", body, wire.BulkSubmitted, again=again, wait_sec=wait_sec
        ).jobs

    def job(self, job_id: str, *, wait_sec: float = 0) -> wire.JobInfo:
        """With `wait_sec` the answer comes when the job is settled, or when the time is over."""
        query = {"wait_sec": wait_sec} if wait_sec else {}
        return self._get(f"queue/jobs/{_part(job_id)}", wire.JobInfo, query, wait_sec=wait_sec)

    def wait(self, job_id: str, timeout: float | None = None) -> wire.JobInfo:
        """Until the job is settled; after `timeout` seconds as it then is."""
        left = timeout
        while True:
            turn = 30.0 if left is None else min(30.0, left)
            job = self.job(job_id, wait_sec=max(turn, 0.001))
            left = None if left is None else left - turn
            if job.state not in _OPEN or (left is not None and left <= 0):
                return job

    def jobs(
        self,
        *,
        states: Sequence[JobState | str] = (),
        addon_id: str | None = None,
        job_type: str | None = None,
        tag: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        text: str | None = None,
        after: int = 0,
        limit: int = 50,
        newest_first: bool = False,
    ) -> wire.Jobs:
        """`since` and `before`: when a job was created. `text`: a part of its type, payload, tags or error."""
        job_filter: dict[str, Any] = {"state": ",".join(states), "addon_id": addon_id, "job_type": job_type}
        job_filter |= {"tag": tag, "since": since, "before": before, "text": text}
        return self._get(
            "queue/jobs",
            wire.Jobs,
            {**job_filter, "after": after, "limit": limit, "newest_first": newest_first},
        )

    def count(self, **job_filter: Any) -> dict[JobState, int]:
        """How many jobs of each state match: any of `wire.JobFilter` but `state`."""
        return self._get("queue/count", wire.JobCounts, job_filter).jobs

    def cancel_all(self, **job_filter: Any) -> wire.BulkChanged:
        """Cancel every job that the filter finds: any of `wire.JobFilter`. Jobs that could not be canceled are `refused`."""
        return self._change_all("queue/cancel/bulk", job_filter)

    def retry_all(self, **job_filter: Any) -> wire.BulkChanged:
        """Queue every FAILED or BLOCKED job again that the filter finds."""
        return self._change_all("queue/retry/bulk", job_filter)

    def _change_all(self, path: str, job_filter: dict[str, Any]) -> wire.BulkChanged:
        total = wire.BulkChanged(0, [], 0)
        while total.next is not None:
            body = wire.BulkChange(**job_filter, after=total.next)
            page = self._post(path, body, wire.BulkChanged, again=True)
            total = wire.BulkChanged(total.changed + page.changed, [*total.refused, *page.refused], page.next)
        return total

    def rerun(self, job_id: str, payload: Any = UNSET, **fields: Any) -> wire.Submitted:
        """A new job with the request of this one; `payload` and any of `wire.Rerun` replace what it had."""
        if payload is not UNSET:
            fields["payload"] = Raw(json_of(payload).encode())
        return self._post(f"queue/jobs/{_part(job_id)}/rerun", wire.Rerun(**fields), wire.Submitted)

    def find(self, part: str, *, limit: int = 10) -> list[str]:
        """Job ids that contain this."""
        return self._get("queue/find", wire.Found, {"part": part, "limit": limit}).job_ids

    def cancel(self, job_id: str, *, now: bool = False) -> wire.JobInfo:
        """`now`: the runner kills the job at once, without asking it to stop first."""
        body = wire.Cancel(now=True) if now else None
        return self._post(f"queue/jobs/{_part(job_id)}/cancel", body, wire.JobInfo, again=True)

    def retry(self, job_id: str) -> wire.JobInfo:
        return self._post(f"queue/jobs/{_part(job_id)}/retry", None, wire.JobInfo)

    def edit(self, job_id: str, **fields: Any) -> wire.JobInfo:
        """`priority`, `earliest_start_at`, `deadline_at` of a queued job; None takes a time away."""
        return self._post(f"queue/jobs/{_part(job_id)}/edit", wire.Edit(**fields), wire.JobInfo, again=True)

    def dependencies(self, job_id: str) -> wire.JobDependencies:
        """The jobs that a job waits for or waited for, and those that wait for it."""
        return self._get(f"queue/jobs/{_part(job_id)}/dependencies", wire.JobDependencies)

    def explain(self, job_id: str) -> wire.Explained:
        return self._get(f"queue/jobs/{_part(job_id)}/explain", wire.Explained)

    def logs(
        self, job_id: str, *, attempt: int | None = None, offset: int = 0, wait_sec: float = 0
    ) -> wire.Logs:
        """What a command or function printed; with `wait_sec` it waits for more."""
        query = {"attempt": attempt, "offset": offset, "wait_sec": wait_sec or None}
        return self._get(f"queue/jobs/{_part(job_id)}/logs", wire.Logs, query, wait_sec=wait_sec)

    # arrays

    def submit_array(self, array: str, job: wire.SubmitBody) -> wire.ArrayInfo:
        """`array`: the indices, and how many at once: `1-1000%8`. `job`: what `job_of` makes."""
        again = job.idempotency_key is not None
        return self._post("arrays/submit", wire.ArrayBody(array=array, job=job), wire.ArrayInfo, again=again)

    def arrays(self, *, addon_id: str | None = None, limit: int = 50) -> list[wire.ArrayInfo]:
        """The newest first."""
        return self._get("arrays", wire.ArrayList, {"addon_id": addon_id, "limit": limit}).arrays

    def array(self, array_id: str, *, index: int | None = None, wait_sec: float = 0) -> wire.ArrayInfo:
        """
        With `wait_sec` the answer comes when the last index has ended, or when the time is over. With
        `index` it names the newest job of that index (`job_id`).
        """
        query = {"index": index} | ({"wait_sec": wait_sec} if wait_sec else {})
        return self._get(f"arrays/{_part(array_id)}", wire.ArrayInfo, query, wait_sec=wait_sec)

    def cancel_array(self, array_id: str) -> wire.ArrayInfo:
        return self._post(f"arrays/{_part(array_id)}/cancel", None, wire.ArrayInfo, again=True)

    def retry_array(self, array_id: str) -> wire.ArrayInfo:
        return self._post(f"arrays/{_part(array_id)}/retry", None, wire.ArrayInfo)

    # batches

    def submit_batch(
        self,
        name: str,
        addon_id: str,
        jobs: Sequence[wire.SubmitBody] = (),
        *,
        on_end: wire.SubmitBody | None = None,
        on_failure: wire.SubmitBody | None = None,
        open: bool = False,  # noqa: A002 - the word of the API
        idempotency_key: str | None = None,
    ) -> wire.BatchInfo:
        """
        All or none. `jobs` and the callbacks: what `job_of` makes. An `open` batch does not end before `close_batch`; until
        then, and while one of its jobs lives, `submit(..., batch=name)` adds more. The same request with the same
        `idempotency_key` finds the batch; without a key another batch of that name is refused (KeyConflict).
        """
        body = wire.BatchBody(
            name=name,
            addon_id=addon_id,
            jobs=tuple(jobs),
            on_end=on_end,
            on_failure=on_failure,
            open=open,
            # With a key the request can be sent again if its answer is lost.
            idempotency_key=idempotency_key or str(uuid4()),
        )
        return self._post("batches/submit", body, wire.BatchInfo, again=True)

    def batches(self, *, addon_id: str | None = None, limit: int = 50) -> list[wire.BatchInfo]:
        """The newest first, without their callbacks."""
        return self._get("batches", wire.BatchList, {"addon_id": addon_id, "limit": limit}).batches

    def batch(self, name: str, *, wait_sec: float = 0) -> wire.BatchInfo:
        """With `wait_sec` the answer comes when the batch has ended, or when the time is over."""
        query = {"wait_sec": wait_sec} if wait_sec else {}
        return self._get(f"batches/{_part(name)}", wire.BatchInfo, query, wait_sec=wait_sec)

    def close_batch(self, name: str) -> wire.BatchInfo:
        """It ends with the jobs that it has."""
        return self._post(f"batches/{_part(name)}/close", None, wire.BatchInfo, again=True)

    def cancel_batch(self, name: str) -> wire.BatchChangedAnswer:
        return self._post(f"batches/{_part(name)}/cancel", None, wire.BatchChangedAnswer, again=True)

    def retry_batch(self, name: str) -> wire.BatchChangedAnswer:
        return self._post(f"batches/{_part(name)}/retry", None, wire.BatchChangedAnswer)

    # schedules

    def schedules(self, *, addon_id: str | None = None) -> list[wire.ScheduleInfo]:
        return self._get("schedules", wire.ScheduleList, {"addon_id": addon_id}).schedules

    def schedule(self, name: str) -> wire.ScheduleInfo:
        return self._get(f"schedules/{_part(name)}", wire.ScheduleInfo)

    def add_schedule(self, name: str, job: wire.SubmitBody, **fields: Any) -> wire.ScheduleInfo:
        """`job`: what `job_of` makes. `fields`: `cron`, `every_sec` or `at`, and the others of `wire.ScheduleBody`."""
        body = wire.ScheduleBody(name=name, job=job, **fields)
        return self._post("schedules/add", body, wire.ScheduleInfo)

    def edit_schedule(self, name: str, **fields: Any) -> wire.ScheduleInfo:
        """Any of `wire.ScheduleEdit`."""
        path = f"schedules/{_part(name)}/edit"
        return self._post(path, wire.ScheduleEdit(**fields), wire.ScheduleInfo, again=True)

    def pause_schedule(self, name: str) -> wire.ScheduleInfo:
        return self._post(f"schedules/{_part(name)}/pause", None, wire.ScheduleInfo, again=True)

    def resume_schedule(self, name: str) -> wire.ScheduleInfo:
        return self._post(f"schedules/{_part(name)}/resume", None, wire.ScheduleInfo, again=True)

    def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> wire.Submitted:
        """A job of the schedule at once, whatever its overlap says and also while it is paused."""
        body = wire.ScheduleRun(idempotency_key=idempotency_key)
        again = idempotency_key is not None
        return self._post(f"schedules/{_part(name)}/run", body, wire.Submitted, again=again)

    def remove_schedule(self, name: str) -> None:
        self._post(f"schedules/{_part(name)}/remove", None, wire.Ok)

    # workers

    def dispatchable(
        self,
        *,
        addon_id: str | None = None,
        job_type: str | None = None,
        limit: int = 50,
        wait_sec: float = 0,
    ) -> list[wire.DispatchableJob]:
        query = {"addon_id": addon_id, "job_type": job_type, "limit": limit, "wait_sec": wait_sec or None}
        return self._get("queue/dispatchable", wire.Dispatchable, query, wait_sec=wait_sec).jobs

    def claim(
        self,
        *,
        addon_id: str | None = None,
        job_types: Sequence[str] = (),
        limit: int = 1,
        wait_sec: float = 0,
        worker: str = "",
    ) -> wire.ClaimAnswer:
        body = wire.ClaimRequest(
            addon_id=addon_id, job_types=tuple(job_types), limit=limit, wait_sec=wait_sec, worker=worker
        )
        return self._post("queue/claim", body, wire.ClaimAnswer, wait_sec=wait_sec)

    def lease(self, job_id: str, *, worker: str = "") -> wire.LeaseGranted:
        """The two-step way: the reservation of a DISPATCHING job becomes the lease."""
        return self._post("lease/request", wire.LeaseRequest(job_id=job_id, worker=worker), wire.LeaseGranted)

    def ask(self, addon_id: str, job_type: str, **fields: Any) -> wire.LeaseGranted:
        """May this much work start now? A lease without a job, or why not and when to ask again."""
        body = wire.LeaseRequest(addon_id=addon_id, job_type=job_type, **fields)
        return self._post("lease/request", body, wire.LeaseGranted)

    def ack(
        self, job_id: str, lease_id: str, *, worker: str = "", pid: int | None = None
    ) -> wire.HeartbeatAnswer:
        """The worker has started. `pid`: of the process that runs the job."""
        body = wire.Ack(lease_id=lease_id, worker=worker, pid=pid)
        return self._post(f"queue/jobs/{_part(job_id)}/ack", body, wire.HeartbeatAnswer, again=True)

    def heartbeat(
        self,
        lease_id: str,
        *,
        progress: float | None = None,
        spent: float | None = None,
        checkpoint: bytes | None = None,
        pid: int | None = None,
        timeout: float | None = None,
    ) -> wire.HeartbeatAnswer:
        """`spent`: the total of this lease so far. `checkpoint` is JSON. `pid`: of the process that runs the job. Sent again for as long as `timeout` allows, but no longer."""
        body = wire.Heartbeat(
            lease_id=lease_id,
            progress=progress,
            spent=spent,
            checkpoint=UNSET if checkpoint is None else Raw(checkpoint),
            pid=pid,
        )
        return self._post(
            "lease/heartbeat", body, wire.HeartbeatAnswer, timeout=timeout, again=timeout is None
        )

    def complete(self, job_id: str, lease_id: str, result: Any = None) -> wire.Completed:
        body = wire.OutcomeReport(lease_id=lease_id, state="DONE", result=Raw(json_of(result).encode()))
        return self._post(f"queue/jobs/{_part(job_id)}/complete", body, wire.Completed, again=True)

    def fail(
        self, job_id: str, lease_id: str, error: str, *, failure: wire.Failure = wire.Failure.JOB_ERROR
    ) -> wire.Completed:
        body = wire.OutcomeReport(lease_id=lease_id, state="FAILED", error=error, failure=failure)
        return self._post(f"queue/jobs/{_part(job_id)}/complete", body, wire.Completed, again=True)

    def complete_many(self, outcomes: Sequence[wire.OutcomeReport]) -> list[wire.Ended]:
        """Each on its own merits: a stale one among them has a `problem`, the others are settled."""
        return self._post(
            "queue/complete/bulk", wire.Outcomes(outcomes=list(outcomes)), wire.SettledJob, again=True
        ).outcomes

    def exchange(
        self,
        outcomes: Sequence[wire.OutcomeReport],
        *,
        addon_id: str | None = None,
        job_types: Sequence[str] = (),
        limit: int = 1,
        worker: str = "",
    ) -> wire.ExchangeAnswerBody:
        """`complete_many` and a `claim` that does not wait, in one round trip and one commit."""
        body = wire.ExchangeRequest(
            outcomes=list(outcomes), addon_id=addon_id, job_types=tuple(job_types), limit=limit, worker=worker
        )
        return self._post("queue/exchange", body, wire.ExchangeAnswerBody)

    def report(self, lease_id: str, **fields: Any) -> wire.LoadReported:
        """Progress, spending and perhaps the outcome, in one call: any of `wire.Report`."""
        return self._post("lease/report", wire.LoadReport(lease_id=lease_id, **fields), wire.LoadReported)

    def release(self, lease_id: str) -> wire.Completed:
        return self._post("lease/release", wire.Release(lease_id=lease_id), wire.Completed, again=True)

    # looking at it all

    def events(
        self, *, after: int = 0, limit: int = 100, job_id: str | None = None, wait_sec: float = 0
    ) -> wire.Events:
        query = {"after": after, "limit": limit, "job_id": job_id, "wait_sec": wait_sec or None}
        return self._get("events", wire.Events, query, wait_sec=wait_sec)

    def stream(
        self, *, after: int | None = None, job_id: str | None = None, addon_id: str | None = None
    ) -> EventStream:
        """
        Events as they happen, for ever; lost connections are made again where they broke off. It begins with what happens from now on, or
        after the number `after`; for one job with its first event, and `after` counts that job's `n`.
        """
        query = {"job_id": job_id, "addon_id": addon_id}
        return EventStream(self.transport, _path("events/stream", query), after)

    def stats(self) -> wire.Stats:
        return self._get("stats", wire.Stats)

    def types(self) -> list[wire.TypeInfo]:
        """What was learned about each job type, and how good the predictions about it were."""
        return self._get("types", wire.TypeList).types

    def history(self, range_sec: int = 900) -> wire.History:
        """The figures of the charts, a list per figure: the last quarter of an hour, or up to seven days."""
        return self._get("pulse/history", wire.History, {"range_sec": range_sec})

    def alerts(self) -> list[wire.AlertInfo]:
        """The newest alerts to owners, newest first."""
        return self._get("alerts", wire.AlertList).alerts

    def programs(self) -> list[wire.Program]:
        """Pools and graphs of the programs that attached them."""
        return self._get("programs", wire.ProgramList).programs

    def attach(self, name: str, tasks: Sequence[wire.TaskInfo]) -> None:
        """Shows a program's pools and graphs on the page. Repeat it about once a second while they should be shown."""
        self._post("programs/attach", wire.Attach(name=name, tasks=list(tasks)), wire.Ok, again=True)

    def leases(self, *, addon_id: str | None = None, limit: int = 100) -> list[wire.Lease]:
        return self._get("leases", wire.LeaseList, {"addon_id": addon_id, "limit": limit}).leases

    def addons(self) -> wire.Addons:
        return self._get("addons", wire.Addons)

    def set_addon(self, addon_id: str, **fields: Any) -> wire.AddonInfo:
        """`weight`, `paused`; `create`: also an addon that has never had a job."""
        return self._post(
            "addons/edit", wire.AddonEdit(addon_id=addon_id, **fields), wire.AddonInfo, again=True
        )

    def capacity(self) -> wire.CapacityInfo:
        return self._get("capacity", wire.CapacityInfo)

    def signals(self, addon_id: str, **readings: float) -> None:
        """An application's own readings, such as `p95_ms=180`."""
        self._post("signals", wire.LoadSignals(addon_id=addon_id, readings=readings), wire.Ok, again=True)

    def pause(self, addon_id: str | None = None, *, create: bool = False) -> None:
        """`create`: also an addon that has never had a job."""
        self._post("pause", wire.Scoped(addon_id=addon_id, create=create), wire.Ok, again=True)

    def resume(self, addon_id: str | None = None) -> None:
        self._post("resume", wire.Scoped(addon_id=addon_id), wire.Ok, again=True)

    def hosts(self) -> wire.Hosts:
        """The hosts that share these jobs: alive or lost, with what capacity, drained or not."""
        return self._get("hosts", wire.Hosts)

    def drain(self, host: str) -> None:
        """It starts nothing more, also after a restart, until `undrain`. What runs there goes on."""
        self._post("hosts/drain", wire.HostNamed(host=host), wire.Ok, again=True)

    def undrain(self, host: str) -> None:
        self._post("hosts/undrain", wire.HostNamed(host=host), wire.Ok, again=True)

    def kick(self) -> None:
        self._post("kick", None, wire.Ok, again=True)

    def login(self, *, read_only: bool = False) -> wire.Login:
        """A link that opens the page, good once. `read_only`: the page can change nothing."""
        return self._post("login", wire.LoginRequest(read_only=read_only), wire.Login)

    def health(self) -> wire.HostInfo:
        """Which version answers, since when, and what is wrong."""
        return self._get("health", wire.HostInfo)

    # tokens

    def tokens(self) -> list[wire.Token]:
        return self._get("tokens", wire.Tokens).tokens

    def make_token(self, name: str, scopes: Sequence[wire.Scope | str], **fields: Any) -> wire.TokenMade:
        body = wire.NewToken(name=name, scopes=[wire.Scope(scope) for scope in scopes], **fields)
        return self._post("tokens/create", body, wire.TokenMade)

    def revoke_token(self, token_id: str) -> None:
        self._post(f"tokens/{_part(token_id)}/revoke", None, wire.Ok)

    # the way there and back

    def _get(
        self, path: str, answer: type[Answer], query: dict[str, Any] | None = None, *, wait_sec: float = 0
    ) -> Answer:
        return self._ask("GET", _path(path, query or {}), None, answer, again=True, wait_sec=wait_sec)

    def _post(
        self,
        path: str,
        body: Struct | None,
        answer: type[Answer],
        *,
        again: bool = False,
        wait_sec: float = 0,
        timeout: float | None = None,
    ) -> Answer:
        content = b"{}" if body is None else _body(body)
        return self._ask("POST", path, content, answer, again=again, wait_sec=wait_sec, timeout=timeout)

    def _ask(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        answer: type[Answer],
        *,
        again: bool,
        wait_sec: float = 0,
        timeout: float | None = None,
    ) -> Answer:
        reply = self.transport.request(
            verb,
            f"{wire.PREFIX}/{path}",
            body,
            timeout=(self._timeout if timeout is None else timeout) + wait_sec,
            again=again,
            retry_for=self.retry_for if timeout is None else 0.0,
        )
        if reply.status >= 400:
            raise from_answer(reply.status, reply.body)
        return msgspec.json.decode(reply.body, type=answer)


_OPEN = frozenset({JobState.QUEUED, JobState.DISPATCHING, JobState.RUNNING})


def job_of(addon_id: str, job_type: str, payload: Any = None, **fields: Any) -> wire.SubmitBody:
    """A job to submit, from plain values."""
    unknown = fields.keys() - set(wire.SubmitBody.__struct_fields__)
    if unknown:
        raise BadIntent.of(*((name, "is not a field of a job") for name in sorted(unknown)))
    try:
        content = _encode(payload)
        if payload is not None and b"null" in content:
            refuse_not_finite(msgspec.to_builtins(payload), "it")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _bad("payload", f"has no form in JSON: {safe_str(error)}") from None
    return wire.SubmitBody(addon_id=addon_id, job_type=job_type, payload=Raw(content), **fields)


def _body(body: Struct) -> bytes:
    try:
        return _encode(body)
    except UnicodeEncodeError:
        raise _not_utf8(structs.asdict(body)) from None


def _not_utf8(fields: dict[str, Any]) -> BadIntent:
    """A file name or an argument in another encoding, as Python reads them. It is refused: replaced, it would name something else."""
    for name, value in fields.items():
        try:
            _encode(value)
        except UnicodeEncodeError:
            return _bad(name, "is not valid UTF-8")
    return _bad("body", "is not valid UTF-8")


def _bad(field: str, message: str) -> BadIntent:
    return BadIntent.of((field, message))


def _path(path: str, query: dict[str, Any]) -> str:
    given = {name: _word(value) for name, value in query.items() if value not in (None, "")}
    try:
        return f"{path}?{urlencode(given)}" if given else path
    except UnicodeEncodeError:
        raise _not_utf8(given) from None


def _word(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _part(text: str) -> str:
    return quote(text, safe="", errors="replace")
