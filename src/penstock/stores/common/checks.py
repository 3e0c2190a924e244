"""
What every store refuses (submits, hosts, commits whose outcome is unknown), with one wording, and the audit
of a whole store.

The audit recomputes every total from its rows and checks every invariant. `db check` runs it, and the
simulation runs it after each commit.
"""

#: The rows that a named statement answers with.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from penstock.core.errors import DispatcherHeld, KeyConflict, OutcomeUnknown, QueueFull
from penstock.core.jobs.admission import keys_of
from penstock.core.jobs.changes import Note, principal_data
from penstock.core.jobs.intent import AdmissionClass, Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Host
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import HostId, JobId
from penstock.stores.api import Receipt


class BatchUnknown(OutcomeUnknown):
    """Of operations that share a transaction. `answers`: the answer to each, if they were written."""

    def __init__(self, error: OutcomeUnknown, answers: Sequence[Any]) -> None:
        super().__init__(str(error), **error.data)
        self.answers = answers


def key_conflict(intent: Intent, job_id: JobId | None) -> KeyConflict:
    return KeyConflict(
        f"idempotency_key {intent.idempotency_key!r} was used for another job",
        field="idempotency_key",
        job_id=job_id,
    )


def refuse_beyond(limit: int, queued: int, more: int, where: str) -> None:
    if queued + more > limit:
        raise QueueFull(
            f"{queued} jobs are queued {where}, the limit is {limit}",
            limit=limit,
            queued=queued,
            retry_after_sec=5,
        )


def with_jobs(error: OutcomeUnknown, answer: Iterable[Any]) -> OutcomeUnknown:
    """A submit whose outcome is unknown is told which jobs exist if it was written."""
    jobs = list(dict.fromkeys(receipt.job_id for receipt in answer if isinstance(receipt, Receipt)))
    if not jobs:
        return error
    more = f" and {len(jobs) - 3} more" if len(jobs) > 3 else ""
    words = f"{error}. Ask for job {', '.join(jobs[:3])}{more}, or submit again with the same idempotency key"
    return OutcomeUnknown(words, **{**error.data, "job_ids": jobs})


def name_taken(host: Host) -> DispatcherHeld:
    return DispatcherHeld(
        f"another scheduler that is alive on this database is called {host.host} too: give this one a name of its own (host.name)",
        holder=host.host,
    )


def drain_note(host: HostId, draining: bool, by: str) -> Note:
    return Note(EventKind.HOST_SET, data={"host": host, "draining": draining, **principal_data(by)})


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
