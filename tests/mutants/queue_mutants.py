"""Bugs that somebody could write into the dispatch queue."""

from __future__ import annotations

from tests.mutants.planting import Mutant

QUEUE = "penstock/core/queue.py"
TICKET = "penstock/core/ticket.py"
TESTS = (
    "tests/core/test_queue_examples.py",
    "tests/core/test_queue_endings.py",
    "tests/core/test_queue_model.py",
)


def in_queue(name: str, old: str, new: str, file: str = QUEUE) -> Mutant:
    return Mutant(f"queue: {name}", file, old, new, TESTS)


MUTANTS = [
    # Limits
    in_queue(
        "limits are not checked",
        "if not isinstance(value, int) or isinstance(value, bool) or value < least:",
        "if False:",
        TICKET,
    ),
    in_queue(
        "a plain policy word stays a plain word",
        'object.__setattr__(self, "policy", Policy(self.policy))',
        "Policy(self.policy)",
        TICKET,
    ),
    in_queue("no bound is a bound", "        self.max_queue_depth = limits.max_queue_depth\n", "        self.max_queue_depth = min(limits.max_queue_depth, 5)\n"),
    # Room
    in_queue(
        "one too many enters",
        "            if self.pending + self.reserved < self.max_queue_depth + (free if free > 0 else 0):",
        "            if self.pending + self.reserved <= self.max_queue_depth + (free if free > 0 else 0):",
    ),
    in_queue(
        "one too many reserves",
        "        return self.pending + self.reserved < self.max_queue_depth + (free if free > 0 else 0)",
        "        return self.pending + self.reserved <= self.max_queue_depth + (free if free > 0 else 0)",
    ),
    in_queue(
        "reserved places are not counted on entry",
        "            if self.pending + self.reserved < self.max_queue_depth",
        "            if self.pending < self.max_queue_depth",
    ),
    in_queue(
        "reserved places are not counted on reserve",
        "        return self.pending + self.reserved < self.max_queue_depth",
        "        return self.pending < self.max_queue_depth",
    ),
    in_queue(
        "free slots are no room: nothing enters at depth 0",
        "            free = self.limit - self.in_flight\n            if",
        "            free = 0\n            if",
    ),
    in_queue(
        "room is counted when a call completes, paused or not",
        "        free = self.limit - self.in_flight\n        return",
        "        free = self.limits.max_in_flight - self.in_flight\n        return",
    ),
    in_queue(
        "slots above the limit are used",
        "else min(self.slots, self.limits.max_in_flight)",
        "else self.slots",
    ),
    in_queue("fewer slots change nothing", "        self.slots = slots\n", "        self.slots = max(slots, self.slots)\n"),
    # Policies
    in_queue(
        "reject and drop-latest wait",
        "            self._accept(ticket, now)\n            return ACCEPTED\n        return REFUSED",
        "            self._accept(ticket, now)\n            return ACCEPTED\n        return self._wait(ticket)",
    ),
    in_queue(
        "reject and drop-latest wait for a place",
        "            return Verdict.RESERVED\n        return REFUSED",
        "            return Verdict.RESERVED\n        return self._wait(ticket)",
    ),
    in_queue(
        "a full queue refuses under block",
        "                return ACCEPTED\n        if self._blocks:\n            return self._wait(ticket)",
        "                return ACCEPTED\n        if self._blocks:\n            return REFUSED",
    ),
    in_queue(
        "drop-oldest drops the newest",
        "        oldest = self._pop_pending()\n",
        "        oldest = self._pending.pop()\n        self.pending -= 1\n",
    ),
    in_queue(
        "drop-oldest tells nobody",
        "        self.evicted.append(oldest)\n",
        "",
    ),
    in_queue(
        "the evicted are not settled",
        "        oldest.stage = SETTLED\n",
        "",
    ),
    in_queue(
        "a depth of 0 drops what was requeued",
        " and limits.max_queue_depth > 0\n",
        "\n",
    ),
    in_queue(
        "drop-oldest accepts although there is nothing to drop",
        "        if self._evicts and self.pending:\n            self._evict_oldest()\n            self._accept(ticket, now)",
        "        if self._evicts:\n            if self.pending:\n                self._evict_oldest()\n            self._accept(ticket, now)",
    ),
    # Waiting
    in_queue("a waiter enters behind its back", "            if ticket.eager:\n", "            if True:\n"),
    in_queue("a waiter with a payload is asked for one", "            if ticket.eager:\n", "            if False:\n"),
    in_queue("the last waiter is served first", "            ticket = waiters.popleft()\n", "            ticket = waiters.pop()\n"),
    in_queue(
        "all waiters are woken by one room",
        "        while room > 0 and waiters and self._building is None:\n",
        "        while waiters and self._building is None:\n",
    ),
    in_queue(
        "waiters do not wait for the payload before them",
        "        while room > 0 and waiters and self._building is None:\n",
        "        while room > 0 and waiters:\n",
    ),
    in_queue(
        "a newcomer overtakes a payload that is being made",
        "        if not self.waiting and self._building is None:\n",
        "        if not self.waiting:\n",
    ),
    in_queue(
        "a payload that is there goes on holding up others",
        "        if self._building is ticket:\n            self._building = None\n        if self.disposed:",
        "        if self.disposed:",
    ),
    in_queue(
        "one waiter is skipped",
        "            ticket = waiters.popleft()\n",
        "            ticket = waiters.popleft()\n            waiters.rotate(-1)\n",
    ),
    in_queue("a granted waiter is not told", "            self.granted.append(ticket)\n", ""),
    in_queue(
        "a completion wakes nobody",
        "        self.in_flight -= 1\n        if self.waiting:\n            self._grant(now)\n        return stage is IN_FLIGHT",
        "        self.in_flight -= 1\n        return stage is IN_FLIGHT",
    ),
    in_queue(
        "a cancel wakes nobody",
        "        if self.waiting:\n            self._grant(now)\n        return phase",
        "        return phase",
    ),
    in_queue(
        "a loss wakes nobody",
        "        if self.waiting:\n            self._grant(now)\n        return exhausted",
        "        return exhausted",
    ),
    in_queue(
        "more slots wake nobody",
        "self.limits.max_in_flight)\n        if self.waiting:\n            self._grant(now)\n",
        "self.limits.max_in_flight)\n",
    ),
    # Places
    in_queue(
        "a place takes two payloads",
        "        if ticket.stage is not RESERVED:\n            return False\n",
        "",
    ),
    in_queue("a filled place stays reserved", "        self.reserved -= 1\n        if self._building", "        if self._building"),
    in_queue(
        "a cancelled place stays reserved",
        "                self.reserved -= 1\n                phase",
        "                phase",
    ),
    in_queue(
        "a place may be filled after dispose",
        "        if self.disposed:\n            ticket.stage = SETTLED\n            return False\n",
        "",
    ),
    # Order and dispatch
    in_queue(
        "first in, last out",
        "            ticket = queue.popleft()\n            if ticket.stage is PENDING:",
        "            ticket = queue.pop()\n            if ticket.stage is PENDING:",
    ),
    in_queue(
        "cancelled calls are dispatched",
        "            ticket = queue.popleft()\n            if ticket.stage is PENDING:",
        "            ticket = queue.popleft()\n            if True:",
    ),
    in_queue(
        "a slot too many is used",
        "        if self.in_flight >= self.limit or not self.pending:",
        "        if self.in_flight > self.limit or not self.pending:",
    ),
    in_queue("a requeued call keeps its dispatch id", "        ticket.dispatch = self._cursor\n", "        ticket.dispatch = ticket.dispatch or self._cursor\n"),
    in_queue("attempts are not counted", "        ticket.attempt += 1\n", "        ticket.attempt = 1\n"),
    # Endings
    in_queue(
        "a stale completion is accepted",
        "        if ticket.dispatch != dispatch:\n            return False\n",
        "",
    ),
    in_queue(
        "a completion counts twice",
        "        if stage is not IN_FLIGHT and stage is not ENDING:\n            return False\n",
        "",
    ),
    in_queue("the outcome of a cancelled call counts", "        return stage is IN_FLIGHT\n", "        return True\n"),
    in_queue(
        "a cancelled call in flight gives its slot away at once",
        "                ticket.stage = ENDING\n",
        "                ticket.stage = SETTLED\n                self.in_flight -= 1\n",
    ),
    in_queue(
        "a cancelled call never gives its slot back",
        "        if stage is not IN_FLIGHT and stage is not ENDING:",
        "        if stage is not IN_FLIGHT:",
    ),
    in_queue(
        "a cancelled call whose worker is ended never gives its slot back",
        "            if ticket.stage is ENDING:\n                ticket.stage = SETTLED\n                self.in_flight -= 1\n            elif",
        "            if",
    ),
    in_queue(
        "a cancelled pending call keeps its place",
        "                self.pending -= 1\n                phase",
        "                phase",
    ),
    in_queue(
        "a waiter that gave up is still counted",
        "                self.waiting -= 1\n                phase",
        "                phase",
    ),
    in_queue(
        "a reserved call is reported as queued",
        "                self.reserved -= 1\n                phase = Phase.WAITING",
        "                self.reserved -= 1\n                phase = Phase.QUEUED",
    ),
    in_queue(
        "what has ended can be cancelled",
        "            case _:\n                return None\n",
        "            case _:\n                return Phase.QUEUED\n",
    ),
    in_queue("the cancelled are never swept out", "        if len(queue) > 2 * alive + 32:", "        if False:"),
    in_queue(
        "the sweep loses one",
        "            kept = [ticket for ticket in queue if ticket.stage is stage]\n",
        "            kept = [ticket for ticket in queue if ticket.stage is stage][1:]\n",
    ),
    # Crashes
    in_queue(
        "requeued to the back",
        "            if self.limits.requeue_to_front:\n",
        "            if False:\n",
    ),
    in_queue(
        "requeued to the front though asked for the back",
        "            if self.limits.requeue_to_front:\n",
        "            if True:\n",
    ),
    in_queue(
        "requeued in the order of loss",
        "                heappush(self._front, (ticket.serial, ticket))\n",
        "                self._serial += 1\n                heappush(self._front, (self._serial, ticket))\n",
    ),
    in_queue(
        "to the back in any order",
        "        requeued.sort(key=lambda ticket: ticket.serial)\n",
        "",
    ),
    in_queue("one attempt too many", "if ticket.crashes >= self.limits.max_attempts or", "if ticket.crashes > self.limits.max_attempts or"),
    in_queue("one attempt too few", "if ticket.crashes >= self.limits.max_attempts or", "if ticket.crashes + 1 >= self.limits.max_attempts or"),
    in_queue(
        "whoever was on a dead worker is blamed",
        "if ticket.crashes >= self.limits.max_attempts or",
        "if ticket.attempt >= self.limits.max_attempts or",
    ),
    in_queue("nobody is blamed", "            ticket.crashes += 1\n", "            pass\n"),
    in_queue("lost after dispose, lost for ever", "max_attempts or self.disposed:", "max_attempts:"),
    # Holding back and closing
    in_queue("paused still dispatches", "        self.paused = True\n        self.limit = 0\n", "        self.paused = True\n"),
    in_queue("slots resume a paused queue", "0 if self.paused or self.disposed else", "0 if self.disposed else"),
    in_queue("resume wakes a disposed queue", "0 if self.paused or self.disposed else", "0 if self.paused else"),
    in_queue("resume does nothing", "        self.paused = False\n        self._set_limit(now)\n", "        self.paused = False\n"),
    in_queue("dispose leaves the waiters", "        ended = [*self, *self.waiters()]\n", "        ended = [*self]\n"),
    in_queue("clear forgets the requeued", "        ended = [*self, *self.waiters()]\n        self._front.clear()\n", "        self._front.clear()\n        ended = [*self, *self.waiters()]\n"),
    in_queue("the cleared are not settled", "        for ticket in ended:\n            ticket.stage = SETTLED\n", ""),
    in_queue("the cleared still count", "        self.pending = self.waiting = 0\n", "        self.waiting = 0\n"),
    in_queue("a disposed queue dispatches", "        self.disposed = True\n        self.limit = 0\n", "        self.disposed = True\n"),
    in_queue("a disposed queue accepts", "        self.disposed = True\n", ""),
    in_queue("clear disposes", "    def clear(self) -> list[TicketT]:\n", "    def clear(self) -> list[TicketT]:\n        self.disposed = True\n"),
    in_queue(
        "reserved places are idle",
        "not (self.in_flight or self.pending or self.waiting or self.reserved)",
        "not (self.in_flight or self.pending or self.waiting)",
        TICKET,
    ),
    in_queue("the state shows the slots as the limit", "                self._max_in_flight,\n", "                self.limit,\n"),
    in_queue("the state shows no policy", "                self._policy,\n", "                Policy.BLOCK,\n"),
    # Wait time
    in_queue("the wait leaves waiting out", "        ticket.waiting_for = now - ticket.called_at\n", ""),
    in_queue(
        "the last wait leaves waiting out",
        "ticket.last_wait = pending_for if ticket.attempt > 1 else ticket.waiting_for + pending_for",
        "ticket.last_wait = pending_for",
    ),
    in_queue("a requeued call forgets its first wait", "        ticket.pending_for += pending_for\n", "        ticket.pending_for = pending_for\n"),
    in_queue(
        "a requeued call counts its run as a wait",
        "        for ticket in requeued:\n            ticket.entered_at = now\n",
        "        for ticket in requeued:\n",
    ),
]  # fmt: skip
