"""How a dispatch begins: the same value in every store that has rows."""

from __future__ import annotations

from typing import Final

from penstock.core.demand import AdmissionClass
from penstock.core.job import Dispatch
from penstock.core.landing import DispatchPhase, EndReason
from penstock.core.order import Placement, QueuedJob
from penstock.core.words import DispatchId, HostId, Moment
from penstock.stores.protocol import Terms
from penstock.stores.rows import make_dispatch

__all__ = ["new_dispatch"]


def new_dispatch(
    dispatch_id: DispatchId,
    waiting: QueuedJob | None,
    admission_class: AdmissionClass,
    offer: Placement,
    terms: Terms,
    *,
    host: HostId,
    now: Moment,
    ends_at: Moment | None = None,
    limits: tuple[Moment | None, EndReason | None] = (None, None),
) -> Dispatch:
    """`waiting`: None for a lease without a job."""
    leased = offer is Placement.LEASE
    return make_dispatch(
        dispatch_id,
        None if waiting is None else waiting.job_id,
        admission_class.addon_id,
        host,
        admission_class,
        0 if waiting is None else waiting.fence + 1,
        DispatchPhase.LEASED if leased else DispatchPhase.RESERVED,
        now,
        now + (terms.lease_for if leased else terms.reserve_for),
        now if leased else None,
        ends_at,
        *(limits if leased else (None, None)),
        None,
        terms.worker if leased else "",
        *_NOTHING_YET,
    )


#: Spent, progress, how it ended, and the pid.
_NOTHING_YET: Final = (0, None, None, None, None, None, None)
