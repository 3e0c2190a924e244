"""
Admission: whether a job of an admission class may start now (`Gates`), and the ledger that decides it. Lease
requests, the dispatcher, explain and simulation all use the same `Gates`.

The first gate that refuses gives the reason, in this order: labels, draining, paused, not yet ready, the
quiet state, caps, budget, units. Units come last, so "not enough units" means that nothing else is in the
way, and the round may keep units for the job.

The ledger holds units and counts in flight, and each addon's fair-share account. A round changes its own copy
as it picks, so the second pick sees the first; the store writes the difference. Units and counts are sums
over live dispatches, and `audit` compares them with these.

Fair share compares how much each addon has used lately, in relation to its weight. An account is the
exponentially weighted average of the units that an addon holds. It consists of two numbers and a moment, so
it is exact at any moment without reading a dispatch. A job of ten hours counts while it runs, and an addon
that was idle for a week has about the credit of one half-life. Virtual start times (SFQ) were considered on
paper and rejected: with bands, one addon's start in a high band would wipe out the differences below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Busy, QuietState
from penstock.core.jobs.reasons import (
    BudgetSpent,
    CapReached,
    Draining,
    LabelMissing,
    NotEnoughUnits,
    NotQuiet,
    NotQuietLongEnough,
    NotReady,
    Paused,
    Reason,
    UnitsKept,
)
from penstock.core.jobs.types import (
    HOUR,
    MINUTE,
    SECOND,
    AddonId,
    Constraint,
    JobId,
    Moment,
    Money,
    Priority,
    RunWhen,
    Span,
    moment_of,
    seconds,
)


class AdmissionClass(Struct, frozen=True, gc=False):
    """
    The part of an intent that admission looks at. Two jobs of one class get the same decision at the same
    moment, so a round looks only at the head of each ready queue. Anything else that admission will depend on
    must become a field here.
    """

    addon_id: AddonId
    job_type: str
    cost_units: int
    constraints: Constraint = Constraint.NONE
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: int = 0
    #: HIGH and up may start on a BUSY machine.
    high: bool = False
    #: Grows by one when the expected duration doubles. Only similar durations share a ready queue, so that a
    #: long job at its head does not hide a short one that could run in kept units. 0: no duration is known.
    duration_class: int = 0
    #: In alphabetical order.
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        *parts, labels = astuple(self)
        words = [str(int(part) if isinstance(part, int) else part) for part in parts]
        return "\x1f".join([*words, " ".join(labels)] if labels else words)


def admission_class_of(intent: Intent) -> AdmissionClass:
    expected = intent.expected_duration_sec
    return AdmissionClass(
        addon_id=intent.addon_id,
        job_type=intent.job_type,
        cost_units=intent.cost_units,
        constraints=Constraint(intent.constraints),
        run_when=RunWhen(intent.run_when),
        quiet_for_sec=intent.quiet_for_sec,
        high=intent.priority >= Priority.HIGH,
        duration_class=0 if expected is None else max(1, (int(-(-expected // 1)) - 1).bit_length()),
        labels=tuple(sorted(intent.labels)) if intent.labels else (),
    )


UNMEASURED = Busy(0.0, "fixed capacity")


class Conditions(Struct, frozen=True):
    """The state of the host at one moment."""

    capacity: int
    quiet: QuietState = QuietState.QUIET
    streak: Span = 0
    busy: Busy = UNMEASURED
    draining: bool = False
    labels: frozenset[str] = frozenset()

    def missing(self, admission_class: AdmissionClass) -> tuple[str, ...]:
        """The labels that a job of the class requires and this host does not have."""
        if not admission_class.labels:  # the usual case; every round checks every ready queue
            return ()
        return tuple(label for label in admission_class.labels if label not in self.labels)


class Caps(Struct, frozen=True):
    """
    How many dispatches may be in flight at once. `per_addon` and `per_type` hold for each name that `addons`
    and `types` do not have.
    """

    concurrent: int | None = None
    per_addon: int | None = None
    addons: Mapping[str, int] = field(default_factory=dict)
    per_type: int | None = None
    types: Mapping[str, int] = field(default_factory=dict)  # "addon/type", or "type" in any addon
    constraints: Mapping[str, int] = field(default_factory=dict)

    def limit(self, scope: str, name: str) -> int | None:
        match scope:
            case "addon":
                return self.addons.get(name, self.per_addon)
            case "type":
                return self.types.get(name, self.types.get(name.partition("/")[2], self.per_type))
            case _:
                return self.constraints.get(name)

    @property
    def by_name(self) -> bool:
        """Whether there is a cap for an addon, a type or a constraint; most schedulers have none."""
        one_for_all = self.per_addon is not None or self.per_type is not None
        return one_for_all or bool(self.addons or self.types or self.constraints)

    def limits_of(self, admission_class: AdmissionClass) -> list[tuple[tuple[str, str], int]]:
        """The ledger rows of this class that have a cap, each with its cap."""
        return [(key, limit) for key in keys_of(admission_class) if (limit := self.limit(*key)) is not None]


class Window(Struct, frozen=True):
    """A day or a month (UTC) for which spending is summed up."""

    kind: str  # day or month
    name: str  # 2026-11-16, 2026-11
    ends_at: Moment


def windows(now: Moment) -> tuple[Window, Window]:
    """The day and the month of this moment."""
    return _windows_of_day(now // (24 * HOUR))


@lru_cache(maxsize=8)
def _windows_of_day(day: int) -> tuple[Window, Window]:
    """Cached: every round needs the windows, and they change only at midnight."""
    midnight = datetime.fromtimestamp(day * 86_400, UTC)
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (
        Window("day", f"{midnight:%Y-%m-%d}", moment_of(midnight + timedelta(days=1))),
        Window("month", f"{midnight:%Y-%m}", moment_of(next_month)),
    )


class Budget(Struct, frozen=True):
    """How much an addon may spend in a day and in a month."""

    day: Money | None = None
    month: Money | None = None

    def limits(self, now: Moment) -> Iterator[tuple[Window, Money]]:
        """The windows that have a limit, each with its limit."""
        for window, limit in zip(windows(now), (self.day, self.month), strict=True):
            if limit is not None:
                yield window, limit


class AdmissionLimits(Struct, frozen=True):
    caps: Caps = Caps()
    budgets: Mapping[AddonId, Budget] = field(default_factory=dict)


class Kept(Struct):
    """Units kept for a job that was passed over. `spare` units stay free even when that job has started."""

    job_id: JobId
    needs: int
    starts_at: Moment | None
    spare: int

    def lets_past(self, cost: int, ends_at: Moment | None) -> bool:
        return cost <= self.spare or self.ends_before(ends_at)

    def ends_before(self, ends_at: Moment | None) -> bool:
        return ends_at is not None and self.starts_at is not None and ends_at <= self.starts_at


class Gates:
    """
    The gates for one admission class. Gates that cannot change during a round are evaluated once, the others
    for every job. `urgent`: the jobs are time-sensitive and near their deadlines.
    """

    __slots__ = (
        "_admission_class", "_budget", "_capacity", "_caps", "_concurrent", "_cost", "_ledger", "_shut",
    )  # fmt: skip

    def __init__(
        self,
        admission_class: AdmissionClass,
        ledger: Ledger,
        conditions: Conditions,
        limits: AdmissionLimits,
        now: Moment,
        *,
        ready_at: Moment = 0,
        urgent: bool = False,
    ) -> None:
        self._admission_class, self._cost = admission_class, admission_class.cost_units
        self._ledger, self._capacity = ledger, conditions.capacity
        self._shut = _shut(admission_class, ledger, conditions, now, ready_at=ready_at, urgent=urgent)
        caps = limits.caps
        self._concurrent = caps.concurrent
        self._caps = caps.limits_of(admission_class) if caps.by_name else ()
        self._budget = _budget(admission_class, ledger, limits, now) if limits.budgets else None

    @property
    def keys(self) -> list[tuple[str, str]]:
        return keys_of(self._admission_class)

    def refusal(self, kept: Kept | None = None, ends_at: Moment | None = None) -> Reason | None:
        """Why the next job may not start; None: it may. `ends_at`: its expected end if it starts now."""
        return self._shut or self._cap() or self._budget or self._room(kept, ends_at)

    def room_for(self) -> int:
        """How many jobs may start while no units are kept. `refusal` then says why no further job may."""
        if self._shut or self._budget:
            return 0
        ledger = self._ledger
        room = (self._capacity - ledger.units) // self._cost
        if self._concurrent is not None:
            room = min(room, self._concurrent - ledger.running)
        for key, limit in self._caps:
            room = min(room, limit - ledger.counts.get(key, 0))
        return max(0, room)

    def _cap(self) -> Reason | None:
        if self._concurrent is not None and self._ledger.running >= self._concurrent:
            return CapReached("concurrent", "", self._concurrent)
        for key, limit in self._caps:
            if self._ledger.counts.get(key, 0) >= limit:
                return CapReached(*key, limit)
        return None

    def _room(self, kept: Kept | None, ends_at: Moment | None) -> Reason | None:
        free = max(0, self._capacity - self._ledger.units)
        if self._cost > free:
            return NotEnoughUnits(self._cost, free, self._capacity)
        if kept is not None and not kept.lets_past(self._cost, ends_at):
            return UnitsKept(kept.job_id, kept.needs, kept.starts_at)
        return None


def _shut(
    admission_class: AdmissionClass,
    ledger: Ledger,
    conditions: Conditions,
    now: Moment,
    *,
    ready_at: Moment,
    urgent: bool,
) -> Reason | None:
    """The reason of the first gate that refuses for the whole round."""
    if missing := conditions.missing(admission_class):
        return LabelMissing(missing)
    if conditions.draining:
        return Draining()
    scope = ledger.paused(admission_class.addon_id)
    if scope is not None:
        return Paused(scope)
    if ready_at > now:
        return NotReady(ready_at)
    if conditions.quiet is not _QUIET:  # on a QUIET host every job may start
        wants = _worst_allowed(admission_class, urgent)
        if _RANK[conditions.quiet] > _RANK[wants]:
            return NotQuiet(conditions.quiet, wants, conditions.busy.score, conditions.busy.by)
    if admission_class.quiet_for_sec and not urgent:
        streak_sec = seconds(conditions.streak)
        if admission_class.quiet_for_sec > streak_sec:
            return NotQuietLongEnough(streak_sec, admission_class.quiet_for_sec)
    return None


#: Looked up once: in Python 3.11 the lookup takes longer than the check.
_QUIET: Final = QuietState.QUIET
_RANK = {state: rank for rank, state in enumerate(QuietState)}


def _worst_allowed(admission_class: AdmissionClass, urgent: bool) -> QuietState:
    if urgent or admission_class.run_when is RunWhen.ANY:
        return QuietState.BUSY
    if admission_class.run_when is RunWhen.QUIET:
        return QuietState.QUIET
    return QuietState.BUSY if admission_class.high else QuietState.NORMAL


def _budget(
    admission_class: AdmissionClass, ledger: Ledger, limits: AdmissionLimits, now: Moment
) -> Reason | None:
    budget = limits.budgets.get(admission_class.addon_id)
    if budget is None:
        return None
    spent = ledger.spent.get(admission_class.addon_id, {})
    for window, limit in budget.limits(now):
        if (amount := spent.get(window.kind, 0)) >= limit:
            return BudgetSpent(window.kind, amount, limit, window.ends_at, admission_class.addon_id)
    return None


#: Stands for all addons: pausing it pauses everything.
EVERYTHING = AddonId("*")


class Ledger(Struct):
    """What is in flight and what was spent, as admission counts it."""

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
        """A copy as if these dispatches had ended, to see what would be admitted then. Shares stay."""
        ledger = replace(self, counts=dict(self.counts))
        for admission_class in ended:
            ledger.units -= admission_class.cost_units
            ledger.running -= 1
            for name in keys_of(admission_class):
                ledger.counts[name] -= 1
        return ledger


def keys_of(admission_class: AdmissionClass) -> list[tuple[str, str]]:
    """The ledger rows in which a dispatch counts, besides that of its host."""
    addon_id = admission_class.addon_id
    keys: list[tuple[str, str]] = [
        ("addon", addon_id),
        ("type", f"{addon_id}/{admission_class.job_type}"),
    ]
    if admission_class.constraints:
        keys += [("constraint", name) for name in admission_class.constraints.names]
    return keys


class FairShare(Struct, frozen=True):
    half_life: Span = 5 * MINUTE
    #: Accounts are compared as they will be this far ahead, so that starts of the same round already count.
    ahead: Span = 10 * SECOND


class Account(Struct):
    """An addon's fair-share account. `units`: of its live dispatches now. `average`: its use until `at`."""

    weight: int = 100
    paused: bool = False
    average: float = 0.0
    units: int = 0
    at: Moment = 0

    def key(self, now: Moment, sharing: FairShare) -> float:
        """The smaller the key, the further the addon is below its share."""
        return self._then(now + sharing.ahead, sharing) / self.weight

    def hold(self, units: int, now: Moment, sharing: FairShare) -> None:
        """Count units as held from now on. Negative units are given back."""
        self.average = self._then(now, sharing)
        self.at = max(self.at, now)
        self.units += units

    def _then(self, moment: Moment, sharing: FairShare) -> float:
        if moment <= self.at:
            return self.average
        gone: float = 0.5 ** ((moment - self.at) / sharing.half_life)
        return self.units + (self.average - self.units) * gone
