"""
How a dispatch begins: the same value in every store that has rows. And new ids: UUIDv7 sort by time, so an index of a million of
them grows at its end.
"""

from __future__ import annotations

import uuid_utils

from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import Placement, QueuedJob
from penstock.core.jobs.types import DispatchId, HostId, Moment
from penstock.stores.api import Terms

__all__ = ["new_dispatch", "uuid7"]


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
    stop_at, stop_for = limits if leased else (None, None)
    return Dispatch(
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
        stop_at,
        stop_for,
        worker=terms.worker if leased else "",
    )


def uuid7() -> str:
    return str(uuid_utils.uuid7())
