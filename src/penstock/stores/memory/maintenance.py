"""
What the memory store writes beside the life of a job: addons, retention, the clock, hosts, the right to dispatch; and the trail that all
of it leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs.admission import Account
from penstock.core.jobs.changes import Note, addon_note, drain_note
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import Aging, order_key
from penstock.core.jobs.states import PRUNABLE
from penstock.core.jobs.types import DispatchId, HostId, Moment, Span
from penstock.stores.api import (
    LOST_FOR,
    DrainHost,
    Operation,
    Prune,
    RegisterHost,
    Relay,
    RemoveHost,
    Reorder,
    SetAddon,
    Shift,
    name_taken,
)
from penstock.stores.memory.tables import MemoryTables


class MemoryUpkeep(MemoryTables):
    def _keep_up(self, operation: Operation[Any]) -> Any:
        match operation:
            case SetAddon():
                return self._set_addon(operation)
            case Prune(before, limit):
                return self._prune(before, limit)
            case Shift(by):
                return self._shift(by)
            case Reorder(aging, after, limit):
                return self._reorder(aging, after, limit)
            case RegisterHost(host):
                return self._register_host(host)
            case RemoveHost(host_id, instance):
                return self._remove_host(host_id, instance)
            case DrainHost(host_id, draining, by):
                return self._drain_host(host_id, draining, by)
        raise TypeError(f"{type(operation).__name__} is no operation of this store")

    def _set_addon(self, operation: SetAddon) -> None:
        addon_id, weight, paused = operation.addon_id, operation.weight, operation.paused
        account = self._accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused
        note = addon_note(addon_id, account.weight, account.paused, operation.by)
        self._note(self._clock(), note, None)

    def _prune(self, before: Moment, limit: int) -> int:
        old = [j for j in self._jobs.values() if j.state in PRUNABLE and (j.ended_at or 0) < before]
        old = sorted(old, key=lambda job: (job.ended_at or 0, job.no))[:limit]
        for job in old:
            self._forget(job)
        if old:
            gone = {job.job_id for job in old}
            self._events = [event for event in self._events if event.job_id not in gone]
            pruned = Note(EventKind.PRUNED, data={"jobs": len(old), "before": before})
            self._note(self._clock(), pruned, None)
        return len(old)

    def _forget(self, job: Job) -> None:
        for dispatch in self.attempts(job.job_id):
            del self._dispatches[dispatch.dispatch_id]
        del self._jobs[job.job_id], self._trails[job.job_id]
        self._checkpoints.pop(job.job_id, None)
        self._tally[job.intent.addon_id, job.state] -= 1
        if job.intent.idempotency_key is not None:
            del self._keys[job.intent.addon_id, job.intent.idempotency_key]

    def _shift(self, by: Span) -> int:
        for dispatch_id, dispatch in self._live.items():
            moved = replace(
                dispatch,
                admitted_at=dispatch.admitted_at + by,
                started_at=_moved(dispatch.started_at, by),
                expires_at=dispatch.expires_at + by,
                stop_at=_moved(dispatch.stop_at, by),
                ends_at=_moved(dispatch.ends_at, by),
            )
            self._live[dispatch_id] = self._dispatches[dispatch_id] = moved
            if dispatch.job_id is not None:
                job = self._jobs[dispatch.job_id]
                self._jobs[job.job_id] = replace(
                    job, ready_at=job.ready_at + by, not_before=_moved(job.not_before, by)
                )
        for job_id, place in self._lines.shift(by, self._clock()):
            job = self._jobs[job_id]
            self._jobs[job_id] = replace(
                job,
                ready_at=place.ready_at,
                not_before=place.not_before,
                denied_at=_moved(job.denied_at, by),
                passed_at=_moved(job.passed_at, by),
            )
        self._note(self._clock(), Note(EventKind.CLOCK_SHIFTED, data={"by": by}), None)
        return len(self._live)

    def _reorder(self, aging: Aging, after: int, limit: int) -> int:
        queued = sorted((self._jobs[job_id] for job_id in self._lines.queued()), key=lambda job: job.no)
        looked_at = [job for job in queued if job.no > after][:limit]
        for job in looked_at:
            self._lines.set_turn(job.job_id, order_key(job.intent.priority, job.ready_at, aging))
        return looked_at[-1].no if looked_at else 0

    # hosts

    def _register_host(self, host: Host) -> Host:
        known = self._hosts.get(host.host)
        if known is not None and known.instance != host.instance and known.alive(host.seen_at):
            raise name_taken(host)
        self._hosts = {
            name: h for name, h in self._hosts.items() if h.draining or h.until >= host.seen_at - LOST_FOR
        }
        registered = replace(host, draining=known is not None and known.draining)
        self._hosts[host.host] = registered
        return registered

    def _remove_host(self, host: HostId, instance: str) -> None:
        known = self._hosts.get(host)
        if known is not None and known.instance == instance:
            del self._hosts[host]
            if known.draining:
                self._hosts[host] = replace(known, until=known.seen_at)

    def hosts(self) -> list[Host]:
        with self._lock:
            return [replace(h, units=self.ledger(name).units) for name, h in sorted(self._hosts.items())]

    def _drain_host(self, host: HostId, draining: bool, by: str) -> bool:
        known = self._hosts.get(host)
        if known is None:
            return False
        self._hosts[host] = replace(known, draining=draining)
        self._note(self._clock(), drain_note(host, draining, by), None)
        return True

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:  # noqa: ARG002 - there is no other process
        with self._lock:
            if self._holder is not None:
                raise DispatcherHeld(f"this store is dispatched by {self._holder}", holder=self._holder)
            self._holder = holder

    def release_dispatch(self) -> None:
        self._holder = None

    def listen(self) -> None:
        pass  # there is no other process

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        self._holder = None

    # the trail

    def _note(self, at: Moment, note: Note, job: Job | None, dispatch_id: DispatchId | None = None) -> None:
        self._seq += 1
        trail = [] if job is None else self._trails[job.job_id]
        event = Event(
            seq=self._seq,
            at=at,
            kind=note.kind,
            job_id=None if job is None else job.job_id,
            n=len(trail) + 1 if job is not None else 0,
            state=None if job is None else job.state,
            reason=note.reason,
            dispatch_id=dispatch_id,
            data=dict(note.data),
        )
        self._events.append(event)
        trail.append(event)


def _moved(moment: Moment | None, by: Span) -> Moment | None:
    return None if moment is None else moment + by
