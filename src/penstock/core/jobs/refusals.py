"""
All gates that refuse a job, and not only the first.

Admission stops at the first refusal, because a round must be quick. For explain, this module removes the
cause of each refusal in turn and evaluates the same gates again, so that the rules exist only once.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Conditions, Gates, Ledger
from penstock.core.jobs.load import Busy, Host
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
)
from penstock.core.jobs.round import RoundInputs
from penstock.core.jobs.types import SECOND, Moment

_ENDLESS = 1 << 40


def all_refusals(
    inputs: RoundInputs, admission_class: AdmissionClass, *, ready_at: Moment = 0, urgent: bool = False
) -> tuple[Reason, ...]:
    """All reasons that hold, in the order of the gates. The first is the one that a round records."""
    world = _World(inputs.conditions, inputs.view.ledger, inputs.limits, ready_at)
    return tuple(_refusals(world, admission_class, inputs.view.now, urgent))


def refusal_on(
    host: Host, inputs: RoundInputs, admission_class: AdmissionClass, *, urgent: bool = False
) -> Reason | None:
    """
    Why another host does not start such a job, by its registration; None: it could. The registration does not
    say how long the host has been quiet, nor how many jobs it runs.
    """
    now = inputs.view.now
    conditions = Conditions(
        host.capacity,
        host.quiet,
        streak=now,
        busy=Busy(0.0, "its registration"),
        draining=host.draining,
        labels=frozenset(host.labels),
    )
    ledger = replace(inputs.view.ledger, units=host.units, running=0)
    reason = Gates(admission_class, ledger, conditions, inputs.limits, now, urgent=urgent).refusal()
    return Draining(host.host) if isinstance(reason, Draining) else reason


class _World(Struct, frozen=True):
    """The values that the gates read."""

    conditions: Conditions
    ledger: Ledger
    limits: AdmissionLimits
    ready_at: Moment


def _refusals(
    world: _World | None, admission_class: AdmissionClass, now: Moment, urgent: bool
) -> Iterator[Reason]:
    while world is not None:
        gates = Gates(
            admission_class,
            world.ledger,
            world.conditions,
            world.limits,
            now,
            ready_at=world.ready_at,
            urgent=urgent,
        )
        reason = gates.refusal()
        if reason is None:
            return
        yield reason
        world = _without(world, reason, admission_class)


def _without(world: _World, reason: Reason, admission_class: AdmissionClass) -> _World | None:
    """The values with which this reason does not hold; None: it is no reason of a gate."""
    conditions, ledger, ready_at = world.conditions, world.ledger, world.ready_at
    match reason:
        case LabelMissing(labels):
            conditions = replace(conditions, labels=conditions.labels | set(labels))
        case Draining():
            conditions = replace(conditions, draining=False)
        case Paused(scope):
            accounts = {
                addon_id: replace(account, paused=account.paused and addon_id != scope)
                for addon_id, account in ledger.accounts.items()
            }
            ledger = replace(ledger, accounts=accounts)
        case NotReady():
            ready_at = 0
        case NotQuiet(wants=wants):
            conditions = replace(conditions, quiet=wants)
        case NotQuietLongEnough(wants_sec=wants_sec):
            conditions = replace(conditions, streak=wants_sec * SECOND)
        case CapReached("concurrent", _, limit):
            ledger = replace(ledger, running=limit - 1)
        case CapReached(scope, name, limit):
            ledger = replace(ledger, counts={**ledger.counts, (scope, name): limit - 1})
        case BudgetSpent(window=window, limit=limit):
            addon_id = admission_class.addon_id
            spent = {**ledger.spent.get(addon_id, {}), window: limit - 1}
            ledger = replace(ledger, spent={**ledger.spent, addon_id: spent})
        case NotEnoughUnits():
            conditions = replace(conditions, capacity=_ENDLESS)
        case _:
            return None
    return _World(conditions, ledger, world.limits, ready_at)
