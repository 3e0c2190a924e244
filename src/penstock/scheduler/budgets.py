"""
Budgets: alerts about spending, and the runs that a spent budget stops (SPEC TR-8).

The alert about a mark is written in the transaction of the heartbeat that crosses it, so each mark gets one
alert. Stopping does not depend on the crossing but on being over the limit: a scheduler that dies between the
two stops the runs when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from penstock.core.errors import Refused
from penstock.core.jobs import changes
from penstock.core.jobs.changes import Change, Note, alert_note
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.spending import Standing, over, spending_alerts
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import HOUR, AddonId, EndReason, JobId, Moment, Money
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, Store, committed

log = logging.getLogger("penstock.budgets")


class BudgetEnforcer:
    """Upkeep, once a tick; and the judge of each heartbeat's spending."""

    def __init__(self, store: Store, rules: SchedulerRules) -> None:
        self._store, self._rules = store, rules

    def notes(self, standing: Standing) -> Sequence[Note]:
        """The alerts that this heartbeat gives occasion to."""
        if standing.spent == standing.spent_before:
            return ()
        budget = self._rules.limits.budgets.get(standing.addon_id)
        return [alert_note(alert) for alert in spending_alerts(standing, budget, self._store.now())]

    def allows(self, standing: Standing) -> bool:
        """Whether this run may go on. If its addon's budget is spent, this stops all runs of the addon."""
        spent = self._over_budget(standing.addon_id, standing.addon_spent, self._store.now())
        if spent is not None:
            self._close(standing.addon_id, spent)
        return spent is None and not over(standing.spent, standing.cost_limit)

    def step(self, now: Moment) -> Moment:
        budgets = self._rules.limits.budgets
        if not budgets:
            return now + HOUR
        spent = self._store.ledger(self._rules.host).spent
        for addon_id in budgets:
            window = self._over_budget(addon_id, spent.get(addon_id, {}), now)
            if window is not None:
                self._close(addon_id, window)
        return now + self._rules.tick

    def _over_budget(self, addon_id: AddonId, spent: Mapping[str, Money], now: Moment) -> str | None:
        """The window whose limit is reached."""
        budget = self._rules.limits.budgets.get(addon_id)
        limits = () if budget is None else budget.windows(now)
        return next((window for window, limit, _ in limits if over(spent.get(window, 0), limit)), None)

    def _close(self, addon_id: AddonId, window: str) -> None:
        live = self._store.live(addon_id=addon_id, phases=[DispatchPhase.RESERVED, DispatchPhase.LEASED])
        jobs = {job.job_id: job for job in self._store.jobs([d.job_id for d in live if d.job_id is not None])}
        committed(self._store, Apply(list(self._endings(live, jobs, window))))

    def _endings(self, live: Sequence[Dispatch], jobs: Mapping[JobId, Job], window: str) -> Iterator[Change]:
        now, rules, reason = self._store.now(), self._rules, EndReason.COST_LIMIT_REACHED
        for dispatch in live:
            job = None if dispatch.job_id is None else jobs.get(dispatch.job_id)
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
            except Refused:  # it ended or changed since it was read; the next step reads again
                log.debug("dispatch %s moved on", dispatch.dispatch_id)
                continue
            if change is not None:
                yield change
