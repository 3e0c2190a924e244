"""Batches: the body of a submit, and what the API shows of a batch."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from penstock.core.jobs.states import JobState
from penstock.wire.common import MAX_BULK, AddonName, Key, PageSize, Wait, WireAnswer, WireRequest
from penstock.wire.jobs import BatchName, SubmitBody


class BatchBody(WireRequest):
    """
    `jobs`: as in a submit, without `wait_sec`; more can be added by a submit with `batch`. `on_end`: the job that starts
    when all have ended. `on_failure`: the job that starts when the first has failed. `open`: the batch does not end
    before it is closed. `idempotency_key`: the same request again finds the batch that it made.
    """

    name: BatchName
    addon_id: AddonName
    jobs: Annotated[tuple[SubmitBody, ...], Meta(max_length=MAX_BULK)] = ()
    on_end: SubmitBody | None = None
    on_failure: SubmitBody | None = None
    open: bool = False
    idempotency_key: Key | None = None


class BatchesQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 50


class BatchQuery(WireRequest):
    wait_sec: Wait = 0


class BatchCallback(WireAnswer):
    """`on`: `end` or `failure`."""

    on: str
    job_id: str
    state: JobState
    title: str


class BatchInfo(WireAnswer):
    """
    `state`: RUNNING until the batch is closed and its last job has ended. `open`: it takes more jobs, and does not end
    before it is closed. `live`: jobs that have not ended. Its jobs have the tag `batch:NAME`.
    """

    name: str
    addon_id: str
    state: JobState
    open: bool
    total: int
    live: int
    done: int
    failed: int
    canceled: int
    created_at: datetime
    ended_at: datetime | None = None
    callbacks: tuple[BatchCallback, ...] = ()
    #: False when the same request with the same key had made the batch before.
    created: bool = True
    #: The new jobs of this submit, without the callbacks.
    jobs: tuple[str, ...] = ()


class BatchList(WireAnswer):
    batches: list[BatchInfo]


class BatchChangedAnswer(WireAnswer):
    """`changed`: how many of its jobs."""

    changed: int
    batch: BatchInfo
