"""
Maintenance, the budget enforcer and recovery: the scheduler's duties that no caller asks for.

Maintenance ends expired leases and reservations, stops attempts that run too long, applies deadlines,
resolves the dependencies that were too many for one transaction, and prunes old jobs. Every write is a
compare-and-set, so any number of processes may run it. An error in one row affects that row alone.

The budget enforcer stops the attempts of an addon whose budget is spent (SPEC TR-8). The heartbeat that
crosses a mark writes the alert in its own transaction, so each mark gets one alert. The stop does not depend
on that heartbeat: once a tick the enforcer checks which addons are over their limits. So if a scheduler dies
after the alert, the next one stops the attempts.

Recovery deals with the dispatches that the last scheduler left in flight (SPEC TR-11):

- An attempt of this host's runner returns to the queue as one crash, with its backoff. Before that the runner
  ends the processes that are still running, which no other part can find. So no job runs twice at once.
- A worker of an add-on is a process of its own and may be alive. It could not renew its lease while no
  scheduler listened, so the lease gets the time of one whole lease from now on. If the worker is gone, its
  job loses that time and no more. Ending the lease could start a second attempt beside the living first one,
  and count a crash against the job.
- A reservation gets its whole time again too: its worker could not ask for the lease.
- A dispatch that was asked to stop keeps its deadline. A worker that gets no answer stops by itself when its
  lease ends.

Giving time is always safe: until an extended lease ends, no other worker gets the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from penstock.core.errors import Refused
from penstock.core.jobs import changes
from penstock.core.jobs.changes import Change, Note, alert_note
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.spending import RenewedDispatch, over, spending_alerts
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import HOUR, AddonId, DispatchId, EndReason, Moment, Money
from penstock.scheduler.driver import TOLERANCE, SteadyClock, comes_later
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import (
    Apply,
    Due,
    Overdue,
    Prune,
    Reorder,
    ResolveDependencies,
    Shift,
    Store,
    committed,
    with_jobs,
)

log = logging.getLogger("penstock.maintenance")


class Maintenance:
    """
    Upkeep that applies deadlines and expirations, and prunes. `on_shift` is called after the clock was set
    and every lease and reservation has moved with it.
    """

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        clock: SteadyClock | None = None,
        *,
        on_shift: Callable[[], None] = lambda: None,
        batch: int = 200,
    ) -> None:
        self._store, self._rules, self._clock, self._batch = store, rules, clock, batch
        self._on_shift = on_shift
        self._prune_at: Moment = 0

    def step(self, now: Moment) -> Moment:
        now += self._follow_jumps()
        while len(overdue := self._store.overdue(self._batch)) > 0:
            decided = [change for item in overdue if (change := self._decide(item, now)) is not None]
            settled = committed(self._store, Apply(decided))
            if len(overdue) < self._batch or not any(settled):
                break
        if not comes_later(self._prune_at, now, self._rules.prune_every):
            forgotten = committed(self._store, Prune(now - self._rules.retention, self._rules.prune_step))
            # A step that pruned jobs may have left some: continue soon, but let other writers in between.
            self._prune_at = now + (self._rules.tick if forgotten else self._rules.prune_every)
        alarm = self._store.alarm()
        if alarm == 0:  # jobs ended with more children than one transaction may resolve
            committed(self._store, ResolveDependencies())
        return self._prune_at if alarm is None else min(self._prune_at, max(alarm, now))

    def _follow_jumps(self) -> int:
        by = 0 if self._clock is None else self._clock.jump()
        if by and self._clock is not None:
            log.warning(
                "the wall clock was set by %+.1f s; leases and delays of retries move with it", by / 1e6
            )
            self._clock.accept(by)
            committed(self._store, Shift(by))
            self._on_shift()
        return by

    def _decide(self, item: Overdue, now: Moment) -> Change | None:
        try:
            return self._change(item, now)
        except Refused:
            log.exception("cannot settle %s", item)
            return None

    def _change(self, item: Overdue, now: Moment) -> Change | None:
        """The change that deals with an overdue deadline, stop, lease or reservation."""
        due, job, dispatch = item
        if dispatch is None:
            return None if job is None else changes.miss_deadline(job, now)
        if due is Due.STOP:
            reason = dispatch.stop_for or EndReason.MAX_RUNTIME_EXCEEDED
            return changes.stop(dispatch, job, reason, now, grace=self._rules.grace)
        how = EndReason.START_TIMEOUT if dispatch.phase is DispatchPhase.RESERVED else EndReason.LEASE_EXPIRED
        if job is None:
            return changes.release(dispatch, now, how)
        schedules, ordering = self._rules.schedules, self._rules.ordering
        return changes.end(job, dispatch, how, now, schedules=schedules, ordering=ordering)


class BudgetEnforcer:
    """Stops the attempts of addons whose budget is spent: with each heartbeat, and once a tick as upkeep."""

    def __init__(self, store: Store, rules: SchedulerRules) -> None:
        self._store, self._rules = store, rules

    def notes(self, renewed: RenewedDispatch) -> Sequence[Note]:
        """The alerts for the marks that this heartbeat crosses."""
        if renewed.spent == renewed.spent_before:
            return ()
        budget = self._rules.limits.budgets.get(renewed.addon_id)
        return [alert_note(alert) for alert in spending_alerts(renewed, budget, self._store.now())]

    def allows(self, renewed: RenewedDispatch) -> bool:
        """Whether this attempt may go on. If its addon's budget is spent, stop all attempts of the addon."""
        spent = self._over_budget(renewed.addon_id, renewed.addon_spent, self._store.now())
        if spent is not None:
            self._stop_addon(renewed.addon_id, spent)
        return spent is None and not over(renewed.spent, renewed.cost_limit)

    def step(self, now: Moment) -> Moment:
        budgets = self._rules.limits.budgets
        if not budgets:
            return now + HOUR
        spent = self._store.ledger(self._rules.host).spent
        for addon_id in budgets:
            window = self._over_budget(addon_id, spent.get(addon_id, {}), now)
            if window is not None:
                self._stop_addon(addon_id, window)
        return now + self._rules.tick

    def _over_budget(self, addon_id: AddonId, spent: Mapping[str, Money], now: Moment) -> str | None:
        """The budget window whose limit is reached; None: no limit is."""
        budget = self._rules.limits.budgets.get(addon_id)
        limits = () if budget is None else budget.limits(now)
        return next((window.kind for window, limit in limits if over(spent.get(window.kind, 0), limit)), None)

    def _stop_addon(self, addon_id: AddonId, window: str) -> None:
        live = self._store.live(addon_id=addon_id, phases=[DispatchPhase.RESERVED, DispatchPhase.LEASED])
        committed(self._store, Apply(list(self._stops(live, window))))

    def _stops(self, live: Sequence[Dispatch], window: str) -> Iterator[Change]:
        now, rules, reason = self._store.now(), self._rules, EndReason.COST_LIMIT_REACHED
        for dispatch, job in with_jobs(self._store, live):
            try:
                if dispatch.phase is DispatchPhase.LEASED:
                    because = {"budget": window}
                    change = changes.stop(dispatch, job, reason, now, grace=rules.grace, because=because)
                elif job is not None:
                    change = changes.end(
                        job, dispatch, reason, now, schedules=rules.schedules, ordering=rules.ordering
                    )
                else:
                    continue
            except Refused:  # the dispatch ended or changed since the read; the next step reads again
                continue
            if change is not None:
                yield change


#: A function that gets every live dispatch of this host, ends the processes of those that its runner ran, and
#: returns those whose processes are gone for certain. The others keep their leases until these expire.
Survivors: TypeAlias = Callable[[Sequence[Dispatch]], Collection[DispatchId]]

#: Dispatches in one transaction: a start with ten thousand leases must not hold the write lock in one piece.
_BATCH: Final = 500
_ALL: Final = 1_000_000
_STEP: Final = 5_000


class Recovered(NamedTuple):
    """How many dispatches recovery put back, and to how many it gave time."""

    put_back: int
    given_time: int


def workers_named(prefix: str) -> Survivors:
    """
    Survivors for workers that cannot outlive their scheduler, such as threads of its process: all are gone.
    """

    def gone(dispatches: Sequence[Dispatch]) -> list[DispatchId]:
        return [d.dispatch_id for d in dispatches if d.worker.startswith(prefix)]

    return gone


def recover(
    store: Store, rules: SchedulerRules, survivors: Survivors | None = None, holder: str = ""
) -> Recovered:
    """
    Put back or extend the dispatches that the last scheduler of this host left in flight. The caller has the
    right to dispatch and has dispatched nothing yet.
    """
    _follow_clock_set_back(store)
    here = [d for d in store.live(limit=_ALL) if d.host == rules.host]
    gone = frozenset(survivors(here)) if survivors is not None and here else frozenset[DispatchId]()
    done = Recovered(0, 0)
    for start in range(0, len(here), _BATCH):
        done = _settle(store, rules, here[start : start + _BATCH], gone, done)
    data = {"holder": holder, "put_back": done.put_back, "given_time": done.given_time}
    committed(store, Apply([Change(at=store.now(), notes=(Note(EventKind.SCHEDULER_STARTED, data=data),))]))
    if here:
        log.info(
            "%d attempts were in flight: %d go back to the queue, %d may go on until their leases end",
            len(here),
            *done,
        )
    return done


def _follow_clock_set_back(store: Store) -> None:
    """
    Move all leases and delays back if the clock was set back while no scheduler ran: then the newest event
    lies ahead of it. The exact amount is unknown, so this moves by the least that it can be. No delay gets
    longer than it was when that event was written.
    """
    if store.shared:  # the clock is that of the database server
        return
    newest = store.events(store.newest() - 1, 1)
    ahead = newest[-1].at - store.now() if newest else 0
    if ahead > TOLERANCE:
        log.warning(
            "the wall clock was set back by %.1f s or more; leases and delays of retries move with it",
            ahead / 1e6,
        )
        committed(store, Shift(-ahead))


def put_in_order(store: Store, aging: Aging) -> None:
    """
    Compute the order of all queued jobs again if the aging setting was changed: the order keys of two
    settings cannot be compared. It works in steps, between which others can write, and skips a key that stays
    the same.
    """
    last = committed(store, Reorder(aging, 0, _STEP))
    while last:
        last = committed(store, Reorder(aging, last, _STEP))


def _settle(
    store: Store,
    rules: SchedulerRules,
    batch: Sequence[Dispatch],
    gone: Collection[DispatchId],
    done: Recovered,
) -> Recovered:
    """Put back or extend one batch of dispatches."""
    now = store.now()
    ended = [_put_back(d, job, rules, now) for d, job in with_jobs(store, batch) if d.dispatch_id in gone]
    waiting = [d for d in batch if d.dispatch_id not in gone and d.phase is not DispatchPhase.ENDING]
    given_time = [
        changes.prolong(
            d, now + (rules.reserve_for if d.phase is DispatchPhase.RESERVED else rules.lease_for), now
        )
        for d in waiting
    ]
    # Each write is a compare-and-set: if a worker has reported meanwhile, its report stays.
    settled = committed(store, Apply([change for change in ended if change is not None]))
    prolonged = committed(store, Apply(given_time))
    return Recovered(done.put_back + sum(settled), done.given_time + sum(prolonged))


def _put_back(dispatch: Dispatch, job: Job | None, rules: SchedulerRules, now: Moment) -> Change | None:
    how = EndReason.SCHEDULER_RESTARTED
    if dispatch.job_id is None:
        return changes.release(dispatch, now, how)
    if job is None or job.dispatch_id != dispatch.dispatch_id:
        return None  # the dispatch ended since the read
    return changes.end(job, dispatch, how, now, schedules=rules.schedules, ordering=rules.ordering)
