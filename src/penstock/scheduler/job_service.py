"""
The job service: the operations on jobs and leases, for submitters, workers and people. Each operation reads
the store, lets the core decide, and commits by compare-and-set.

If the job changed in between, the operation reads and decides again. A worker whose dispatch has ended or was
replaced gets a StaleDispatch, and has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from difflib import get_close_matches
from functools import partial
from itertools import starmap
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from msgspec.structs import replace

from penstock.core.errors import IllegalMove, NotFound, NotWritten, Refused, StaleDispatch, Unavailable
from penstock.core.jobs import changes
from penstock.core.jobs.admission import EVERYTHING, AdmissionClass
from penstock.core.jobs.changes import Change, Renewal
from penstock.core.jobs.explain import Explanation
from penstock.core.jobs.groups import MOST_MEMBERS, is_batch_id
from penstock.core.jobs.intent import MAX_PAYLOAD, Intent, all_but_payload, check
from penstock.core.jobs.job import Dispatch, Event, Job
from penstock.core.jobs.learning import TypeStats
from penstock.core.jobs.reasons import Reason
from penstock.core.jobs.round import AdmissionView, RoundResult, decide_standalone_lease
from penstock.core.jobs.states import MOVES, DispatchPhase, JobState, Move
from penstock.core.jobs.types import (
    AddonId,
    DispatchId,
    EndReason,
    JobId,
    Money,
    RunWhen,
    member_of,
)
from penstock.core.jobs.viewer import Viewer
from penstock.core.jobs.workers import WorkerKinds
from penstock.core.text import error_text, storable, storable_json, type_name
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.explainer import Explainer
from penstock.scheduler.forecaster import Forecaster
from penstock.scheduler.learning import Learner
from penstock.scheduler.maintenance import BudgetEnforcer
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.waitlist import SubmitWaitlist
from penstock.stores.api import (
    Apply,
    Complete,
    CompletedDispatch,
    Grant,
    JobResults,
    Query,
    Receipt,
    Renew,
    SetAddon,
    Store,
    Submit,
    Transactional,
    committed,
    committed_apart,
    with_jobs,
)


class YieldRequests:
    """
    The attempts that were asked to yield to another job and have not ended since, in memory.

    The runner of this process gets a request at once, an add-on's worker with its next heartbeat. A crash
    forgets the requests; the next scheduler asks again if units are still needed.
    """

    def __init__(self) -> None:
        self._requests: set[DispatchId] = set()
        self._listeners: list[Callable[[DispatchId], None]] = []

    def __contains__(self, dispatch_id: DispatchId) -> bool:
        return dispatch_id in self._requests

    def on_ask(self, listener: Callable[[DispatchId], None]) -> None:
        """Call `listener` with each request, also when an attempt is asked again."""
        self._listeners.append(listener)

    def ask(self, dispatch_id: DispatchId) -> None:
        self._requests.add(dispatch_id)
        for listener in self._listeners:
            listener(dispatch_id)

    def withdraw(self, dispatch_id: DispatchId) -> None:
        """Forget the request: the attempt has ended, or its units are no longer needed."""
        self._requests.discard(dispatch_id)


def feed(store: Store, after: int = 0, page: int = 500) -> Iterator[Event]:
    """All events after the cursor `after`; the `seq` of the last one is the reader's next cursor."""
    while batch := store.events(after, page):
        yield from batch
        after = batch[-1].seq


T = TypeVar("T")
log = logging.getLogger("penstock.scheduler")

#: More conflicts than this in a row mean that something is wrong with the store.
_TRIES = 8
_MOST_POLLED: Final = 1_000
#: Characters of an error: as many as the HTTP API takes.
_MAX_ERROR: Final = 20_000


#: Ends that the library and add-on workers report for a function that left because it was asked to yield.
_GIVEN_BACK: Final = frozenset({EndReason.RELEASED, EndReason.GRACEFUL_SHUTDOWN})


class GrantedJob(NamedTuple):
    """A leased job, with all that its worker needs to run it."""

    job: Job
    dispatch: Dispatch
    #: Counts from 1, and grows with each failure.
    attempt: int
    checkpoint: str | None
    #: JSON: for each parent its id, its state and its result; None: it has none.
    parents: str | None = None


class EndReport(NamedTuple):
    """A worker's report of the end of an attempt."""

    dispatch_id: DispatchId
    how: EndReason = EndReason.COMPLETED
    result: str | None = None
    error: str | None = None


class BulkResult(NamedTuple):
    """
    The result of a change to many jobs. `refused`: the jobs that could not be changed, with the reason.
    `next`: the cursor of the next page; None: this was the last.
    """

    changed: int
    refused: list[tuple[JobId, str]]
    next: int | None


class PendingExchange(NamedTuple):
    """
    An exchange whose answers are not here yet. `admitted`: None if reserved jobs were enough for the claim.
    """

    reports: Sequence[EndReport]
    leased: list[Dispatch]
    ending: Future[list[bool]]
    admitted: Future[list[Grant]] | None
    #: Gets the preview of the store, if it makes one, and None when the claim has its answer.
    previews: SimpleQueue[list[Grant] | None]


class Answer(NamedTuple):
    """
    The answer to a heartbeat. `stop`: why the attempt must end now; None: it goes on. `should_yield`: the
    attempt should end at its next checkpoint.
    """

    expires_at: int
    stop: EndReason | None
    should_yield: bool = False


class JobService:
    """The operations on jobs and leases; see the top of this file."""

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        dispatcher: Dispatcher,
        waitlist: SubmitWaitlist | None = None,
        *,
        yields: YieldRequests | None = None,
        learner: Learner | None = None,
    ) -> None:
        self._store, self._rules, self._dispatcher = store, rules, dispatcher
        self.learner = learner or Learner(store)
        self.forecaster = Forecaster(store, rules, dispatcher, self.learner)
        self.explainer = Explainer(store, rules, dispatcher, self.forecaster, self.learner)
        self._waitlist = waitlist or SubmitWaitlist(store, dispatcher.commit_submits, rules.depth)
        self._budgets = BudgetEnforcer(store, rules)
        self.yields = yields or YieldRequests()
        self._most_units = rules.capacity.most
        #: The fields of the last valid intent. A thread that sees an older value only checks once more.
        self._passed: object = None

    # submitters and people

    def submit(self, intents: Sequence[Intent], wait_sec: float = 0) -> list[Receipt]:
        """
        Submit all jobs or none; they are durable when this returns. At the depth limit it waits for room, up
        to `wait_sec`, then raises QueueFull.
        """
        receipts = self.submit_soon(intents, wait_sec, wait=True).result()
        return self.explainer.with_forecasts(intents, receipts)

    def submit_within(self, connection: Any, intents: Sequence[Intent]) -> list[Receipt]:
        """
        Submit as part of the caller's own transaction. At the depth limit this raises QueueFull at once: a
        transaction must not wait for room that others make.
        """
        if not isinstance(self._store, Transactional):
            raise TypeError(
                "jobs can be part of a transaction only where they are in the same database: "
                "this needs a scheduler on postgresql://"
            )
        self._check(intents)
        return self._store.submit_within(connection, intents, self._rules.depth)

    def submit_soon(
        self, intents: Sequence[Intent], wait_sec: float = 0, *, wait: bool = False
    ) -> Future[list[Receipt]]:
        """
        Check the jobs now, and submit them; they are durable when the Future has its result. Canceling the
        Future while the submit waits for room gives up its place. `wait`: the caller has nothing else to do,
        and its thread may write. The receipts of jobs with a deadline have no forecast yet: see
        `Explainer.with_forecasts`.
        """
        self._check(intents)
        if wait_sec > 0 or self._waitlist.waiters:
            return self._waitlist.submit_soon(intents, wait_sec, wait=wait)
        [receipts] = self._dispatcher.commit_submits([Submit(intents, self._rules.depth)], wait=wait)
        return receipts

    def _check(self, intents: Sequence[Intent]) -> None:
        """
        Check the jobs; BadIntent names every problem. Jobs that differ only in their payload are checked
        once: fields that were valid a moment ago still are, except a deadline.
        """
        now, passed = self._store.now(), self._passed
        for intent in intents:
            fields = all_but_payload(intent)
            if fields != passed or len(intent.payload) > MAX_PAYLOAD:
                check(intent, now, most_units=self._most_units)
                passed = fields
                self._passed = fields if intent.deadline_at is None else None

    def cancel(self, job_id: JobId, by: str = "") -> Job:
        return self._change(job_id, partial(self.decide, Move.CANCEL, by))

    def retry(self, job_id: JobId, by: str = "") -> Job:
        return self._change(job_id, partial(self.decide, Move.RETRY, by))

    def decide(self, move: Move, by: str, job: Job) -> Change | None:
        """The change that cancels or retries the job; None: there is nothing to change."""
        now, ordering = self._store.now(), self._rules.ordering
        if move is Move.RETRY:
            member = None if job.state is JobState.BLOCKED else member_of(job.job_id)  # BLOCKED has not ended
            if member is not None and self._store.array(member[0]) is not None:
                raise IllegalMove(
                    f"{job.job_id} belongs to an array: retry the failed indices of array {member[0]}",
                    state=str(job.state),
                    move=str(move),
                )
            return changes.retry(job, now, ordering, by)
        dispatch = None if job.dispatch_id is None else self._store.dispatch(job.dispatch_id)
        return changes.cancel(job, dispatch, now, grace=self._rules.grace, by=by, **self._end_settings)

    def change_all(
        self,
        move: Move,
        query: Query,
        by: str = "",
        check_job: Callable[[Job], None] = lambda _: None,
    ) -> BulkResult:
        """
        Cancel or retry the jobs that the query finds, at most `query.limit`, in one commit. `check_job`
        raises Refused for a job that this caller may not change. A job that changed in between is decided
        again, alone.
        """
        able = {state for state, way in MOVES if way is move}
        states = [state for state in query.states or able if state in able]
        jobs = self._store.find(replace(query, states=states)) if states else []
        changed, refused = 0, list[tuple[JobId, str]]()
        decided: list[tuple[Job, Change]] = []
        for job in jobs:
            try:
                check_job(job)
                if (change := self.decide(move, by, job)) is not None:
                    decided.append((job, change))
            except Refused as refusal:
                refused.append((job.job_id, str(refusal)))
        written = committed_apart(self._store, Apply, [change for _, change in decided])
        for (job, _), answer in zip(decided, written, strict=True):
            try:
                if answer is not True:
                    self._change(job.job_id, partial(self.decide, move, by))
                changed += 1
            except Refused as refusal:
                refused.append((job.job_id, str(refusal)))
        return BulkResult(changed, refused, jobs[-1].no if jobs and len(jobs) == query.limit else None)

    def rerun_intent(self, job_id: JobId, **fields: Any) -> Intent:
        """
        The request of a job, for a new job. It has the changed `fields`, and leaves out the idempotency key
        (which stands for the old job), the parents (which may be pruned), the batch, and times that have
        passed.
        """
        if (member := member_of(job_id)) is not None:
            raise IllegalMove(
                f"{job_id} belongs to an array: a new job would have no index; submit an array of this index, or "
                f"retry the failed indices of array {member[0]}",
                job_id=job_id,
            )
        now = self._store.now()
        intent = replace(self._job(job_id).intent, **{"idempotency_key": None, "after": (), **fields})
        intent = replace(intent, tags=tuple(tag for tag in intent.tags if not is_batch_id(tag)))
        times: dict[str, Any] = {
            name: None
            for name in ("deadline_at", "earliest_start_at")
            if name not in fields and (getattr(intent, name) or now + 1) <= now
        }
        if "deadline_at" in times:
            times["time_sensitive"] = False
        return replace(intent, **times)

    def edit(self, job_id: JobId, by: str = "", **fields: Any) -> Job:
        """
        Change `priority`, `earliest_start_at`, `deadline_at`, `run_when` or `quiet_for_sec` of a queued job.
        Another `run_when` than "quiet" ends `quiet_for_sec`.
        """
        if fields.get("run_when", RunWhen.QUIET) != RunWhen.QUIET:
            fields.setdefault("quiet_for_sec", 0)

        def decide(job: Job) -> Change:
            now, intent = self._store.now(), replace(job.intent, **fields)
            change = changes.edit(job, intent, now, self._rules.ordering, by)
            check(intent, now, most_units=self._most_units)
            return change

        return self._change(job_id, decide)

    def type_stats(self) -> list[TypeStats]:
        """What was learned about each job type, and how good the predictions about it were."""
        return self.learner.stats()

    def explain(self, job_id: JobId, viewer: Viewer | None = None) -> Explanation:
        """
        Explain why the job is in its state. `viewer`: an addon, which must not learn names of others' jobs.
        """
        return self.explainer.explain(job_id, viewer)

    def pause(self, addon_id: AddonId = EVERYTHING, by: str = "") -> None:
        """
        Start no further job of this addon, also after a restart. Attempts go on, and submits are accepted.
        """
        committed(self._store, SetAddon(addon_id, paused=True, by=by))

    def resume(self, addon_id: AddonId = EVERYTHING, by: str = "") -> None:
        """
        Let jobs of this addon start again. EVERYTHING: an addon that was paused by its name stays paused.
        """
        committed(self._store, SetAddon(addon_id, paused=False, by=by))

    def require_addon(self, addon_id: AddonId) -> None:
        """Raise NotFound for an addon that has never had a job or a setting: its name may be misspelt."""
        addon_ids = [addon.addon_id for addon in self._store.addons()]
        if addon_id not in (EVERYTHING, *addon_ids, *self._rules.limits.budgets):
            near = get_close_matches(addon_id, addon_ids, 1)
            meant = (
                f"did you mean {near[0]}?"
                if near
                else "`--create` (over HTTP `create`) sets it up in advance"
            )
            raise NotFound(f"addon {addon_id} has never had a job; {meant}", addon_id=addon_id)

    def _change(self, job_id: JobId, decide: Callable[[Job], Change | None]) -> Job:
        """Decide about the job and apply the change. If the job changed in between, decide again."""
        for _ in range(_TRIES):
            change = decide(self._job(job_id))
            if change is None or committed(self._store, Apply([change]))[0]:
                return self._job(job_id)
        raise StaleDispatch(f"job {job_id} kept changing; ask again", job_id=job_id)

    # workers

    def dispatchable(self, addon_id: AddonId | None = None, limit: int = 100) -> list[Dispatch]:
        """The reservations, each of which waits until a worker asks for its lease."""
        return self._store.live(addon_id=addon_id, phases=[DispatchPhase.RESERVED], limit=limit)

    def poll(self, kinds: WorkerKinds, limit: int = 100) -> list[Dispatch]:
        """The reservations for a polling worker, and count it as present."""
        self.offer_to(kinds)
        reserved = self.dispatchable(kinds.addon_id, _MOST_POLLED)
        return [d for d in reserved if d.job_id is not None and kinds.fits(d.admission_class)][:limit]

    def offer_to(self, kinds: WorkerKinds) -> None:
        """
        Count a polling worker as present: rounds then reserve jobs of these kinds for it instead of leaving
        them to claims.
        """
        self._dispatcher.offer_to(kinds, self._store.now())

    def lease(self, job_id: JobId, worker: str = "") -> Dispatch:
        """Turn the reservation of a DISPATCHING job into a lease: the second step of a polling worker."""
        job = self._job(job_id)
        dispatch = None if job.dispatch_id is None else self._store.dispatch(job.dispatch_id)
        if dispatch is None or dispatch.phase is not DispatchPhase.RESERVED:
            raise StaleDispatch(
                f"a {job.state} job has no reservation to lease", state=str(job.state), job_id=job_id
            )
        change = changes.start(job, dispatch, self._store.now(), ttl=self._rules.lease_for, worker=worker)
        if not committed(self._store, Apply([change]))[0]:
            raise StaleDispatch("the reservation was taken, canceled or timed out", job_id=job_id)
        return self._dispatch(dispatch.dispatch_id)

    def claim(self, kinds: WorkerKinds, limit: int = 1, worker: str = "") -> list[GrantedJob]:
        """
        Lease jobs in one step: first those that are reserved for such a worker already, then those that may
        start now.
        """
        leased = self._lease_reserved(kinds, limit, worker)
        claimed = self.granted(starmap(Grant, with_jobs(self._store, leased))) if leased else []
        if len(claimed) < limit:
            admit = self._dispatcher.claim(kinds, limit - len(claimed), worker)
            claimed += self.granted(committed(self._store, admit))
        return claimed

    def _lease_reserved(self, kinds: WorkerKinds, limit: int, worker: str) -> list[Dispatch]:
        """Lease reserved jobs. Only those of this host: a reservation of another host holds units there."""
        leases: list[Dispatch] = []
        if not self._dispatcher.may_have_reserved(kinds):
            return leases
        for dispatch in self.dispatchable(kinds.addon_id):
            if len(leases) == limit:
                break
            here = dispatch.host == self._rules.host
            if here and dispatch.job_id is not None and kinds.fits(dispatch.admission_class):
                try:
                    leases.append(self.lease(dispatch.job_id, worker))
                except StaleDispatch:
                    continue
        return leases

    def granted(self, grants: Iterable[Grant]) -> list[GrantedJob]:
        """The leased jobs among the grants, with all that their workers need."""
        return [
            GrantedJob(
                job,
                d,
                1 if d.fence == 1 else job.attempt,
                None if d.fence == 1 else self._store.checkpoint(job.job_id),
                self._parents(job, results) if job.intent.after else None,
            )
            for d, job, results in grants
            if job is not None
        ]

    def _parents(self, job: Job, results: JobResults) -> str:
        """
        The states and results of a job's parents, as JSON. When they get too large together, further results
        are null. A batch stands for its members. `results`: those that came with the grant.
        """
        ids: list[JobId] = []
        for dependency in job.intent.after:
            ids += self._members(dependency.job_id) if is_batch_id(dependency.job_id) else [dependency.job_id]
        if not results.keys() >= {*ids}:
            results = self._store.job_results(ids)
        room, texts = MAX_PAYLOAD, []
        for job_id in ids:
            state, result = results.get(job_id, (None, None))
            result = result or "null"
            room -= len(result)
            name = "null" if state is None else f'"{state}"'
            texts.append(f'["{job_id}",{name},{result if room >= 0 else "null"}]')
        return f"[{','.join(texts)}]"

    def _members(self, batch: JobId) -> list[JobId]:
        """The members of a batch that are still stored, in the order of their submit."""
        return [d.parent for d in self._store.dependencies(batch, MOST_MEMBERS) if d.child == batch]

    def ask(
        self, admission_class: AdmissionClass, priority: int, worker: str = ""
    ) -> tuple[Dispatch | None, Reason | None]:
        """Request a standalone lease. Returns the lease, or None and the reason why it cannot start now."""
        reasons: list[Reason | None] = []

        def decide(view: AdmissionView) -> RoundResult:
            inputs = self._dispatcher.inputs(view)
            round_result, reason = decide_standalone_lease(inputs, admission_class, priority)
            reasons.append(reason)
            return round_result

        grants = committed(self._store, self._dispatcher.admit(decide, worker))
        return (grants[0].dispatch if grants else None), reasons[-1]

    def heartbeat(
        self,
        dispatch_id: DispatchId,
        *,
        progress: float | None = None,
        spent: Money | None = None,
        checkpoint: str | None = None,
        pid: int | None = None,
    ) -> Answer:
        """
        Renew a lease, and store what the worker reports. `spent`: the total of this dispatch so far. `pid`:
        the process that runs the job.
        """
        checkpoint = None if checkpoint is None else storable_json(checkpoint)
        until = self._store.now() + self._rules.lease_for
        beat = Renewal(
            dispatch_id=dispatch_id,
            expires_at=until,
            progress=progress,
            spent=spent,
            checkpoint=checkpoint,
            pid=pid,
        )
        [renewed] = committed(self._store, Renew([beat], self._budgets.notes))
        if renewed is None:
            self._dispatch(dispatch_id)
            raise StaleDispatch(
                "this lease has expired, ended or been replaced: stop the run", dispatch_id=dispatch_id
            )
        self._dispatcher.renewed(dispatch_id)
        if not self._budgets.allows(renewed) and renewed.phase is DispatchPhase.LEASED:
            stopped = self.stop(dispatch_id, EndReason.COST_LIMIT_REACHED)
            return Answer(stopped.expires_at, stopped.reason)
        stop = renewed.reason if renewed.phase is DispatchPhase.ENDING else None
        return Answer(renewed.expires_at, stop, stop is None and dispatch_id in self.yields)

    def stop(self, dispatch_id: DispatchId, reason: EndReason) -> Dispatch:
        """Ask an attempt to end. If it was asked before, the first reason stays."""
        for _ in range(_TRIES):
            dispatch = self._dispatch(dispatch_id)
            if dispatch.phase is DispatchPhase.ENDED:
                raise StaleDispatch("this dispatch has ended", dispatch_id=dispatch_id)
            job = None if dispatch.job_id is None else self._store.job(dispatch.job_id)
            change = changes.stop(dispatch, job, reason, self._store.now(), grace=self._rules.grace)
            if change is None or committed(self._store, Apply([change]))[0]:
                return self._dispatch(dispatch_id)
        raise StaleDispatch("this dispatch kept changing; ask again", dispatch_id=dispatch_id)

    def release(self, dispatch_id: DispatchId) -> JobState | None:
        """Give a lease back: its job returns to the queue. A standalone lease just ends."""
        return self.end(dispatch_id, EndReason.RELEASED)

    def end(
        self,
        dispatch_id: DispatchId,
        how: EndReason = EndReason.COMPLETED,
        *,
        result: str | None = None,
        error: str | None = None,
    ) -> JobState | None:
        """Report the end of an attempt. Returns the job's new state; None for a standalone lease."""
        [answer] = self.end_many([EndReport(dispatch_id, how, result, error)])
        if isinstance(answer, Refused):
            raise answer
        return answer

    def end_many(self, reports: Sequence[EndReport]) -> list[JobState | Refused | None]:
        """
        `end` for many reports in one commit. Returns for each its job's new state, or why it changed nothing.
        """
        reports = [_storable(report) for report in reports]
        return self._ended(reports, self._completed(reports))

    def exchange(
        self, reports: Sequence[EndReport], kinds: WorkerKinds, limit: int = 1, worker: str = ""
    ) -> tuple[list[JobState | Refused | None], list[GrantedJob]]:
        """
        `end_many` and `claim`, in one commit where possible: the claimed jobs get the units of the ended
        attempts.
        """
        return self.finish_exchange(self.exchange_soon(reports, kinds, limit, worker, wait=True), list)

    def exchange_soon(
        self, reports: Sequence[EndReport], kinds: WorkerKinds, limit: int, worker: str, *, wait: bool = False
    ) -> PendingExchange:
        """
        Begin an `exchange`; `finish_exchange` ends it. `wait`: the caller has nothing else to do meanwhile.
        """
        reports = [_storable(report) for report in reports]
        complete = Complete(_completions(reports))
        leased = self._lease_reserved(kinds, limit, worker)
        previews: SimpleQueue[list[Grant] | None] = SimpleQueue()
        if len(leased) == limit:
            [ending] = self._store.commit(complete, wait=wait)
            previews.put(None)
            return PendingExchange(reports, leased, ending, None, previews)
        admit = self._dispatcher.claim(
            kinds, limit - len(leased), worker, previews.put, with_report=bool(reports)
        )
        ending, admitted = self._store.commit(complete, admit, wait=wait)
        admitted.add_done_callback(lambda _: previews.put(None))
        return PendingExchange(reports, leased, ending, admitted, previews)

    def finish_exchange(
        self, pending: PendingExchange, prepare: Callable[[list[GrantedJob]], list[T]]
    ) -> tuple[list[JobState | Refused | None], list[T]]:
        """
        Wait for the answers of an exchange. `prepare` gets the granted jobs, perhaps before they are on disk,
        so that the caller can prepare them meanwhile. They may start only when this returns what `prepare`
        made.
        """
        reports, leased, ending, admitted, previews = pending
        preview, prepared = previews.get(), None
        if preview is not None and not leased and all(map(_needs_no_reads, preview)):
            prepared = prepare(self.granted(preview))
        done = self._completed(reports, ending)
        try:
            grants = [] if admitted is None else admitted.result()
        except Unavailable:
            raise
        except Exception:
            log.exception("a claim failed; the reported ends are written, and nothing is claimed")
            grants = []
        if prepared is None or grants is not preview:
            prepared = prepare(self.granted([*starmap(Grant, with_jobs(self._store, leased)), *grants]))
        return self._ended(reports, done), prepared

    def _completed(
        self, reports: Sequence[EndReport], ending: Future[list[bool]] | None = None
    ) -> Sequence[bool | Exception]:
        """
        Write the reports of completed attempts; for each, whether the store accepted it. Most attempts
        complete under a valid lease, and need no read: the store refuses the others, and `_ended` then reads
        and decides. `ending`: the answer of a write of all reports together; if it failed, each is written
        alone.
        """
        if ending is not None:
            try:
                return ending.result()
            except Unavailable:
                raise
            except Exception:
                log.exception(
                    "completions that were reported together cannot be written; each is written alone"
                )
        return committed_apart(self._store, Complete, _completions(reports))

    def _ended(
        self, reports: Sequence[EndReport], completed: Sequence[bool | Exception]
    ) -> list[JobState | Refused | None]:
        """
        Write the reports that are not written yet; the answers for all. If the store cannot write a report,
        its job fails, and the error says so.
        """
        done = iter(completed)
        answers: list[JobState | Refused | None] = [JobState.DONE] * len(reports)
        open_reports = {
            i: report
            for i, report in enumerate(reports)
            if report.how is not EndReason.COMPLETED or next(done) is not True
        }
        for _ in range(_TRIES):
            if not open_reports:
                break
            decided = {i: self._ending(report) for i, report in open_reports.items()}
            changed = {i: change for i, change in decided.items() if isinstance(change, Change)}
            outcomes = committed_apart(self._store, Apply, list(changed.values()))
            applied = iter(outcomes)
            for i, change in decided.items():
                written = True if isinstance(change, Refused) else next(applied)
                if isinstance(written, Exception):
                    report = open_reports[i]
                    open_reports[i] = _not_written(report, written)
                    if open_reports[i] == report:  # the store cannot write that error either
                        answers[i] = NotWritten(open_reports[i].error or "", dispatch_id=report.dispatch_id)
                        del open_reports[i]
                elif written:
                    answers[i] = change if isinstance(change, Refused) else _state_after(change)
                    del open_reports[i]
        for i in open_reports:
            answers[i] = StaleDispatch("this dispatch has been replaced", dispatch_id=reports[i].dispatch_id)
        return answers

    def _ending(self, report: EndReport) -> Change | Refused:
        """The change that ends the attempt, or why the report is refused."""
        dispatch_id, how, result, error = report
        try:
            dispatch = self._dispatch(dispatch_id)
            now = self._store.now()
            if dispatch.phase is DispatchPhase.ENDED:
                return StaleDispatch("this dispatch has ended already", dispatch_id=dispatch_id)
            if dispatch.expires_at <= now:
                return StaleDispatch(
                    "this lease has expired: what it did may be done again", dispatch_id=dispatch_id
                )
            job = None if dispatch.job_id is None else self._store.job(dispatch.job_id)
            if job is None:
                return changes.release(dispatch, now, how)
            if how in _GIVEN_BACK and dispatch_id in self.yields:
                how = EndReason.COOPERATIVE_PREEMPTION
            return changes.end(
                job, dispatch, how, now, result=result, error=error, reported=True, **self._end_settings
            )
        except Refused as refusal:
            return refusal

    def _job(self, job_id: JobId) -> Job:
        job = self._store.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        return job

    def _dispatch(self, dispatch_id: DispatchId) -> Dispatch:
        dispatch = self._store.dispatch(dispatch_id)
        if dispatch is None:
            raise NotFound(f"there is no lease {dispatch_id}", dispatch_id=dispatch_id)
        return dispatch

    @property
    def _end_settings(self) -> dict[str, Any]:
        return {"schedules": self._rules.schedules, "ordering": self._rules.ordering}


def _needs_no_reads(grant: Grant) -> bool:
    """
    Whether the job can be prepared without a read. A first attempt has no checkpoint, but a job with parents
    needs their results, which the commit under way may change.
    """
    return grant.dispatch.fence == 1 and not (grant.job is not None and grant.job.intent.after)


def _state_after(change: Change) -> JobState | None:
    return None if change.job is None else change.job.target


def _storable(report: EndReport) -> EndReport:
    """The report with text that a database can store: result and error come from user code."""
    dispatch_id, how, result, error = report
    if error is None and (result is None or result.isascii()):
        return report
    return EndReport(
        dispatch_id,
        how,
        None if result is None else storable(result),
        None if error is None else storable(error, _MAX_ERROR),
    )


def _not_written(report: EndReport, error: Exception) -> EndReport:
    """
    The report of a failure, in place of a report whose text cannot be written. Its message has only the type
    of the error and nothing of that text, so it can be written, and is the same when the worker repeats its
    report.
    """
    log.error("the end of %s cannot be written: %s", report.dispatch_id, error_text(error))
    words = f"what it returned or raised cannot be written to the database ({type_name(error)})"
    return EndReport(report.dispatch_id, EndReason.JOB_ERROR, error=words)


def _completions(reports: Sequence[EndReport]) -> list[CompletedDispatch]:
    return [
        CompletedDispatch(dispatch_id, result)
        for dispatch_id, how, result, _ in reports
        if how is EndReason.COMPLETED
    ]
