"""
The running half of a library scheduler: `JobRunner` claims jobs, runs them and reports their ends;
`BackgroundWork` is what `Scheduler.start` makes and `Scheduler.stop` closes.

One exchange with the store is one commit: it reports attempts that ended since the last one, and claims as
many jobs as `core/jobs/workers.py` plans. So under load each commit has many jobs, and functions of the last
batch run meanwhile. An attempt that waits too long for a thread goes back to the queue.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any, Final, Protocol

from penstock.core.errors import Refused
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, Span, seconds
from penstock.core.jobs.workers import SOON, Batching, BatchPlan, WorkerKinds
from penstock.library.attempt import JobAttempt, grace_sec, remote_call, renewals
from penstock.library.function import JobFunction
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import EndReport, GrantedJob, JobService
from penstock.scheduler.maintenance import workers_named
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Grant, Store
from penstock.work.executors import JobExecutor, ProcessExecutor, ThreadExecutor
from penstock.work.leases import KeeperThread, LeaseKeeper
from penstock.work.outcome import STOPPED, Outcome

log = logging.getLogger("penstock.library")

#: The most exchanges of one step: then the other parts of the scheduler have their turn.
MOST_EXCHANGES: Final = 8
#: How long a claimed attempt may wait for a thread before it goes back to the queue.
STALE: Final[Span] = 1 * SECOND
#: How long the driver waits for brief functions that are about to end.
LAST_SEC: Final = 0.00025
#: A stop waits at least this long for a claim that is being written.
CLAIM_SEC: Final = 0.5
#: The prefix of the names of such workers. Their threads and processes end with the program, so when a
#: scheduler starts, no dispatch of such a worker runs any more.
WORKER: Final = "library:"
#: How much longer than its timeout a stop waits for functions.
_CLOSING_SEC: Final = 0.5
#: A function that is shorter than this ends before a stop could reach it.
QUICK_SEC: Final = 0.1


class JobRunner:
    """Claims jobs for the functions of this program, runs them on executors, and reports their ends."""

    def __init__(
        self,
        functions: Mapping[str, JobFunction[..., Any, Any]],
        executors: Callable[
            [Callable[[JobAttempt], bool], Callable[[JobAttempt, Outcome], None]], JobExecutor[JobAttempt]
        ],
        *,
        workers: int,
        name: str,
        now: Callable[[], Moment],
        tick: Span = 2 * SECOND,
        expensive: bool = False,
    ) -> None:
        self._functions, self._name, self._now, self._tick = functions, name, now, tick
        self._kinds = WorkerKinds(job_types=frozenset())
        #: Claimed attempts that have not begun. The thread that pops one may run it or give it back.
        self.waiting: dict[DispatchId, JobAttempt] = {}
        #: Attempts that ended and are not reported.
        self.ended: deque[tuple[JobAttempt, Outcome]] = deque()
        #: When the executor last got attempts.
        self.given_at: Moment = 0
        #: When a claim last got fewer jobs than it asked for, and so all that were ready.
        self._emptied_at: Moment = 0
        self._closing = self._woken = False
        #: Whether a thread of the executor was sent to claim; the id of the thread that commits a claim now.
        self._claimer_sent, self._committer = False, 0
        #: Whether this wakes the driver after a claim of its own; whether that claim may have missed a commit.
        self._wakes_after_claim = self._missed = False
        self._idle = Condition()
        #: Held during a claim, by the driver or with a submit: from the count of free places until they are
        #: taken.
        self._claiming = Lock()
        self.executors = executors(self.begin, self.finish)
        self.batching = Batching(workers, self.executors.ahead, expensive=expensive)

    def join(self, job_service: JobService, wake: Callable[[], None]) -> None:
        """Connect with the job service, which is made after this, its part. `wake`: wakes the driver."""
        self._job_service, self._wake = job_service, wake
        self.leases: LeaseKeeper[JobAttempt] = LeaseKeeper(
            renewals(job_service, self._now), on_stop=self._stop, on_yield=self.executors.ask_to_yield
        )
        self.running = self.leases.live

    # called by the driver

    def step(self, now: Moment) -> Moment:
        """Report, claim and start jobs. Returns the moment of the next step."""
        self._woken = False
        self._give_back_stale()
        plan = self._plan(now, taken_at=self.given_at)
        if plan.wake:
            self.executors.wake_threads()
        if plan.again_at is not None and not (plan.report or plan.claim):
            return plan.again_at  # probably woken by its own commit; the end of the batch wakes it again
        woken_after_claim, self._wakes_after_claim = self._wakes_after_claim, False
        if not self.ended and woken_after_claim and not self._missed:
            return now + (SOON if self.waiting else self._tick)
        if not self.ended and now < self._emptied_at + SOON:
            return self._emptied_at + SOON  # probably woken by its own commit
        with self._claiming:
            self._wait_for_the_last()
            self._exchange()
        return now + (SOON if self.waiting else self._tick)

    def on_commit(self) -> None:
        """
        Called after a change of a store that several processes share. An idle thread claims jobs and runs
        them, which is faster than waking the driver first. The driver is woken afterwards, because other
        parts may wait for the change.
        """
        is_own = get_ident() == self._committer
        if not is_own:
            self._missed = True
        idle = self.free > 0 and not (self.waiting or self.ended or self._closing)
        if idle and not self._claimer_sent and not self._claiming.locked():
            self._claimer_sent = True
            if self.executors.run_soon(self._claim_here):
                return
            self._claimer_sent = False
        self._wakes_after_claim |= is_own
        self._wake()

    def _claim_here(self) -> None:
        """
        Claim in a thread of the executor, which then runs the jobs. If this fails, the driver claims and
        logs.
        """
        started = 0
        try:
            if self._claiming.acquire(blocking=False):
                try:
                    started = self._exchange(here=True)
                finally:
                    self._claiming.release()
                self._wakes_after_claim = True
        except Exception:  # noqa: BLE001, S110  # the driver gets the same error
            pass
        finally:
            self._claimer_sent = False
            if not started:  # else its commit has woken the driver
                self._wake()

    def _wait_for_the_last(self) -> None:
        """Wait for brief functions that still run, so that they need no commit of their own."""
        if (
            self.batching.expensive
            and self.batching.brief
            and 0 < len(self.ended) < len(self.running)
            and not self.waiting
        ):
            time.sleep(LAST_SEC)

    def _exchange(self, *, here: bool = False) -> int:
        """
        Report ended attempts, claim jobs and start them; returns how many start. If the store fails, the
        reports stay for the next step. `here`: the calling thread is one of the executor.

        Under load several exchanges follow each other, and the attempts of one begin when the next has been
        sent.
        """
        claimed: list[JobAttempt] = []
        started = 0
        try:
            for _ in range(MOST_EXCHANGES):
                if self.batching.expensive:
                    # This thread writes the next exchange, and the claimed attempts must not wait for that.
                    ready, claimed = claimed, []
                    self._give(ready)
                plan = self._plan(self._now(), claimed=len(claimed))
                ended = list(itertools.islice(self.ended, plan.report))
                if not plan.claim or self._closing or not self._functions:
                    self._report(ended)
                    break
                self._committer, self._missed = get_ident(), False
                try:
                    pending = self._job_service.exchange_soon(
                        _reports(ended), self.kinds, plan.claim, self._name, wait=self.batching.expensive
                    )
                finally:
                    self._committer = 0
                ready, claimed = claimed, []
                self._give(ready)
                states, claimed = self._job_service.finish_exchange(pending, self._attempts)
                started += len(claimed)
                self._reported(ended, states)
                self._emptied_at = self._now() if 0 < len(claimed) < plan.claim else 0
                if len(self.ended) < max(1, len(claimed)):
                    break
        except BaseException:
            self._wakes_after_claim = False
            raise
        finally:
            self._give(claimed, here=here)
        return started

    def _attempts(self, claimed: list[GrantedJob]) -> list[JobAttempt]:
        offset = self.leases.clock() - seconds(self._now())  # from the store's clock to the keeper's
        return [
            JobAttempt(
                each,
                self._functions[each.job.intent.job_type],
                self.leases,
                offset + seconds(each.dispatch.admitted_at),
            )
            for each in claimed
        ]

    @property
    def kinds(self) -> WorkerKinds:
        if len(self._kinds.job_types) != len(self._functions):  # functions are only added
            self._kinds = WorkerKinds(job_types=frozenset(self._functions))
        return self._kinds

    @property
    def free(self) -> int:
        return self.batching.places - len(self.running) - len(self.waiting)

    def _give(self, attempts: list[JobAttempt], *, here: bool = False) -> None:
        """
        Give attempts to the executor. `here`: the calling thread takes one of them, so one thread less is
        woken.
        """
        self.waiting.update({attempt.dispatch_id: attempt for attempt in attempts})
        self.given_at = self._now() if attempts else self.given_at
        self.executors.start(attempts, at_once=not self.batching.brief, awake=int(here))

    # called by the dispatcher with a submit: an idle thread gets the job by the same commit

    def claim(self) -> tuple[WorkerKinds, int, str] | None:
        """What this worker runs, how many jobs it can take, and its name. None: it claims none now."""
        if self._closing or self.free <= 0 or self.ended or not self._functions:
            return None
        # A step that is claiming now will be woken for this submit.
        if not self._claiming.acquire(blocking=False):
            return None
        return self.kinds, self.free, self._name

    def take(self, grants: list[Grant], *, comes: bool = False) -> None:
        """
        Start the granted jobs, after `claim`. `comes`: the calling thread will run one of them (`work`).
        """
        try:
            self._give(self._attempts(self._job_service.granted(grants)), here=comes)
        finally:
            self._claiming.release()

    def work(self) -> None:
        self.executors.work()

    # reports

    def _report_all(self) -> None:
        while ended := list(itertools.islice(self.ended, self._plan(self._now()).report)):
            self._report(ended)

    def _report(self, ended: list[tuple[JobAttempt, Outcome]]) -> None:
        self._reported(ended, self._job_service.end_many(_reports(ended)) if ended else [])

    def _reported(
        self, ended: list[tuple[JobAttempt, Outcome]], answers: Sequence[JobState | Refused | None]
    ) -> None:
        for (attempt, _), answer in zip(ended, answers, strict=True):
            self.ended.popleft()
            self.running.pop(attempt.dispatch_id, None)
            if isinstance(answer, Refused) and not attempt.lost:
                name, job_id = attempt.function.name, attempt.facts.job_id
                log.warning("the outcome of %s is refused: %s; job %s", name, answer, job_id)
        if self._closing:
            with self._idle:
                self._idle.notify_all()

    # the plan

    def _plan(self, now: Moment, *, claimed: int = 0, taken_at: Moment = 0) -> BatchPlan:
        """The next plan. `claimed`: how many attempts the executor has not got yet."""
        return self.batching.plan(
            now,
            free=self.free - claimed,
            waiting=len(self.waiting),
            ended=len(self.ended),
            taken_at=taken_at,
        )

    def _give_back_stale(self) -> None:
        if self.waiting:
            since = self._now() - STALE
            self._give_back([a for a in list(self.waiting.values()) if a.claimed_at < since])

    def _give_back(self, attempts: list[JobAttempt]) -> None:
        mine = [a for a in attempts if self.waiting.pop(a.dispatch_id, None) is not None]
        if mine:
            self._job_service.end_many([EndReport(a.dispatch_id, EndReason.RELEASED) for a in mine])

    # called by the executor's threads and the lease keeper

    def begin(self, attempt: JobAttempt) -> bool:
        if self.waiting.pop(attempt.dispatch_id, None) is None:
            return False
        attempt.began_at = self.leases.clock()
        self.running[attempt.dispatch_id] = attempt
        return True

    def finish(self, attempt: JobAttempt, outcome: Outcome) -> None:
        self.batching.learn(int((self.leases.clock() - attempt.began_at) * SECOND))
        if outcome is STOPPED or outcome == STOPPED:
            outcome = Outcome(EndReason.GRACEFUL_SHUTDOWN)
        attempt.finished = True
        self.ended.append((attempt, outcome))
        if not self._woken and self.batching.is_full(len(self.waiting), len(self.ended)):
            self._woken = True
            self._wake()

    def _stop(self, attempt: JobAttempt) -> None:
        """
        End an attempt that must stop. If it is lost, its outcome does not count, and another may run in its
        place.
        """
        self.executors.end(attempt)
        if attempt.lost and self.running.pop(attempt.dispatch_id, None) is not None:
            log.warning("%s of job %s has lost its lease", attempt.function.name, attempt.facts.job_id)
            attempt.given_up = True
            self.executors.give_up(attempt)

    # stopping

    def drain(self, timeout: float) -> None:
        """
        Claim no more jobs, ask functions to yield, and wait for them while the driver reports their ends.
        """
        self._closing = True
        until = time.monotonic() + timeout
        # Wait for a claim in progress; no other follows. Not for ever, because a commit may hang.
        if self._claiming.acquire(timeout=max(timeout, CLAIM_SEC)):
            self._claiming.release()
        while True:
            self._give_back(list(self.waiting.values()))
            for attempt in list(self.running.values()):
                attempt.yielding = True
                self.executors.ask_to_yield(attempt)
            remaining = until - time.monotonic()
            if remaining <= 0 or not (self.running or self.waiting):
                return
            with self._idle:
                self._idle.wait(min(remaining, 0.05))

    def close(self, wait: float) -> None:
        """
        Report ended attempts and end the others, after the driver has stopped. Not every function can be
        ended, but its job goes back to the queue in any case.
        """
        self._give_back(list(self.waiting.values()))
        self._report_all()
        for attempt in list(self.running.values()):
            attempt.lost = True
        self.executors.close(wait=wait)
        self._report_all()
        stuck = list(self.running.values())
        if stuck:
            self._job_service.end_many([EndReport(a.dispatch_id, EndReason.GRACEFUL_SHUTDOWN) for a in stuck])
        for attempt in stuck:
            name, job_id = attempt.function.name, attempt.facts.job_id
            log.warning("%s did not stop in time; job %s is back in the queue", name, job_id)


def _reports(ended: list[tuple[JobAttempt, Outcome]]) -> list[EndReport]:
    return [EndReport(attempt.dispatch_id, *outcome) for attempt, outcome in ended]


class RunningWork(Protocol):
    """
    What a scheduler runs between start and stop. The test kit has another one, which runs jobs only on
    request.
    """

    service: SchedulerService

    def start(self) -> None:
        """Start, once. If this raises, the caller calls `stop`."""

    def wake(self) -> None: ...

    def stop(self, timeout: float) -> None: ...


class BackgroundWork:
    """Runs a scheduler service and a job runner in threads of this process."""

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        clock: SteadyClock | None,
        functions: Mapping[str, JobFunction[..., Any, Any]],
        *,
        workers: int,
        kind: str,
    ) -> None:
        def executors(
            began: Callable[[JobAttempt], bool], finished: Callable[[JobAttempt, Outcome], None]
        ) -> JobExecutor[JobAttempt]:
            if kind == "thread":
                return ThreadExecutor(workers, began, finished)
            return ProcessExecutor(workers, began, finished, remote_call, grace_sec)

        name = f"{WORKER}{os.getpid()}"
        self.job_runner = JobRunner(
            functions,
            executors,
            workers=workers,
            name=name,
            now=store.now,
            expensive=store.shared,
        )
        self.service = SchedulerService(
            store,
            rules,
            clock=clock,
            more=[self.job_runner],
            survivors=workers_named(WORKER),
            pids=lambda: [os.getpid()],
            reserves=False,
            on_commit=self.job_runner.on_commit if store.shared else None,
        )
        self.job_runner.join(self.service.job_service, self.service.wake)
        self._changed = False  # whether the store has changed since stops were last read
        self._keeper_thread = KeeperThread(
            self.job_runner.leases, self._read_stops, longest_pause=min(0.5, seconds(rules.lease_for) / 6)
        )

    def start(self) -> None:
        kinds, service = self.job_runner.kinds, self.service
        # Before the registration, by which other hosts learn which functions this program runs.
        if kinds.job_types:
            service.pulling_workers.came(kinds, service.store.now() + service.rules.fetch_for)
        self.service.start(f"{Path(sys.argv[0]).name or 'python'}, process {os.getpid()}")
        self.service.store.on_change(self._on_change)
        self._keeper_thread.start()
        if not self.service.store.shared:  # else a round locks rows, and submits must not wait for it
            self.service.dispatcher.idle_worker = self.job_runner

    def wake(self) -> None:
        self.service.wake()

    def _on_change(self) -> None:
        self._changed = True
        self._keeper_thread.wake()

    def _read_stops(self) -> None:
        """
        Read which dispatches must stop, after a change in the store: so a cancel reaches a function before
        its next heartbeat. Without a function that runs for `QUICK_SEC` nothing is read.
        """
        changed, self._changed = self._changed, False
        if not changed:
            return
        leases = self.job_runner.leases
        since = leases.clock() - QUICK_SEC
        began = [lease.began_at for lease in list(leases.live.values())]
        if any(moment < since for moment in began):
            stops = self.service.store.live(phases=[DispatchPhase.ENDING])
            leases.note_stops({dispatch.dispatch_id: dispatch.reason for dispatch in stops})
        if any(moment >= since for moment in began):
            self._on_change()  # look again for those that have just begun

    def stop(self, timeout: float) -> None:
        """
        Stop within a bounded time, whatever the functions do. Everything is closed, even if the wait is
        interrupted.
        """
        self.service.dispatcher.idle_worker = None
        try:
            self.job_runner.drain(timeout)
        finally:
            self.service.driver.stop()
            self._keeper_thread.stop()
            self.job_runner.close(_CLOSING_SEC)
            self.service.stop()
