"""A heartbeat: a lease is prolonged, and what its run has come to is written down."""

from __future__ import annotations

import apsw

from penstock.core.changes import Note, Renewal
from penstock.core.job import EventKind
from penstock.core.landing import DispatchPhase, EndReason
from penstock.core.spend import windows
from penstock.core.states import JobState
from penstock.core.words import AddonId, JobId, Moment, Money
from penstock.stores.protocol import NOTHING_SPENT, Standing, Tell
from penstock.stores.rows import parts_of
from penstock.stores.sqlite_file import one, statements
from penstock.stores.sqlite_pages import NO_JOB, SqliteWriteBatch

__all__ = ["renew"]


def renew(
    con: apsw.Connection, pages: SqliteWriteBatch, beat: Renewal, tell: Tell, now: Moment
) -> Standing | None:
    job_id, fence = parts_of(beat.dispatch_id)
    named = {"dispatch_id": beat.dispatch_id, "job_id": job_id, "fence": fence}
    row = one(con, "dispatch_for_beat", named)
    if row is None:
        return None
    phase, expires_at, reason, addon_id, spent, no, job_id, job_spent, spent_before, n, limit, in_flight = row
    if phase not in (DispatchPhase.LEASED, DispatchPhase.ENDING) or expires_at <= now:
        return None
    until = beat.expires_at if phase == DispatchPhase.LEASED else expires_at
    more = max(0, (beat.spent or 0) - spent)
    if more:
        con.executemany(statements()["spend"], [(addon_id, w.name, more) for w in windows(now)])
    before = 0 if no is None else job_spent - spent_before
    standing = Standing(
        beat.dispatch_id,
        None if job_id is None else JobId(job_id),
        AddonId(addon_id),
        DispatchPhase(phase),
        None if reason is None else EndReason(reason),
        until,
        before,
        before + more,
        limit,
        _addon_spent(con, addon_id, now) if more else NOTHING_SPENT,
    )
    told = list(tell(standing))
    if no is not None and (more or told or beat.progress is not None or beat.checkpoint is not None):
        if beat.checkpoint is not None:
            con.execute(statements()["set_checkpoint"], (no, now, fence, beat.checkpoint))
            told.insert(0, Note(EventKind.CHECKPOINT))
        con.execute(statements()["beat_job"], (beat.progress, more, no))
    for note in told:
        whose = NO_JOB
        if note.of_job and no is not None:
            n += 1
            whose = (no, JobId(job_id), n, JobState.RUNNING)
        pages.note(now, note, whose, beat.dispatch_id)
    con.execute(statements()["renew"], (until, beat.progress, spent + more, n, beat.pid, in_flight))
    return standing


def _addon_spent(con: apsw.Connection, addon_id: str, now: Moment) -> dict[str, Money]:
    return {
        window.kind: one(con, "spent_in", {"addon_id": addon_id, "period": window.name})[0]
        for window in windows(now)
    }
