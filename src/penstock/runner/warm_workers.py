"""
Warm workers: which worker gets which function call, and how each call ends.

A long function has a worker to itself. Of short functions a worker gets several calls at a time, as many as
it runs in a few milliseconds, so that it need not wait while the ends of the last calls are committed. A call
that its worker has not begun can be taken back: its job must stop, the call before it takes longer than such
calls usually take, or the worker died.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.jobs.types import SECOND, EndReason, Moment
from penstock.core.jobs.workers import Batching, BatchPlan
from penstock.core.text import parsed, safe_str, storable_json
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.links import ActiveDispatch, WardenLink, WorkerLink
from penstock.runner.payload import FunctionPayload, RunnerOptions
from penstock.scheduler.permissions import SystemUser
from penstock.work.outcome import DONE, MAX_RESULT, RELEASED, STOPPED, Outcome

log = logging.getLogger("penstock.runner")

#: A worker that is silent for this long runs a call that is longer than usual.
_STUCK_SEC: Final = 0.1
#: Seconds without further workers after a start failed because this process was out of descriptors.
_SHORT_SEC: Final = 5.0
#: A call goes back to the queue, for another host, when no worker was free for it in this time.
_STALE_SEC: Final = 1.0
#: How many functions have a mean duration here. Beyond that all are forgotten and learned again.
_MAX_FUNCTIONS: Final = 10_000


class WarmWorkers:
    """
    The warm workers of one runner.

    `start_worker` starts a worker with these limits, as this user. `answer` answers a request of a function.
    `on_end` is called when an attempt has ended and none of its processes is left.
    """

    def __init__(
        self,
        settings: RunnerOptions,
        loop: IoLoop,
        batching: Batching,
        *,
        start_worker: Callable[[Mapping[str, int], SystemUser | None], WorkerLink],
        answer: Callable[[ActiveDispatch, Frame], Frame],
        on_end: Callable[[ActiveDispatch, Outcome], None],
    ) -> None:
        self._settings, self._loop, self._batching = settings, loop, batching
        self._share_sec = settings.ahead_sec / 2  # a worker gets this much work at once
        self._start_worker, self._answer, self._on_end = start_worker, answer, on_end
        self._workers: dict[WardenLink, WorkerLink] = {}
        self._waiting: deque[ActiveDispatch] = deque()
        self._mean: dict[str, float] = {}  # by function, in seconds; recent calls count more
        self._start_not_before = 0.0  # no descriptors for one more worker before

    # calls that are taken and have not ended

    @property
    def _held_calls(self) -> int:
        return len(self._waiting) + sum(len(worker.calls) for worker in self._workers.values())

    @property
    def ahead(self) -> int:
        """How many calls are taken beyond one for each worker."""
        return max(0, self._held_calls - self._settings.workers)

    def plan(self, now: Moment, ended: int, taken_at: Moment) -> BatchPlan:
        """
        How many ended attempts to report, and how many calls to claim. A worker with a long call claims none.
        """
        late = time.monotonic() - _STUCK_SEC
        plan = self._batching.plan(
            now,
            free=self._settings.workers - self._held_calls - ended,
            waiting=self.ahead,
            ended=ended,
            taken_at=taken_at,
            stuck=sum(bool(w.calls) and w.active_at < late for w in self._workers.values()),
        )
        if time.monotonic() >= self._start_not_before:
            return plan
        idle = sum(not worker.calls and not worker.last for worker in self._workers.values())
        return replace(plan, claim=max(0, idle - len(self._waiting)))

    # handing over

    def add(self, attempt: ActiveDispatch) -> None:
        """Keep the call until `feed`: calls that come together are handed over together."""
        attempt.waiting_since = time.monotonic()
        self._waiting.append(attempt)

    def feed(self) -> None:
        share = -(-self._held_calls // self._settings.workers)
        while self._waiting and (worker := self._next_worker()):
            self._hand_over(worker, share)

    def _next_worker(self) -> WorkerLink | None:
        """
        The worker for the next call: an idle one, else a new one, else the one with the least work if that is
        little.
        """
        limits, user = self._waiting[0].work.limits, self._user(self._waiting[0])
        usable = [] if limits else [w for w in self._workers.values() if not w.last and w.user == user]
        least = min(usable, key=lambda worker: len(worker.calls), default=None)
        if least is not None and not least.calls:
            return least
        busy = sum(bool(worker.calls) for worker in self._workers.values())
        if busy < self._settings.workers and time.monotonic() >= self._start_not_before:
            try:
                return self._add_worker(limits, user)
            except OSError as error:
                log.warning("no further worker can be started for functions: %s", error)
                self._start_not_before = time.monotonic() + _SHORT_SEC
        if least is None or self._load(least) + self._expected(self._waiting[0]) > self._share_sec:
            return None
        return least

    def _user(self, attempt: ActiveDispatch) -> SystemUser | None:
        return self._settings.user_of(attempt.job.intent.addon_id) if self._settings.users else None

    def _add_worker(self, limits: Mapping[str, int], user: SystemUser | None) -> WorkerLink:
        worker = self._start_worker(limits, user)
        worker.user = user
        worker.last = bool(limits)  # no call without limits may follow: a limit cannot be raised
        self._workers[worker.warden] = worker
        self._loop.add(worker, partial(self._read, worker))
        return worker

    def _hand_over(self, worker: WorkerLink, share: int) -> None:
        """Give waiting calls to a worker. `share`: how many calls it may have."""
        most = min(share - len(worker.calls), self._settings.jobs_per_worker - worker.begun)
        attempts, load = [self._waiting.popleft()], self._load(worker)
        load += self._expected(attempts[0])
        while self._waiting and len(attempts) < most and not worker.last:
            load += self._expected(self._waiting[0])
            if load > self._share_sec or self._waiting[0].work.limits:
                break
            if self._user(self._waiting[0]) != worker.user:
                break
            attempts.append(self._waiting.popleft())
        worker.active_at = time.monotonic()
        worker.hand_over(attempts)
        worker.last = worker.last or worker.begun >= self._settings.jobs_per_worker

    def _load(self, worker: WorkerLink) -> float:
        return sum(map(self._expected, worker.calls.values()))

    def _expected(self, attempt: ActiveDispatch) -> float:
        """
        Seconds that the call will likely take. A new function may take any time, so no call waits behind it.
        """
        return self._mean.get(_function_of(attempt), self._settings.ahead_sec)

    # taking back

    def take_back(self, attempt: ActiveDispatch) -> bool:
        """Take back a call that has not begun. False: it has begun."""
        if attempt.worker is not None and attempt.call in attempt.worker.calls:
            self._take_back_calls(attempt.worker)
        if attempt not in self._waiting:
            return False
        self._waiting.remove(attempt)
        return True

    def _take_back_calls(self, worker: WorkerLink) -> None:
        attempts = worker.take_back()
        for attempt in attempts:
            attempt.worker = attempt.warden = None
        self._waiting.extendleft(reversed(attempts))

    def step(self) -> float | None:
        """Returns the seconds until the next step is due."""
        now = time.monotonic()
        deep = [worker for worker in self._workers.values() if len(worker.calls) > 1]
        for worker in deep:
            if now - worker.active_at >= _STUCK_SEC:
                self._take_back_calls(worker)
        while self._waiting and now - self._waiting[0].waiting_since >= _STALE_SEC:
            self._on_end(self._waiting.popleft(), RELEASED)
        self.feed()
        extra = self._surplus_workers()
        for worker in extra:
            if now - worker.active_at >= self._settings.idle_sec:
                self._retire(worker)
        if deep:
            return _STUCK_SEC
        if self._waiting:
            return _STALE_SEC
        return self._settings.idle_sec if extra else None

    def _surplus_workers(self) -> list[WorkerLink]:
        """The idle workers beyond those that are kept warm, longest idle first."""
        if len(self._workers) <= self._settings.warm:
            return []
        idle = [worker for worker in self._workers.values() if not worker.calls and not worker.last]
        idle.sort(key=lambda worker: worker.active_at)
        return idle[: max(0, len(idle) - self._settings.warm)]

    # reports

    def _read(self, worker: WorkerLink) -> None:
        frames = worker.receive()
        for frame in frames or ():
            self._handle_frame(worker, frame)
        if frames is None:
            self._retire(worker)
            worker.warden.order("kill", why="the worker closed its channel")
        elif not worker.calls:
            self._on_idle(worker)
        self.feed()

    def _handle_frame(self, worker: WorkerLink, frame: Frame) -> None:
        worker.active_at = time.monotonic()
        call = next(iter(worker.calls), None)
        if call is None or frame.get("call") != call:
            # A thread that an earlier function left behind sent this, and waits for an answer.
            worker.send({"op": "answer", "error": "this attempt is over"})
            return
        attempt = worker.calls[call]
        outcome = _outcome(frame)
        if outcome is None:
            worker.send(self._answer(attempt, frame) | {"op": "answer"})
            return
        del worker.calls[call]
        attempt.outcome = outcome
        self._learn_duration(attempt, frame.get("sec"))
        if frame.get("left") or (not worker.calls and worker.left_processes()):
            worker.closing[call] = attempt
            self._end_worker(worker)
        elif attempt.has_notes:
            worker.closing[call] = attempt
            worker.warden.order("over", call=call)
        else:
            self._on_end(attempt, outcome)

    def _end_worker(self, worker: WorkerLink) -> None:
        """
        End a worker together with the processes that its function left running. Other workers get its calls.
        """
        self._take_back_calls(worker)
        worker.last = True
        worker.warden.order("term")
        worker.warden.order("kill", why="its function left processes running")

    def _on_idle(self, worker: WorkerLink) -> None:
        if worker.last and not worker.closing:
            self._retire(worker)
        else:
            worker.warden.order("until", until=None)

    def _retire(self, worker: WorkerLink) -> None:
        """Give the worker no more calls. It exits when its channel closes."""
        worker.last = True
        if worker.fileno() >= 0:
            self._take_back_calls(worker)
            self._loop.drop(worker)
            worker.close()

    def _learn_duration(self, attempt: ActiveDispatch, sec: Any) -> None:
        if not isinstance(sec, float) or not 0 <= sec < 1e9:
            return
        if len(self._mean) > _MAX_FUNCTIONS:
            self._mean.clear()
        name = _function_of(attempt)
        before = self._mean.setdefault(name, sec)
        self._mean[name] = before + (sec - before) / 4
        self._batching.learn(int(sec * SECOND))

    # reports of its warden

    def on_written(self, warden: WardenLink) -> None:
        worker = self._workers[warden]
        for call in warden.written_calls:
            attempt = worker.closing.pop(call, None)
            if attempt is not None and attempt.outcome is not None:
                self._on_end(attempt, attempt.outcome)
        warden.written_calls.clear()
        if not worker.calls:
            self._on_idle(worker)

    def on_warden_gone(self, warden: WardenLink) -> list[ActiveDispatch]:
        """
        The calls that the worker of this warden had begun. Frames that it sent before it died still count.
        """
        worker = self._workers.pop(warden, None)
        if worker is None:
            return []
        while worker.fileno() >= 0 and (frames := worker.receive()):
            for frame in frames:
                self._handle_frame(worker, frame)
        self._retire(worker)
        return [*worker.closing.values(), *worker.calls.values()]

    @property
    def wardens(self) -> list[WardenLink]:
        return list(self._workers)

    def close(self) -> None:
        for worker in self._workers.values():
            self._retire(worker)


def _function_of(attempt: ActiveDispatch) -> str:
    assert isinstance(attempt.work, FunctionPayload)
    return attempt.work.function


def _outcome(frame: Frame) -> Outcome | None:
    """
    The outcome that a worker reports. None: its function has not ended. A worker runs foreign code, so it is
    not trusted: its result must be JSON of a bounded length, and it may report only a few end reasons.
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
