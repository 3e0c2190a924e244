"""The types of batches: the body of a submit, and a batch in an answer."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from penstock.core.jobs.states import JobState
from penstock.wire.common import MAX_BULK, AddonName, Key, PageSize, Wait, WireAnswer, WireRequest
from penstock.wire.jobs import BatchName, SubmitBody


class BatchBody(WireRequest):
    """
    A submit of a batch. `jobs`: as in a submit, without `wait_sec`; a submit with `batch` adds more.
    `on_end`: the job that starts when all jobs have ended. `on_failure`: the job that starts when the first
    has failed. `open`: the batch does not end before it is closed. `idempotency_key`: a repeated request
    returns the batch that exists.
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
    """A callback job of a batch. `on`: `end` or `failure`."""

    on: str
    job_id: str
    state: JobState
    title: str


class BatchInfo(WireAnswer):
    """
    A batch. `state`: RUNNING until it is closed and its last job has ended. `open`: it takes more jobs, and
    does not end before it is closed. `live`: how many jobs have not ended. Its jobs have the tag
    `batch:NAME`.
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
    #: False: the idempotency key was used before, and this is that batch.
    created: bool = True
    #: The jobs of this submit, without the callbacks.
    jobs: tuple[str, ...] = ()


class BatchList(WireAnswer):
    batches: list[BatchInfo]


class BatchChangedAnswer(WireAnswer):
    """`changed`: how many jobs of the batch were changed."""

    changed: int
    batch: BatchInfo
