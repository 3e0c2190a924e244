"""
The SDK worker: functions by job type, run under leases that are renewed beside them.

    main      claims as many jobs as it has hands for, and waits in the request until there are some
    hands     threads that run functions, here or in a process of their own
    heart     renews every lease, and tells functions to yield or stop
    reporter  tells how runs ended, in batches

None of the last two ever runs a line of the user's code, so a function that is busy keeps its lease. A function that holds the interpreter's lock
for long (one call into C that takes minutes) starves them all the same: `processes=True` is for those, and for functions that
must be ended when they do not look.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.client.client import Client
from penstock.client.context import JobContext, facts_of
from penstock.client.handlers import Ending, Failed, Given, Handler, call
from penstock.client.heart import Heart
from penstock.client.holds import Hold, Holds
from penstock.client.reporter import Reporter
from penstock.client.signals import heard
from penstock.client.tenure import Tenure, monotonic
from penstock.core.refusals import Unavailable

if TYPE_CHECKING:
    from penstock.client.processes import Hand

__all__ = ["Worker"]

log = logging.getLogger("penstock.worker")
F = TypeVar("F", bound=Handler)

#: How long a request for jobs waits for some.
POLL_SEC: Final = 20.0


class Worker:
    """
    Without a url, token or addon they come from PENSTOCK_URL, PENSTOCK_TOKEN (or PENSTOCK_TOKEN_FILE) and PENSTOCK_ADDON, and without
    those from the data directory of this user's daemon.
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
        # Of its own, so that the one request which waits can be let go of.
        self.fetcher = Client(self.client.url, token=self.client.token, retry_for=0.0)
        self.addon = addon or os.environ.get("PENSTOCK_ADDON") or None
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.poll_sec = poll_sec
        self._handlers: dict[str, Handler] = {}
        self._stopping = threading.Event()
        self._running: _Shift | None = None

    def job(self, job_type: str | None = None) -> Callable[[F], F]:
        """The function that runs jobs of this type; by default the type is its name. Its first argument is the JobContext."""

        def register(function: F) -> F:
            name = job_type or function.__name__
            if name in self._handlers:
                raise ValueError(f"job type {name!r} has a function already: {self._handlers[name]!r}")
            self._handlers[name] = function
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
        Works until SIGTERM, SIGINT or `stop()`; returns how many jobs it ran. On a stop, functions see `should_yield` and have
        `stop_within` seconds to finish; a second signal does not wait.

        `prefetch`: so many jobs more are leased ahead, for jobs that are shorter than a round trip. `processes`: each function runs in a
        process, which is ended when it must be. `until_idle`: return when there is nothing to claim.
        """
        if not self._handlers:
            raise ValueError("this worker has no functions: register some with @worker.job(...)")
        if concurrency < 1 or prefetch < 0:
            raise ValueError("concurrency must be at least 1, and prefetch at least 0")
        shift = self._running = _Shift(self, self._handlers, concurrency, prefetch, processes=processes)
        with heard(self._on_signal):
            try:
                shift.work(self._stopping, until_idle=until_idle)
            finally:
                self._stopping.set()
                shift.finish(stop_within)
                self._running = None
        return shift.ran

    def stop(self) -> None:
        """From any thread: claim no more, let functions yield or finish, then `run` returns."""
        self._stopping.set()
        self.fetcher.hang_up()
        if self._running is not None:
            self._running.wind_down()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            log.warning("told to stop twice: leaving at once")
            if self._running is not None:
                self._running.abandon()
            return
        log.info("%s: stopping", number.name)
        self.stop()


class _Shift:
    """One `run` of a worker."""

    def __init__(
        self,
        worker: Worker,
        handlers: dict[str, Handler],
        concurrency: int,
        prefetch: int,
        *,
        processes: bool,
    ) -> None:
        self._worker, self._client, self._handlers = worker, worker.client, handlers
        self._room, self._prefetch = concurrency + prefetch, prefetch
        self._holds = Holds()
        self._waiting: SimpleQueue[Hold | None] = SimpleQueue()
        self._busy = 0  # claimed, and not yet through its function
        self._changed = Condition()
        self._abandoned = False
        self.ran = 0
        self._heart = Heart(self._client, self._holds, monotonic)
        self._heart_stop = threading.Event()
        self._reporter = Reporter(self._client, self._reported, self._heart.confirm)
        self._processes = processes
        self._hands = [self._thread(f"hand-{n}", self._hand) for n in range(concurrency)]
        self._keepers = [self._thread("heart", self._beat), self._thread("reporter", self._reporter.run)]
        for thread in (*self._hands, *self._keepers):
            thread.start()

    def _thread(self, name: str, target: Callable[[], None]) -> Thread:
        return Thread(target=target, name=f"penstock-{name}", daemon=True)

    # The main thread claims

    def work(self, stopping: threading.Event, *, until_idle: bool) -> None:
        pause = 0.1
        while not stopping.is_set():
            free = self._wait_for_room(stopping)
            if free == 0:
                continue
            try:
                got = self._claim(free, 0.0 if until_idle else self._worker.poll_sec)
            except Unavailable as error:
                if stopping.is_set():
                    return
                if pause == 0.1:
                    log.warning("no jobs can be fetched: %s", error)
                stopping.wait(pause)
                pause = min(2.0, pause * 1.5)
                continue
            pause = 0.1
            if until_idle and got == 0 and self._all_told(stopping):
                return

    def _wait_for_room(self, stopping: threading.Event) -> int:
        """Fetching one by one as hands become free would be a request per job: half of what is fetched ahead must be gone first."""
        enough = max(1, self._prefetch // 2)
        with self._changed:
            if self._room - self._busy < enough and not stopping.is_set():
                self._changed.wait(1.0)
            free = self._room - self._busy
        return free if free >= enough else 0

    def _claim(self, limit: int, wait_sec: float) -> int:
        sent_at = monotonic()
        claimed = self._worker.fetcher.claim(
            addon_id=self._worker.addon,
            job_types=tuple(self._handlers),
            limit=min(limit, 500),
            wait_sec=wait_sec,
            worker=self._worker.name,
        )
        for job in claimed.jobs:
            hold = Hold(facts_of(job), Tenure(sent_at, claimed.ttl_sec), self._heart.beat_now)
            if monotonic() >= hold.tenure.beat_at:
                # The answer waited for a job, or for us: how long the lease has run we cannot know, so it is renewed first.
                self._heart.confirm(hold)
            self._holds.add(hold)
            with self._changed:
                self._busy += 1
            self._waiting.put(hold)
        return len(claimed.jobs)

    def _all_told(self, stopping: threading.Event) -> bool:
        """Nothing to claim, and nothing of ours that could still come back to the queue."""
        with self._changed:
            while len(self._holds) and not stopping.is_set():
                self._changed.wait(0.2)
                if self._busy < self._room:
                    break
            return not len(self._holds)

    # Hands run functions

    def _hand(self) -> None:
        hand = self._own_process() if self._processes else None
        try:
            while (hold := self._waiting.get()) is not None:
                ending = self._run(hold, hand)
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()
                self._reporter.put(hold, ending)
        finally:
            if hand is not None:
                hand.close()

    def _own_process(self) -> Hand:
        from penstock.client.processes import Hand  # noqa: PLC0415  # pools are slow to import for those who run threads

        return Hand(self._client)

    def _run(self, hold: Hold, hand: Hand | None) -> Ending:
        if hold.cancelled or hold.yielding:
            return Given()
        handler = self._handlers.get(hold.facts.job_type)
        if handler is None:
            return Failed(f"this worker has no function for {hold.facts.job_type!r}")
        self.ran += 1
        return call(handler, JobContext(hold.facts, hold)) if hand is None else hand.run(handler, hold)

    # The keepers: heart and reporter

    def _beat(self) -> None:
        while not self._heart_stop.is_set():
            try:
                next_at = self._heart.step(monotonic())
            except Exception:
                log.exception("a heartbeat failed; the next one is tried")
                next_at = monotonic() + 0.5
            # Looked at often enough that news are told within a second, whatever the lease.
            self._heart_stop.wait(min(0.5, max(0.01, next_at - monotonic())))

    def _reported(self, hold: Hold, _ending: Ending | None) -> None:
        self._holds.remove(hold)
        with self._changed:
            self._changed.notify_all()

    # The end of the shift

    def wind_down(self) -> None:
        """What has not begun is given back; what runs is asked to yield."""
        for hold in self._holds:
            hold.ask_to_yield()

    def abandon(self) -> None:
        self._abandoned = True

    def finish(self, within: float) -> None:
        self.wind_down()
        for _ in self._hands:
            self._waiting.put(None)
        self._wait_until(lambda: not any(hand.is_alive() for hand in self._hands), within)
        stuck = [hold for hold in self._holds if hold.stop is None]
        if any(hand.is_alive() for hand in self._hands):
            # A thread cannot be ended. Giving its lease back would let the job run twice at once, so the lease is left to expire.
            names = ", ".join(hold.facts.job_id[-8:] for hold in stuck)
            log.warning("still running and left to the expiry of their leases: %s", names)
        self._reporter.close()
        self._wait_until(lambda: not self._keepers[1].is_alive(), 5.0)
        self._heart_stop.set()
        self._keepers[0].join(2.0)

    def _wait_until(self, true: Callable[[], bool], within: float) -> None:
        until = time.monotonic() + within
        while not true() and time.monotonic() < until and not self._abandoned:
            time.sleep(0.02)
