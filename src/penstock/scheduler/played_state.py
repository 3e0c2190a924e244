"""
The state that all parts of a player share: the clock, the load, what became of each job, and what is due.

Each part (`played_waiting`, `played_rounds`, `played_attempts`, `played_preemption`) holds the `Play`, reads it,
and leaves in it what another part must look at: a moment in `due`, a host in `ask`, a queue in `heads`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from heapq import heappush
from itertools import count
from typing import Final

from penstock.core.jobs.types import JobId, Moment
from penstock.scheduler.arrivals import Load
from penstock.scheduler.played_accounts import PlayedAccounts
from penstock.scheduler.played_hosts import FreeUnits, HostInPlay, PlayedHost, WorkersOfOtherHosts
from penstock.scheduler.played_queues import WaitingJobs
from penstock.scheduler.rules import SchedulerRules

#: In the columns of moments and hosts: never.
NOT_STARTED: Final = -1


class PlayedState(IntEnum):
    """What has become of a job. The states from `DONE` on are final."""

    COMING = 0  # not submitted yet
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELED = 5
    BLOCKED = 6
    REFUSED = 7


class MomentKind(IntEnum):
    """What happens at a moment. Of what happens at one moment, the first goes first."""

    CALL = 0
    CANCEL = 1
    DEADLINE = 2
    READY = 3
    URGENT = 4
    ASK = 5  # a host should run a round
    TICK = 6  # of a host that keeps units: they may be kept for another job now
    LOOK = 7  # the preemption should look: nothing else need happen at that tick


def count_in(counts: dict[int, int], key: int, more: int) -> None:
    """Unlike in a `Counter`, no key has a count of 0: the smallest and the largest key are found at once."""
    count = counts.get(key, 0) + more
    if count:
        counts[key] = count
    else:
        del counts[key]


class Play:
    """The columns `state`, `started_at`, `ended_at` and `host` are those of the player, by the number of the job."""

    def __init__(
        self,
        rules: SchedulerRules,
        hosts: Sequence[PlayedHost],
        load: Load,
        accounts: PlayedAccounts,
        now: Moment,
    ) -> None:
        self.rules, self.now, self.load = rules, now, load
        self.ordering, self.limits = rules.ordering, rules.limits
        self.sharing, self.aging = rules.ordering.sharing, rules.ordering.aging
        self.state = bytearray()
        self.started_at, self.ended_at, self.host = array("q"), array("q"), array("l")
        #: How many jobs will never start again.
        self.settled = 0
        self.waiting = WaitingJobs(load)
        self.hosts = [
            HostInPlay(number, host, host.capacity or rules.capacity, accounts.ledger(), self.waiting)
            for number, host in enumerate(hosts)
        ]
        if len(self.hosts) > 1:
            for host in self.hosts:
                host.others = WorkersOfOtherHosts(host, self.hosts)
        self.free = FreeUnits(self.hosts)
        #: A heap: when, what, and the number of a job, a host or a call.
        self.due: list[tuple[Moment, int, int]] = []
        self.calls: dict[int, Callable[[], None]] = {}
        self._call_numbers = count()
        #: Hosts to ask, and queues whose head has not been offered to every host.
        self.ask: dict[int, None] = {}
        self.heads: dict[int, None] = {}
        #: How often a run has begun or ended, or the conditions of a host or an addon have changed.
        self.changes = 0
        #: How often a job has entered a ready queue.
        self.entries = 0
        #: The hosts that keep units for a job.
        self.keeping: dict[JobId, set[int]] = defaultdict(set)

    def plan(self, moment: Moment, what: MomentKind, number: int) -> None:
        heappush(self.due, (moment, what, number))

    def at(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call this at that moment."""
        number = next(self._call_numbers)
        self.calls[number] = call
        self.plan(moment, MomentKind.CALL, number)

    def count_change(self, host: HostInPlay) -> None:
        """A run has begun or ended."""
        self.changes += 1
        host.changes += 1

    def conditions_changed(self, hosts: Iterable[HostInPlay]) -> None:
        """What their last rounds went by no longer holds: load, drains, pauses, budgets."""
        self.changes += 1
        for host in hosts:
            host.view.gates.clear()
            host.rivals = None
            self.ask[host.number] = None

    def ask_all(self) -> None:
        """What may start has changed for every host."""
        self.ask.update(dict.fromkeys(range(len(self.hosts))))

    def next_tick(self) -> Moment:
        tick = self.rules.tick
        return self.now - self.now % tick + tick

    def grow(self) -> None:
        """Make the columns as long as the load."""
        missing = len(self.load) - len(self.state)
        if missing > 0:
            self.state.extend(bytes(missing))
            never = [NOT_STARTED] * missing
            for column in (self.started_at, self.ended_at, self.host):
                column.extend(never)
            self.waiting.grow()
