"""The dispatch queue for threads and event loops: one lock around the pure machine, and the three ways to wait for it.

A thread sleeps on a lock of its own; a coroutine awaits its loop's mailbox; and where neither may happen (`submit` on
a thread that must not block) the Future waits and holds its payload (DQ-11). Each is woken by its own place becoming
free and by nothing else.

The workers' side is a `WorkerGroup`. The gate calls it with the lock held; it hands calls out and reports them settled or
lost. Everything that may take long or run somebody else's code (pickling, copying, callbacks, hooks, waking) happens
with the lock released.

The keys of a gate's calls: which calls have which, and which are canceled.

A canceled key is sticky: it refuses later calls, too, until it is cleared. All of this is done with the gate's lock held,
so that no cancel can fall between the look at a key and the entry of its call.
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
from penstock.core.text import safe_repr
from penstock.pools.blocking import canceled, dropped, may_block, timed_out
from penstock.pools.future import Call, CancelSignal, until_settled
from penstock.pools.timers import call_at, clock
from penstock.pools.workers.base import CallTotals, WorkerGroup
from penstock.telemetry.hooks import HookDispatcher, QueueHooks


class CallQueue:
    def __init__(self, limits: QueueLimits, *, name: str, hooks: Iterable[QueueHooks] = ()) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.queue: DispatchQueue[Call[Any]] = DispatchQueue(limits)
        self.hook_dispatcher = HookDispatcher(hooks)
        self.totals = CallTotals()
        self.group: WorkerGroup
        self.refusal: PenstockError | None = None  # why newcomers are refused
        self.dead = False  # nor is anything put into a place that was given before
        self.keys = Keys()
        self._when_idle: list[Callable[[], object]] = []

    # Ways in

    def submit(self, call: Call[Any], prepare: Callable[[], None] | None) -> None:
        """
        Until the call is accepted. `prepare` makes its payload and is called once there is a place for it; None means
        that there is nothing to make. Raises if the call cannot be accepted; afterwards its Future tells.
        """
        if prepare is not None and not may_block():
            try:
                prepare()
            except BaseException as error:
                self._turn_away(call, error)
                raise
            prepare = None
        call.eager = prepare is None
        if prepare is not None:
            call.in_turn = True
        if self.enter(call) is WAIT:
            self._sleep(call)
        if prepare is not None:
            self.fill(call, prepare)

    def enter(self, call: Call[Any]) -> EnterResult:
        """The part of coming in that never waits. For a call without a mailbox its thread will sleep, if it must and may."""
        queue, hook_dispatcher = self.queue, self.hook_dispatcher
        if call.guarded and call.signal is not None:
            call.signal._watch(call)
        try:
            with self.lock:
                now = clock()  # under the lock, here and everywhere: times go up in the order of events
                if self.refusal is not None:
                    raise self.refusal.copy()
                if call.guarded:
                    self._check_guards(call)
                enter_result = queue.enter(call, now) if call.eager else queue.reserve(call, now)
                if enter_result is ACCEPTED:
                    if hook_dispatcher.queued is not None:
                        hook_dispatcher.news.append((hook_dispatcher.queued, call))
                    if queue.in_flight < queue.limit:
                        self.group.pump(now)
                elif enter_result is WAIT and call.mailbox is None and (not call.eager or may_block()):
                    call.asleep = allocate_lock()
                    call.asleep.acquire()
                evicted = self._collect_evicted() if queue.evicted else ()
                if hook_dispatcher.state is not None:
                    hook_dispatcher.news.append((hook_dispatcher.state, queue.state()))
            if enter_result is REFUSED:
                raise dropped(self.name, queue.limits)
        except BaseException as error:
            self._turn_away(call, error)
            raise
        if call.guarded and call.deadline is not None:
            self._arm(call)
        for other in evicted:
            self._finish(other, dropped(self.name, queue.limits))
        if hook_dispatcher.news:
            hook_dispatcher.tell()
        return enter_result

    def _turn_away(self, call: Call[Any], error: BaseException) -> None:
        """
        End a call that did not get in: it was refused, its payload could not be made, or Ctrl-C came. The hooks hear of it,
        and it is settled, because a hook may ask for its exception.
        """
        hook_dispatcher = self.hook_dispatcher
        with self.lock:
            new = call.stage is NEW
            if new:
                call.stage = SETTLED
                if isinstance(error, QueueDropError):
                    self.totals.rejected += 1
                    hook_dispatcher.note(hook_dispatcher.reject, call)
                else:
                    self.totals.canceled += 1
                    hook_dispatcher.note(hook_dispatcher.cancel, (call, CancelPhase.WAITING))
                self.note_state()
        if not new:  # Ctrl-C, just after its entry
            self.cancel(call, "interrupted")
            return
        # A copy: the one that is raised has a traceback, which leads back to the call.
        ended_by = (
            error.copy()
            if isinstance(error, PenstockError)
            else canceled(type(error).__name__, CancelPhase.WAITING)
        )
        self._finish(call, ended_by)
        hook_dispatcher.tell()

    def enter_run(self, calls: list[Call[Any]]) -> int:
        """
        As many of these as there is room for, under one hold of the lock. They have their payloads and no guards. Returns
        how many; the others may come in by `submit`, where they wait or are refused.
        """
        queue, hook_dispatcher = self.queue, self.hook_dispatcher
        with self.lock:
            now = clock()
            entered = queue.enter_run(calls, now) if self.refusal is None else 0
            if entered:
                hook_dispatcher.note_run(hook_dispatcher.queued, calls[:entered])
                self.group.pump(now)
                self.note_state()
        hook_dispatcher.tell()
        return entered

    def fill(self, call: Call[Any], prepare: Callable[[], None]) -> None:
        """Make the payload and put it into the place that the call has."""
        try:
            prepare()
        except BaseException:  # Ctrl-C too: a place that is never filled would hold up the queue
            self.cancel(call, "its payload could not be made")
            raise
        with self.lock:
            now = clock()
            filled = not self.dead and self.queue.fill(call, now)
            if filled:
                self.hook_dispatcher.note(self.hook_dispatcher.queued, call)
                self.group.pump(now)
                self.note_state()
            wake = self.collect_granted()
            refusal = self.refusal if self.dead else None
        for rouse in wake:
            rouse()
        self.hook_dispatcher.tell()
        if not filled:
            if refusal is not None:
                self._end(call, lambda _: refusal.copy(), "canceled")
            until_settled(lambda: call._exception is None)  # another thread ends it
            raise call._exception or self._closed()

    def _sleep(self, call: Call[Any]) -> None:
        """Room or the end of the call wakes this thread, whichever is first."""
        asleep = call.asleep
        if asleep is None:
            return
        try:
            self.group.lead(call, for_space=True)
            asleep.acquire()
        except BaseException:  # Ctrl-C while waiting: nobody will hold the Future
            self.cancel(call, "interrupted")
            raise
        if (
            call._exception is not None and not call.attempt
        ):  # one that ran has a Future that says how it ended
            raise call._exception

    def collect_granted(self) -> list[Callable[[], object]]:
        """With the lock held: how to wake those who got a place. Call each once the lock is released."""
        granted = self.queue.granted
        if not granted:
            return []
        self.queue.granted = []
        wake: list[Callable[[], object]] = []
        for call in granted:
            if call.asleep is not None:
                wake.append(call.asleep.release)
                call.asleep = None
                self.group.nudge(call)
            elif call.mailbox is not None and not call.eager:
                wake.append(partial(call.mailbox.post, call))
            if call.eager:
                self.hook_dispatcher.note(self.hook_dispatcher.queued, call)
        return wake

    def note_state(self) -> None:
        """Once for each time that the lock was held to change something, before it is released."""
        if self.hook_dispatcher.state is not None:
            self.hook_dispatcher.news.append((self.hook_dispatcher.state, self.queue.state()))

    def _collect_evicted(self) -> list[Call[Any]]:
        evicted, self.queue.evicted = self.queue.evicted, []
        self.totals.rejected += len(evicted)
        for call in evicted:
            self.hook_dispatcher.note(self.hook_dispatcher.reject, call)
        return evicted

    def _closed(self) -> PoolClosedError:
        return PoolClosedError(f"{self.name} is closed", pool=self.name)

    # Ways out

    def report(
        self,
        done: Iterable[tuple[Call[Any], Any, BaseException | None]],
        wake: Iterable[Callable[[], object]],
    ) -> None:
        """With the lock released: calls whose outcome counts, and those who got a place through their leaving."""
        for rouse in wake:
            rouse()
        settled = []
        for call, result, error in done:
            if call.guarded:
                self._unguard(call)
            call._settle(result, error)
            settled.append(call)
        if settled:
            self.hook_dispatcher.note_run(self.hook_dispatcher.settle, settled)
        self.after()

    def after(self) -> None:
        """With the lock released, after something ended."""
        if self.hook_dispatcher.news:
            self.hook_dispatcher.tell()
        if self._when_idle:
            self._tell_idle()

    def _finish(self, call: Call[Any], error: PenstockError) -> None:
        """A call ended otherwise than by its run."""
        self._unguard(call)
        call._settle(None, error)
        if call.span is not None:
            call.span.end(call, error)
        self.group.nudge(call)

    def cancel(self, call: Call[Any], reason: str | None = None) -> bool:
        """True if this is what ended the call."""
        return self._end(call, partial(canceled, reason), "canceled")

    def _expire(self, call: Call[Any], timeout: float) -> None:
        self._end(call, partial(timed_out, timeout), "timed_out")

    def _end(self, call: Call[Any], error: Callable[[CancelPhase], PenstockError], total: str) -> bool:
        with self.lock:
            now = clock()
            phase = self.queue.cancel(call, now)
            if phase is None:
                return False
            setattr(self.totals, total, getattr(self.totals, total) + 1)
            self.hook_dispatcher.note(self.hook_dispatcher.cancel, (call, phase))
            if phase is CancelPhase.IN_FLIGHT:
                self.group.tell_canceled(call, now)
            self.group.pump(now)
            wake = self.collect_granted()
            asleep, call.asleep = call.asleep, None
            self.note_state()
        self._finish(call, error(phase))
        if asleep is not None:
            asleep.release()
        self.report((), wake)
        return True

    # Keys, timeouts and signals: what can end a call besides its own Future

    def guard(
        self, call: Call[Any], *, key: Hashable, timeout: float | None, signal: CancelSignal | None
    ) -> None:
        """Said of a call before it enters."""
        call.guarded = True
        call.key, call.signal = key, signal
        if timeout is not None:
            call.timeout = timeout
            call.deadline = clock() + timeout

    def _check_guards(self, call: Call[Any]) -> None:
        """With the lock held, so that no cancel can fall between this look and the call's entry."""
        if call.signal is not None and call.signal.canceled:
            raise CallCanceled(
                "its signal was canceled before", phase=CancelPhase.WAITING, reason=call.signal.reason
            )
        self.keys.enter(call)

    def _arm(self, call: Call[Any]) -> None:
        assert call.deadline is not None
        call.timer = call_at(call.deadline, self._expire, call, call.timeout)
        if call.done():
            call.timer.cancel()

    def _unguard(self, call: Call[Any]) -> None:
        if not call.guarded:
            return
        call.guarded = False
        if call.timer is not None:
            call.timer.cancel()
        if call.signal is not None:
            call.signal._forget(call)
        if call.key is not None:
            with self.lock:
                self.keys.leave(call)

    def cancel_key(self, key: Hashable, reason: str | None) -> int:
        """Sticky: later calls with this key are refused until `clear_key`. Returns how many it ended."""
        with self.lock:
            calls = self.keys.cancel(key, reason)
        # The latest first: a place that becomes free must not go to a call that is about to be ended, too.
        return sum(self.cancel(call, reason) for call in reversed(calls))

    def clear_key(self, key: Hashable) -> bool:
        with self.lock:
            return self.keys.clear(key)

    # Holding back and closing

    def change(self, how: Callable[[float], object]) -> None:
        """Change what the queue may hand out, then hand out and wake whatever that allows."""
        with self.lock:
            now = clock()
            how(now)
            self.group.pump(now)
            wake = self.collect_granted()
            self.note_state()
        self.report((), wake)

    def pause(self) -> None:
        self.change(lambda _: self.queue.pause())

    def resume(self) -> None:
        self.change(self.queue.resume)

    def refuse(self, why: PenstockError) -> None:
        """Accept nothing new; what was accepted or waits already goes on."""
        with self.lock:
            if self.refusal is None:
                self.refusal = why

    def fail_all(
        self, why: PenstockError, error: Callable[[Call[Any]], PenstockError], *, dispose: bool
    ) -> None:
        """End everything that waits, is pending or runs; newcomers are told `why` (until `reopen`, if not disposed)."""
        queue = self.queue
        with self.lock:
            now = clock()
            self.refusal, self.dead = why, True
            ended = [
                (call, CancelPhase.IN_FLIGHT) for call in self.group.in_flight() if call.stage is IN_FLIGHT
            ]
            for call, _ in ended:
                queue.cancel(call, now)
                self.group.tell_canceled(call, now)
            queued = queue.pending
            for place, call in enumerate(queue.dispose() if dispose else queue.clear()):
                ended.append((call, CancelPhase.QUEUED if place < queued else CancelPhase.WAITING))
            asleep = [call.asleep for call, _ in ended if call.asleep is not None]
            self.totals.canceled += len(ended)
            for call, phase in ended:
                call.asleep = None
                self.hook_dispatcher.note(self.hook_dispatcher.cancel, (call, phase))
            self.note_state()
        for call, _ in ended:
            self._finish(call, error(call))
        for sleeper in asleep:
            sleeper.release()
        self.report((), ())

    def abandon(self) -> None:
        """In a copy of this process, made by a fork: the workers are not ours, and whoever held the lock is not here."""
        self.lock = threading.Lock()
        self.refusal = PenstockError(
            f"{self.name} belongs to the process that was forked; make a pool of your own in the child"
        )

    def reopen(self) -> None:
        with self.lock:
            self.refusal, self.dead = None, False

    def when_idle(self, fn: Callable[[], object]) -> None:
        """Call it once, as soon as nothing is in flight, pending, waiting or reserved."""
        with self.lock:
            self._when_idle.append(fn)
        self._tell_idle()

    def _tell_idle(self) -> None:
        with self.lock:
            if not self.queue.state().idle:
                return
            tell, self._when_idle = self._when_idle, []
        for fn in tell:
            fn()

    def queued(self) -> list[Call[Any]]:
        """What waits or is pending."""
        with self.lock:
            return [*self.queue, *self.queue.waiters()]

    def queue_is_idle(self) -> bool:
        """A glance, without the lock."""
        return not self.queue.in_flight

    def state(self) -> QueueState:
        with self.lock:
            return self.queue.state()


class Keys:
    def __init__(self) -> None:
        self._calls: dict[Hashable, dict[Call[Any], None]] = {}  # a dict, because a set has no order
        self._canceled: dict[Hashable, str | None] = {}

    def enter(self, call: Call[Any]) -> None:
        """Raises if its key is canceled, or is none."""
        if call.key is None:
            return
        try:
            canceled = call.key in self._canceled
        except TypeError:
            key, call.key = call.key, None
            raise TypeError(
                f"key is {safe_repr(key, 200)}; it must be hashable, like a string or a number"
            ) from None
        if canceled:
            why = f"its key {safe_repr(call.key, 200)} is canceled until cleared"
            raise CallCanceled(why, phase=CancelPhase.WAITING, reason=self._canceled[call.key])
        self._calls.setdefault(call.key, {})[call] = None

    def leave(self, call: Call[Any]) -> None:
        same = self._calls.get(call.key)
        if same is not None:
            same.pop(call, None)
            if not same:
                del self._calls[call.key]

    def cancel(self, key: Hashable, reason: str | None) -> list[Call[Any]]:
        """The calls that have it, in the order in which they came."""
        self._canceled[key] = reason
        return list(self._calls.get(key, ()))

    def clear(self, key: Hashable) -> bool:
        """False if it was not canceled."""
        return self._canceled.pop(key, self) is not self

    def __len__(self) -> int:
        """How many keys calls have at present."""
        return len(self._calls)
