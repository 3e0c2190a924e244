"""
The SDK worker: claims jobs, runs a function for each, and renews the leases meanwhile.

    main      claims jobs while there is nothing to report; the request waits until there are some
    executor  runs functions on threads, an event loop or worker processes
    leases    renews every lease, and tells functions that they should yield or stop
    reporter  reports outcomes, and claims jobs in the same request

`Batching` (`core/jobs/workers.py`) plans how many jobs a request reports and claims, and when.

The last two never run the user's code, so a busy function keeps its lease. But a function that holds the
interpreter's lock for minutes (one long call into C) stops them too. `processes=True` is for such functions,
and for functions that must be ended although they do not check.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Condition, Thread
from typing import Any, Final, TypeAlias, TypeVar

from penstock.client.client import Client
from penstock.client.reporter import Reporter
from penstock.client.signals import handled_signals
from penstock.core.errors import Unavailable
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, moment_of
from penstock.core.jobs.workers import Batching, BatchPlan
from penstock.wire import ClaimAnswer, ClaimedJob, HeartbeatAnswer, OutcomeAnswer, OutcomeReport
from penstock.work.context import JobFacts, takes_context
from penstock.work.executors import (
    JobExecutor,
    ProcessExecutor,
    ProcessSignals,
    RemoteCall,
    RemoteOutcome,
    ThreadExecutor,
    run_in_process,
)
from penstock.work.leases import (
    RENEW_AT,
    FunctionLease,
    KeeperThread,
    LeaseKeeper,
    RenewalReply,
    RenewalRequest,
)
from penstock.work.outcome import RELEASED, CurrentJob, Outcome, call_with

log = logging.getLogger("penstock.worker")
Handler: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Handler)

#: Seconds that a request for jobs waits until there are some.
POLL_SEC: Final = 20.0
#: Seconds that an executor may take to close after its functions have ended.
_CLOSING_SEC: Final = 2.0
#: Fraction of a lease after which functions must stop if it is not renewed, so that they are gone when it
#: ends.
AT_RISK: Final = 0.66
#: Fraction of a lease that one renewal may take: two can be lost before the lease is at risk.
_PATIENCE: Final = 0.15


class Worker:
    """
    Runs the jobs of one addon.

    Defaults of `url`, `token` and `addon`: PENSTOCK_URL, PENSTOCK_TOKEN (or PENSTOCK_TOKEN_FILE) and
    PENSTOCK_ADDON; without those, url and token come from the data directory of this user's daemon.

    For example:

        worker = penstock.Worker(addon="photos")

        @worker.job("thumbnail")
        def thumbnail(job: penstock.JobContext, path: str) -> str:
            return path.replace(".jpg", ".small.jpg")

        worker.run(concurrency=4)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        addon: str | None = None,
        token: str | None = None,
        name: str | None = None,
        poll_sec: float = POLL_SEC,
    ) -> None:
        self.client = Client(url, token=token)
        # Another client for the waiting request, so that this request alone can be ended.
        self.fetcher = Client(self.client.url, token=self.client.token, retry_for=0.0)
        self.addon = addon or os.environ.get("PENSTOCK_ADDON") or None
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.poll_sec = poll_sec
        self._handlers: dict[str, JobHandler] = {}
        self.stopping = threading.Event()
        self._running: WorkerLoop | None = None

    def job(self, job_type: str | None = None) -> Callable[[F], F]:
        """
        Register the function for jobs of this type; by default the type is the function's name. In the
        function `penstock.current_job()` returns the context. A first parameter annotated `JobContext`, or
        one without an annotation that is called `job` or `ctx`, gets it too.
        """

        def register(function: F) -> F:
            name = job_type or function.__name__
            if name in self._handlers:
                raise ValueError(
                    f"job type {name!r} has a function already: {self._handlers[name].function!r}"
                )
            self._handlers[name] = JobHandler(function)
            return function

        return register

    def run(
        self,
        concurrency: int = 1,
        *,
        prefetch: int = 0,
        processes: bool = False,
        stop_within: float = 30.0,
        until_idle: bool = False,
    ) -> int:
        """
        Run jobs until SIGTERM, SIGINT or `stop()`, and return how many it ran. On a stop, functions see
        `should_yield` and have `stop_within` seconds to finish. A second signal exits at once.

        `prefetch`: how many more jobs to lease ahead, for jobs that are shorter than a round trip.
        `processes`: run each function in a process, which can be ended. `until_idle`: return when there is
        nothing to claim.
        """
        if not self._handlers:
            raise ValueError("this worker has no functions: register some with @worker.job(...)")
        if concurrency < 1 or prefetch < 0:
            raise ValueError("concurrency must be at least 1, and prefetch at least 0")
        loop = self._running = WorkerLoop(self, self._handlers, concurrency, prefetch, processes=processes)
        with handled_signals(self._on_signal):
            try:
                loop.work(until_idle=until_idle)
            finally:
                self.stopping.set()
                loop.finish(stop_within)
                self._running = None
                self.stopping.clear()
        return loop.ran

    def stop(self) -> None:
        """Claim no more jobs, let functions yield or finish, and end `run`. Any thread may call this."""
        self.stopping.set()
        self.fetcher.hang_up()
        loop = self._running
        if loop is not None:
            loop.wind_down()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stopping.is_set():
            log.warning("second signal: exiting at once")
            if self._running is not None:
                self._running.abandoned = True
            return
        log.info("%s: stopping", number.name)
        self.stop()


class WorkerLoop:
    """One `run` of a worker."""

    def __init__(
        self,
        worker: Worker,
        handlers: dict[str, JobHandler],
        concurrency: int,
        prefetch: int,
        *,
        processes: bool,
    ) -> None:
        self._worker, self._client, self._handlers = worker, worker.client, handlers
        # A request costs a round trip, like a commit on a database server.
        self.batching = Batching(concurrency, prefetch=prefetch, expensive=True)
        self._ttl_sec = 0.0  # the length of the leases that were claimed last
        self._given_at: Moment = 0  # when the executor was last given attempts
        self._busy = 0  # jobs that are claimed and whose function has not ended
        self._requested = 0  # jobs in claims that are not answered yet
        self._stopping = worker.stopping
        self._changed = Condition()
        #: Set by a second signal: do not wait any more.
        self.abandoned = False
        self.ran = 0
        remote = partial(remote_call, self._client.url, self._client.token)
        self._executor: JobExecutor[FunctionLease] = (
            ProcessExecutor(concurrency, self._begin, self._finish, remote, grace_sec)
            if processes
            else ThreadExecutor(concurrency, self._begin, self._finish)
        )
        self._leases: LeaseKeeper[FunctionLease] = LeaseKeeper(
            self._renew, on_stop=self._executor.end, on_yield=self._executor.ask_to_yield, at_risk=AT_RISK
        )
        self._reporter = Reporter(
            self._exchange,
            self._client.release,
            self._reported,
            self._leases.renew,
            plan=lambda ended: self._plan(ended, self._given_at),
            on_idle=self._notify,
        )
        self._reporter_thread = Thread(target=self._reporter.run, name="penstock-reporter", daemon=True)
        self._reporter_thread.start()
        self._keeper_thread = KeeperThread(self._leases, self._hang_up_again)
        self._keeper_thread.start()

    # called in the main thread

    def work(self, *, until_idle: bool) -> None:
        pause = 0.1
        while not self._stopping.is_set():
            if not self._should_claim():
                continue
            try:
                got = self._claim(0.0 if until_idle else self._worker.poll_sec)
            except Unavailable as error:
                if self._stopping.is_set():
                    return
                if pause == 0.1:
                    log.warning("no jobs can be fetched: %s", error)
                self._stopping.wait(pause)
                pause = min(2.0, pause * 1.5)
                continue
            pause = 0.1
            if until_idle and got == 0 and self._all_reported():
                return

    def _should_claim(self) -> bool:
        """
        Wait until a claim is due. While outcomes are reported, the same requests claim new jobs
        (`_exchange`).
        """

        def is_due() -> bool:
            return self._reporter.idle and self._plan().claim > 0 and not self._stopping.is_set()

        with self._changed:
            return is_due() or (self._changed.wait(1.0) and is_due())

    def _plan(self, ended: int = 0, taken_at: Moment = 0) -> BatchPlan:
        places = self.batching.places
        return self.batching.plan(
            int(self._leases.clock() * SECOND),
            free=places - len(self._leases.live) - self._requested,
            waiting=max(0, self._busy - places),
            ended=ended,
            taken_at=0 if self._stopping.is_set() else taken_at,
        )

    def _claim(self, wait_sec: float) -> int | None:
        """Claim jobs, and return how many came. None: the reporter has just claimed for all free places."""
        with self._claim_limit() as limit:
            if not limit:
                return None
            sent_at = self._leases.clock()
            claimed = self._worker.fetcher.claim(**self._wanted(limit), wait_sec=wait_sec)
            self._take(claimed, sent_at)
        return len(claimed.jobs)

    @contextmanager
    def _claim_limit(self, reported: int = 0) -> Iterator[int]:
        """
        How many jobs to claim. Until its answer a claim counts as granted, so that two claims at once do not
        get too many jobs.
        """
        with self._changed:
            limit = self._plan(reported).claim
            self._requested += limit
        try:
            yield limit
        finally:
            with self._changed:
                self._requested -= limit

    def _wanted(self, limit: int) -> dict[str, Any]:
        return {
            "addon_id": self._worker.addon,
            "job_types": tuple(self._handlers),
            "limit": limit,
            "worker": self._worker.name,
        }

    def _take(self, claimed: ClaimAnswer, sent_at: float) -> None:
        self._ttl_sec = claimed.ttl_sec
        leases = [
            FunctionLease(facts_of(job), self._handlers[job.job_type], self._leases, sent_at, claimed.ttl_sec)
            for job in claimed.jobs
        ]
        for lease in leases:
            if self._leases.clock() >= sent_at + claimed.ttl_sec * RENEW_AT:
                # The request waited, or this process was slow: the age of the lease is unknown, so renew it.
                self._leases.renew(lease)
            lease.yielding = self._stopping.is_set()
            self._leases.live[lease.dispatch_id] = lease
        with self._changed:
            self._busy += len(leases)
            self._given_at = int(self._leases.clock() * SECOND)
        self._executor.start(leases)

    def _all_reported(self) -> bool:
        """Whether there is nothing to claim, and no lease here could still put a job back into the queue."""
        with self._changed:
            if self._leases.live:
                self._changed.wait(0.2)
            return not self._leases.live

    # called in threads of the executor

    def _begin(self, lease: FunctionLease) -> bool:
        if lease.canceled or lease.yielding:
            self._finish(lease, RELEASED)
            return False
        with self._changed:
            self.ran += 1
        lease.began_at = self._leases.clock()
        return True

    def _finish(self, lease: FunctionLease, outcome: Outcome) -> None:
        with self._changed:
            self._busy -= 1
            if lease.began_at:
                self.batching.learn(int((self._leases.clock() - lease.began_at) * SECOND))
        lease.finished = True
        self._reporter.put(lease, outcome)

    # called in threads that run no code of the user

    def _renew(self, requests: Sequence[RenewalRequest]) -> list[RenewalReply | Exception]:
        [request] = requests
        answer = _heartbeat(self._client, request, max(0.2, self._ttl_sec * _PATIENCE))
        stop = (answer.stop or EndReason.CANCELED) if answer.cancel else None
        return [RenewalReply(answer.ttl_sec, stop, answer.yield_)]

    def _hang_up_again(self) -> None:
        """End a claim that the main thread began just after `stop` had ended the others."""
        if self._stopping.is_set():
            self._worker.fetcher.hang_up()

    def _reported(self, lease: FunctionLease, _outcome: Outcome | None) -> None:
        self._leases.live.pop(lease.dispatch_id, None)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _exchange(self, outcomes: Sequence[OutcomeReport]) -> list[OutcomeAnswer]:
        """Report outcomes and claim new jobs in one request: the ended attempts make room for them."""
        with self._claim_limit(len(outcomes)) as limit:
            if not limit or self._stopping.is_set():
                return self._client.complete_many(outcomes)
            sent_at = self._leases.clock()
            answer = self._client.exchange(outcomes, **self._wanted(limit))
            self._take(answer, sent_at)
        return answer.outcomes

    # stopping

    def wind_down(self) -> None:
        """Give back the jobs that have not begun, and ask running functions to yield."""
        for lease in self._held():
            lease.yielding = True
            self._executor.ask_to_yield(lease)
        self._notify()

    def _held(self) -> list[FunctionLease]:
        return list(self._leases.live.values())

    def finish(self, within: float) -> None:
        self.wind_down()
        if not self._wait_until(self._is_idle, within):
            forced = [lease for lease in self._held() if lease.ended_by is not None]
            for lease in forced:
                lease.lose(EndReason.GRACEFUL_SHUTDOWN)
                self._executor.end(lease)
            self._wait_until(self._is_idle, 10.0 if forced else 0.0)
        stuck = [lease.facts.job_id[-8:] for lease in self._held() if lease.stop is None]
        if stuck and not self._is_idle():
            # A thread cannot be ended. Let its lease expire: given back now, the job could run twice at once.
            log.warning("still running; their leases will expire: %s", ", ".join(stuck))
        self._reporter.close()
        self._wait_until(lambda: not self._reporter_thread.is_alive(), 5.0)
        self._keeper_thread.stop(2.0)
        self._executor.close(wait=0.0 if self.abandoned else _CLOSING_SEC)

    def _is_idle(self) -> bool:
        return self._busy == 0

    def _wait_until(self, condition: Callable[[], bool], within: float) -> bool:
        """Wait until the condition holds. Returns whether it does."""
        until = time.monotonic() + within
        while not condition() and time.monotonic() < until and not self.abandoned:
            time.sleep(0.02)
        return condition()


# calls of functions with the payload of a job, here or in a worker process

_CONTEXT_NAMES: Final = ("job", "ctx")
#: Fraction of the lease between the stop and the end of the process, so that the process is gone before the
#: lease.
_GRACE: Final = 0.1


def facts_of(job: ClaimedJob) -> JobFacts:
    deadline = job.deadline_at
    checkpoint = bytes(job.checkpoint).decode()
    return JobFacts(
        job.job_id,
        job.job_type,
        DispatchId(job.lease_id),
        job.fence,
        job.attempt,
        job.addon_id,
        job.tags,
        None if deadline is None else moment_of(deadline),
        bytes(job.payload).decode() or "null",
        None if checkpoint in ("", "null") else checkpoint,
        bytes(job.parents).decode() or None,
    )


class JobHandler:
    """
    A registered function, which can be pickled for worker processes. A payload that is an object becomes
    keyword arguments, a list becomes positional ones, null none, and any other value the only argument. The
    context is the first argument if the first parameter is annotated `JobContext`, or has no annotation and
    is called `job` or `ctx`.
    """

    def __init__(self, function: Handler) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self._takes_context = takes_context(function, _CONTEXT_NAMES)

    def invoke(self, job: CurrentJob) -> Any:
        context = (job.context,) if self._takes_context else ()
        match json.loads(job.facts.payload):
            case dict() as named:
                return call_with(self.function, context, named)
            case list() as listed:
                return call_with(self.function, (*context, *listed), {})
            case None:
                return call_with(self.function, context, {})
            case value:
                return call_with(self.function, (*context, value), {})


def grace_sec(lease: FunctionLease) -> float:
    return max(0.1, lease.ttl * _GRACE)


def remote_call(url: str, token: str, lease: FunctionLease, signals: ProcessSignals) -> RemoteCall:
    return RemoteCall(_run, (lease.function, lease.facts, signals, url, token))


def _run(
    handler: JobHandler, facts: JobFacts, signals: ProcessSignals, url: str, token: str
) -> RemoteOutcome:
    """Run the function in a worker process, which reports through a client of its own."""
    with Client(url, token=token) as client:
        return run_in_process(
            handler.invoke, facts, signals, lambda request: not _heartbeat(client, request).cancel
        )


def _heartbeat(client: Client, request: RenewalRequest, timeout: float | None = None) -> HeartbeatAnswer:
    return client.heartbeat(
        request.dispatch_id,
        progress=request.progress,
        spent=None if request.spent is None else request.spent / 1_000_000,
        checkpoint=None if request.checkpoint is None else request.checkpoint.encode(),
        pid=request.pid,
        timeout=timeout,
    )
