"""
The call queue of a pool: the pure dispatch queue with a lock, and three ways to wait for a place in it.

A thread sleeps on a lock of its own. A coroutine is woken through its loop's notifier. On a thread that must
not block, `submit` returns at once, and the Future waits and keeps its payload (DQ-11). Each is woken only
when its own place is free.

The queue gives calls to a `WorkerGroup`, with the lock held; the group assigns them to workers and reports
them as settled or lost. Everything that may take long or run foreign code (pickling, copying, callbacks,
hooks, waking) happens with the lock released.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

from penstock.core.calls.queue import DispatchQueue
from penstock.core.calls.ticket import (
    ACCEPTED,
    IN_FLIGHT,
    NEW,
    REFUSED,
    SETTLED,
    WAIT,
    CancelPhase,
    EnterResult,
    QueueLimits,
    QueueState,
)
from penstock.core.errors import CallCanceled, PenstockError, PoolClosedError, QueueDropError
from penstock.pools.context import may_block
from penstock.pools.future import Call, until_settled
from penstock.pools.guards import CancelSignal, Keys, canceled, dropped, timed_out
from penstock.pools.timers import call_at, clock
from penstock.pools.workers.base import CallTotals, WorkerGroup
from penstock.telemetry.hooks import HookDispatcher, QueueHooks

#: A call that ended, with its result or its error.
Outcome = tuple[Call[Any], Any, BaseException | None]


class CallQueue:
    def __init__(self, limits: QueueLimits, *, name: str, hooks: Iterable[QueueHooks] = ()) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.queue: DispatchQueue[Call[Any]] = DispatchQueue(limits)
        self.hooks = HookDispatcher(hooks)
        self.totals = CallTotals()
        self.group: WorkerGroup
        self.refusal: PenstockError | None = None  # why new calls are refused
        self.dead = False  # reserved places are refused, too
        self.keys = Keys()
        self.idle_callbacks: list[Callable[[], object]] = []

    # Entering

    def submit(self, call: Call[Any], prepare: Callable[[], None] | None) -> None:
        """
        Return when the call is accepted, or raise if it is refused. `prepare` makes the payload once there is
        a place for it; None: the payload exists. After that the Future shows how the call ends.
        """
        if prepare is not None and not may_block():
            try:
                prepare()
            except BaseException as error:
                self._end_unentered(call, error)
                raise
            prepare = None
        if prepare is None:
            call.eager = True
        else:
            call.in_turn = True
        if self.enter(call) is WAIT:
            self.wait_for_place(call)
        if prepare is not None:
            self.fill(call, prepare)

    def enter(self, call: Call[Any]) -> EnterResult:
        """
        Enter a call without waiting. If the call must wait for its place and has no notifier, its thread must
        then sleep (`wait_for_place`).
        """
        queue, hooks = self.queue, self.hooks
        try:
            with self.lock:
                now = clock()  # under the lock, as everywhere: times grow in the order of events
                if self.refusal is not None:
                    raise self.refusal.copy()
                if call.guarded:
                    self._check_guards(call)
                enter_result = queue.enter(call, now)
                if enter_result is ACCEPTED:
                    if hooks.queued is not None:
                        hooks.events.append((hooks.queued, call))
                    if queue.in_flight < queue.limit:
                        self.group.dispatch_pending(now)
                elif enter_result is WAIT and call.notifier is None and (not call.eager or may_block()):
                    call.asleep = allocate_lock()
                    call.asleep.acquire()
                evicted = self._collect_evicted() if queue.evicted else ()
                if hooks.state is not None:
                    hooks.events.append((hooks.state, queue.state()))
            if enter_result is REFUSED:
                raise dropped(self.name, queue.limits)
        except BaseException as error:
            self._end_unentered(call, error)
            raise
        if call.guarded and call.deadline is not None:
            self._arm(call)
        for other in evicted:
            self._settle_with(other, dropped(self.name, queue.limits))
        if hooks.events:
            hooks.deliver()
        return enter_result

    def _end_unentered(self, call: Call[Any], error: BaseException) -> None:
        """
        End a call that did not enter: it was refused, its payload could not be made, or Ctrl-C came. Settle
        it before the hooks get their event, because a hook may read its exception.
        """

        def ended_by(phase: CancelPhase) -> PenstockError:
            # A copy: the traceback of the raised error refers to the call.
            return error.copy() if isinstance(error, PenstockError) else canceled(type(error).__name__, phase)

        self._end(call, ended_by, "rejected" if isinstance(error, QueueDropError) else "canceled")

    def enter_run(self, calls: list[Call[Any]]) -> int:
        """
        Enter as many of these calls as there is room for, with one acquisition of the lock. They have
        payloads and no guards. Returns how many entered; the others may enter by `submit`, where they wait or
        are refused.
        """
        queue, hooks = self.queue, self.hooks
        with self.lock:
            now = clock()
            entered = queue.enter_run(calls, now) if self.refusal is None else 0
            if entered:
                hooks.record_all(hooks.queued, calls[:entered])
                self.group.dispatch_pending(now)
            wake = self.end_change() if entered else ()
        self.deliver((), wake)
        return entered

    def fill(self, call: Call[Any], prepare: Callable[[], None]) -> None:
        """Make the payload of a call that has a place."""
        try:
            prepare()
        except BaseException:  # Ctrl-C too: a place that is never filled would block the queue
            self.cancel(call, "its payload could not be made")
            raise
        with self.lock:
            now = clock()
            filled = not self.dead and self.queue.fill(call, now)
            if filled:
                self.hooks.record(self.hooks.queued, call)
                self.group.dispatch_pending(now)
            wake = self.end_change()
            refusal = self.refusal if self.dead else None
        for wake_up in wake:
            wake_up()
        self.hooks.deliver()
        if not filled:
            if refusal is not None:
                self._end(call, lambda _: refusal.copy(), "canceled")
            until_settled(lambda: call.error is None)  # another thread ends it
            raise call.error or PoolClosedError(f"{self.name} is closed", pool=self.name)

    def wait_for_place(self, call: Call[Any]) -> None:
        """Sleep until the call has its place or has ended, whichever is first."""
        asleep = call.asleep
        if asleep is None:
            return
        try:
            if self.group.reader is not None:
                self.group.reader.read_while_waiting(call, for_space=True)
            asleep.acquire()
        except BaseException:  # Ctrl-C while waiting: the caller never gets the Future
            self.cancel(call, "interrupted")
            raise
        if call.error is not None and not call.attempt:  # the Future of a call that ran says how it ended
            raise call.error

    def end_change(self) -> Iterable[Callable[[], object]]:
        """
        Record the new state; the last step before the lock is released after a change. Returns functions that
        wake the callers that got a place: call each once after the release.
        """
        wake = self._collect_granted() if self.queue.granted else ()
        if self.hooks.state is not None:
            self.hooks.events.append((self.hooks.state, self.queue.state()))
        return wake

    def _collect_granted(self) -> Iterable[Callable[[], object]]:
        granted, self.queue.granted = self.queue.granted, []
        wake: list[Callable[[], object]] = []
        for call in granted:
            if call.asleep is not None:
                wake.append(call.asleep.release)
                call.asleep = None
                self._wake_reader(call)
            elif call.notifier is not None and not call.eager:
                wake.append(partial(call.notifier.notify, call))
            if call.eager:
                self.hooks.record(self.hooks.queued, call)
        return wake

    def _collect_evicted(self) -> list[Call[Any]]:
        evicted, self.queue.evicted = self.queue.evicted, []
        self.totals.rejected += len(evicted)
        for call in evicted:
            self.hooks.record(self.hooks.reject, call)
        return evicted

    # Ending

    def deliver(self, done: Iterable[Outcome], wake: Iterable[Callable[[], object]]) -> None:
        """
        Set the outcomes of ended calls, and wake the callers that got a place. Called with the lock released.
        """
        for wake_up in wake:
            wake_up()
        settled = []
        for call, result, error in done:
            if call.guarded:
                self.unguard(call)
            call.body = None  # it may be large
            call.set_outcome(result, error)
            settled.append(call)
        if settled:
            self.hooks.record_all(self.hooks.settle, settled)
        if self.hooks.events:
            self.hooks.deliver()
        if self.idle_callbacks:
            self._call_idle_callbacks()

    def _settle_with(self, call: Call[Any], error: PenstockError) -> None:
        """End a call with an error that its function did not raise."""
        self.unguard(call)
        call.body = None
        call.set_outcome(None, error)
        if call.span is not None:
            call.span.end(call, error)
        self._wake_reader(call)

    def _wake_reader(self, call: Call[Any]) -> None:
        """Wake the thread that reads replies while it waits for this call, because the call changed."""
        if self.group.reader is not None:
            self.group.reader.wake(call)

    def cancel(self, call: Call[Any], reason: str | None = None) -> bool:
        """Cancel a call. True if this ended it."""
        return self._end(call, partial(canceled, reason), "canceled")

    def _expire(self, call: Call[Any], timeout: float) -> None:
        self._end(call, partial(timed_out, timeout), "timed_out")

    def _end(self, call: Call[Any], error: Callable[[CancelPhase], PenstockError], total: str) -> bool:
        """End a call in any stage, and count it in this total. False: it has ended already."""
        hooks = self.hooks
        with self.lock:
            now = clock()
            phase = CancelPhase.WAITING if call.stage is NEW else self.queue.cancel(call, now)
            if phase is None:
                return False
            if call.stage is NEW:
                call.stage = SETTLED
            setattr(self.totals, total, getattr(self.totals, total) + 1)
            if total == "rejected":
                hooks.record(hooks.reject, call)
            else:
                hooks.record(hooks.cancel, (call, phase))
            if phase is CancelPhase.IN_FLIGHT:
                self.group.stop_call(call, now)
            self.group.dispatch_pending(now)
            wake = self.end_change()
            asleep, call.asleep = call.asleep, None
        self._settle_with(call, error(phase))
        if asleep is not None:
            asleep.release()
        self.deliver((), wake)
        return True

    # Keys, timeouts and signals, which can end a call besides its own Future (see guards.py)

    def guard(
        self, call: Call[Any], *, key: Hashable, timeout: float | None, signal: CancelSignal | None
    ) -> None:
        """Set the key, timeout and signal of a call, before it enters."""
        call.guarded = True
        call.key, call.signal = key, signal
        if timeout is not None:
            call.timeout = timeout
            call.deadline = clock() + timeout

    def _check_guards(self, call: Call[Any]) -> None:
        """With the lock held, so that no cancel can fall between this check and the call's entry."""
        if call.signal is not None and not call.signal.add(call):
            raise CallCanceled(
                "its signal was canceled before", phase=CancelPhase.WAITING, reason=call.signal.reason
            )
        self.keys.enter(call)

    def _arm(self, call: Call[Any]) -> None:
        assert call.deadline is not None
        call.timer = call_at(call.deadline, self._expire, call, call.timeout)
        if call.done():
            call.timer.cancel()

    def unguard(self, call: Call[Any]) -> None:
        if not call.guarded:
            return
        call.guarded = False
        if call.timer is not None:
            call.timer.cancel()
        if call.signal is not None:
            call.signal.discard(call)
        if call.key is not None:
            with self.lock:
                self.keys.leave(call)

    def cancel_key(self, key: Hashable, reason: str | None) -> int:
        """
        Cancel all calls with this key, and refuse later ones until `clear_key`. Returns how many calls it
        ended.
        """
        with self.lock:
            calls = self.keys.cancel(key, reason)
        # The latest first: a place that becomes free must not go to a call that is canceled next.
        return sum(self.cancel(call, reason) for call in reversed(calls))

    def clear_key(self, key: Hashable) -> bool:
        with self.lock:
            return self.keys.clear(key)

    # Pausing and closing

    def change(self, update: Callable[[float], Iterable[Outcome] | None]) -> None:
        """
        Call `update(now)` under the lock and dispatch calls. Then, with the lock released, deliver the
        outcomes that `update` returned, and wake callers.
        """
        with self.lock:
            now = clock()
            outcomes = update(now)
            self.group.dispatch_pending(now)
            wake = self.end_change()
        self.deliver(outcomes or (), wake)

    def pause(self) -> None:
        self.change(lambda _: self.queue.pause())

    def resume(self) -> None:
        self.change(self.queue.resume)

    def refuse(self, why: PenstockError) -> None:
        """Accept no new calls. Accepted and waiting calls continue."""
        with self.lock:
            if self.refusal is None:
                self.refusal = why

    def fail_all(self, why: PenstockError, *, dispose: bool = False) -> None:
        """
        End every waiting, pending and running call with a copy of `why`, and refuse new calls with it, until
        `reopen` or, with `dispose`, for ever.
        """
        queue = self.queue
        with self.lock:
            now = clock()
            self.refusal, self.dead = why, True
            ended = [
                (call, CancelPhase.IN_FLIGHT) for call in self.group.in_flight() if call.stage is IN_FLIGHT
            ]
            for call, _ in ended:
                queue.cancel(call, now)
                self.group.stop_call(call, now)
            queued = queue.pending
            for place, call in enumerate(queue.dispose() if dispose else queue.clear()):
                ended.append((call, CancelPhase.QUEUED if place < queued else CancelPhase.WAITING))
            asleep = [call.asleep for call, _ in ended if call.asleep is not None]
            self.totals.canceled += len(ended)
            for call, phase in ended:
                call.asleep = None
                self.hooks.record(self.hooks.cancel, (call, phase))
            wake = self.end_change()
        for call, _ in ended:
            self._settle_with(call, why.copy() if dispose else why.copy(attempt=call.attempt))
        for sleeper in asleep:
            sleeper.release()
        self.deliver((), wake)

    def abandon(self) -> None:
        """
        Disable the queue in a forked copy of this process: the workers belong to the parent, and the thread
        that held the lock does not exist here.
        """
        self.lock = threading.Lock()
        self.refusal = PenstockError(
            f"{self.name} belongs to the process that was forked; make a pool of your own in the child"
        )

    def reopen(self) -> None:
        with self.lock:
            self.refusal, self.dead = None, False

    def when_idle(self, fn: Callable[[], object]) -> None:
        """Call `fn` once, as soon as nothing is in flight, pending, waiting or reserved."""
        with self.lock:
            self.idle_callbacks.append(fn)
        self._call_idle_callbacks()

    def _call_idle_callbacks(self) -> None:
        with self.lock:
            if not self.queue.state().idle:
                return
            callbacks, self.idle_callbacks = self.idle_callbacks, []
        for fn in callbacks:
            fn()

    def queued(self) -> list[Call[Any]]:
        """The calls that wait or are pending."""
        with self.lock:
            return [*self.queue, *self.queue.waiters()]

    def state(self) -> QueueState:
        with self.lock:
            return self.queue.state()
