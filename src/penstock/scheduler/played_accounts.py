"""
Accounts and budgets in a play: what each addon holds, what it has spent, and what the ledgers of the hosts share.

Every host has a ledger of its own for its units. Counts for caps, accounts and spending hold for all hosts, so
all ledgers refer to the same ones here. Spending is kept by day and by month; `count_spending` puts what counts
now where the ledgers see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.core.jobs.admission import Account, Budget, Ledger, Window, windows
from penstock.core.jobs.types import AddonId, Moment, Money


class PlayedAccounts:
    def __init__(self, accounts: Mapping[AddonId, Account], budgets: Mapping[AddonId, Budget]) -> None:
        self._accounts = {addon: replace(account) for addon, account in accounts.items()}
        self._budgets = budgets
        self._counts: dict[tuple[str, str], int] = {}
        #: By addon and the name of a window (this day, this month).
        self._spent: Counter[tuple[AddonId, str]] = Counter()
        self._spent_now: dict[AddonId, dict[str, Money]] = {}

    def ledger(self) -> Ledger:
        """For one host."""
        return Ledger(counts=self._counts, accounts=self._accounts, spent=self._spent_now)

    def set_addon(self, addon_id: AddonId, weight: int | None, paused: bool | None) -> None:
        """None: as before."""
        account = self._accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused

    def spend(self, addon_id: AddonId, amount: Money, now: Moment) -> list[Window]:
        """The windows in which the budget of this addon is spent now."""
        for window in windows(now):
            self._spent[addon_id, window.name] += amount
        self.count_spending(now)
        budget = self._budgets.get(addon_id)
        if budget is None:
            return []
        spent = self._spent_now.get(addon_id, {})
        return [w for w, limit in budget.limits(now) if spent.get(w.kind, 0) >= limit]

    def count_spending(self, now: Moment) -> None:
        """Let the ledgers see what was spent in the windows of this moment."""
        self._spent_now.clear()
        for window in windows(now):
            for (addon_id, name), amount in self._spent.items():
                if name == window.name:
                    self._spent_now.setdefault(addon_id, {})[window.kind] = amount
