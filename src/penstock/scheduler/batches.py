"""
Batches: the operations of people and programs. The rules are in `core/jobs/groups.py`. The transaction that
ends the last job of a batch also ends the batch, so nothing here has to watch for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from penstock.core.errors import BadIntent, KeyConflict, NotFound
from penstock.core.jobs import groups
from penstock.core.jobs.changes import Change, Note, principal_data
from penstock.core.jobs.dependencies import batch_of
from penstock.core.jobs.groups import MOST_MEMBERS, GroupChange, JobGroup, batch_id
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.job import EventKind, Job
from penstock.core.jobs.states import Move
from penstock.core.jobs.types import BATCH_NAME_WORDS, BATCH_TAG, CALLBACK_TAG, AddonId, JobId, Moment
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, ChangeBatch, Query, Receipt, Store, SubmitBatch, committed

_PAGE: Final = 1_000


class BatchRequest(NamedTuple):
    """
    The request for a new batch. `jobs`: without the tag of the batch. `is_open`: the batch takes more jobs
    until it is closed. `key`: the idempotency key, by which the same request finds the batch that it made;
    without one, a second request of that name is refused.
    """

    name: str
    addon_id: AddonId
    jobs: Sequence[Intent]
    on_end: Intent | None = None
    on_failure: Intent | None = None
    is_open: bool = False
    key: str | None = None

    def intents(self) -> list[Intent]:
        """The jobs to submit: the members, then the callbacks."""
        intents = [groups.member(job, self.name) for job in self.jobs]
        if self.on_end is not None:
            intents.append(groups.on_end(self.on_end, self.name))
        if self.on_failure is not None:
            intents.append(groups.on_failure(self.on_failure, self.name))
        return intents

    def digest(self) -> str:
        """A hash of the whole request; empty without a key."""
        return "" if self.key is None else blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


class SubmittedBatch(NamedTuple):
    """
    A batch, and whether this request made it. `receipts`: of the members, then of the callbacks; none if the
    same request made the batch before.
    """

    group: JobGroup
    created: bool
    receipts: Sequence[Receipt]


class BatchChanged(NamedTuple):
    """A batch after a cancel or a retry. `changed`: the number of jobs that it changed."""

    group: JobGroup
    changed: int


class BatchService:
    """The operations on batches. `by`: the principal, for the trail."""

    def __init__(self, store: Store, rules: SchedulerRules, job_service: JobService) -> None:
        self._store, self._rules, self._job_service = store, rules, job_service

    def submit(self, request: BatchRequest, by: str = "") -> SubmittedBatch:
        """
        Submit a batch with all its jobs or none, durable when this returns. The same request again with its
        key finds the batch that it made. Raises BadIntent, KeyConflict (another batch has the name) or
        QueueFull.
        """
        intents = self._checked(request)
        digest = request.digest()
        group = JobGroup(batch_id(request.name), request.addon_id, 0, is_open=request.is_open, digest=digest)
        try:
            receipts = committed(self._store, SubmitBatch(group, intents, self._rules.depth, by))
        except KeyConflict as conflict:
            stored = self._store.group(group.group_id)
            if (
                conflict.data.get("batch") != request.name
                or stored is None
                or not digest
                or stored.digest != digest
            ):
                raise
            return SubmittedBatch(stored, created=False, receipts=())
        return SubmittedBatch(self.get(request.name), created=True, receipts=receipts)

    def get(self, name: str) -> JobGroup:
        group = self._store.group(JobId(f"{BATCH_TAG}{name}"))
        if group is None:
            raise _unknown(name)
        return group

    def newest(self, limit: int = 50, addon_id: AddonId | None = None) -> list[JobGroup]:
        return self._store.batches(limit, addon_id)

    def callbacks(self, group: JobGroup) -> list[Job]:
        """The callbacks of a batch that are stored, in the order of their submit."""
        return self._store.find(Query(tag=f"{CALLBACK_TAG}{group.name}", limit=10))

    def close(self, name: str, by: str = "") -> JobGroup:
        """Close a batch: it takes no more jobs, and ends with its last one. A closed batch stays as it is."""
        return self._change(name, lambda group, now: groups.close_batch(group, now, by))

    def cancel(
        self, name: str, by: str = "", check_job: Callable[[Job], None] = lambda _: None
    ) -> BatchChanged:
        """
        Close a batch, and cancel its jobs that have not ended. Queued jobs have ended when this returns. `check_job`
        raises Refused for a job that this caller may not change.
        """
        self._note(name, EventKind.BATCH_CANCELED, by)
        self.close(name, by)
        changed = self._change_all(name, Move.CANCEL, by, check_job)
        return BatchChanged(self.get(name), changed)

    def retry(
        self, name: str, by: str = "", check_job: Callable[[Job], None] = lambda _: None
    ) -> BatchChanged:
        """
        Queue every FAILED or BLOCKED job again. Callbacks that ran do not run again. `check_job`: as in `cancel`.
        """
        self._note(name, EventKind.BATCH_RETRIED, by)
        changed = self._change_all(name, Move.RETRY, by, check_job)
        return BatchChanged(self.get(name), changed)

    def _change_all(self, name: str, move: Move, by: str, check_job: Callable[[Job], None]) -> int:
        changed, after = 0, 0
        while True:
            query = Query(tag=f"{BATCH_TAG}{name}", after=after, limit=_PAGE)
            result = self._job_service.change_all(move, query, by, check_job)
            changed += result.changed
            if result.next is None:
                return changed
            after = result.next

    def _note(self, name: str, kind: EventKind, by: str) -> None:
        group = self.get(name)
        data = {"batch": name, "addon_id": group.addon_id, **principal_data(by)}
        committed(self._store, Apply([Change(self._store.now(), (Note(kind, data=data),))]))

    def _change(self, name: str, decide: Callable[[JobGroup, Moment], GroupChange | None]) -> JobGroup:
        group = committed(self._store, ChangeBatch(self.get(name).group_id, decide))
        if group is None:
            raise _unknown(name)
        return group

    def _checked(self, request: BatchRequest) -> list[Intent]:
        problems: list[tuple[str, str]] = []
        try:
            batch_id(request.name)
        except ValueError:
            raise BadIntent.of(("name", BATCH_NAME_WORDS)) from None
        if len(request.jobs) > MOST_MEMBERS:
            problems.append(("jobs", f"must be at most {MOST_MEMBERS:,}, not {len(request.jobs):,}"))
        named = [(f"jobs[{at}].", job) for at, job in enumerate(request.jobs[:MOST_MEMBERS])]
        for field in ("on_end", "on_failure"):
            if (callback := getattr(request, field)) is not None:
                named.append((f"{field}.", callback))
                if callback.after:
                    problems.append((f"{field}.after", "cannot be given: a callback waits for its batch"))
        now, most = self._store.now(), self._rules.capacity.most
        for at, intent in named:
            if batch_of(intent) is not None:
                problems.append((f"{at}tags", f"cannot name a batch: its jobs are in {request.name}"))
                continue
            try:
                check(groups.member(intent, request.name), now, most_units=most)
            except BadIntent as bad:
                problems += [(f"{at}{problem['field']}", problem["message"]) for problem in bad.problems]
            if len(problems) > 100:
                break
        if problems:
            raise BadIntent.of(*problems[:100])
        return request.intents()


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no batch {name!r:.80}", batch=name)
