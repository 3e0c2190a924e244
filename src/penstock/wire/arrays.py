"""Arrays: the body of a submit, and what the API shows of an array."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from penstock.core.jobs.states import JobState
from penstock.wire.common import AddonName, Ident, PageSize, Wait, WireAnswer, WireRequest, matching
from penstock.wire.jobs import SubmitBody


class ArrayBody(WireRequest):
    """
    `array`: the indices, and how many at once: `1-1000%8`, `0,5,7-9`. `job`: each of its jobs, as in a submit,
    without `after` and `wait_sec`; its idempotency key is that of the whole array.
    """

    array: Annotated[
        str,
        matching(
            r"^[0-9,% -]*$(?!\n)",
            "must be indices such as 1-1000, 0,5,7-9 or 1-1000%8, where 8 run at once",
            max_length=20_000,
        ),
    ]
    job: SubmitBody


class ArraysQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 50


class ArrayQuery(WireRequest):
    """`index`: the answer names the newest job of this index."""

    wait_sec: Wait = 0
    index: Annotated[int, Meta(ge=0, le=999_999_999)] | UnsetType = UNSET


class ArrayInfo(WireAnswer):
    """
    `state`: RUNNING until the last index has ended. `waiting`: indices that have no job yet. `live`: those
    whose jobs have not ended. `failed_indices`: as ranges; at most 1,000 characters of them.
    """

    array_id: str
    addon_id: str
    job_type: str
    title: str
    state: JobState
    indices: str
    total: int
    at_once: int | None
    waiting: int
    live: int
    done: int
    failed: int
    canceled: int
    failed_indices: str
    live_jobs: list[str]
    created_at: datetime
    ended_at: datetime | None = None
    #: False when the idempotency key had been used before, and this is that array.
    created: bool = True
    #: Of the index that was asked for.
    job_id: Ident | None = None


class ArrayList(WireAnswer):
    arrays: list[ArrayInfo]
