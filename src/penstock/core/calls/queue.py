"""
The dispatch queue decides which calls may enter, which is next, and which outcomes count.

It is pure: no lock, no thread, no clock. Its user (`CallQueue`) locks it, passes the time, and carries out
the decisions. All worker pools use it, so the rules of admission are written once.

Three decisions are not obvious:

*Room.* A new call is accepted if fewer calls are accepted and not started than `max_queue_depth` plus the
free slots. With a depth of 0, accepted means started. If the user dispatches all it can before it releases
the lock, there are never free slots and pending calls at the same time, so `pending` never exceeds the depth
(except for requeued calls, DQ-6). A free slot counts only if a call may start in it, so not while paused.
`take` makes no room: the room was given away when the slot became free.

*Waiters hold no payload.* Room for a waiter becomes a RESERVED place of that waiter, which then makes its
payload. So each place causes one wake-up, and a later caller cannot take it. Only a waiter that has its
payload (`eager`: a Future that waits in place of a thread which must not block) becomes PENDING at once. Two
woken threads could fill their places in any order; so if the payload is made at once (`in_turn`), the next
waiter gets its place after that, and calls start in the order of their callers. A reservation may take its
time and delays no other call.

*Canceled calls stay in the deque* until they reach its head, marked and not counted. If there are more of
them than of others, they are removed. So a cancel needs no search, and the deque stays small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from penstock.core.calls.ticket import (
    ACCEPTED,
    CLOSED,
    ENDING,
    IN_FLIGHT,
    PENDING,
    REFUSED,
    RESERVED,
    SETTLED,
    WAIT,
    WAITING,
    CancelPhase,
    EnterResult,
    Policy,
    QueueLimits,
    QueueState,
    Stage,
    Ticket,
)

TicketT = TypeVar("TicketT", bound=Ticket)


class DispatchQueue(Generic[TicketT]):
    """
    The queue of one pool. Calls enter by `enter` (and `fill`, if they had no payload), leave by `take`, and
    end by `settle`, `cancel`, `requeue_lost` or `dispose`.

    Effects on *other* tickets are added to two lists, which the user reads before it releases its lock:
    `granted` (waiters that got a place: wake each once) and `evicted` (fail each with a QueueDropError).
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._blocks = limits.policy is Policy.BLOCK
        # With a depth of 0 a pending call was requeued after a crash; a new one could not start in its place.
        self._evicts = limits.policy is Policy.DROP_OLDEST and limits.max_queue_depth > 0
        self.max_queue_depth = limits.max_queue_depth
        self.slots = limits.max_in_flight
        self.paused = False
        self.disposed = False
        self.in_flight = 0
        self.pending = 0
        self.waiting = 0
        self.reserved = 0
        self.granted: list[TicketT] = []
        self.evicted: list[TicketT] = []
        self.limit = limits.max_in_flight  # how many calls may be in flight now
        self._pending: deque[TicketT] = deque()
        self._front: list[tuple[int, TicketT]] = []
        self._waiters: deque[TicketT] = deque()
        self._building: TicketT | None = None  # the call whose payload is being made; all others wait for it
        self._serial = 0
        self._cursor = 0

    # Entering

    def enter(self, ticket: TicketT, now: float) -> EnterResult:
        """
        Accept a call, reserve a place for it, make it wait, or refuse it. A call with a payload (`eager`) is
        accepted; for one without, a place is reserved, and `fill` or `cancel` must follow.
        """
        ticket.called_at = now
        if self.disposed:
            return CLOSED
        if self.waiting or self._building is not None or self._places() <= 0:
            if self._blocks:
                ticket.stage = WAITING
                self.waiting += 1
                self._waiters.append(ticket)
                return WAIT
            if not (self._evicts and self.pending):
                return REFUSED
            self._evict_oldest()
        if not ticket.eager:
            self._reserve(ticket)
            return EnterResult.RESERVED
        # `_accept`, inlined: every call takes this path.
        ticket.stage = PENDING
        ticket.entered_at = now
        self._serial += 1
        ticket.serial = self._serial
        self.pending += 1
        self._pending.append(ticket)
        return ACCEPTED

    def fill(self, ticket: TicketT, now: float) -> bool:
        """Accept a call that now has its payload. False: it was canceled, or the queue was disposed."""
        if ticket.stage is not RESERVED:
            return False
        self.reserved -= 1
        if self._building is ticket:
            self._building = None
        if self.disposed:
            ticket.stage = SETTLED
            return False
        self._accept(ticket, now)
        if self.waiting:
            self._grant(now)
        return True

    def enter_run(self, tickets: Sequence[TicketT], now: float) -> int:
        """
        `enter` for many calls with payloads, as many as there is room for. Returns how many.
        """
        entered = int(min(self.free_places(), len(tickets)))
        serial = self._serial
        for ticket in islice(tickets, entered):
            serial += 1
            ticket.serial = serial
            ticket.stage = PENDING
            ticket.called_at = ticket.entered_at = now
            self._pending.append(ticket)
        self._serial = serial
        self.pending += entered
        return entered

    def free_places(self) -> float:
        """How many calls would be accepted now, one after the other."""
        if self.waiting or self.disposed or self._building is not None:
            return 0
        return max(0, self._places())

    def _places(self) -> float:
        """How many more calls may be accepted or reserved. Negative after calls came back from a crash."""
        free = self.limit - self.in_flight
        return self.max_queue_depth + (free if free > 0 else 0) - self.pending - self.reserved

    def _accept(self, ticket: TicketT, now: float) -> None:
        ticket.stage = PENDING
        ticket.waiting_for = now - ticket.called_at
        ticket.entered_at = now
        self._serial += 1
        ticket.serial = self._serial
        self.pending += 1
        self._pending.append(ticket)

    def _reserve(self, ticket: TicketT) -> None:
        ticket.stage = RESERVED
        self.reserved += 1

    def _evict_oldest(self) -> None:
        oldest = self._pop_pending()
        oldest.stage = SETTLED
        self.evicted.append(oldest)

    def _grant(self, now: float) -> None:
        """
        Give places to waiters, first come first served.
        """
        waiters = self._waiters
        places = self._places()
        while places > 0 and waiters and self._building is None:
            ticket = waiters.popleft()
            if ticket.stage is not WAITING:
                continue
            places -= 1
            self.waiting -= 1
            if ticket.eager:
                self._accept(ticket, now)
            else:
                self._reserve(ticket)
                if ticket.in_turn:
                    self._building = ticket
            self.granted.append(ticket)

    # Dispatching

    def take(self, now: float) -> TicketT | None:
        """Take the next call for a worker. None: there is no call, or no free slot."""
        if self.in_flight >= self.limit or not self.pending:
            return None
        ticket = self._pop_pending()
        ticket.stage = IN_FLIGHT
        self.in_flight += 1
        self._cursor += 1
        ticket.dispatch = self._cursor
        ticket.attempt += 1
        pending_for = now - ticket.entered_at
        ticket.pending_for += pending_for
        ticket.last_wait = pending_for if ticket.attempt > 1 else ticket.waiting_for + pending_for
        return ticket

    def _pop_pending(self) -> TicketT:
        """Remove and return the next pending call; there must be one. Requeued calls go first."""
        self.pending -= 1
        front, queue = self._front, self._pending
        while front:
            ticket = heappop(front)[1]
            if ticket.stage is PENDING:
                return ticket
        ticket = queue.popleft()
        while ticket.stage is not PENDING:
            ticket = queue.popleft()
        return ticket

    # Ending

    def settle(self, ticket: TicketT, dispatch: int, now: float) -> bool:
        """
        End an attempt. True: its outcome counts. False: the call had ended before (then its slot is free
        now), or this is not the current attempt (then nothing changes).
        """
        if ticket.dispatch != dispatch:
            return False
        stage = ticket.stage
        if stage is not IN_FLIGHT and stage is not ENDING:
            return False
        ticket.stage = SETTLED
        self.in_flight -= 1
        if self.waiting:
            self._grant(now)
        return stage is IN_FLIGHT

    def cancel(self, ticket: TicketT, now: float) -> CancelPhase | None:
        """Cancel a call in any stage. Returns the phase in which it was. None: it has ended already."""
        match ticket.stage:
            case Stage.WAITING:
                self.waiting -= 1
                phase = CancelPhase.WAITING
                ticket.stage = SETTLED
                self._sweep(self._waiters, WAITING, self.waiting)
            case Stage.RESERVED:
                self.reserved -= 1
                phase = CancelPhase.WAITING
                ticket.stage = SETTLED
                if self._building is ticket:
                    self._building = None
            case Stage.PENDING:
                self.pending -= 1
                phase = CancelPhase.QUEUED
                ticket.stage = SETTLED
                self._sweep(self._pending, PENDING, self.pending)
            case Stage.IN_FLIGHT:
                ticket.stage = ENDING
                return CancelPhase.IN_FLIGHT
            case _:
                return None
        if self.waiting:
            self._grant(now)
        return phase

    @staticmethod
    def _sweep(queue: deque[TicketT], stage: Stage, alive: int) -> None:
        if len(queue) > 2 * alive + 32:
            kept = [ticket for ticket in queue if ticket.stage is stage]
            queue.clear()
            queue.extend(kept)

    def requeue_lost(
        self, tickets: Iterable[TicketT], now: float, *, blame: Iterable[TicketT] = ()
    ) -> list[TicketT]:
        """
        Take back the calls of a dead worker. Calls in flight become pending again, even beyond the admission
        limit; ended calls only free their slot. Calls in `blame` ran when the worker died: those that have
        now crashed `max_attempts` workers are settled and returned, to be failed. After `dispose` all are,
        because no call leaves the queue then.
        """
        for ticket in blame:
            ticket.crashes += 1
        exhausted: list[TicketT] = []
        requeued: list[TicketT] = []
        for ticket in tickets:
            if ticket.stage is ENDING:
                ticket.stage = SETTLED
                self.in_flight -= 1
            elif ticket.stage is IN_FLIGHT:
                self.in_flight -= 1
                if ticket.crashes >= self.limits.max_attempts or self.disposed:
                    ticket.stage = SETTLED
                    exhausted.append(ticket)
                else:
                    ticket.stage = PENDING
                    requeued.append(ticket)
        requeued.sort(key=lambda ticket: ticket.serial)
        for ticket in requeued:
            ticket.entered_at = now
            self.pending += 1
            if self.limits.requeue_to_front:
                heappush(self._front, (ticket.serial, ticket))
            else:
                self._serial += 1
                ticket.serial = self._serial
                self._pending.append(ticket)
        if self.waiting:
            self._grant(now)
        return exhausted

    # Pausing

    def set_slots(self, slots: int, now: float) -> None:
        """Set how many calls the workers can have now, without those of crashed workers."""
        self.slots = slots
        self._set_limit(now)

    def pause(self) -> None:
        self.paused = True
        self.limit = 0

    def resume(self, now: float) -> None:
        self.paused = False
        self._set_limit(now)

    def _set_limit(self, now: float) -> None:
        self.limit = 0 if self.paused or self.disposed else min(self.slots, self.limits.max_in_flight)
        if self.waiting:
            self._grant(now)

    def clear(self) -> list[TicketT]:
        """End all calls that are pending or waiting, and return them in their order."""
        ended = [*self, *self.waiters()]
        self._front.clear()
        self._pending.clear()
        self._waiters.clear()
        self.pending = self.waiting = 0
        for ticket in ended:
            ticket.stage = SETTLED
        return ended

    def dispose(self) -> list[TicketT]:
        """`clear`, and accept and dispatch no more calls. The user ends the calls in flight."""
        self.disposed = True
        self.limit = 0
        return self.clear()

    # State

    def __iter__(self) -> Iterator[TicketT]:
        """The pending calls, next one first."""
        front = (ticket for _, ticket in sorted(self._front, key=lambda entry: entry[0]))
        return (t for part in (front, self._pending) for t in part if t.stage is PENDING)

    def waiters(self) -> Iterator[TicketT]:
        return (ticket for ticket in self._waiters if ticket.stage is WAITING)

    def stored(self) -> tuple[int, int, int]:
        """The numbers of stored tickets (pending, requeued, waiting), canceled ones included."""
        return len(self._pending), len(self._front), len(self._waiters)

    def state(self) -> QueueState:
        return QueueState(
            self.in_flight,
            self.pending,
            self.waiting,
            self.reserved,
            self.limits.max_in_flight,
            self.max_queue_depth,
            self.limits.policy,
            self.paused,
            self.disposed,
        )
