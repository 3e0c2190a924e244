"""The types of arrays: the body of a submit, and an array in an answer."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from penstock.core.jobs.states import JobState
from penstock.wire.common import AddonName, Ident, PageSize, Wait, WireAnswer, WireRequest, matching
from penstock.wire.jobs import SubmitBody

Indices: TypeAlias = Annotated[
    str,
    matching(
        r"^[0-9,% -]*$(?!\n)",
        "must be indices such as 1-1000, 0,5,7-9 or 1-1000%8, where 8 run at once",
        max_length=20_000,
    ),
]


class ArrayBody(WireRequest):
    """
    A submit of an array. `array`: the indices, and how many run at once: `1-1000%8`, `0,5,7-9`. `job`: the
    job of each index, as in a submit, without `after` and `wait_sec`; its idempotency key is that of the
    whole array.
    """

    array: Indices
    job: SubmitBody


class ArraysQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 50


class ArrayQuery(WireRequest):
    """`index`: also name the newest job of this index."""

    wait_sec: Wait = 0
    index: Annotated[int, Meta(ge=0, le=999_999_999)] | UnsetType = UNSET


class ArrayInfo(WireAnswer):
    """
    An array. `state`: RUNNING until the last index has ended. `waiting`: how many indices have no job yet.
    `live`: how many jobs have not ended. `failed_indices`: as ranges, at most 1,000 characters.
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
    #: False: the idempotency key was used before, and this is that array.
    created: bool = True
    #: The newest job of the requested index.
    job_id: Ident | None = None


class ArrayList(WireAnswer):
    arrays: list[ArrayInfo]
