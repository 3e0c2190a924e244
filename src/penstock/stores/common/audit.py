"""
Every sum recomputed from the rows it is a sum of, and every invariant asked for. Behind `db check`, and behind every commit of the simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from penstock.core.jobs.end_rules import DispatchPhase
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.ledger import keys_of
from penstock.core.jobs.states import JobState

__all__ = ["audit"]

#: The rows that a named statement answers with.
Ask: TypeAlias = Callable[[str], Iterable[Any]]


def audit(ask: Ask, demand_of: Callable[[int], AdmissionClass]) -> Iterator[str]:
    yield from _sums(ask, demand_of)
    yield from _jobs(ask)


def _sums(ask: Ask, demand_of: Callable[[int], AdmissionClass]) -> Iterator[str]:
    units: Counter[tuple[str, str]] = Counter()
    running: Counter[tuple[str, str]] = Counter()
    held: Counter[str] = Counter()
    for dispatch_id, host, cost, addon_id, class_no, phase, fence, job_id, state, job_fence in list(
        ask("audit_dispatches")
    ):
        held[addon_id] += cost
        for key in [("host", host), *keys_of(demand_of(class_no))]:
            units[key] += cost
            running[key] += 1
        expected = JobState.DISPATCHING if phase == DispatchPhase.RESERVED else JobState.RUNNING
        if job_id is not None and (state != expected or fence != job_fence):
            yield f"dispatch {dispatch_id} is {phase}, its job is {state} with fence {job_fence}"
    ledger = {(scope, name): (u, r) for scope, name, u, r in ask("ledger")}
    for key in ledger.keys() | units.keys():
        if ledger.get(key, (0, 0)) != (units[key], running[key]):
            yield f"ledger {key} says {ledger.get(key)}, its dispatches say {(units[key], running[key])}"
    for addon_id, _, _, _, account, _ in ask("addons"):
        if account != held[addon_id]:
            yield f"account {addon_id} holds {account}, its dispatches hold {held[addon_id]}"


def _jobs(ask: Ask) -> Iterator[str]:
    tally = {(addon_id, state): n for addon_id, state, n in ask("tally")}
    counted = {(addon_id, state): n for addon_id, state, n in ask("audit_tally")}
    if tally != counted:
        yield f"the tally says {tally}, the jobs are {counted}"
    for name, problem in (
        ("audit_in_flight", "is in flight without a live dispatch"),
        ("audit_trail", "has a gap in its events"),
        ("audit_fold", "is not in the state its last event tells"),
    ):
        for (job_id,) in ask(name):
            yield f"job {job_id} {problem}"
