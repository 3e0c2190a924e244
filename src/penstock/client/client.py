"""
The typed client of the HTTP API: one method per route, with answers of the types in `penstock.wire`.

A request is repeated only where that is safe: when it certainly did not arrive, when it only reads, or when
repeating it changes nothing (a submit with an idempotency key). Refusals are raised as the errors of the
library (`penstock.core.errors`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlencode
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from penstock import wire
from penstock.client.transport import EventStream, Transport, decoded, from_answer, local_url, token_of
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.states import JobState
from penstock.core.text import refuse_not_finite, safe_str
from penstock.work.context import json_of

Answer = TypeVar("Answer", bound=Struct)

_encode = msgspec.json.Encoder().encode


class Client:
    """
    A client of one scheduler. Threads may share it.

    Default of `url`: PENSTOCK_URL, else the Unix socket in the data directory of this user's daemon. Default
    of `token`: PENSTOCK_TOKEN, else the file that PENSTOCK_TOKEN_FILE names, else the file in that data
    directory.

    `retry_for`: for how many seconds a repeatable request is repeated before it raises Unreachable.

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
        """
        End waiting requests. They raise Unreachable, unless their answer still arrives. Any thread may call
        this.
        """
        self.transport.hang_up()

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # jobs

    def submit(self, addon_id: str, job_type: str, payload: Any = None, **fields: Any) -> wire.Submitted:
        """Submit a job, which is durable when this returns. `fields`: any field of `wire.SubmitBody`."""
        return self.submit_job(job_of(addon_id, job_type, payload, **fields))

    def submit_job(self, job: wire.SubmitBody) -> wire.Submitted:
        repeatable = job.idempotency_key is not None
        return self._post(
            "queue/jobs/submit", job, wire.Submitted, repeatable=repeatable, wait_sec=job.wait_sec
        )

    def submit_many(self, jobs: Sequence[wire.SubmitBody], *, wait_sec: float = 0) -> list[wire.Submitted]:
        """
        Submit all jobs or none, in one transaction. `wait_sec`: how long to wait for room in a full queue.
        """
        repeatable = all(job.idempotency_key is not None for job in jobs)
        body = wire.SubmitMany(jobs=list(jobs), wait_sec=wait_sec)
        return self._post(
            "queue/jobs/submit/bulk", body, wire.BulkSubmitted, repeatable=repeatable, wait_sec=wait_sec
        ).jobs

    def job(self, job_id: str, *, wait_sec: float = 0) -> wire.JobInfo:
        """The job as it is now; with `wait_sec`, as it is when it is settled or the time is over."""
        query = {"wait_sec": wait_sec} if wait_sec else {}
        return self._get(f"queue/jobs/{_part('job', job_id)}", wire.JobInfo, query, wait_sec=wait_sec)

    def wait(self, job_id: str, timeout: float | None = None) -> wire.JobInfo:
        """Wait until the job is settled, or for `timeout` seconds, and return it."""
        remaining = timeout
        while True:
            wait_sec = 30.0 if remaining is None else min(30.0, remaining)
            job = self.job(job_id, wait_sec=max(wait_sec, 0.001))
            remaining = None if remaining is None else remaining - wait_sec
            if job.state not in _OPEN or (remaining is not None and remaining <= 0):
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
        """
        List jobs. `since` and `before`: when they were created. `text`: a part of type, payload, tags or
        error.
        """
        job_filter: dict[str, Any] = {"state": ",".join(states), "addon_id": addon_id, "job_type": job_type}
        job_filter |= {"tag": tag, "since": since, "before": before, "text": text}
        return self._get(
            "queue/jobs",
            wire.Jobs,
            {**job_filter, "after": after, "limit": limit, "newest_first": newest_first},
        )

    def count(self, **job_filter: Any) -> dict[JobState, int]:
        """How many jobs of each state match the filter: any field of `wire.JobFilter` but `state`."""
        return self._get("queue/count", wire.JobCounts, job_filter).jobs

    def cancel_all(self, **job_filter: Any) -> wire.BulkChanged:
        """
        Cancel every job that matches the filter (fields of `wire.JobFilter`). `refused` has jobs that cannot
        be canceled.
        """
        return self._change_all("queue/cancel/bulk", job_filter)

    def retry_all(self, **job_filter: Any) -> wire.BulkChanged:
        """Queue again every FAILED or BLOCKED job that matches the filter."""
        return self._change_all("queue/retry/bulk", job_filter)

    def _change_all(self, path: str, job_filter: dict[str, Any]) -> wire.BulkChanged:
        total = wire.BulkChanged(0, [], 0)
        while total.next is not None:
            body = wire.BulkChange(**job_filter, after=total.next)
            page = self._post(path, body, wire.BulkChanged, repeatable=True)
            total = wire.BulkChanged(total.changed + page.changed, [*total.refused, *page.refused], page.next)
        return total

    def rerun(self, job_id: str, payload: Any = UNSET, **fields: Any) -> wire.Submitted:
        """
        Submit a new job with the request of this one. `payload` and any field of `wire.Rerun` replace its
        values.
        """
        if payload is not UNSET:
            fields["payload"] = Raw(json_of(payload).encode())
        repeatable = "idempotency_key" in fields
        return self._post(
            f"queue/jobs/{_part('job', job_id)}/rerun",
            wire.Rerun(**fields),
            wire.Submitted,
            repeatable=repeatable,
        )

    def find(self, part: str, *, limit: int = 10) -> list[str]:
        """The ids that contain this part."""
        return self._get("queue/find", wire.FoundJobs, {"part": part, "limit": limit}).job_ids

    def cancel(self, job_id: str, *, now: bool = False) -> wire.JobInfo:
        """Cancel a job. `now`: the runner kills it at once, instead of asking it to stop first."""
        body = wire.Cancel(now=True) if now else None
        return self._post(f"queue/jobs/{_part('job', job_id)}/cancel", body, wire.JobInfo, repeatable=True)

    def retry(self, job_id: str) -> wire.JobInfo:
        return self._post(f"queue/jobs/{_part('job', job_id)}/retry", None, wire.JobInfo)

    def edit(self, job_id: str, **fields: Any) -> wire.JobInfo:
        """
        Change `priority`, `earliest_start_at`, `deadline_at`, `run_when` or `quiet_for_sec` of a queued job.
        None removes a time.
        """
        return self._post(
            f"queue/jobs/{_part('job', job_id)}/edit", wire.Edit(**fields), wire.JobInfo, repeatable=True
        )

    def dependencies(self, job_id: str) -> wire.JobDependencies:
        """The jobs that a job waits for or waited for, and those that wait for it."""
        return self._get(f"queue/jobs/{_part('job', job_id)}/dependencies", wire.JobDependencies)

    def explain(self, job_id: str) -> wire.Explained:
        return self._get(f"queue/jobs/{_part('job', job_id)}/explain", wire.Explained)

    def logs(
        self, job_id: str, *, attempt: int | None = None, offset: int = 0, wait_sec: float = 0
    ) -> wire.Logs:
        """The output of a command or function. `wait_sec`: how long to wait for more of it."""
        query = {"attempt": attempt, "offset": offset, "wait_sec": wait_sec or None}
        return self._get(f"queue/jobs/{_part('job', job_id)}/logs", wire.Logs, query, wait_sec=wait_sec)

    # arrays

    def submit_array(self, array: str, job: wire.SubmitBody) -> wire.ArrayInfo:
        """
        Submit an array. `array`: the indices, and how many run at once: `1-1000%8`. `job`: made by `job_of`.
        """
        repeatable = job.idempotency_key is not None
        return self._post(
            "arrays/submit", wire.ArrayBody(array=array, job=job), wire.ArrayInfo, repeatable=repeatable
        )

    def arrays(self, *, addon_id: str | None = None, limit: int = 50) -> list[wire.ArrayInfo]:
        """The arrays, newest first."""
        return self._get("arrays", wire.ArrayList, {"addon_id": addon_id, "limit": limit}).arrays

    def array(self, array_id: str, *, index: int | None = None, wait_sec: float = 0) -> wire.ArrayInfo:
        """
        The array as it is now; with `wait_sec`, as it is when its last index has ended or the time is over.
        With `index` its `job_id` is the newest job of that index.
        """
        query = {"index": index} | ({"wait_sec": wait_sec} if wait_sec else {})
        return self._get(f"arrays/{_part('array', array_id)}", wire.ArrayInfo, query, wait_sec=wait_sec)

    def cancel_array(self, array_id: str) -> wire.ArrayInfo:
        return self._post(f"arrays/{_part('array', array_id)}/cancel", None, wire.ArrayInfo, repeatable=True)

    def retry_array(self, array_id: str) -> wire.ArrayInfo:
        return self._post(f"arrays/{_part('array', array_id)}/retry", None, wire.ArrayInfo)

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
        Submit a batch with all its jobs, or nothing. `job_of` makes the jobs and callbacks. An `open` batch
        does not end before `close_batch`; until then, and while one of its jobs lives, `submit(...,
        batch=name)` adds more. The same request with the same `idempotency_key` returns the batch that
        exists; without a key a second batch of that name is refused (KeyConflict).
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
        return self._post("batches/submit", body, wire.BatchInfo, repeatable=True)

    def batches(self, *, addon_id: str | None = None, limit: int = 50) -> list[wire.BatchInfo]:
        """The batches, newest first, without their callbacks."""
        return self._get("batches", wire.BatchList, {"addon_id": addon_id, "limit": limit}).batches

    def batch(self, name: str, *, wait_sec: float = 0) -> wire.BatchInfo:
        """The batch as it is now; with `wait_sec`, as it is when it has ended or the time is over."""
        query = {"wait_sec": wait_sec} if wait_sec else {}
        return self._get(f"batches/{_part('batch', name)}", wire.BatchInfo, query, wait_sec=wait_sec)

    def close_batch(self, name: str) -> wire.BatchInfo:
        """Close an open batch: it takes no more jobs, and ends when its jobs have ended."""
        return self._post(f"batches/{_part('batch', name)}/close", None, wire.BatchInfo, repeatable=True)

    def cancel_batch(self, name: str) -> wire.BatchChangedAnswer:
        return self._post(
            f"batches/{_part('batch', name)}/cancel", None, wire.BatchChangedAnswer, repeatable=True
        )

    def retry_batch(self, name: str) -> wire.BatchChangedAnswer:
        return self._post(f"batches/{_part('batch', name)}/retry", None, wire.BatchChangedAnswer)

    # schedules

    def schedules(self, *, addon_id: str | None = None) -> list[wire.ScheduleInfo]:
        return self._get("schedules", wire.ScheduleList, {"addon_id": addon_id}).schedules

    def schedule(self, name: str) -> wire.ScheduleInfo:
        return self._get(f"schedules/{_part('schedule', name)}", wire.ScheduleInfo)

    def add_schedule(self, name: str, job: wire.SubmitBody, **fields: Any) -> wire.ScheduleInfo:
        """
        Add a schedule. `job`: made by `job_of`. `fields`: `cron`, `every_sec` or `at`, and other fields of
        `wire.ScheduleBody`.
        """
        body = wire.ScheduleBody(name=name, job=job, **fields)
        return self._post("schedules/add", body, wire.ScheduleInfo)

    def edit_schedule(self, name: str, **fields: Any) -> wire.ScheduleInfo:
        """Change a schedule. `fields`: any field of `wire.ScheduleEdit`."""
        path = f"schedules/{_part('schedule', name)}/edit"
        return self._post(path, wire.ScheduleEdit(**fields), wire.ScheduleInfo, repeatable=True)

    def pause_schedule(self, name: str) -> wire.ScheduleInfo:
        return self._post(
            f"schedules/{_part('schedule', name)}/pause", None, wire.ScheduleInfo, repeatable=True
        )

    def resume_schedule(self, name: str) -> wire.ScheduleInfo:
        return self._post(
            f"schedules/{_part('schedule', name)}/resume", None, wire.ScheduleInfo, repeatable=True
        )

    def run_schedule(self, name: str, *, idempotency_key: str | None = None) -> wire.Submitted:
        """Submit a job of the schedule now, whatever its overlap says and even while it is paused."""
        body = wire.ScheduleRun(idempotency_key=idempotency_key)
        repeatable = idempotency_key is not None
        return self._post(
            f"schedules/{_part('schedule', name)}/run", body, wire.Submitted, repeatable=repeatable
        )

    def remove_schedule(self, name: str) -> None:
        self._post(f"schedules/{_part('schedule', name)}/remove", None, wire.Ok)

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
        """Turn the reservation of a DISPATCHING job into a lease (two-step workers)."""
        return self._post("lease/request", wire.LeaseRequest(job_id=job_id, worker=worker), wire.LeaseGranted)

    def ask(self, addon_id: str, job_type: str, **fields: Any) -> wire.LeaseGranted:
        """
        Request a lease without a job, for other work. The answer is the lease, or the reason of the refusal
        and when to ask again.
        """
        body = wire.LeaseRequest(addon_id=addon_id, job_type=job_type, **fields)
        return self._post("lease/request", body, wire.LeaseGranted)

    def ack(
        self, job_id: str, lease_id: str, *, worker: str = "", pid: int | None = None
    ) -> wire.HeartbeatAnswer:
        """Report that the worker has started. `pid`: the process that runs the job."""
        body = wire.Ack(lease_id=lease_id, worker=worker, pid=pid)
        return self._post(
            f"queue/jobs/{_part('job', job_id)}/ack", body, wire.HeartbeatAnswer, repeatable=True
        )

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
        """
        Renew a lease. `spent`: the total of this lease so far. `checkpoint`: JSON. `pid`: the process that
        runs the job. With a `timeout` the request takes at most that long and is not repeated.
        """
        body = wire.Heartbeat(
            lease_id=lease_id,
            progress=progress,
            spent=spent,
            checkpoint=UNSET if checkpoint is None else Raw(checkpoint),
            pid=pid,
        )
        return self._post(
            "lease/heartbeat", body, wire.HeartbeatAnswer, timeout=timeout, repeatable=timeout is None
        )

    def complete(self, job_id: str, lease_id: str, result: Any = None) -> wire.Completed:
        body = wire.OutcomeReport(lease_id=lease_id, state="DONE", result=Raw(json_of(result).encode()))
        return self._post(
            f"queue/jobs/{_part('job', job_id)}/complete", body, wire.Completed, repeatable=True
        )

    def fail(
        self, job_id: str, lease_id: str, error: str, *, failure: wire.Failure = wire.Failure.JOB_ERROR
    ) -> wire.Completed:
        body = wire.OutcomeReport(lease_id=lease_id, state="FAILED", error=error, failure=failure)
        return self._post(
            f"queue/jobs/{_part('job', job_id)}/complete", body, wire.Completed, repeatable=True
        )

    def complete_many(self, outcomes: Sequence[wire.OutcomeReport]) -> list[wire.OutcomeAnswer]:
        """
        Report outcomes. Each is judged on its own: a stale one gets a `problem`, the others are settled.
        """
        return self._post(
            "queue/complete/bulk",
            wire.Outcomes(outcomes=list(outcomes)),
            wire.OutcomeAnswers,
            repeatable=True,
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
        """`complete_many` and a `claim` that does not wait, in one request and one commit."""
        body = wire.ExchangeRequest(
            outcomes=list(outcomes), addon_id=addon_id, job_types=tuple(job_types), limit=limit, worker=worker
        )
        return self._post("queue/exchange", body, wire.ExchangeAnswerBody)

    def report(self, lease_id: str, **fields: Any) -> wire.LeaseReported:
        """Report progress, spending and perhaps the outcome of a lease: fields of `wire.LeaseReport`."""
        return self._post("lease/report", wire.LeaseReport(lease_id=lease_id, **fields), wire.LeaseReported)

    def release(self, lease_id: str) -> wire.Completed:
        return self._post("lease/release", wire.Release(lease_id=lease_id), wire.Completed, repeatable=True)

    # status

    def events(
        self, *, after: int = 0, limit: int = 100, job_id: str | None = None, wait_sec: float = 0
    ) -> wire.Events:
        query = {"after": after, "limit": limit, "job_id": job_id, "wait_sec": wait_sec or None}
        return self._get("events", wire.Events, query, wait_sec=wait_sec)

    def stream(
        self, *, after: int | None = None, job_id: str | None = None, addon_id: str | None = None
    ) -> EventStream:
        """
        Follow the events for ever, across lost connections. The stream begins now, or after event number
        `after`. The stream of one job begins with its first event, and its `after` counts the job's `n`.
        """
        query = {"job_id": job_id, "addon_id": addon_id}
        return EventStream(self.transport, _path("events/stream", query), after)

    def stats(self) -> wire.Stats:
        return self._get("stats", wire.Stats)

    def types(self) -> list[wire.TypeInfo]:
        """What the scheduler has learned about each job type, and how good its predictions were."""
        return self._get("types", wire.TypeList).types

    def history(self, range_sec: int = 900) -> wire.History:
        """The figures of the charts, one list per figure: of 15 minutes, or up to seven days."""
        return self._get("stats/history", wire.History, {"range_sec": range_sec})

    def alerts(self) -> list[wire.AlertInfo]:
        """The latest alerts, newest first."""
        return self._get("alerts", wire.AlertList).alerts

    def programs(self) -> list[wire.Program]:
        """The attached programs, with their pools and graphs."""
        return self._get("programs", wire.ProgramList).programs

    def attach(self, name: str, tasks: Sequence[wire.TaskInfo]) -> None:
        """Show a program's pools and graphs on the page. Repeat it about once a second."""
        self._post(
            "programs/attach", wire.AttachRequest(name=name, tasks=list(tasks)), wire.Ok, repeatable=True
        )

    def leases(self, *, addon_id: str | None = None, limit: int = 100) -> list[wire.Lease]:
        return self._get("leases", wire.LeaseList, {"addon_id": addon_id, "limit": limit}).leases

    def addons(self) -> wire.Addons:
        return self._get("addons", wire.Addons)

    def set_addon(self, addon_id: str, **fields: Any) -> wire.AddonInfo:
        """Set an addon's `weight` or `paused`. `create`: also if the addon has never had a job."""
        return self._post(
            "addons/edit", wire.AddonEdit(addon_id=addon_id, **fields), wire.AddonInfo, repeatable=True
        )

    def capacity(self) -> wire.CapacityInfo:
        return self._get("capacity", wire.CapacityInfo)

    def signals(self, addon_id: str, **readings: float) -> None:
        """Report an application's own load readings, such as `p95_ms=180`."""
        self._post(
            "signals", wire.LoadSignals(addon_id=addon_id, readings=readings), wire.Ok, repeatable=True
        )

    def pause(self, addon_id: str | None = None, *, create: bool = False) -> None:
        """Start no more jobs, of one addon or of all. `create`: also if the addon has never had a job."""
        self._post("pause", wire.AddonScope(addon_id=addon_id, create=create), wire.Ok, repeatable=True)

    def resume(self, addon_id: str | None = None) -> None:
        self._post("resume", wire.AddonScope(addon_id=addon_id), wire.Ok, repeatable=True)

    def hosts(self) -> wire.Hosts:
        """The hosts that share these jobs, with their state and capacity."""
        return self._get("hosts", wire.Hosts)

    def drain(self, host: str) -> None:
        """
        Start no more jobs on this host until `undrain`, even after a restart. Its running jobs continue.
        """
        self._post("hosts/drain", wire.HostRequest(host=host), wire.Ok, repeatable=True)

    def undrain(self, host: str) -> None:
        self._post("hosts/undrain", wire.HostRequest(host=host), wire.Ok, repeatable=True)

    def kick(self) -> None:
        self._post("kick", None, wire.Ok, repeatable=True)

    def login(self, *, read_only: bool = False) -> wire.Login:
        """Make a link that opens the page once. `read_only`: that page can change nothing."""
        return self._post("login", wire.LoginRequest(read_only=read_only), wire.Login)

    def health(self) -> wire.HostInfo:
        """The version of the scheduler, its start, and the problems of its host."""
        return self._get("health", wire.HostInfo)

    # tokens

    def tokens(self) -> list[wire.Token]:
        return self._get("tokens", wire.Tokens).tokens

    def make_token(self, name: str, scopes: Sequence[wire.Scope | str], **fields: Any) -> wire.TokenMade:
        body = wire.NewToken(name=name, scopes=[wire.Scope(scope) for scope in scopes], **fields)
        return self._post("tokens/create", body, wire.TokenMade)

    def revoke_token(self, token_id: str) -> None:
        self._post(f"tokens/{_part('token', token_id)}/revoke", None, wire.Ok)

    # requests and answers

    def _get(
        self, path: str, answer: type[Answer], query: dict[str, Any] | None = None, *, wait_sec: float = 0
    ) -> Answer:
        return self._ask("GET", _path(path, query or {}), None, answer, repeatable=True, wait_sec=wait_sec)

    def _post(
        self,
        path: str,
        body: Struct | None,
        answer: type[Answer],
        *,
        repeatable: bool = False,
        wait_sec: float = 0,
        timeout: float | None = None,
    ) -> Answer:
        content = b"{}" if body is None else _body(body)
        return self._ask(
            "POST", path, content, answer, repeatable=repeatable, wait_sec=wait_sec, timeout=timeout
        )

    def _ask(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        answer: type[Answer],
        *,
        repeatable: bool,
        wait_sec: float = 0,
        timeout: float | None = None,
    ) -> Answer:
        reply = self.transport.request(
            verb,
            f"{wire.PREFIX}/{path}",
            body,
            timeout=(self._timeout if timeout is None else timeout) + wait_sec,
            repeatable=repeatable,
            retry_for=self.retry_for if timeout is None else 0.0,
        )
        if reply.status >= 400:
            raise from_answer(reply.status, reply.body)
        return decoded(reply.body, answer)


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
        raise _bad("payload", f"cannot be written as JSON: {safe_str(error)}") from None
    return wire.SubmitBody(addon_id=addon_id, job_type=job_type, payload=Raw(content), **fields)


def _body(body: Struct) -> bytes:
    try:
        return _encode(body)
    except UnicodeEncodeError:
        raise _not_utf8(structs.asdict(body)) from None


def _not_utf8(fields: dict[str, Any]) -> BadIntent:
    """
    The error for a field that is not UTF-8, such as a file name in another encoding. Replacing characters
    would name another file.
    """
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


def _part(kind: str, name: str) -> str:
    """An id or a name as a part of a path. NotFound: nothing has such a name, so the API has no such path."""
    if not _NAME.fullmatch(name):
        raise NotFound(f"there is no {kind} {name!r:.80}")
    return name


_NAME: Final = re.compile(r"[0-9A-Za-z._-]{1,100}")
