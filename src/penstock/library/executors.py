"""
What functions run on inside this process: threads for plain functions, one event loop for coroutines.

Nothing here knows of the store. Hands are given an attempt and call `finished` with its outcome, once, from a thread of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeAlias

from penstock.core.text import error_line
from penstock.library.attempt import JobAttempt
from penstock.work.context import CurrentJob
from penstock.work.outcome import Outcome, run, run_async

__all__ = ["Began", "Finished", "JobExecutor", "ThreadExecutor"]

log = logging.getLogger("penstock.library")

#: Whether the attempt is still to be run; it may have been given back while it waited for a thread.
Began: TypeAlias = Callable[[JobAttempt], bool]
Finished: TypeAlias = Callable[[JobAttempt, Outcome], None]


class JobExecutor(Protocol):
    #: How many may wait here for each one that runs, when they are short: 0 where handing one over is dear anyway.
    ahead: int

    def start(self, attempts: Sequence[JobAttempt], *, at_once: bool = True, awake: int = 0) -> None:
        """Not `at_once`: they are so brief that one after the other is quicker. `awake`: so many come for one without being woken."""
        ...

    def send(self, node_call: Callable[[], None]) -> bool:
        """A thread that has nothing to do is sent to do this, and then runs what is there. Whether there are such threads."""
        ...

    def rouse(self) -> None:
        """Some have waited for a while: whoever sleeps shall take one."""
        ...

    def end(self, attempt: JobAttempt) -> None:
        """It was told to stop: end it by force where that is possible."""
        ...

    def give_up(self, attempt: JobAttempt) -> None:
        """Its lease is over and it still runs: its place must not be lost with it."""
        ...

    def ask_to_yield(self) -> None:
        """All of them; those in this process see it by their attempt."""
        ...

    def close(self, *, wait: float) -> None:
        """Within so many seconds in all."""
        ...


class ThreadExecutor:
    ahead = 1

    def __init__(self, workers: int, began: Began, finished: Finished) -> None:
        self._began, self._finished = began, finished
        #: Threads take from here until it is empty, and sleep until somebody wakes them: a batch wakes each of them once.
        self._ready: deque[JobAttempt | Callable[[], None] | None] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._threads: list[Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        for _ in range(workers):
            self._hire()

    def start(self, attempts: Sequence[JobAttempt], *, at_once: bool = True, awake: int = 0) -> None:
        plain = [attempt for attempt in attempts if not attempt.function.is_async]
        self._put(plain, (len(plain) if at_once else min(1, len(plain))) - awake)
        for attempt in attempts:
            if attempt.function.is_async:
                asyncio.run_coroutine_threadsafe(self._await(attempt), self._loop or self._start_loop())

    def send(self, node_call: Callable[[], None]) -> bool:
        self._put([node_call], 1)
        return True

    def rouse(self) -> None:
        self._put((), len(self._ready))

    def _put(self, work: Sequence[JobAttempt | Callable[[], None] | None], sleepers: int) -> None:
        self._ready.extend(work)
        for _ in range(min(sleepers, len(self._threads))):
            self._wake.put(None)

    def end(self, attempt: JobAttempt) -> None:
        task = attempt.ended_by
        if isinstance(task, asyncio.Task) and self._loop is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def give_up(self, attempt: JobAttempt) -> None:
        if not attempt.function.is_async:
            self._hire()

    def ask_to_yield(self) -> None:
        pass

    def close(self, *, wait: float) -> None:
        """Threads that are stuck in a function are left to it: they are daemons, and what they return is refused."""
        until = time.monotonic() + wait
        self._closing = True
        self._put([None] * len(self._threads), len(self._threads))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _hire(self) -> None:
        thread = Thread(target=self._work, name=f"penstock-job-{next(self._numbers)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            try:
                attempt = self._ready.popleft()
            except IndexError:
                self._wake.get()
                continue
            if attempt is None:
                return
            if not isinstance(attempt, JobAttempt):
                attempt()
                continue
            self._perform(attempt)
            if attempt.given_up:
                return  # somebody else has its place
            del attempt  # or its payload would stay until the next one comes

    def _perform(self, attempt: JobAttempt) -> None:
        if self._began(attempt):
            self._finished(attempt, run(attempt.function.invoke, CurrentJob(attempt.facts, attempt)))

    # coroutines

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()

        def run_loop() -> None:
            going = True
            while going:
                try:
                    loop.run_forever()
                    going = False
                except BaseException as error:  # noqa: BLE001  # a task that a function started may raise SystemExit
                    log.warning("a task that a job started raised %s; the others go on", error_line(error))
                    going = not self._closing
            if self._tasks:
                for task in self._tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(list(self._tasks)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        thread = Thread(target=run_loop, name="penstock-job-loop", daemon=True)
        self._threads.append(thread)
        thread.start()
        return loop

    async def _await(self, attempt: JobAttempt) -> None:
        if not self._began(attempt):
            return
        attempt.ended_by = task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        outcome = await run_async(attempt.function.invoke, CurrentJob(attempt.facts, attempt))
        self._finished(attempt, outcome)
