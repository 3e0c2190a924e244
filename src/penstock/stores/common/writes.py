"""
The decisions that stores share when they write: which jobs a submit adds, the rows of dispatches that a round
starts and of jobs that it denies, what heartbeats change, and the row of an event. A store reads the rows for
them and writes the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec.structs import replace

from penstock.core.errors import BadIntent
from penstock.core.jobs.admission import windows
from penstock.core.jobs.changes import Note, Renewal
from penstock.core.jobs.dependencies import (
    LOCAL,
    IfUnmet,
    ParentCondition,
    batch_of,
    position,
    stored_parents,
    submit_order,
    unknown_parent,
)
from penstock.core.jobs.groups import JobGroup, check_members
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind
from penstock.core.jobs.load import Host
from penstock.core.jobs.load_hours import NEWEST
from penstock.core.jobs.ordering import Aging, ready_at
from penstock.core.jobs.round import Pick, Placement, RoundResult, running_data, stop_moment
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, JobId, Moment, Money
from penstock.stores.api import (
    LOST_FOR,
    Admit,
    Depth,
    Learn,
    Receipt,
    RecordLoad,
    RemoveHost,
    Renew,
    key_conflict,
    name_taken,
)
from penstock.stores.common.reads import SqlSession
from penstock.stores.common.rows import Queued, body_hash, encode, host_values, new_dispatch

# events


class EventJob(NamedTuple):
    """
    The job of an event: its number and id, the event's number within the job, and the job's state after it.
    """

    no: int | None
    job_id: JobId | None
    n: int
    state: JobState | None


NO_JOB: Final = EventJob(None, None, 0, None)
#: An event in the order that `pack_events` expects: at, kind, job_id, n, state, reason, attempt, data.
EventRow: TypeAlias = tuple[
    Moment, str, str | None, int, str | None, str, str | None, Mapping[str, Any] | None
]


def event_row(at: Moment, note: Note, job: EventJob, dispatch_id: DispatchId | None = None) -> EventRow:
    attempt: str | None = dispatch_id
    if job.job_id is not None and dispatch_id is not None:
        attempt = dispatch_id[len(job.job_id) + 1 :]
    return at, note.kind, job.job_id, job.n, job.state, note.reason, attempt, note.data or None


# rounds

#: As text: the encoder needs half as long for a str as for a member of an enumeration.
_DISPATCHING, _RUNNING = str(EventKind.DISPATCHING), str(EventKind.RUNNING)
_IS_DISPATCHING, _IS_RUNNING = str(JobState.DISPATCHING), str(JobState.RUNNING)
#: When a leased job must be stopped, and the reason.
StopLimit: TypeAlias = tuple[Moment | None, EndReason | None]


def stop_limit(pick: Pick, now: Moment) -> StopLimit:
    queued = pick.waiting
    assert isinstance(queued, Queued)
    return stop_moment(queued.max_runtime_sec, queued.max_active_sec, queued.active, now)


def start_dispatch(
    pick: Pick, limit: StopLimit, admit: Admit, now: Moment, aging: Aging
) -> tuple[Dispatch, Sequence[EventRow]]:
    """The dispatch of a job that a round has picked, and its events. With a lease the job runs at once."""
    queued = pick.waiting
    assert isinstance(queued, Queued)
    job_id, n, attempt = queued.job_id, queued.events + 1, str(queued.fence + 1)
    dispatch = new_dispatch(
        DispatchId(f"{job_id}.{attempt}"),
        queued,
        pick.admission_class,
        pick.offer,
        admit.terms,
        host=admit.host,
        now=now,
        ends_at=pick.ends_at,
        limits=limit,
    )
    admitted = (now, _DISPATCHING, job_id, n, _IS_DISPATCHING, "admitted", attempt, None)
    if pick.offer is not Placement.LEASE:
        return dispatch, (admitted,)
    data = running_data(admit.terms.worker, now - ready_at(queued.turn, queued.priority, aging))
    return dispatch, (admitted, (now, _RUNNING, job_id, n + 1, _IS_RUNNING, "", attempt, data))


def denial_rows(result: RoundResult, now: Moment, add_note: Callable[..., None]) -> list[tuple[Any, ...]]:
    """The rows for the statement `deny_jobs`; `add_note` gets the event of each denial."""
    rows: list[tuple[Any, ...]] = []
    for denial in result.denials:
        queued, code, data = cast("Queued", denial.waiting), denial.reason.code, denial.as_json()
        n = queued.events + 1
        job = EventJob(queued.no, queued.job_id, n, JobState.QUEUED)
        add_note(now, Note(EventKind.DENIED, code, data), job)
        rows.append((code, encode(data) or "{}", now, n, queued.no))
    return rows


# submits

#: For each addon and idempotency key: the receipt of its job (None: not submitted yet) and the hash of the
#: submitted intent.
UsedKeys: TypeAlias = dict[tuple[AddonId, str], tuple[Receipt | None, bytes]]


def key_of(intent: Intent) -> tuple[AddonId, str] | None:
    return None if intent.idempotency_key is None else (intent.addon_id, intent.idempotency_key)


def submit_intents(
    intents: Sequence[Intent],
    depth: Depth,
    used: UsedKeys,
    *,
    queued: Callable[[AddonId | None], int],
    insert: Callable[[int, Intent], Receipt],
    existing: Callable[[Collection[JobId]], Collection[JobId]],
    batches: Callable[[Collection[JobId]], Mapping[JobId, JobGroup]],
    waiting: Callable[[Collection[JobId], Collection[JobId]], Iterable[tuple[JobId, JobId]]],
    written: Mapping[int, Receipt] = MappingProxyType({}),
) -> list[Receipt]:
    """
    Submit intents and return their receipts. `insert` adds a job; it gets the position of the intent, and the
    intent with the ids of its parents. `used`: the keys of these intents that have a job already; keys of new
    jobs are added to it. `existing` tells which of these jobs and groups exist. `batches` locks these batches
    and returns them. `waiting` gives pairs of one of these batches and one of these parents that waits for it,
    directly or through others. `written`: receipts of jobs that exist already, by position.

    A submit that conflicts with a key is refused for that before it is refused for its size, and before any
    job is added.
    """
    new: list[Intent] = []
    for at, intent in enumerate(intents):
        key = key_of(intent)
        if key is not None:
            receipt, used_hash = used.setdefault(key, (None, body_hash(intent)))
            if used_hash != body_hash(intent):
                raise key_conflict(intent, None if receipt is None else receipt.job_id)
        if at not in written and (key is None or used[key][0] is None):
            new.append(intent)
    parents = set[JobId]()
    if children := [intent for intent in new if intent.after]:
        parents = stored_parents(children)
        for unknown in sorted(parents - set(existing(parents))):
            raise unknown_parent(unknown)
        _check_parents_differ(intents, used, written)
    added = added_members(new)
    if added:
        check_members(batches(added), added)
    pairs = waiting(added, parents) if added and parents else ()
    order = submit_order(intents, pairs) if children else range(len(intents))
    depth.check(new, queued)
    receipts: dict[int, Receipt] = {}
    for at in order:
        intent = intents[at]
        key = key_of(intent)
        receipt = written.get(at) or (None if key is None else used[key][0])
        if receipt is None:
            receipt = insert(at, _with_ids(intent, receipts) if intent.after else intent)
            if key is not None:
                used[key] = (replace(receipt, created=False), used[key][1])
        receipts[at] = receipt
    return [receipts[at] for at in range(len(intents))]


def added_members(intents: Iterable[Intent]) -> Counter[JobId]:
    """How many of these new jobs are members of each batch."""
    return Counter(batch for intent in intents if intent.tags and (batch := batch_of(intent)) is not None)


#: `condition` and `if_unmet` of a batch's dependency on a member. They are not read: a batch counts every
#: end.
MEMBERSHIP: Final = (str(ParentCondition.DONE), str(IfUnmet.CANCEL))


def new_dependencies(job_id: JobId, intent: Intent) -> list[tuple[JobId, JobId, str, str]]:
    """
    The rows of a new job in `dependency`: parent, child, condition, if_unmet. A batch is a child of its
    members.
    """
    rows = [(d.job_id, job_id, str(d.condition), str(intent.if_unmet)) for d in intent.after]
    batch = batch_of(intent) if intent.tags else None
    return rows if batch is None else [*rows, (job_id, batch, *MEMBERSHIP)]


def _check_parents_differ(intents: Sequence[Intent], used: UsedKeys, written: Mapping[int, Receipt]) -> None:
    """
    Refuse a new job that names one parent in two ways. An idempotency key can make one job of two positions, or of a
    position and an id. BadIntent.
    """
    first_of_key: dict[tuple[AddonId, str], str] = {}
    names: dict[int, str] = {}
    is_new: list[bool] = []
    for at, intent in enumerate(intents):
        key = key_of(intent)
        receipt = written.get(at) or (None if key is None else used[key][0])
        is_new.append(receipt is None)
        if receipt is not None:
            names[at] = receipt.job_id
        elif key is not None:
            names[at] = first_of_key.setdefault(key, f"{LOCAL}{at}")
    if not names:
        return
    for at, intent in enumerate(intents):
        parents: dict[str, str] = {}
        for dependency in intent.after if is_new[at] else ():
            parent = position(dependency.job_id)
            name = dependency.job_id if parent is None else names.get(parent, dependency.job_id)
            if name in parents:
                twice = f"{parents[name]} and {dependency.job_id}"
                raise BadIntent.of(
                    ("after", f"of job {LOCAL}{at} names one job twice: {twice}, by an idempotency_key")
                )
            parents[name] = dependency.job_id


def _with_ids(intent: Intent, receipts: Mapping[int, Receipt]) -> Intent:
    """The intent with the ids of those parents that it names by their position in the same submit."""
    positions = [(dependency, position(dependency.job_id)) for dependency in intent.after]
    after = tuple(
        d if at is None else replace(d, job_id=receipts[at].job_id, named=d.job_id) for d, at in positions
    )
    return replace(intent, after=after)


def new_job_id(receipt: Receipt | None) -> JobId | None:
    """The id of the job that the submit added. None: it added none, because the key had a job already."""
    return receipt.job_id if receipt is not None and receipt.created else None


# heartbeats


@dataclass(slots=True)
class Renewed:
    """
    A dispatch, and those fields of its job that a heartbeat may change: a row of `dispatches_for_beats`.
    """

    dispatch_id: DispatchId
    phase: str
    expires_at: Moment
    reason: str | None
    addon_id: AddonId
    spent: int
    progress: float | None
    fence: int
    no: int | None
    job_id: JobId | None
    job_spent: int
    spent_before: int
    events: int
    #: Where the dispatch is stored: the number of its flight on PostgreSQL, its own number on SQLite.
    place: int
    job_progress: float | None
    cost_limit: int | None
    unit: str | None
    pid: int | None
    renewed: bool = False
    hastened: bool = False
    job_changes: bool = False


class Heartbeats:
    """
    Applies the heartbeats of one transaction to rows, one after the other. A store then writes only the
    dispatches and jobs that changed. `rows`: of `dispatches_for_beats`. `add_note` adds an event to the
    transaction.
    """

    def __init__(self, now: Moment, rows: Sequence[Any], add_note: Callable[..., None]) -> None:
        self._now, self._add_note = now, add_note
        self._dispatches = {row[0]: Renewed(*row) for row in rows}
        self._spent: Counter[tuple[str, str]] = Counter()
        self._addon_spent: dict[tuple[str, str], Money] = {}
        #: By the job's number: number, moment, fence, text.
        self.checkpoints: dict[int, tuple[Any, ...]] = {}

    def renew_all(
        self,
        operations: Sequence[Renew],
        spend: Callable[[list[tuple[str, str, Money]]], Sequence[tuple[str, str, Money]]],
    ) -> list[list[RenewedDispatch | None]]:
        """
        Apply all heartbeats. `spend` adds amounts to addons by period, and returns what each has spent by
        then.
        """
        renewed = [[self._renew(renewal) for renewal in operation.renewals] for operation in operations]
        if self._spent:  # sorted: every transaction locks them in this order, so none deadlocks
            for addon_id, period, spent in spend([(*key, paid) for key, paid in sorted(self._spent.items())]):
                self._addon_spent[addon_id, period] = spent - self._spent[addon_id, period]
        return [
            [None if renewed is None else self._write_notes(renewed, operation) for renewed in row]
            for operation, row in zip(operations, renewed, strict=True)
        ]

    @property
    def renewed(self) -> list[Renewed]:
        return [dispatch for dispatch in self._dispatches.values() if dispatch.renewed]

    def _renew(self, renewal: Renewal) -> RenewedDispatch | None:
        dispatch = self._dispatches.get(renewal.dispatch_id)
        if (
            dispatch is None
            or dispatch.phase not in (DispatchPhase.LEASED, DispatchPhase.ENDING)
            or dispatch.expires_at <= self._now
        ):
            return None
        dispatch.renewed = True
        if dispatch.phase == DispatchPhase.LEASED:
            dispatch.hastened |= renewal.expires_at < dispatch.expires_at
            dispatch.expires_at = renewal.expires_at
        paid = max(0, (renewal.spent or 0) - dispatch.spent)
        dispatch.spent += paid
        if renewal.progress is not None:
            dispatch.progress = renewal.progress
        if renewal.pid is not None:
            dispatch.pid = renewal.pid
        before = 0 if dispatch.no is None else dispatch.job_spent - dispatch.spent_before
        if dispatch.no is not None and (
            paid or renewal.progress is not None or renewal.checkpoint is not None
        ):
            self._change_job(dispatch, dispatch.no, renewal, paid)
        for window in windows(self._now) if paid else ():
            self._spent[dispatch.addon_id, window.name] += paid
        return RenewedDispatch(
            renewal.dispatch_id,
            dispatch.job_id,
            dispatch.addon_id,
            DispatchPhase(dispatch.phase),
            None if dispatch.reason is None else EndReason(dispatch.reason),
            dispatch.expires_at,
            before,
            before + paid,
            dispatch.cost_limit,
            dispatch.unit or "",
        )

    def _change_job(self, dispatch: Renewed, no: int, renewal: Renewal, paid: Money) -> None:
        dispatch.job_changes = True
        dispatch.job_spent += paid
        if renewal.progress is not None:
            dispatch.job_progress = renewal.progress
        if renewal.checkpoint is not None:
            self.checkpoints[no] = (no, self._now, dispatch.fence, renewal.checkpoint)
            self._note(dispatch, Note(EventKind.CHECKPOINT))

    def _note(self, dispatch: Renewed, note: Note) -> None:
        job = NO_JOB
        if note.of_job and dispatch.no is not None:
            dispatch.job_changes, dispatch.events = True, dispatch.events + 1
            job = EventJob(dispatch.no, dispatch.job_id, dispatch.events, JobState.RUNNING)
        self._add_note(self._now, note, job, dispatch.dispatch_id)

    def _write_notes(self, renewed: RenewedDispatch, operation: Renew) -> RenewedDispatch:
        """
        Add the notes that the operation makes of the dispatch, with what its addon has spent by then: the
        amounts of one transaction count one after the other.
        """
        if paid := renewed.spent - renewed.spent_before:
            spent: dict[str, Money] = {}
            for window in windows(self._now):
                self._addon_spent[renewed.addon_id, window.name] += paid
                spent[window.kind] = self._addon_spent[renewed.addon_id, window.name]
            renewed = replace(renewed, addon_spent=spent)
        for note in operation.notes_for(renewed):
            self._note(self._dispatches[renewed.dispatch_id], note)
        return renewed


# hosts


def register_host(session: SqlSession, host: Host) -> Host:
    rows = session.execute("register_host", host_values(host))
    if not rows:
        raise name_taken(host)
    session.execute("forget_hosts", {"before": host.seen_at - LOST_FOR})
    return replace(host, draining=bool(rows[0][0]))


def record_load(session: SqlSession, operation: RecordLoad, now: Moment) -> None:
    values = {"host": operation.host, "hour": operation.hour, "busy": operation.busy}
    session.execute("record_load", {**values, "at": now, "newest": NEWEST})


def remove_host(session: SqlSession, operation: RemoveHost) -> None:
    values = {"host": operation.host, "instance": operation.instance}
    session.execute_many(("leave_host", values), ("lose_host", values))


# learning


def learn(session: SqlSession, operation: Learn) -> bool:
    if not session.execute("move_learned_cursor", {"after": operation.after, "upto": operation.upto}):
        return False
    if operation.records:
        rows = msgspec.json.encode([*operation.records.items()]).decode()
        session.execute("set_learned", {"upto": operation.upto, "rows": rows})
    if operation.forgotten:
        session.execute("forget_learned", {"names": session.array(operation.forgotten)})
    return True
