"""What a transaction writes beside the life of a job: addons, hosts, retention, the order when its rules change, and a clock that was set."""

from __future__ import annotations

from typing import Any, Final

import apsw
import msgspec
from msgspec.structs import replace

from penstock.core.jobs.admission import Account
from penstock.core.jobs.changes import Note, addon_note, drain_note
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, HostId, Moment, Span
from penstock.stores.api import (
    LOST_FOR,
    DrainHost,
    Operation,
    Prune,
    RegisterHost,
    RemoveHost,
    Reorder,
    SetAddon,
    Shift,
    name_taken,
)
from penstock.stores.common.rows import forget, host_values, listed
from penstock.stores.sqlite.connection import one, query
from penstock.stores.sqlite.guard import Loss
from penstock.stores.sqlite.write_batch import NO_JOB, SqliteWriteBatch

_FORGET: Final = ("forget_mentions", "forget_checkpoint", "forget_intent", "forget_dispatches", "forget_job")
_numbers: Final = msgspec.json.Decoder(list[int]).decode


class SqliteUpkeep:
    _con: apsw.Connection
    _sql: dict[str, str]
    _pages: SqliteWriteBatch
    _now: Moment

    def keep_up(self, operation: Operation[Any]) -> Any:
        match operation:
            case SetAddon(addon_id, weight, paused, by):
                return self.set_addon(addon_id, weight, paused, by)
            case Prune(before, limit):
                return self.prune(before, limit)
            case Shift(by):
                return self.shift(by)
            case Reorder(aging, after, limit):
                return self.reorder(aging, after, limit)
            case RegisterHost(host):
                return self.register_host(host)
            case RemoveHost(host_id, instance):
                return self.remove_host(host_id, instance)
            case DrainHost(host_id, draining, by):
                return self.drain_host(host_id, draining, by)
        raise TypeError(f"{type(operation).__name__} is no operation of this store")

    def set_addon(self, addon_id: AddonId, weight: int | None, paused: bool | None, by: str) -> None:
        account = self._pages.accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused
        self._pages.touched.add(addon_id)
        self._pages.note(self._now, addon_note(addon_id, account.weight, account.paused, by), NO_JOB)

    def register_host(self, host: Host) -> Host:
        row = one(self._con, "register_host", host_values(host))
        if row is None:
            raise name_taken(host)
        self._con.execute(self._sql["forget_hosts"], {"before": host.seen_at - LOST_FOR})
        return replace(host, draining=bool(row[0]))

    def remove_host(self, host: HostId, instance: str) -> None:
        for name in ("leave_host", "lose_host"):
            self._con.execute(self._sql[name], {"host": host, "instance": instance})

    def drain_host(self, host: HostId, draining: bool, by: str) -> bool:
        if one(self._con, "drain_host", {"host": host, "draining": int(draining)}) is None:
            return False
        self._pages.note(self._now, drain_note(host, draining, by), NO_JOB)
        return True

    def prune(self, before: Moment, limit: int) -> int:
        self._pages.flush_rows()
        asked = {"before": before, "most": limit}
        batches, done = self._old_done(asked)
        settled = [tuple(row) for row in query(self._con, "old_jobs", asked)]
        old = sorted(settled + done)[:limit]
        self._forget_events({no: job_id for _, no, job_id, *_ in old})
        for _, no, _, addon_id, state in old:
            for name in _FORGET:
                self._con.execute(self._sql[name], (no,))
            self._pages.tally[addon_id, state] -= 1
        if old:
            self._shorten_done(batches, {no for _, no, *_ in old})
            self._pages.note(
                self._now, Note(EventKind.PRUNED, data={"jobs": len(old), "before": before}), NO_JOB
            )
        return len(old)

    def _old_done(self, asked: dict[str, int]) -> tuple[dict[int, list[int]], list[tuple[Any, ...]]]:
        """Which were done together, and all of them as rows of `old_jobs`."""
        batches: dict[int, list[int]] = {}
        found: list[tuple[Any, ...]] = []
        for batch, at, jobs in query(self._con, "old_ended_jobs", asked):
            batches[batch] = _numbers(jobs)
            found += [(at, *job, JobState.DONE) for job in query(self._con, "done_jobs", {"nos": jobs})]
            if len(found) >= asked["most"]:
                break
        return batches, found

    def _shorten_done(self, batches: dict[int, list[int]], gone: set[int]) -> None:
        for batch, jobs in batches.items():
            left = [no for no in jobs if no not in gone]
            if not left:
                self._con.execute(self._sql["forget_ended_jobs"], (batch,))
            elif len(left) < len(jobs):
                self._con.execute(self._sql["shorten_ended_jobs"], (listed(left), batch))

    def _forget_events(self, gone: dict[int, str]) -> None:
        jobs = set(gone.values())
        for batch, text in list(query(self._con, "batches_of", {"nos": listed([*gone])})):
            left = forget(text, jobs)
            if left is None:
                self._con.execute(self._sql["forget_batches"], (batch,))
            else:
                self._con.execute(self._sql["rewrite_batches"], (left, batch))

    def reorder(self, aging: Aging, after: int, limit: int) -> int:
        self._pages.flush_rows()
        (last,) = one(self._con, "last_to_reorder", {"after": after, "most": limit})
        if last is not None:
            values = {"after": after, "last": last, "per_point": aging.per_point}
            self._con.execute(self._sql["reorder"], values)
        return last or 0

    def accept_loss(self, loss: Loss) -> None:
        """Event numbers go on behind those that were lost, so that no reader's cursor is ahead of the trail."""
        self._pages.batch = max(self._pages.batch, loss.known + 1)
        self._pages.note(self._now, Note(EventKind.LOSS_ACCEPTED, data=loss._asdict()), NO_JOB)

    def shift(self, by: Span) -> int:
        self._pages.forget_leases()
        self._pages.flush_rows()
        self._con.execute(self._sql["shift"], {"by": by})
        moved = self._con.changes()
        self._con.execute(self._sql["shift_queue"], {"by": by, "now": self._now})
        self._con.execute(self._sql["shift_queued_jobs"], {"by": by})
        self._con.execute(self._sql["shift_dispatched_jobs"], {"by": by})
        self._pages.note(self._now, Note(EventKind.CLOCK_SHIFTED, data={"by": by}), NO_JOB)
        return moved
