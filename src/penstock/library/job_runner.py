"""
The workers of this process as one part of the scheduler: `step` settles what has ended and claims what may start.

One step is one settlement of all that ended since the last and one claim of all that there is room for, so under load each commit
carries many jobs, while the functions of the last batch run. Where functions are short, some more are claimed than threads are free (`_ahead`):
else the threads would stand still during every commit. What then waits too long for a thread goes back to the queue.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition, Lock, get_ident
from typing import Any, Final

from penstock.core.errors import Refused
from penstock.core.jobs.batching import AHEAD, EXPENSIVE, SOON, Batching, BatchPlan
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, Span, seconds
from penstock.library.attempt import JobAttempt, renewals
from penstock.library.function import JobFunction
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.job_service import EndReport, GrantedJob, JobService
from penstock.stores.api import Grant
from penstock.work.executors import JobExecutor
from penstock.work.leases import LeaseKeeper
from penstock.work.outcome import STOPPED, Outcome

log = logging.getLogger("penstock.library")

#: Then the other parts of the scheduler have their turn.
MOST_EXCHANGES: Final = 8
STALE: Final[Span] = 1 * SECOND
#: How long the driver waits for brief functions that are about to end.
LAST_SEC: Final = 0.00025
#: At least this long a stop waits for a claim that is being written.
CLAIM_SEC: Final = 0.5


class JobRunner:
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
        far: bool = False,
    ) -> None:
        """`far`: a commit costs round trips."""
        self._far = far
        self._functions, self._workers, self._name, self._now, self._tick = (
            functions,
            workers,
            name,
            now,
            tick,
        )
        self._known = WorkerKinds(job_types=frozenset())
        #: Claimed, and not begun. Whoever pops one has it: the thread that runs it, or the one that gives it back.
        self._waiting: dict[DispatchId, JobAttempt] = {}
        self._over: deque[tuple[JobAttempt, Outcome]] = deque()
        self._mean_sec = AHEAD / SECOND  # of a function, lately; a guess until the first has ended
        self._guessed = True
        self._closing = False
        self._rung = False
        #: When a claim last brought some, and all that could be had.
        self._asked_at: Moment = 0
        #: When the threads were last given something.
        self._took_at: Moment = 0
        #: A thread of the hands was sent to look, and which one it is while it does.
        self._sent, self._scout = False, 0
        #: It saw all that anybody has told of so far, or is about to.
        self._looked = False
        self._idle = Condition()
        #: Held during a claim, by the driver or beside a submit, from counting the room until what was claimed is in it.
        self._claiming = Lock()
        self.executors = executors(self._begin, self._finish)
        self._batching = Batching(workers, self.executors.ahead)
        #: Of a store that others share, a commit costs round trips.
        self._commit_cost = EXPENSIVE if far else 0

    def join(self, job_service: JobService, ring: Callable[[], None]) -> None:
        """The job service is made with its parts, of which this is one: so it comes after."""
        self._job_service, self._ring = job_service, ring
        self.leases: LeaseKeeper[JobAttempt] = LeaseKeeper(
            renewals(job_service, self._now), on_stop=self._stop, on_yield=self.executors.ask_to_yield
        )
        self.running = self.leases.live

    # what the driver asks

    def step(self, now: Moment) -> Moment:
        self._rung = False
        self._give_back_stale()
        plan = self._plan(now, taken_at=self._took_at)
        if plan.wake:
            self.executors.rouse()
        if plan.again_at is not None and not (plan.report or plan.claim):
            return plan.again_at  # woken by a commit of its own; the last of the batch wakes it again
        looked, self._looked = self._looked, False
        if not self._over and looked:
            return now + (SOON if self._waiting else self._tick)
        if not self._over and now < self._asked_at + SOON:
            return self._asked_at + SOON  # most likely rung by our own commit
        with self._claiming:
            self._wait_for_the_last()
            self._exchange()
        return now + (SOON if self._waiting else self._tick)

    # what the store tells, in any thread

    def heard(self) -> None:
        """
        Something was committed. Where a commit costs round trips, a thread that has nothing to do looks what may start, and runs it: the
        driver would have to be woken, and then wake that thread. The driver hears of it behind that, since other parts may wait for it.
        """
        idle = self._far and self._free > 0 and not (self._waiting or self._over or self._closing)
        if idle and not self._sent and not self._claiming.locked():
            self._sent = True
            if self.executors.send(self._look):
                return
            self._sent = False
        if get_ident() != self._scout:  # what was told while it looks it may have missed
            self._looked = False
        self._ring()

    def _look(self) -> None:
        """In a thread of the hands, which goes on to run what it brings. What it cannot do the driver does again, and says so."""
        brought = 0
        self._scout, self._looked = get_ident(), True
        try:
            if self._claiming.acquire(blocking=False):
                try:
                    brought = self._exchange(here=True)
                finally:
                    self._claiming.release()
            else:
                self._looked = False
        except Exception:  # noqa: BLE001 - it is the driver's to log, and to wait before it asks again
            self._looked = False
        finally:
            self._scout, self._sent = 0, False
            if not brought:  # else its commit has rung
                self._ring()

    def _wait_for_the_last(self) -> None:
        """Brief functions that are still running will have ended before a commit for them alone could be sent."""
        if self._far and self._brief and 0 < len(self._over) < len(self.running) and not self._waiting:
            time.sleep(LAST_SEC)

    def _exchange(self, *, here: bool = False) -> int:
        """
        What has ended for what may start, and how many these are. If the store fails, what has ended stays, and is told with the next step.
        `here`: this is a thread of the hands.

        Under load one exchange follows another, and what the last one brought begins when the next is on its way.
        """
        brought: list[JobAttempt] = []
        started = 0
        try:
            for _ in range(MOST_EXCHANGES):
                if self._far:  # the next exchange is written in this thread: what the last one brought must not wait for it
                    ready, brought = brought, []
                    self._take(ready)
                plan = self._plan(self._now(), brought=len(brought))
                over = list(itertools.islice(self._over, plan.report))
                reports = [EndReport(a.dispatch_id, *outcome) for a, outcome in over]
                room = plan.claim
                if not room or self._closing or not self._functions:
                    self._settled(over, self._job_service.end_many(reports) if over else [])
                    break
                landing = self._job_service.exchange_soon(
                    reports, self._kinds, room, self._name, wait=self._far
                )
                ready, brought = brought, []
                self._take(ready)
                answers, brought = landing(self._attempts)
                started += len(brought)
                self._settled(over, answers)
                self._asked_at = self._now() if 0 < len(brought) < room else 0
                if len(self._over) < max(1, len(brought)):
                    break
        finally:
            self._take(brought, here=here)
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
    def _kinds(self) -> WorkerKinds:
        if len(self._known.job_types) != len(self._functions):  # they only ever become more
            self._known = WorkerKinds(job_types=frozenset(self._functions))
        return self._known

    @property
    def _free(self) -> int:
        return self._workers - len(self.running) - len(self._waiting)

    def _take(self, attempts: list[JobAttempt], *, here: bool = False) -> None:
        """`here`: the calling thread is one of the executor's, and takes one without being woken."""
        self._waiting.update({attempt.dispatch_id: attempt for attempt in attempts})
        self._took_at = self._now() if attempts else self._took_at
        self.executors.start(attempts, at_once=not self._brief, awake=int(here))

    # what the dispatcher asks when a job is submitted: a thread that has nothing to do gets it with the same commit

    def claim(self) -> tuple[WorkerKinds, int, str] | None:
        if self._closing or self._free <= 0 or self._over or not self._functions:
            return None
        # A step that claims now will be woken for this submit, and comes back for it.
        if not self._claiming.acquire(blocking=False):
            return None
        return self._kinds, self._free, self._name

    def take(self, grants: list[Grant]) -> None:
        try:
            self._take(self._attempts(self._job_service.granted(grants)))
        finally:
            self._claiming.release()

    def settle(self) -> None:
        while over := list(itertools.islice(self._over, self._plan(self._now()).report)):
            self._settled(
                over,
                self._job_service.end_many([EndReport(a.dispatch_id, *outcome) for a, outcome in over]),
            )

    def _plan(self, now: Moment, *, brought: int = 0, taken_at: Moment = 0) -> BatchPlan:
        """`brought`: claimed attempts that the executor has not been given yet."""
        return self._batching.plan(
            now,
            free=self._free - brought,
            waiting=len(self._waiting),
            ended=len(self._over),
            mean_run=self._mean,
            commit_cost=self._commit_cost,
            taken_at=taken_at,
        )

    def _settled(
        self, over: list[tuple[JobAttempt, Outcome]], answers: Sequence[JobState | Refused | None]
    ) -> None:
        for (attempt, _), answer in zip(over, answers, strict=True):
            self._over.popleft()
            self.running.pop(attempt.dispatch_id, None)
            if isinstance(answer, Refused) and not attempt.lost:
                log.warning(
                    "what %s came to is refused: %s; job %s",
                    attempt.function.name,
                    answer,
                    attempt.facts.job_id,
                )
        if self._closing:
            with self._idle:
                self._idle.notify_all()

    @property
    def _mean(self) -> Span:
        return int(self._mean_sec * SECOND)

    @property
    def _brief(self) -> bool:
        return self._batching.brief(self._mean)

    def _give_back_stale(self) -> None:
        if self._waiting:
            since = self._now() - STALE
            self._give_back([a for a in list(self._waiting.values()) if a.claimed_at < since])

    def _give_back(self, attempts: list[JobAttempt]) -> None:
        mine = [a for a in attempts if self._waiting.pop(a.dispatch_id, None) is not None]
        if mine:
            self._job_service.end_many([EndReport(a.dispatch_id, EndReason.RELEASED) for a in mine])

    # what the hands tell, from their own threads

    def _begin(self, attempt: JobAttempt) -> bool:
        if self._waiting.pop(attempt.dispatch_id, None) is None:
            return False
        attempt.began_at = self.leases.clock()
        self.running[attempt.dispatch_id] = attempt
        return True

    def _stop(self, attempt: JobAttempt) -> None:
        """For the lease keeper. The outcome of a lost attempt does not count, and another may run in its place."""
        self.executors.end(attempt)
        if attempt.lost and self.running.pop(attempt.dispatch_id, None) is not None:
            log.warning("%s of job %s has lost its lease", attempt.function.name, attempt.facts.job_id)
            attempt.given_up = True
            self.executors.give_up(attempt)

    def _finish(self, attempt: JobAttempt, outcome: Outcome) -> None:
        ran = self.leases.clock() - attempt.began_at
        self._mean_sec += (ran - self._mean_sec) / (1 if self._guessed else 16)
        self._guessed = False
        if outcome is STOPPED or outcome == STOPPED:
            outcome = Outcome(EndReason.GRACEFUL_SHUTDOWN)
        self._over.append((attempt, outcome))
        if not self._rung and self._batching.is_full(
            len(self._waiting), len(self._over), self._mean, self._commit_cost
        ):
            self._rung = True
            self._ring()

    # stopping

    def drain(self, timeout: float) -> None:
        """Take nothing more, ask what runs to yield, and wait for it, while the driver goes on settling."""
        self._closing = True
        until = time.monotonic() + timeout
        # What is being claimed is seen below, and nothing is claimed after it. Bounded, because a commit may hang.
        if self._claiming.acquire(timeout=max(timeout, CLAIM_SEC)):
            self._claiming.release()
        while True:
            self._give_back(list(self._waiting.values()))
            for attempt in list(self.running.values()):
                attempt.yielding = True
                self.executors.ask_to_yield(attempt)
            left = until - time.monotonic()
            if left <= 0 or not (self.running or self._waiting):
                return
            with self._idle:
                self._idle.wait(min(left, 0.05))

    def close(self, wait: float) -> None:
        """With the driver gone. What has ended is settled; what has not is ended where that is possible, and put back in any case."""
        self._give_back(list(self._waiting.values()))
        self.settle()
        for attempt in list(self.running.values()):
            attempt.lost = True
        self.executors.close(wait=wait)
        self.settle()
        left = list(self.running.values())
        if left:
            self._job_service.end_many([EndReport(a.dispatch_id, EndReason.GRACEFUL_SHUTDOWN) for a in left])
        for attempt in left:
            log.warning(
                "%s did not stop in time; job %s is back in the queue",
                attempt.function.name,
                attempt.facts.job_id,
            )
