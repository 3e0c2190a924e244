"""
What happens to most jobs: they are taken, and they complete. Here whole batches of them move by few steps.

Everything that is the same for a batch is reckoned once, and what must be read comes as one text: a cursor gives the interpreter's lock
away and takes it back for every row, and the threads that run the jobs want that lock too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from penstock.core.changes import running_data, stop_moment
from penstock.core.intent import Intent
from penstock.core.job import Dispatch, Job, Kind, dispatch_id_of
from penstock.core.landing import End, Phase
from penstock.core.order import Offer, Ordering, Pick, Waiting, ready_at
from penstock.core.share import Sharing
from penstock.core.states import State
from penstock.core.words import HostId, Moment
from penstock.stores.protocol import Done, Terms
from penstock.stores.rows import make_dispatch
from penstock.stores.sqlite_floor import Standby
from penstock.stores.sqlite_pages import Pages

__all__ = ["complete", "take"]


def take(
    pages: Pages,
    picks: Sequence[Pick],
    standby: dict[int, Standby],
    terms: Terms,
    ordering: Ordering,
    *,
    host: HostId,
    now: Moment,
) -> list[Dispatch]:
    """What a round has picked becomes dispatches, in its order."""
    made: list[Dispatch] = []
    for _, alike in groupby(picks, lambda pick: (id(pick.demand), pick.offer)):
        made += _take(pages, list(alike), standby, terms, ordering, host=host, now=now)
    return made


def _take(
    pages: Pages,
    picks: list[Pick],
    standby: dict[int, Standby],
    terms: Terms,
    ordering: Ordering,
    *,
    host: HostId,
    now: Moment,
) -> list[Dispatch]:
    """`picks`: of one demand, and all offered alike."""
    demand, offer = picks[0].demand, picks[0].offer
    leased, demand_no = offer is Offer.LEASE, standby[picks[0].waiting.no].demand_no
    state, phase, started_at, worker, until = (
        (State.RUNNING, Phase.LEASED, now, terms.worker, now + terms.lease_for)
        if leased
        else (State.DISPATCHING, Phase.RESERVED, None, "", now + terms.reserve_for)
    )
    made, rows = [], []
    for waiting, _, _, ends_at in picks:
        no, fence = waiting.no, waiting.fence + 1
        _, n, max_runtime, max_active, active = standby[no]
        job_id, attempt = waiting.job_id, str(fence)
        dispatch_id = dispatch_id_of(job_id, fence)
        n += 1
        pages.event(no, now, Kind.DISPATCHING, job_id, n, State.DISPATCHING, "admitted", attempt, None)
        stop_at, stop_for = None, None
        if leased:
            n += 1
            waited = now - ready_at(waiting.turn, waiting.priority, ordering.aging)
            pages.event(no, now, Kind.RUNNING, job_id, n, state, "", attempt, running_data(worker, waited))
            stop_at, stop_for = stop_moment(max_runtime, max_active, active, now)
        pages.take_job(no, state, fence, n)
        rows.append(
            (
                dispatch_id, no, demand_no, demand.addon_id, host, fence, demand.cost_units, phase, now, started_at, until,
                ends_at, stop_at, stop_for, worker
            )
        )  # fmt: skip
        made.append(
            make_dispatch(
                dispatch_id, job_id, demand.addon_id, host, demand, fence, phase, now, until, started_at, ends_at,
                stop_at, stop_for, None, worker, 0, None, None, None, None, None
            )
        )  # fmt: skip
        if leased and (intent := pages.fresh.get(no)) is not None:
            pages.started.append(_just_started(waiting, intent, made[-1], ordering))
    pages.add_dispatches(rows)
    pages.hold(host, demand_no, len(picks))
    pages.moved(demand.addon_id, State.QUEUED, state, len(picks))
    pages.touched.add(demand.addon_id)  # its account was changed by the round, as it picked
    return made


def _just_started(waiting: Waiting, intent: Intent, dispatch: Dispatch, ordering: Ordering) -> Job:
    """A job that was submitted at this moment too."""
    return Job(
        no=waiting.no,
        job_id=waiting.job_id,
        intent=intent,
        state=State.RUNNING,
        created_at=dispatch.admitted_at,
        ready_at=ready_at(waiting.turn, waiting.priority, ordering.aging),
        fence=dispatch.fence,
        dispatch_id=dispatch.dispatch_id,
    )


def complete(pages: Pages, done: Sequence[Done], sharing: Sharing, now: Moment) -> list[bool]:
    """As `changes.completed` says, for each that still runs under its lease."""
    pages.flush_rows()
    answers = [False] * len(done)
    jobs, plain = pages.updates("complete_job"), list[str]()
    freed: Counter[tuple[str, int]] = Counter()
    for at, no, n, demand_no, host, started_at in pages.leases([each.dispatch_id for each in done], now):
        dispatch_id, result = done[at]
        answers[at] = True
        if result is None:
            plain.append(dispatch_id)
        else:
            pages.update("complete_dispatch", dispatch_id, now, result)
        jobs.setdefault((n + 1, now, max(0, now - started_at)), []).append(no)
        job_id, _, attempt = dispatch_id.rpartition(".")
        pages.event(no, now, Kind.DONE, job_id, n + 1, State.DONE, End.COMPLETED, attempt, None)
        freed[host, demand_no] += 1
    if plain:
        pages.updates("complete_dispatch").setdefault((now, None), []).extend(plain)
    for (host, demand_no), n in freed.items():
        demand = pages.give_back(HostId(host), demand_no, n, sharing, now)
        pages.moved(demand.addon_id, State.RUNNING, State.DONE, n)
    return answers
