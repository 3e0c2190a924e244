"""
The ledger: units and counts in flight, and each addon's fair-share account.

A round changes its own copy as it picks, so the second pick sees the first; the store writes the difference.
Units and counts are sums over live dispatches, which is how `audit` proves them.

Fair share compares how much each addon has used lately, for its weight.

An account is the exponentially weighted average of the units that an addon holds, so cost-unit-seconds within
a window that slides without edges. Two numbers and a moment carry it: it is exact at any moment without
reading a single dispatch, a job of ten hours counts while it runs, and an addon that was idle comes back with
the credit of one half-life and not of a week. Virtual start times (SFQ) were weighed against it, on paper:
with bands, one addon's start in a high band would wipe out the differences below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.types import MINUTE, SECOND, AddonId, Moment, Span

#: The addon that stands for all of them: pausing it pauses everything.
EVERYTHING = AddonId("*")


class Ledger(Struct):
    units: int = 0  # reserved, leased and ending, on this host
    running: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=dict)  # in flight, on all hosts
    accounts: dict[AddonId, Account] = field(default_factory=dict)
    spent: Mapping[AddonId, Mapping[str, int]] = field(default_factory=dict)  # by window: day, month

    def share(self, addon_id: AddonId, now: Moment, sharing: FairShare) -> float:
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
        admission_class: AdmissionClass,
        now: Moment,
        sharing: FairShare,
        keys: Sequence[tuple[str, str]] | None = None,
        n: int = 1,
    ) -> None:
        """Count `n` more dispatches of this class. `keys`: the class's `keys_of`, if the caller has them."""
        account = self.accounts.get(admission_class.addon_id) or self.accounts.setdefault(
            admission_class.addon_id, Account()
        )
        account.hold(n * admission_class.cost_units, now, sharing)
        self.units += n * admission_class.cost_units
        self.running += n
        for name in keys_of(admission_class) if keys is None else keys:
            self.counts[name] = self.counts.get(name, 0) + n

    def without(self, ended: Iterable[AdmissionClass]) -> Ledger:
        """A copy as if these had ended, to try out what would be admitted then. Shares stay."""
        ledger = replace(self, counts=dict(self.counts))
        for admission_class in ended:
            ledger.units -= admission_class.cost_units
            ledger.running -= 1
            for name in keys_of(admission_class):
                ledger.counts[name] -= 1
        return ledger


def keys_of(admission_class: AdmissionClass) -> list[tuple[str, str]]:
    """The ledger rows that a dispatch counts in, besides its host's."""
    return [
        ("addon", admission_class.addon_id),
        ("type", f"{admission_class.addon_id}/{admission_class.job_type}"),
        *(("constraint", name) for name in admission_class.constraints.names),
    ]


class FairShare(Struct, frozen=True):
    half_life: Span = 5 * MINUTE
    #: Accounts compare as they will be this far ahead: two starts within one round must already count.
    ahead: Span = 10 * SECOND


class Account(Struct):
    """An addon's fair-share account. `units` is the sum over live dispatches; only `average` has a past."""

    weight: int = 100
    paused: bool = False
    average: float = 0.0
    units: int = 0
    at: Moment = 0

    def key(self, now: Moment, sharing: FairShare) -> float:
        """The smaller the key, the further the addon is below its share."""
        return self._then(now + sharing.ahead, sharing) / self.weight

    def hold(self, units: int, now: Moment, sharing: FairShare) -> None:
        """Negative units give back."""
        self.average = self._then(now, sharing)
        self.at = max(self.at, now)
        self.units += units

    def _then(self, moment: Moment, sharing: FairShare) -> float:
        if moment <= self.at:
            return self.average
        gone: float = 0.5 ** ((moment - self.at) / sharing.half_life)
        return self.units + (self.average - self.units) * gone
