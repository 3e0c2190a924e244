"""
What a scheduler does first: it deals with what the one before it left in flight (SPEC TR-11).

Nobody ticked and nobody listened since then, and the two kinds of runs came through that differently:

- What our own runner ran here is put back, each as one crash with its backoff. First its surviving processes are ended, by
  the runner, who alone can find them: so nothing runs twice at once.
- A worker of an add-on is a process of its own and may well be alive. It could not renew while nobody listened, which is not
  its fault, so its lease is not ended: it gets the time of one whole lease from now on. A worker that is gone costs its job
  that much time and no more; ending the lease instead would run a job a second time beside its living first run, and count a
  crash against it. A reservation is treated alike: its worker could not ask for the lease.
- What had been told to stop keeps its moment. A worker that hears nothing stops by itself when its lease is over, and that
  moment passed, or will pass, without us.

Giving time is always safe: until an extended lease is over, nobody else is given the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeAlias

from penstock.core.jobs import changes
from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.types import DispatchId, JobId, Moment
from penstock.scheduler.clock import TOLERANCE
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, Reorder, Shift, Store, committed

__all__ = ["Recovered", "Survivors", "put_in_order", "recover", "workers_named"]

log = logging.getLogger("penstock.recovery")

#: Is shown every dispatch that lives on this host; ends the processes of those that it ran, and answers with those whose
#: processes are gone for certain. What it leaves out keeps its lease, and is given up when that is over.
Survivors: TypeAlias = Callable[[Sequence[Dispatch]], Collection[DispatchId]]

#: One transaction each: a start with ten thousand leases must not hold the write lock in one piece.
_BATCH: Final = 500
_ALL: Final = 1_000_000
_STEP: Final = 5_000


class Recovered(NamedTuple):
    put_back: int
    given_time: int


def workers_named(prefix: str) -> Survivors:
    """For workers that cannot outlive their scheduler, as threads of its process."""

    def gone(dispatches: Sequence[Dispatch]) -> list[DispatchId]:
        return [d.dispatch_id for d in dispatches if d.worker.startswith(prefix)]

    return gone


def recover(
    store: Store, rules: SchedulerRules, survivors: Survivors | None = None, holder: str = ""
) -> Recovered:
    """To be called with the right to dispatch, and before anything else is done with it."""
    _follow_the_clock(store)
    here = [d for d in store.live(limit=_ALL) if d.host == rules.host]
    gone = frozenset(survivors(here)) if survivors is not None and here else frozenset[DispatchId]()
    done = Recovered(0, 0)
    for start in range(0, len(here), _BATCH):
        done = _settle(store, rules, here[start : start + _BATCH], gone, done)
    told = {"holder": holder, "put_back": done.put_back, "given_time": done.given_time}
    committed(store, Apply([Change(at=store.now(), notes=(Note(EventKind.SCHEDULER_STARTED, data=told),))]))
    if here:
        log.info("found %d in flight: %d put back, %d given time", len(here), *done)
    return done


def _follow_the_clock(store: Store) -> None:
    """
    The wall clock was set back while no scheduler ran, if the newest event lies ahead of it. By how much is not known, for the time in between
    is not; moving everything by the least that it can be makes no delay longer than it was when that event was written.
    """
    if store.shared:  # its clock is the server's
        return
    newest = store.events(store.newest() - 1, 1)
    ahead = newest[-1].at - store.now() if newest else 0
    if ahead > TOLERANCE:
        log.warning(
            "the wall clock was set back by %.1f s or more; leases and delays of retries move with it",
            ahead / 1e6,
        )
        committed(store, Shift(-ahead))


def put_in_order(store: Store, aging: Aging) -> None:
    """
    Where jobs stand was reckoned under the aging that was set when they became ready. When it has been changed since, new ones and old ones
    could not be compared. All of them are looked at, in steps between which others write; where nothing has changed nothing is written.
    """
    last = committed(store, Reorder(aging, 0, _STEP))
    while last:
        last = committed(store, Reorder(aging, last, _STEP))


def _settle(
    store: Store,
    rules: SchedulerRules,
    batch: Sequence[Dispatch],
    gone: Collection[DispatchId],
    done: Recovered,
) -> Recovered:
    now = store.now()
    jobs = {job.job_id: job for job in store.jobs([d.job_id for d in batch if d.job_id is not None])}
    ended = [_put_back(d, jobs, rules, now) for d in batch if d.dispatch_id in gone]
    waiting = [d for d in batch if d.dispatch_id not in gone and d.phase is not DispatchPhase.ENDING]
    given_time = [
        changes.prolong(
            d, now + (rules.reserve_for if d.phase is DispatchPhase.RESERVED else rules.lease_for), now
        )
        for d in waiting
    ]
    # Each is compare-and-set: a worker that was faster with its report keeps what it reported.
    settled = committed(store, Apply([change for change in ended if change is not None]))
    prolonged = committed(store, Apply(given_time))
    return Recovered(done.put_back + sum(settled), done.given_time + sum(prolonged))


def _put_back(
    dispatch: Dispatch, jobs: dict[JobId, Job], rules: SchedulerRules, now: Moment
) -> Change | None:
    how = EndReason.SCHEDULER_RESTARTED
    if dispatch.job_id is None:
        return changes.release(dispatch, now, how)
    job = jobs.get(dispatch.job_id)
    if job is None or job.dispatch_id != dispatch.dispatch_id:
        return None  # it has been settled since we looked
    return changes.end(job, dispatch, how, now, schedules=rules.schedules, ordering=rules.ordering)
