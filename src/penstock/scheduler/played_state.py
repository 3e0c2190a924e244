"""
The state that all parts of a player share: the clock, the load, the state of each job, the moments that are
due, and the accounts of addons.

Each part (`played_waiting`, `played_rounds`, `played_attempts`, `played_preemption`) has the `Play` and reads
it. A part tells another one what to do by an entry in it: a moment in `due`, a host in `ask`, a queue in
`heads`.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from heapq import heappush
from itertools import count
from typing import Final

from msgspec.structs import replace

from penstock.core.jobs.admission import Account, Budget, Ledger, Window, windows
from penstock.core.jobs.round import RoundInputs
from penstock.core.jobs.types import AddonId, JobId, Moment, Money
from penstock.scheduler.arrivals import Load
from penstock.scheduler.played_hosts import (
    FreeUnits,
    HostInPlay,
    PlayedHost,
    WorkerInPlay,
    WorkersOfOtherHosts,
)
from penstock.scheduler.played_queues import WaitingJobs
from penstock.scheduler.rules import SchedulerRules

#: "Never", in the columns of moments and hosts.
NOT_STARTED: Final = -1


class PlayedState(IntEnum):
    """The state of a job in a play. The states from `DONE` on are final."""

    COMING = 0  # not submitted yet
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELED = 5
    BLOCKED = 6
    REFUSED = 7


class MomentKind(IntEnum):
    """What is due at a moment. If several things are due at one moment, they happen in this order."""

    CALL = 0
    CANCEL = 1
    DEADLINE = 2
    READY = 3
    URGENT = 4
    ASK = 5  # a host must run a round
    TICK = 6  # a host that keeps units may have to keep them for another job now
    LOOK = 7  # preemption must look for a victim


def count_in(counts: dict[int, int], key: int, more: int) -> None:
    """Add to a count, and remove a count of 0: then `min` and `max` of the dict find keys that occur."""
    count = counts.get(key, 0) + more
    if count:
        counts[key] = count
    else:
        del counts[key]


class Play:
    """The shared state. The columns `state`, `started_at`, `ended_at` and `host` are those of the player."""

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
        #: The number of jobs that will never start again.
        self.settled = 0
        self.waiting = WaitingJobs(load)
        self.hosts = [
            HostInPlay(
                number,
                host,
                host.capacity or rules.capacity,
                accounts.ledger(),
                self.waiting,
                has_budgets=bool(rules.limits.budgets),
            )
            for number, host in enumerate(hosts)
        ]
        if len(self.hosts) > 1:
            for host in self.hosts:
                host.others = WorkersOfOtherHosts(host, self.hosts)
        self.free = FreeUnits(self.hosts)
        #: A heap of what is due: the moment, the kind, and the number of a job, a host or a call.
        self.due: list[tuple[Moment, int, int]] = []
        self.calls: dict[int, Callable[[], None]] = {}
        self._call_numbers = count()
        #: Hosts that must run a round, and queues whose head was not offered to every host yet.
        self.ask: dict[int, None] = {}
        self.heads: dict[int, None] = {}
        #: Counts starts and ends, and changes of the conditions of a host or an addon.
        self.changes = 0
        #: Counts the jobs that entered a ready queue.
        self.entries = 0
        #: By job, the hosts that keep units for it.
        self.keeping: dict[JobId, set[int]] = defaultdict(set)

    def plan(self, moment: Moment, what: MomentKind, number: int) -> None:
        heappush(self.due, (moment, what, number))

    def at(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call a function at a moment."""
        number = next(self._call_numbers)
        self.calls[number] = call
        self.plan(moment, MomentKind.CALL, number)

    def count_change(self, host: HostInPlay) -> None:
        """Count the start or the end of an attempt."""
        self.changes += 1
        host.changes += 1

    def conditions_changed(self, hosts: Iterable[HostInPlay]) -> None:
        """Let these hosts run rounds anew: their load, a drain, a pause or a budget has changed."""
        self.changes += 1
        for host in hosts:
            host.forget_conditions()
            self.ask[host.number] = None

    def round_inputs(self, host: HostInPlay, worker: WorkerInPlay | None = None) -> RoundInputs:
        """What a round of this host decides with. `worker`: the one that claims in it."""
        inputs = host.inputs
        if inputs is None:
            conditions, offers = host.conditions(self.now), host.offers(self.now, worker)
            inputs = RoundInputs(host.view, conditions, self.limits, self.ordering, *offers, records=False)
            if host.alone and host.quiet is None:
                host.inputs = inputs
        return inputs

    def ask_all(self) -> None:
        """Let every host run a round."""
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


class PlayedAccounts:
    """
    The units that each addon has in use, its spending, and the counts for caps. Every host has a ledger of
    its own for its units; the ledgers of all hosts refer to the same accounts, counts and spending. Spending
    is kept by day and by month; `count_spending` shows the ledgers that of the present day and month.
    """

    def __init__(self, accounts: Mapping[AddonId, Account], budgets: Mapping[AddonId, Budget]) -> None:
        self._accounts = {addon: replace(account) for addon, account in accounts.items()}
        self._budgets = budgets
        self._counts: dict[tuple[str, str], int] = {}
        #: By addon and the name of a window (this day, this month).
        self._spent: Counter[tuple[AddonId, str]] = Counter()
        self._spent_now: dict[AddonId, dict[str, Money]] = {}

    def ledger(self) -> Ledger:
        """A ledger for one host."""
        return Ledger(counts=self._counts, accounts=self._accounts, spent=self._spent_now)

    def set_addon(self, addon_id: AddonId, weight: int | None, paused: bool | None) -> None:
        """Set the weight of an addon, or pause or resume it; None changes nothing."""
        account = self._accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused

    def spend(self, addon_id: AddonId, amount: Money, now: Moment) -> list[Window]:
        """Count spending. Returns the windows in which the addon's budget is spent now."""
        for window in windows(now):
            self._spent[addon_id, window.name] += amount
        self.count_spending(now)
        budget = self._budgets.get(addon_id)
        if budget is None:
            return []
        spent = self._spent_now.get(addon_id, {})
        return [w for w, limit in budget.limits(now) if spent.get(w.kind, 0) >= limit]

    def count_spending(self, now: Moment) -> None:
        """Show the ledgers the spending in the windows of this moment."""
        self._spent_now.clear()
        for window in windows(now):
            for (addon_id, name), amount in self._spent.items():
                if name == window.name:
                    self._spent_now.setdefault(addon_id, {})[window.kind] = amount
