"""
Spending limits: per job, and per addon by day and by month (UTC).

Runs report spending afterwards, so a limit can be exceeded; the event records by how much. Nothing of the
addon starts until the window ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from penstock.core.jobs.admission import Budget, Window, windows
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, JobId, Moment, Money

WARN_AT: Final = 0.80


class SpendMark(StrEnum):
    """
    The mark of a limit that an amount crossed. Each mark is crossed once, however the spending is split.
    """

    WARNED = "warned"
    REACHED = "reached"


def judge(before: Money, added: Money, limit: Money | None) -> SpendMark | None:
    """The mark that this amount crossed; if it crossed both, `REACHED`."""
    if limit is None:
        return None
    after = before + added
    if before < limit <= after:
        return SpendMark.REACHED
    if before < limit * WARN_AT <= after < limit:
        return SpendMark.WARNED
    return None


def over(spent: Money, limit: Money | None) -> bool:
    """Whether the limit is reached, no matter by which amount."""
    return limit is not None and spent >= limit


class Use(Struct, frozen=True):
    """How much of a window is spent, for display; decisions use `judge`."""

    window: Window
    spent: Money
    limit: Money | None

    @property
    def mark(self) -> SpendMark | None:
        return judge(0, self.spent, self.limit)


def uses(budget: Budget | None, spent: Mapping[str, Money], now: Moment) -> list[Use]:
    """The use of the day and of the month, without those that have no limit and no spending."""
    limits = (None, None) if budget is None else (budget.day, budget.month)
    stand = (
        Use(window, spent.get(window.kind, 0), limit)
        for window, limit in zip(windows(now), limits, strict=True)
    )
    return [use for use in stand if use.spent or use.limit is not None]


NOTHING_SPENT: Final[Mapping[str, Money]] = MappingProxyType({})


class RenewedDispatch(Struct, frozen=True, gc=False):
    """A dispatch after its heartbeat, for the answer to the worker and for the spending limits."""

    dispatch_id: DispatchId
    job_id: JobId | None
    addon_id: AddonId
    phase: DispatchPhase
    reason: EndReason | None
    expires_at: Moment
    spent_before: Money
    spent: Money
    cost_limit: Money | None
    unit: str  # of the job's spending; empty for a standalone lease
    #: What its addon has spent by window (day, month), this heartbeat included; empty if the heartbeat added
    #: nothing.
    addon_spent: Mapping[str, Money] = NOTHING_SPENT


def spending_alerts(renewed: RenewedDispatch, budget: Budget | None, now: Moment) -> list[Alert]:
    """
    The alerts of one heartbeat: of each mark that it crosses. A job that a user retried can cross its marks
    again.
    """
    addon_id, job_id, limit = renewed.addon_id, renewed.job_id, renewed.cost_limit
    before, added = renewed.spent_before, renewed.spent - renewed.spent_before
    alerts = []
    if (mark := judge(before, added, limit)) and limit is not None:
        whose = f"job {job_id[-8:]}" if job_id else f"a lease of addon {addon_id}"
        message = _message(whose, mark, before + added, limit, renewed.unit, stopped="it is stopped")
        # The key names the dispatch and no moment: a dispatch crosses a mark once, and two may do so at one
        # moment.
        key = f"{_COST[mark]}/{renewed.dispatch_id}"
        alerts.append(Alert(kind=_COST[mark], addon_id=addon_id, job_id=job_id, key=key, **message))
    for window, most in () if budget is None else budget.limits(now):
        after = renewed.addon_spent.get(window.kind, 0)
        if mark := judge(after - added, added, most):
            during, stopped = f" this {window.kind}", "its running jobs are stopped"
            message = _message(f"addon {addon_id}", mark, after, most, stopped=stopped, during=during)
            key = f"{_BUDGET[mark]}/{addon_id}/{window.name}"
            alerts.append(Alert(kind=_BUDGET[mark], addon_id=addon_id, key=key, **message))
    return alerts


_COST: Final = {SpendMark.WARNED: "cost_warning", SpendMark.REACHED: "cost_limit_reached"}
_BUDGET: Final = {SpendMark.WARNED: "budget_warning", SpendMark.REACHED: "budget_spent"}


def _message(
    whose: str,
    mark: SpendMark,
    spent: Money,
    limit: Money,
    unit: str = "",
    *,
    stopped: str,
    during: str = "",
) -> dict[str, Any]:
    end = f"; {stopped}" if mark is SpendMark.REACHED else ""
    amounts = f"{spent / 1e6:.2f} of {limit / 1e6:.2f} {unit}".rstrip()
    return {
        "text": f"{whose} has spent {amounts}{during}{end}",
        "data": {"spent": spent, "limit": limit, "overshoot": max(0, spent - limit)},
    }
