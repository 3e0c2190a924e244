"""
The wait list: submits that wait until the queue is below its depth limit (SPEC JB-6). First come, first
served. One part serves all of them, so no submit needs a thread.

Each limit has in effect a queue of its own: a submit that waits for an addon's limit delays no other addon,
and one that waits for the total limit delays all. No submit passes another that waits for the same limit, and
one that may not wait gets QueueFull: else a stream of small submits would keep a large one out for ever. A
submit whose idempotency key was used before adds no job, so it never waits.

Requeues never wait. If one takes the place that a waiting submit was woken for, the submit keeps waiting, and
keeps its position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Final, Protocol

from penstock.core.errors import QueueFull, Unavailable
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import HOUR, SECOND, AddonId, Moment
from penstock.stores.api import RETRY_AFTER_SEC, Depth, DepthReached, Receipt, Store, Submit

#: The longest time between two steps while submits wait: a process that sends no wake-up may have made room.
_POLL: Final = 1 * SECOND
_NOTHING_IS_NEW: Final = Depth(total=0)


class CommitSubmits(Protocol):
    """Commits submits; `Dispatcher.commit_submits`."""

    def __call__(self, submits: Sequence[Submit], *, wait: bool = False) -> list[Future[list[Receipt]]]: ...


@dataclass(slots=True, eq=False)
class _Waiter:
    """A submit that waits, or may wait, for room. `number`: its position, by arrival."""

    number: int
    intents: Sequence[Intent]
    since: Moment
    until: Moment
    answer: Future[list[Receipt]] = field(default_factory=Future)


class SubmitWaitlist:
    """
    The wait list, as a part of the scheduler. It calls `wake` when a submit begins to wait: then `step` must
    be called soon, and after every commit.
    """

    def __init__(
        self, store: Store, commit: CommitSubmits, depth: Depth, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._commit, self._depth, self._wake = store, commit, depth, wake
        self.waiters: list[_Waiter] = []
        self._full: tuple[DepthReached, ...] = ()  # the limits for which submits waited at the last step
        self._numbers = count(1)
        self._lock, self._passing = Lock(), Lock()

    def submit_soon(
        self, intents: Sequence[Intent], wait_sec: float = 0, *, wait: bool = False
    ) -> Future[list[Receipt]]:
        """
        Submit, and wait for room up to `wait_sec`; after that the Future raises QueueFull. Canceling the
        Future gives up the place. `wait`: the caller has nothing else to do, and its thread may write.
        """
        now = self._store.now()
        waiter = _Waiter(next(self._numbers), intents, now, now + int(wait_sec * SECOND))
        # Other submits wait for this limit, so no new job may pass them.
        full = _first_that_stops(self._full, {i.addon_id for i in intents}) if self.waiters else None
        depth = self._depth if full is None else _NOTHING_IS_NEW

        def answered(done: Future[list[Receipt]]) -> None:
            error = done.exception()
            if error is None:
                _settle(waiter, done.result())
            elif not isinstance(error, QueueFull):
                _settle(waiter, error)
            elif waiter.until > waiter.since and self._could_ever(waiter.intents):
                self._wait(waiter, error)
            else:
                _settle(waiter, error if full is None else full.refusal())

        [committed] = self._commit([Submit(intents, depth)], wait=wait)
        committed.add_done_callback(answered)
        return waiter.answer

    def _wait(self, waiter: _Waiter, refused: QueueFull) -> None:
        with self._lock:
            self.waiters.append(waiter)
            self.waiters.sort(key=lambda w: w.number)
            # No submit may pass until the next step has found out which limit was reached.
            self._full = (*self._full, DepthReached(None, refused.limit, refused.queued))
        self._wake()

    def _could_ever(self, intents: Sequence[Intent]) -> bool:
        """
        Whether an empty queue has room for these jobs. A larger submit would wait in vain, and delay all
        others.
        """
        return self._depth.reached([intent.addon_id for intent in intents], lambda _: 0) is None

    # the part

    def step(self, now: Moment) -> Moment:
        if not self.waiters:
            return now + HOUR
        if self._passing.acquire(blocking=False):
            try:
                self._store.listen()
                self._serve(now)
            finally:
                self._passing.release()
        with self._lock:
            return min([now + _POLL, *(max(now, waiter.until) for waiter in self.waiters)])

    def _serve(self, now: Moment) -> None:
        queued = Counter({a.addon_id: a.jobs.get(JobState.QUEUED, 0) for a in self._store.addons()})
        full: list[DepthReached] = []

        def queued_of(addon_id: AddonId | None) -> int:
            return queued.total() if addon_id is None else queued[addon_id]

        for waiter in list(self.waiters):
            if waiter.answer.cancelled():
                self._leave(waiter)
                continue
            addons = [intent.addon_id for intent in waiter.intents]
            limit = _first_that_stops(full, addons) or self._depth.reached(addons, queued_of)
            limit = limit or self._enter(waiter)
            if limit is None:
                queued.update(addons)
            elif waiter.until <= now:
                self._leave(waiter)
                _settle(waiter, limit.refusal(now - waiter.since))
            elif limit not in full:
                full.append(limit)
        self._full = tuple(full)

    def _enter(self, waiter: _Waiter) -> DepthReached | None:
        """Try to commit a waiting submit. Returns the limit that still stops it; None: it waits no longer."""
        if not waiter.answer.running() and not waiter.answer.set_running_or_notify_cancel():
            self._leave(waiter)
            return None
        outcome: list[Receipt] | Exception
        try:
            [committed] = self._commit([Submit(waiter.intents, self._depth)], wait=True)
            outcome = committed.result()
        except QueueFull as refused:  # another submit took the room
            return DepthReached(None, refused.limit, refused.queued)
        except Exception as error:  # noqa: BLE001 - the waiting caller gets it
            outcome = error
        self._leave(waiter)
        _settle(waiter, outcome)
        return None

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            self.waiters.remove(waiter)

    def close(self) -> None:
        """
        Fail all waiting submits, because `step` will not be called any more. None of their jobs is stored.
        """
        with self._lock:
            waiting, self.waiters = self.waiters, []
        for waiter in waiting:
            text = "the scheduler stopped while this submit waited for room"
            _settle(waiter, Unavailable(text, retry_after_sec=RETRY_AFTER_SEC))


def _first_that_stops(limits: Iterable[DepthReached], addons: Container[AddonId]) -> DepthReached | None:
    return next((full for full in limits if full.addon_id is None or full.addon_id in addons), None)


def _settle(waiter: _Waiter, outcome: list[Receipt] | BaseException) -> None:
    try:
        if isinstance(outcome, BaseException):
            waiter.answer.set_exception(outcome)
        else:
            waiter.answer.set_result(outcome)
    except InvalidStateError:
        pass  # the caller canceled the Future at this moment
