"""
The store that keeps jobs in memory: for tests and simulation, and the shortest text that shows what a store
does.

It has one lock and plain dictionaries. `tables.py` has them with all reads; this module has what each
operation writes. The SQL stores keep totals; this store computes them from the live dispatches, so tests can
compare the two. Its jobs end with its process. It keeps every other promise of a store: the same contract
suite runs against it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace

from penstock.core.jobs.admission import Account, AdmissionClass, windows
from penstock.core.jobs.changes import Change, Note, Renewal, addon_note, completed, drain_note
from penstock.core.jobs.dependencies import DependencyStatus, IfUnmet, ParentCondition, batch_of
from penstock.core.jobs.groups import add_members
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, DispatchStep, EventKind, Job, JobStep
from penstock.core.jobs.load import Host
from penstock.core.jobs.load_hours import blended
from penstock.core.jobs.ordering import Aging, order_key, place
from penstock.core.jobs.round import Pick, Placement, RoundResult, running_data, stop_moment
from penstock.core.jobs.spending import NOTHING_SPENT, RenewedDispatch
from penstock.core.jobs.states import PRUNABLE, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Span, dispatch_id_of
from penstock.stores.api import (
    LOST_FOR,
    Admit,
    Apply,
    ChangeArray,
    ChangeBatch,
    ChangeSchedule,
    Complete,
    Depth,
    DrainHost,
    Grant,
    Learn,
    NotesFor,
    Operation,
    Prune,
    Receipt,
    RecordLoad,
    RegisterHost,
    RemoveHost,
    Renew,
    Reorder,
    ResolveDependencies,
    ScheduleWritten,
    SetAddon,
    Shift,
    Submit,
    SubmitBatch,
    Terms,
    name_taken,
)
from penstock.stores.common.array_changes import advance_arrays, change_array
from penstock.stores.common.dependencies import StateMove, move_of, resolve
from penstock.stores.common.group_commit import with_callback, written_now
from penstock.stores.common.rows import body_hash, new_dispatch
from penstock.stores.common.writes import UsedKeys, key_of, new_dependencies, new_job_id, submit_intents
from penstock.stores.memory.dependencies import MemoryDependencyRows
from penstock.stores.memory.groups import MemoryArrayRows, add_batch, change_group, drop_group
from penstock.stores.memory.tables import DependencyRow, MemoryTables


class MemoryStore(MemoryTables):
    """A `Store` in this process. An operation that is refused changes nothing, so it needs no rollback."""

    shared = False

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:  # noqa: ARG002 - it never takes long
        with self._lock:
            before = self._seq
            answers = [written_now(partial(self._write, operation)) for operation in operations]
            has_events = self._seq != before
        for operation, answer in zip(operations, answers, strict=True):
            with_callback(operation, answer)
        if has_events:
            self._notify_listeners()
        return answers

    def _write(self, operation: Operation[Any]) -> Any:
        match operation:
            case Submit(intents, depth):
                return self._submit(intents, depth)
            case Admit():
                return self._admit(operation)
            case Apply(changes):
                return self._apply_all(changes)
            case Complete(done):
                now = self._clock()
                return self._apply_all([completed(report.dispatch_id, now, report.result) for report in done])
            case Renew(renewals, notes_for):
                return [self._renew(renewal, notes_for) for renewal in renewals]
        return self._maintain(operation)

    def _maintain(self, operation: Operation[Any]) -> Any:
        match operation:
            case ResolveDependencies():
                return self._resolve_pending()
            case SetAddon():
                return self._set_addon(operation)
            case ChangeSchedule() | RecordLoad() | ChangeArray() | SubmitBatch() | ChangeBatch():
                return self._change_record(operation)
            case Prune(before, limit):
                return self._prune(before, limit)
            case Shift(by):
                return self._shift(by)
            case Reorder(aging, after, limit):
                return self._reorder(aging, after, limit)
            case RegisterHost() | RemoveHost() | DrainHost():
                return self._change_host(operation)
            case Learn():
                return self._learn(operation)
        raise TypeError(f"{type(operation).__name__} is no operation of this store")

    # submit

    def _submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        used: UsedKeys = {}
        for key in {key for intent in intents if (key := key_of(intent)) in self._keys and key is not None}:
            job_id, body = self._keys[key]
            used[key] = (Receipt(job_id, self._jobs[job_id].state, created=False), body)
        receipts = submit_intents(
            *(intents, depth, used),
            queued=self._queued,
            insert=self._insert,
            existing=lambda ids: {parent for parent in ids if parent in self._jobs or parent in self._groups},
            batches=lambda ids: {batch: self._groups[batch] for batch in ids if batch in self._groups},
            waiting=self._waiting,
        )
        created = [self._jobs[receipt.job_id] for receipt in receipts if receipt.created]
        if children := [job.no for job in created if job.intent.after]:
            self._resolve([], children)
        return [replace(r, state=self._jobs[r.job_id].state) for r in receipts]

    def _waiting(self, batches: Collection[JobId], parents: Collection[JobId]) -> list[tuple[JobId, JobId]]:
        """As `submit_intents` asks for it."""
        pairs: list[tuple[JobId, JobId]] = []
        for batch in batches:
            reached, rest = {batch}, [batch]
            while rest:
                rows = self._children.get(rest.pop(), {}).values()
                new = {row.child for row in rows if row.status is DependencyStatus.OPEN} - reached
                reached |= new
                rest += new
            pairs += [(batch, job_id) for job_id in sorted(reached.intersection(parents) - {batch})]
        return pairs

    def _queued(self, addon_id: AddonId | None) -> int:
        tally = self._tally.items()
        return sum(n for (a, state), n in tally if state is JobState.QUEUED and addon_id in (None, a))

    def _insert(self, _: int, intent: Intent, job_id: JobId | None = None) -> Receipt:
        now = self._clock()
        self._last_no += 1
        queue_place = place(intent, now, None, self._ordering)
        job = Job(
            no=self._last_no,
            job_id=job_id or JobId(self._new_id()),
            intent=replace(intent, after=tuple(replace(d, named="") for d in intent.after)),
            state=JobState.QUEUED,
            created_at=now,
            ready_at=queue_place.ready_at,
        )
        self._jobs[job.job_id], self._by_no[job.no] = job, job.job_id
        for parent, child, condition, if_unmet in new_dependencies(job.job_id, job.intent):
            row = DependencyRow(parent, child, ParentCondition(condition), IfUnmet(if_unmet))
            self._dependencies.setdefault(child, {})[parent] = row
            self._children.setdefault(parent, {})[child] = row
        if (batch := batch_of(intent)) is not None:
            self._groups[batch] = add_members(self._groups[batch], 1)
        self._trails[job.job_id] = []
        self._tally[intent.addon_id, JobState.QUEUED] += 1
        self._lines.put(job, queue_place, now)
        if (key := key_of(intent)) is not None:
            self._keys[key] = (job.job_id, body_hash(intent))
        self._note(now, Note(EventKind.SUBMITTED), job)
        return Receipt(job.job_id, JobState.QUEUED, created=True)

    # admit

    def _admit(self, admit: Admit) -> list[Grant]:
        host, now, terms = admit.host, self._clock(), admit.terms
        self._lines.advance(now)
        round_result = admit.run_round(self._admission_view(host, now))
        self._deny(round_result, now)
        grants = [self._start(pick, host, now, terms) for pick in round_result.picks]
        if round_result.standalone_lease is not None:
            grants.append(
                Grant(self._start_standalone_lease(round_result.standalone_lease, host, now, terms))
            )
        return grants

    def _deny(self, round_result: RoundResult, now: Moment) -> None:
        for waiting in round_result.passed:
            self._jobs[waiting.job_id] = replace(self._jobs[waiting.job_id], passed_at=now)
        for denial in round_result.denials:
            job_id, data = denial.waiting.job_id, denial.as_json()
            job = replace(
                self._jobs[job_id],
                denied=denial.reason.code,
                denied_data=json.dumps(data, separators=(",", ":")),
                denied_at=now,
            )
            self._jobs[job_id] = job
            self._note(now, Note(EventKind.DENIED, denial.reason.code, data), job)

    def _start(self, pick: Pick, host: HostId, now: Moment, terms: Terms) -> Grant:
        job = self._jobs[pick.waiting.job_id]
        leased = pick.offer is Placement.LEASE
        dispatch_id = dispatch_id_of(job.job_id, job.fence + 1)
        job = replace(
            job,
            state=JobState.DISPATCHING,
            fence=job.fence + 1,
            dispatch_id=dispatch_id,
            denied="",
            denied_data="{}",
            denied_at=None,
            passed_at=None,
        )
        self._lines.drop(job.job_id)
        self._note(now, Note(EventKind.DISPATCHING, "admitted"), job, dispatch_id)
        limits = stop_moment(job.intent.max_runtime_sec, job.intent.max_active_sec, job.active, now)
        if leased:
            job = replace(job, state=JobState.RUNNING, counters=replace(job.counters, start=0))
            data = running_data(terms.worker, now - job.ready_at)
            self._note(now, Note(EventKind.RUNNING, data=data), job, dispatch_id)
        self._set_state(job, JobState.QUEUED)
        dispatch = new_dispatch(
            dispatch_id,
            pick.waiting,
            pick.admission_class,
            pick.offer,
            terms,
            host=host,
            now=now,
            ends_at=pick.ends_at,
            limits=limits,
        )
        return Grant(self._hold(dispatch, now), job if leased else None)

    def _start_standalone_lease(
        self, admission_class: AdmissionClass, host: HostId, now: Moment, terms: Terms
    ) -> Dispatch:
        dispatch_id = DispatchId(f"{self._new_id()}.0")
        self._note(now, Note(EventKind.ADMITTED), None, dispatch_id)
        dispatch = new_dispatch(
            dispatch_id, None, admission_class, Placement.LEASE, terms, host=host, now=now
        )
        return self._hold(dispatch, now)

    def _hold(self, dispatch: Dispatch, now: Moment) -> Dispatch:
        self._keep(dispatch)
        account = self._accounts.setdefault(dispatch.addon_id, Account())
        account.hold(dispatch.admission_class.cost_units, now, self._ordering.sharing)
        return dispatch

    def _keep(self, dispatch: Dispatch) -> None:
        self._dispatches[dispatch.dispatch_id] = self._live[dispatch.dispatch_id] = dispatch

    # apply

    def _apply_all(self, changes: Sequence[Change]) -> list[bool]:
        applied = [self._apply(change) for change in changes]
        self._resolve(self._moves)
        return applied

    def _resolve(self, moves: Sequence[StateMove], new: Sequence[int] = ()) -> None:
        if moves or new:
            resolve(MemoryDependencyRows(self), moves, new)
            advance_arrays(MemoryArrayRows(self), self._moves)  # children that ended have joined `_moves`
        self._moves = []

    def _resolve_pending(self) -> int:
        pending, self._pending = self._pending, {}
        self._resolve(sorted(pending.values()))
        return len(self._pending)

    def _apply(self, change: Change) -> bool:
        now = self._clock()
        step, ending = change.job, change.dispatch
        if step is not None and not step.applies_to(self._jobs.get(step.job_id)):
            return False
        if ending is not None and not ending.applies_to(self._live.get(ending.dispatch_id), now):
            return False
        active = 0 if ending is None else self._move_dispatch(ending, now).active
        job = None if step is None else self._move_job(step, active, now)
        for note in change.notes:
            self._note(change.at, note, job, None if ending is None else ending.dispatch_id)
        return True

    def _move_dispatch(self, step: DispatchStep, now: Moment) -> Dispatch:
        dispatch = step.apply(self._live[step.dispatch_id], now)
        self._keep(dispatch)
        if step.target is DispatchPhase.ENDED:
            del self._live[step.dispatch_id]
            account = self._accounts.setdefault(dispatch.addon_id, Account())
            account.hold(-dispatch.admission_class.cost_units, now, self._ordering.sharing)
        return dispatch

    def _move_job(self, step: JobStep, active: Span, now: Moment) -> Job:
        job = step.apply(self._jobs[step.job_id], active, now)
        if step.place is not None:
            self._lines.put(job, step.place, now)
        elif step.target is not JobState.QUEUED:
            self._lines.drop(job.job_id)
        self._set_state(job, step.source)
        if (move := move_of(job.no, job.job_id, step.source, step.target)) is not None:
            self._moves.append(move)
        return job

    def _set_state(self, job: Job, source: JobState) -> None:
        self._jobs[job.job_id] = job
        self._tally[job.intent.addon_id, source] -= 1
        self._tally[job.intent.addon_id, job.state] += 1

    # renew

    def _renew(self, renewal: Renewal, notes_for: NotesFor) -> RenewedDispatch | None:
        now = self._clock()
        dispatch = self._live.get(renewal.dispatch_id)
        if dispatch is None or dispatch.phase is DispatchPhase.RESERVED or dispatch.expires_at <= now:
            return None
        paid = max(0, (renewal.spent or 0) - dispatch.spent)
        dispatch = replace(
            dispatch,
            expires_at=renewal.expires_at if dispatch.phase is DispatchPhase.LEASED else dispatch.expires_at,
            progress=dispatch.progress if renewal.progress is None else renewal.progress,
            spent=dispatch.spent + paid,
            pid=dispatch.pid if renewal.pid is None else renewal.pid,
        )
        self._keep(dispatch)
        for window in windows(now) if paid else ():
            self._spent[dispatch.addon_id, window.name] += paid
        job = None if dispatch.job_id is None else self._jobs[dispatch.job_id]
        before = 0 if job is None else job.spent - job.spent_before
        if job is not None:
            progress = job.progress if renewal.progress is None else renewal.progress
            self._jobs[job.job_id] = replace(job, progress=progress, spent=job.spent + paid, pid=dispatch.pid)
            if renewal.checkpoint is not None:
                self._checkpoints[job.job_id] = renewal.checkpoint
                self._note(now, Note(EventKind.CHECKPOINT), job, renewal.dispatch_id)
        renewed = RenewedDispatch(
            renewal.dispatch_id,
            dispatch.job_id,
            dispatch.addon_id,
            dispatch.phase,
            dispatch.reason,
            dispatch.expires_at,
            before,
            before + paid,
            None if job is None else job.intent.cost_limit,
            "" if job is None else job.intent.unit,
            {w.kind: self._spent[dispatch.addon_id, w.name] for w in windows(now)} if paid else NOTHING_SPENT,
        )
        for note in notes_for(renewed):
            self._note(now, note, job if note.of_job else None, renewal.dispatch_id)
        return renewed

    # maintenance

    def _set_addon(self, operation: SetAddon) -> None:
        addon_id, weight, paused = operation.addon_id, operation.weight, operation.paused
        account = self._accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused
        note = addon_note(addon_id, account.weight, account.paused, operation.by)
        self._note(self._clock(), note, None)

    def _change_record(
        self, operation: ChangeSchedule | RecordLoad | ChangeArray | SubmitBatch | ChangeBatch
    ) -> Any:
        if isinstance(operation, ChangeArray):
            answer: Any = change_array(MemoryArrayRows(self), operation)
        elif isinstance(operation, SubmitBatch):
            answer = add_batch(self, operation)
        elif isinstance(operation, ChangeBatch):
            answer = change_group(self, operation.group_id, operation.decide)
        else:
            return self._write_schedule(operation)
        self._moves = []  # they are of children, which `resolve` has resolved already
        return answer

    def _write_schedule(self, operation: ChangeSchedule | RecordLoad) -> ScheduleWritten | None:
        """Change a schedule, or record the load of an hour by which a schedule may choose its hour."""
        if isinstance(operation, RecordLoad):
            key = (operation.host, operation.hour)
            self._load_hours[key] = blended(self._load_hours.get(key), operation.busy)
            return None
        change, depth = operation.change, operation.depth
        stored = self._schedules.get(change.name)
        if change.version != (0 if stored is None else stored.version):
            return None
        receipt = None if change.job is None else self._submit([change.job.intent], depth)[0]
        job_id = new_job_id(receipt)
        record = change.row(job_id)
        self._schedules.pop(change.name, None)
        self._schedules_due.pop(change.name, None)
        if record is not None:
            self._schedules[change.name] = record
            if (due_at := record.due_at) is not None:
                self._schedules_due[change.name] = due_at
        for note in change.events(job_id):
            self._note(change.at, note, None)
        return ScheduleWritten(record, receipt)

    def _prune(self, before: Moment, limit: int) -> int:
        old = [
            job
            for job in self._jobs.values()
            if job.state in PRUNABLE and (job.ended_at or 0) < before and not self._awaited(job.job_id)
        ]
        old = sorted(old, key=lambda job: (job.ended_at or 0, job.no))[:limit]
        for job in old:
            self._forget(job)
        if old:
            pruned_ids = {job.job_id for job in old}
            # The event of a fired schedule is pruned with the job that the schedule became.
            fired = EventKind.SCHEDULE_FIRED
            by_job = ((e.data["job_id"] if e.kind is fired else e.job_id, e) for e in self._events)
            self._events = [event for job_id, event in by_job if job_id not in pruned_ids]
            pruned = Note(EventKind.PRUNED, data={"jobs": len(old), "before": before})
            self._note(self._clock(), pruned, None)
        if (
            len(old) < limit
        ):  # all old jobs are gone, so the key of an array and the name of a batch are free again
            self._forget_groups(before)
        return len(old)

    def _forget_groups(self, before: Moment) -> None:
        for group in [g for g in self._groups.values() if (g.ended_at or before) < before]:
            if not self._awaited(group.group_id):
                self._forget_dependencies(group.group_id)
                drop_group(self, group.group_id)
                self._arrays.pop(group.group_id, None)
                self._indices.pop(group.group_id, None)

    def _awaited(self, job_id: JobId) -> bool:
        """
        Whether a child waits for this job or group, or a batch that has not ended counts it as a member.
        """
        dependencies = self._children.get(job_id, {}).values()
        return any(
            dependency.status is DependencyStatus.OPEN
            or (dependency.child in self._groups and self._groups[dependency.child].state is None)
            for dependency in dependencies
        )

    def _forget_dependencies(self, job_id: JobId) -> None:
        for parent in self._dependencies.pop(job_id, {}):
            self._children.get(parent, {}).pop(job_id, None)
        for child in self._children.pop(job_id, {}):
            self._dependencies.get(child, {}).pop(job_id, None)

    def _forget(self, job: Job) -> None:
        self._forget_dependencies(job.job_id)
        for dispatch in self.attempts(job.job_id):
            del self._dispatches[dispatch.dispatch_id]
        del self._jobs[job.job_id], self._trails[job.job_id], self._by_no[job.no]
        self._checkpoints.pop(job.job_id, None)
        self._tally[job.intent.addon_id, job.state] -= 1
        if (key := key_of(job.intent)) is not None:
            del self._keys[key]

    def _shift(self, by: Span) -> int:
        for dispatch in list(self._live.values()):
            shifted = replace(
                dispatch,
                admitted_at=dispatch.admitted_at + by,
                started_at=_shifted(dispatch.started_at, by),
                expires_at=dispatch.expires_at + by,
                stop_at=_shifted(dispatch.stop_at, by),
                ends_at=_shifted(dispatch.ends_at, by),
            )
            self._keep(shifted)
            if dispatch.job_id is not None:
                job = self._jobs[dispatch.job_id]
                self._jobs[job.job_id] = replace(
                    job, ready_at=job.ready_at + by, not_before=_shifted(job.not_before, by)
                )
        for job_id, queue_place in self._lines.shift(by, self._clock()):
            job = self._jobs[job_id]
            self._jobs[job_id] = replace(
                job,
                ready_at=queue_place.ready_at,
                not_before=queue_place.not_before,
                denied_at=_shifted(job.denied_at, by),
                passed_at=_shifted(job.passed_at, by),
            )
        self._note(self._clock(), Note(EventKind.CLOCK_SHIFTED, data={"by": by}), None)
        return len(self._live)

    def _reorder(self, aging: Aging, after: int, limit: int) -> int:
        queued = sorted((self._jobs[job_id] for job_id in self._lines.queued()), key=lambda job: job.no)
        jobs = [job for job in queued if job.no > after][:limit]
        for job in jobs:
            self._lines.set_turn(job.job_id, order_key(job.intent.priority, job.ready_at, aging))
        return jobs[-1].no if jobs else 0

    def _change_host(self, operation: RegisterHost | RemoveHost | DrainHost) -> Any:
        match operation:
            case RegisterHost(host):
                return self._register_host(host)
            case RemoveHost(host_id, instance):
                return self._remove_host(host_id, instance)
            case DrainHost(host_id, draining, by):
                return self._drain_host(host_id, draining, by)

    def _register_host(self, host: Host) -> Host:
        stored = self._hosts.get(host.host)
        if stored is not None and stored.instance != host.instance and stored.alive(host.seen_at):
            raise name_taken(host)
        self._hosts = {
            name: h for name, h in self._hosts.items() if h.draining or h.until >= host.seen_at - LOST_FOR
        }
        registered = replace(host, draining=stored is not None and stored.draining)
        self._hosts[host.host] = registered
        return registered

    def _remove_host(self, host: HostId, instance: str) -> None:
        stored = self._hosts.get(host)
        if stored is not None and stored.instance == instance:
            del self._hosts[host]
            if stored.draining:
                self._hosts[host] = replace(stored, until=stored.seen_at)

    def _drain_host(self, host: HostId, draining: bool, by: str) -> bool:
        stored = self._hosts.get(host)
        if stored is None:
            return False
        self._hosts[host] = replace(stored, draining=draining)
        self._note(self._clock(), drain_note(host, draining, by), None)
        return True

    def _learn(self, learn: Learn) -> bool:
        if learn.after != self._learned_upto:
            return False
        self._learned_upto = learn.upto
        self._learned.update(learn.records)
        for name in learn.forgotten:
            self._learned.pop(name, None)
        return True


def _shifted(moment: Moment | None, by: Span) -> Moment | None:
    return None if moment is None else moment + by
