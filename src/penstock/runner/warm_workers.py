"""
Functions in warm workers: which worker gets which call, and how each call ended.

A long function has a worker to itself. Short ones are handed over several at a time, as many as a worker runs
in a few milliseconds, so that it need not wait while the ends of the last ones are committed. A call that its
worker has not begun can be taken back: because its job must stop, because the call before it takes longer
than such calls do, or because the worker died.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.jobs.batching import Batching, BatchPlan
from penstock.core.jobs.types import SECOND, EndReason, Moment
from penstock.core.text import parsed, safe_str, storable_json
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.links import ActiveDispatch, WardenLink, WorkerLink
from penstock.runner.payload import FunctionPayload, RunnerOptions
from penstock.scheduler.permissions import SystemUser
from penstock.work.outcome import DONE, MAX_RESULT, RELEASED, STOPPED, Outcome

log = logging.getLogger("penstock.runner")

#: A worker that is silent for this long has met a call that is longer than those before it.
_STUCK_SEC: Final = 0.1
#: How long no worker is started after one could not be, for want of descriptors.
_SHORT_SEC: Final = 5.0
#: A call that no worker was free for in this time goes back to the queue, for another host.
_STALE_SEC: Final = 1.0
#: How many functions have a mean duration here; beyond that all are forgotten and learned anew.
_MOST_KNOWN: Final = 10_000


class WarmWorkers:
    """
    `hire` starts a worker with these limits, as this user. `answer`: to a request of a function. `on_end`: a
    run has ended, and nothing of it is left.
    """

    def __init__(
        self,
        settings: RunnerOptions,
        loop: IoLoop,
        batching: Batching,
        *,
        hire: Callable[[Mapping[str, int], SystemUser | None], WorkerLink],
        answer: Callable[[ActiveDispatch, Frame], Frame],
        on_end: Callable[[ActiveDispatch, Outcome], None],
    ) -> None:
        self._settings, self._loop, self._batching = settings, loop, batching
        self._handful_sec = settings.ahead_sec / 2  # how much work a worker gets at once
        self._hire, self._answer, self._on_end = hire, answer, on_end
        self._workers: dict[WardenLink, WorkerLink] = {}
        self._waiting: deque[ActiveDispatch] = deque()
        self._mean: dict[str, float] = {}  # seconds of a call, lately
        self._hire_at = 0.0  # not before, because there were no descriptors for one more worker

    # how much is in hand

    @property
    def _in_hand(self) -> int:
        return len(self._waiting) + sum(len(worker.calls) for worker in self._workers.values())

    @property
    def ahead(self) -> int:
        """How many calls are in hand beyond one for each worker."""
        return max(0, self._in_hand - self._settings.workers)

    def plan(self, now: Moment, ended: int, taken_at: Moment) -> BatchPlan:
        """How many of the ended runs to report, and how many calls to claim: none for a worker that runs something long."""
        late = time.monotonic() - _STUCK_SEC
        plan = self._batching.plan(
            now,
            free=self._settings.workers - self._in_hand - ended,
            waiting=self.ahead,
            ended=ended,
            taken_at=taken_at,
            stuck=sum(bool(w.calls) and w.active_at < late for w in self._workers.values()),
        )
        if time.monotonic() >= self._hire_at:
            return plan
        idle = sum(not worker.calls and not worker.last for worker in self._workers.values())
        return replace(plan, claim=max(0, idle - len(self._waiting)))

    # handing over

    def add(self, run: ActiveDispatch) -> None:
        """Kept until `feed`: calls that come together are handed over together."""
        run.waits_since = time.monotonic()
        self._waiting.append(run)

    def feed(self) -> None:
        share = -(-self._in_hand // self._settings.workers)
        while self._waiting and (worker := self._next_worker()):
            self._hand_over(worker, share)

    def _next_worker(self) -> WorkerLink | None:
        """The one with the least work, if that is little; a new worker rather than a busy one."""
        limits, user = self._waiting[0].work.limits, self._user(self._waiting[0])
        open_ = [] if limits else [w for w in self._workers.values() if not w.last and w.user == user]
        least = min(open_, key=lambda worker: len(worker.calls), default=None)
        if least is not None and not least.calls:
            return least
        busy = sum(bool(worker.calls) for worker in self._workers.values())
        if busy < self._settings.workers and time.monotonic() >= self._hire_at:
            try:
                return self._new(limits, user)
            except OSError as error:
                log.warning("no further worker can be started for functions: %s", error)
                self._hire_at = time.monotonic() + _SHORT_SEC
        if least is None or self._load(least) + self._expected(self._waiting[0]) > self._handful_sec:
            return None
        return least

    def _user(self, run: ActiveDispatch) -> SystemUser | None:
        return self._settings.user_of(run.job.intent.addon_id) if self._settings.users else None

    def _new(self, limits: Mapping[str, int], user: SystemUser | None) -> WorkerLink:
        worker = self._hire(limits, user)
        worker.user = user
        worker.last = bool(limits)  # limits cannot be raised again
        self._workers[worker.warden] = worker
        self._loop.add(worker, partial(self._read, worker))
        return worker

    def _hand_over(self, worker: WorkerLink, share: int) -> None:
        """`share`: how many calls it may have."""
        most = min(share - len(worker.calls), self._settings.jobs_per_worker - worker.begun)
        runs, load = [self._waiting.popleft()], self._load(worker)
        load += self._expected(runs[0])
        while self._waiting and len(runs) < most and not worker.last:
            load += self._expected(self._waiting[0])
            if load > self._handful_sec or self._waiting[0].work.limits:
                break
            if self._user(self._waiting[0]) != worker.user:
                break
            runs.append(self._waiting.popleft())
        worker.active_at = time.monotonic()
        worker.hand_over(runs)
        worker.last = worker.last or worker.begun >= self._settings.jobs_per_worker

    def _load(self, worker: WorkerLink) -> float:
        return sum(map(self._expected, worker.calls.values()))

    def _expected(self, run: ActiveDispatch) -> float:
        """Seconds. A new function may take any time, so no call is put behind it."""
        return self._mean.get(_name(run), self._settings.ahead_sec)

    # taking back

    def take_back(self, run: ActiveDispatch) -> bool:
        """False: it has begun."""
        if run.worker is not None and run.call in run.worker.calls:
            self._return(run.worker)
        if run not in self._waiting:
            return False
        self._waiting.remove(run)
        return True

    def _return(self, worker: WorkerLink) -> None:
        runs = worker.take_back()
        for run in runs:
            run.worker = run.warden = None
        self._waiting.extendleft(reversed(runs))

    def step(self) -> float | None:
        """Returns the seconds until the next step is due."""
        now = time.monotonic()
        deep = [worker for worker in self._workers.values() if len(worker.calls) > 1]
        for worker in deep:
            if now - worker.active_at >= _STUCK_SEC:
                self._return(worker)
        while self._waiting and now - self._waiting[0].waits_since >= _STALE_SEC:
            self._on_end(self._waiting.popleft(), RELEASED)
        self.feed()
        extra = self._extra()
        for worker in extra:
            if now - worker.active_at >= self._settings.idle_sec:
                self._retire(worker)
        if deep:
            return _STUCK_SEC
        if self._waiting:
            return _STALE_SEC
        return self._settings.idle_sec if extra else None

    def _extra(self) -> list[WorkerLink]:
        """Idle workers beyond those that are kept warm, the longest idle first."""
        if len(self._workers) <= self._settings.warm:
            return []
        idle = [worker for worker in self._workers.values() if not worker.calls and not worker.last]
        idle.sort(key=lambda worker: worker.active_at)
        return idle[: max(0, len(idle) - self._settings.warm)]

    # reports

    def _read(self, worker: WorkerLink) -> None:
        frames = worker.receive()
        for frame in frames or ():
            self._take(worker, frame)
        if frames is None:
            self._retire(worker)
            worker.warden.order("kill", why="the worker broke off the conversation")
        elif not worker.calls:
            self._idle(worker)
        self.feed()

    def _take(self, worker: WorkerLink, frame: Frame) -> None:
        worker.active_at = time.monotonic()
        call = next(iter(worker.calls), None)
        if call is None or frame.get("call") != call:
            # From a thread that its function left behind, which waits for an answer.
            worker.send({"op": "answer", "error": "this run is over"})
            return
        run = worker.calls[call]
        outcome = _outcome(frame)
        if outcome is None:
            worker.send(self._answer(run, frame) | {"op": "answer"})
            return
        del worker.calls[call]
        run.outcome = outcome
        self._learn(run, frame.get("sec"))
        if frame.get("left") or (not worker.calls and worker.left_processes()):
            worker.closing[call] = run
            self._end_with(worker)
        elif run.noted:
            worker.closing[call] = run
            worker.warden.order("over", call=call)
        else:
            self._on_end(run, outcome)

    def _end_with(self, worker: WorkerLink) -> None:
        """The worker is ended with what its function left running. Other workers get its calls."""
        self._return(worker)
        worker.last = True
        worker.warden.order("term")
        worker.warden.order("kill", why="its function left processes running")

    def _idle(self, worker: WorkerLink) -> None:
        if worker.last and not worker.closing:
            self._retire(worker)
        else:
            worker.warden.order("until", until=None)

    def _retire(self, worker: WorkerLink) -> None:
        """It exits when its channel closes."""
        worker.last = True
        if worker.fileno() >= 0:
            self._return(worker)
            self._loop.drop(worker)
            worker.close()

    def _learn(self, run: ActiveDispatch, sec: Any) -> None:
        if not isinstance(sec, float) or not 0 <= sec < 1e9:
            return
        if len(self._mean) > _MOST_KNOWN:
            self._mean.clear()
        name = _name(run)
        before = self._mean.setdefault(name, sec)
        self._mean[name] = before + (sec - before) / 4
        self._batching.learn(int(sec * SECOND))

    # reports of its warden

    def written(self, warden: WardenLink) -> None:
        worker = self._workers[warden]
        for call in warden.written:
            run = worker.closing.pop(call, None)
            if run is not None and run.outcome is not None:
                self._on_end(run, run.outcome)
        warden.written.clear()
        if not worker.calls:
            self._idle(worker)

    def gone(self, warden: WardenLink) -> list[ActiveDispatch]:
        """The runs that it had begun, if this was a worker. What it sent before it died still counts."""
        worker = self._workers.pop(warden, None)
        if worker is None:
            return []
        while worker.fileno() >= 0 and (frames := worker.receive()):
            for frame in frames:
                self._take(worker, frame)
        self._retire(worker)
        return [*worker.closing.values(), *worker.calls.values()]

    @property
    def wardens(self) -> list[WardenLink]:
        return list(self._workers)

    def close(self) -> None:
        for worker in self._workers.values():
            self._retire(worker)


def _name(run: ActiveDispatch) -> str:
    assert isinstance(run.work, FunctionPayload)
    return run.work.function


def _outcome(frame: Frame) -> Outcome | None:
    """
    The outcome that a worker reports; None: its function has not ended. The worker runs foreign code and is
    not trusted: a result must be JSON of a bounded length, and it may report only a few end reasons.
    """
    if frame.get("op") != "ended":
        return None
    match frame.get("end"):
        case EndReason.COMPLETED:
            return _completed(frame.get("result"))
        case EndReason.COOPERATIVE_PREEMPTION:
            return STOPPED
        case EndReason.UNAVAILABLE:
            return Outcome(EndReason.UNAVAILABLE, error=safe_str(frame.get("error", "")))
        case _:
            return Outcome(EndReason.JOB_ERROR, error=safe_str(frame.get("error", "")))


def _completed(result: Any) -> Outcome:
    if result is None:
        return DONE
    try:
        if not isinstance(result, str) or len(result) > MAX_RESULT:
            raise ValueError(f"at most {MAX_RESULT} characters")
        parsed(result)
    except (ValueError, RecursionError) as error:
        return Outcome(EndReason.JOB_ERROR, error=f"the result cannot be kept: {error}")
    return Outcome(EndReason.COMPLETED, result=storable_json(result))
