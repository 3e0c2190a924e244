"""
Who holds what: units and counts in flight, and each addon's account.

A round changes its own copy as it picks, so the second pick of a tick sees the first; the store writes the difference.
Units and counts are sums over the dispatches that live, which is how `audit` can prove them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.demand import Demand
from penstock.core.share import Account, Sharing
from penstock.core.words import AddonId, Moment

__all__ = ["EVERYTHING", "Books", "keys_of"]

#: The addon that stands for all of them: pausing it pauses everything.
EVERYTHING = AddonId("*")


@dataclass(slots=True)
class Books:
    units: int = 0  # reserved, leased and ending, on this host
    running: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)  # in flight, on all hosts
    accounts: dict[AddonId, Account] = field(default_factory=dict)
    spent: Mapping[AddonId, Mapping[str, int]] = field(default_factory=dict)  # by window: day, month

    def share(self, addon_id: AddonId, now: Moment, sharing: Sharing) -> float:
        account = self.accounts.get(addon_id)
        return 0.0 if account is None else account.key(now, sharing)

    def paused(self, addon_id: AddonId) -> AddonId | None:
        for scope in (EVERYTHING, addon_id):
            account = self.accounts.get(scope)
            if account is not None and account.paused:
                return scope
        return None

    def take(
        self,
        demand: Demand,
        now: Moment,
        sharing: Sharing,
        keys: Sequence[tuple[str, str]] | None = None,
        n: int = 1,
    ) -> None:
        """`n` of them. `keys`: those of this demand, where somebody has them at hand."""
        account = self.accounts.get(demand.addon_id) or self.accounts.setdefault(demand.addon_id, Account())
        account.hold(n * demand.cost_units, now, sharing)
        self.units += n * demand.cost_units
        self.running += n
        for name in keys_of(demand) if keys is None else keys:
            self.counts[name] = self.counts.get(name, 0) + n

    def without(self, ended: Iterable[Demand]) -> Books:
        """As if these had ended: to try out what would be admitted then. Shares are left as they are."""
        books = replace(self, counts=dict(self.counts))
        for demand in ended:
            books.units -= demand.cost_units
            books.running -= 1
            for name in keys_of(demand):
                books.counts[name] -= 1
        return books


def keys_of(demand: Demand) -> list[tuple[str, str]]:
    """The ledger rows that a dispatch counts in, besides its host's."""
    return [
        ("addon", demand.addon_id),
        ("type", f"{demand.addon_id}/{demand.job_type}"),
        *(("constraint", name) for name in demand.constraints.names),
    ]
