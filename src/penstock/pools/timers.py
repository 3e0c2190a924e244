"""
One thread that waits for moments, for all pools of the process.

Most timers are deadlines of calls that end long before. `Timer.cancel` drops the function and its arguments
at once, and the heap is cleaned when most of its timers are canceled, so a million ended calls with a timeout
of an hour keep no memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

log = logging.getLogger("penstock")

#: The only clock of pools and graphs, so that waits, timers and spans agree.
clock = time.perf_counter


class Timer:
    __slots__ = ("_args", "_fn")

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._fn: Callable[..., object] | None = fn
        self._args = args

    @property
    def canceled(self) -> bool:
        return self._fn is None

    def cancel(self) -> None:
        if self._fn is not None:
            self._fn, self._args = None, ()
            _timer_thread.count_canceled()

    def fire(self) -> None:
        fn, args = self._fn, self._args
        self._fn, self._args = None, ()
        if fn is not None:
            try:
                fn(*args)
            except Exception:  # this thread serves every pool of the process
                log.exception("a timer of penstock failed")


class _TimerThread:
    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """
        Forget all timers; also called in a forked child, which has a copy of the heap and no thread. The
        child keeps the copy, because freeing an object of the parent, such as a Ray actor's handle, would end
        the actor.
        """
        self._inherited = (getattr(self, "_heap", None), getattr(self, "_inherited", None))
        self._ready = threading.Condition(threading.Lock())
        self._heap: list[tuple[float, int, Timer]] = []
        self._canceled_timers = 0
        self._serial = count()
        self.thread: threading.Thread | None = None

    def call_at(self, when: float, fn: Callable[..., object], *args: Any) -> Timer:
        """Call `fn` on the timer thread at a moment of `clock`. `fn` must not block."""
        timer = Timer(fn, args)
        with self._ready:
            heappush(self._heap, (when, next(self._serial), timer))
            if self._canceled_timers > 64 and self._canceled_timers * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].canceled]
                heapify(self._heap)
                self._canceled_timers = 0
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="penstock-timer", daemon=True)
                self.thread.start()
            elif self._heap[0][2] is timer:
                self._ready.notify()
        return timer

    def count_canceled(self) -> None:
        self._canceled_timers += 1  # an estimate: a lost update only delays the cleaning

    def _run(self) -> None:
        from penstock.pools.context import never_block_here  # noqa: PLC0415  # it imports the clock from here

        never_block_here()
        while True:
            with self._ready:
                due = self._due()
                if not due:
                    self._ready.wait(self._heap[0][0] - clock() if self._heap else None)
            for timer in due:
                timer.fire()
            due.clear()

    def _due(self) -> list[Timer]:
        now, due = clock(), []
        while self._heap and (self._heap[0][2].canceled or self._heap[0][0] <= now):
            due.append(heappop(self._heap)[2])
        return due


_timer_thread = _TimerThread()
call_at = _timer_thread.call_at

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_timer_thread.forget_all)
