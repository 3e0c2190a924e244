"""
Accounts and budgets in a play: the units that each addon has in use, its spending, and what the hosts'
ledgers share.

Every host has a ledger of its own for its units. Counts for caps, accounts and spending hold for all hosts,
so all ledgers refer to the same objects here. Spending is kept by day and by month; `count_spending` shows
the ledgers that of the present day and month.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.core.jobs.admission import Account, Budget, Ledger, Window, windows
from penstock.core.jobs.types import AddonId, Moment, Money


class PlayedAccounts:
    """The accounts, counts and spending that the ledgers of all hosts share."""

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
