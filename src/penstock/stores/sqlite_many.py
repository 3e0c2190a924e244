"""
What happens to most jobs: they are taken, and they complete. Here whole batches of them move by few steps.

Everything that is the same for a batch is reckoned once, and what must be read comes as one text: a cursor gives the interpreter's lock
away and takes it back for every row, and the threads that run the jobs want that lock too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from penstock.core.changes import running_data, stop_moment
from penstock.core.demand import Demand
from penstock.core.job import Dispatch, Kind, dispatch_id_of
from penstock.core.landing import End, Phase
from penstock.core.order import Offer, Ordering, Pick
from penstock.core.quick import quick_tuple
from penstock.core.share import Sharing
from penstock.core.states import State
from penstock.core.words import DispatchId, HostId, Moment
from penstock.stores.protocol import Done, Terms
from penstock.stores.rows import make_dispatch
from penstock.stores.sqlite_floor import Standby
from penstock.stores.sqlite_pages import Pages
from penstock.stores.sqlite_started import Started
from penstock.stores.sqlite_sums import Lease

__all__ = ["complete", "take"]

#: What picks that are taken together have in common.
_KIND: Final = attrgetter("demand", "offer")
_FIRST: Final = "1"
_a_lease: Final = quick_tuple(Lease)
#: As they are written: a word costs the encoder half of what the enumeration's member does.
_DISPATCHING, _RUNNING, _DONE = str(Kind.DISPATCHING), str(Kind.RUNNING), str(Kind.DONE)
_DISPATCHED, _RUNS, _IS_DONE, _COMPLETED = (
    *(str(state) for state in (State.DISPATCHING, State.RUNNING, State.DONE)),
    str(End.COMPLETED),
)


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
    for (demand, offer), its in groupby(picks, _KIND):
        alike = list(its)
        if offer is Offer.LEASE:
            made += _lease(pages, alike, standby, terms, ordering, demand=demand, host=host, now=now)
        else:
            made += _reserve(pages, alike, standby, terms, demand=demand, host=host, now=now)
        pages.hold(host, pages.number(demand), len(alike))
        state = State.RUNNING if offer is Offer.LEASE else State.DISPATCHING
        pages.moved(demand.addon_id, State.QUEUED, state, len(alike))
        pages.touched.add(demand.addon_id)  # its account was changed by the round, as it picked
    return made


def _reserve(
    pages: Pages,
    picks: Sequence[Pick],
    standby: Mapping[int, Standby],
    terms: Terms,
    *,
    demand: Demand,
    host: HostId,
    now: Moment,
) -> list[Dispatch]:
    addon_id, until = demand.addon_id, now + terms.reserve_for
    made, demand_no, phase, batch = [], pages.number(demand), Phase.RESERVED, pages.batch
    for waiting, _, _, ends_at in picks:
        no, job_id, fence = waiting.no, waiting.job_id, waiting.fence + 1
        n = standby[no].events + 1
        dispatch_id = dispatch_id_of(job_id, fence)
        pages.tell((now, _DISPATCHING, job_id, n, _DISPATCHED, "admitted", str(fence), None))
        pages.start(no)
        pages.add_live(
            [(no, None, demand_no, host, fence, phase, n, batch, now, None, until, ends_at, None, None, "")]
        )
        made.append(
            make_dispatch(
                dispatch_id, job_id, addon_id, host, demand, fence, phase, now, until, None, ends_at,
                None, None, None, "", 0, None, None, None, None, None
            )
        )  # fmt: skip
    return made


def _lease(
    pages: Pages,
    picks: Sequence[Pick],
    standby: Mapping[int, Standby],
    terms: Terms,
    ordering: Ordering,
    *,
    demand: Demand,
    host: HostId,
    now: Moment,
) -> list[Dispatch]:
    """They run from now on, and whoever runs them can have the jobs as well."""
    addon_id, until, worker = demand.addon_id, now + terms.lease_for, terms.worker
    demand_no, phase, batch, per_point = (
        pages.number(demand),
        Phase.LEASED,
        pages.batch,
        ordering.aging.per_point,
    )
    made, rows, events, started = (
        [],
        [],
        list[tuple[Any, ...]](),
        Started(demand, pages.fresh, _said(pages, picks)),
    )
    for waiting, _, _, ends_at in picks:
        no, job_id, priority, turn, fence, _, _, _ = waiting
        its, fence, attempt, stop_at, stop_for = standby[no], fence + 1, _FIRST, None, None
        if fence > 1:
            attempt = str(fence)
        dispatch_id, n, since = DispatchId(f"{job_id}.{attempt}"), its.events, turn + priority * per_point
        if its.max_runtime_sec is not None or its.max_active_sec is not None:
            stop_at, stop_for = stop_moment(its.max_runtime_sec, its.max_active_sec, its.active, now)
        events += (
            (now, _DISPATCHING, job_id, n + 1, _DISPATCHED, "admitted", attempt, None),
            (now, _RUNNING, job_id, n + 2, _RUNS, "", attempt, running_data(worker, now - since)),
        )
        pages.start(no)
        rows.append(
            (no, None, demand_no, host, fence, phase, n + 2, batch, now, now, until, ends_at, stop_at, stop_for, worker)
        )  # fmt: skip
        made.append(
            make_dispatch(
                dispatch_id, job_id, addon_id, host, demand, fence, phase, now, until, now, ends_at,
                stop_at, stop_for, None, worker, 0, None, None, None, None, None
            )
        )  # fmt: skip
        pages.leased(dispatch_id, _a_lease((no, n + 2, demand_no, host, until)))
        pages.started[dispatch_id] = (started, waiting, its, dispatch_id, fence, since)
    pages.tell(*events)
    pages.add_live(rows)
    return made


def _said(pages: Pages, picks: Sequence[Pick]) -> dict[int, tuple[Any, ...]]:
    return pages.said([waiting.no for waiting, *_ in picks if waiting.no not in pages.fresh])


def complete(pages: Pages, done: Sequence[Done], sharing: Sharing, now: Moment) -> list[bool]:
    """As `changes.completed` says, for each that still runs under its lease."""
    pages.flush_rows()
    answers = [False] * len(done)
    nos: list[int] = []
    freed: Counter[tuple[str, int]] = Counter()
    events: list[tuple[Any, ...]] = []
    for at, no, n, demand_no, host in pages.leases([each[0] for each in done], now):
        dispatch_id, result = done[at]
        answers[at] = True
        pages.complete(no, result)
        nos.append(no)
        job_id, _, attempt = dispatch_id.rpartition(".")
        events.append((now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))
        freed[host, demand_no] += 1
    pages.tell(*events)
    pages.done(nos)
    for (host, demand_no), n in freed.items():
        demand = pages.give_back(HostId(host), demand_no, n, sharing, now)
        pages.moved(demand.addon_id, State.RUNNING, State.DONE, n)
    return answers
