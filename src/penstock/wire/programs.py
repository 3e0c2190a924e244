"""What programs tell of their pools and graphs, so that the page can show them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from penstock.wire.common import Line, WireAnswer, WireRequest, Words

__all__ = ["Attach", "LaneBar", "LanesInfo", "Program", "ProgramList", "TaskInfo"]


class LaneBar(Struct, forbid_unknown_fields=True):
    """One attempt at a node of a graph. Times in seconds since the run began."""

    node: Line
    lane: Line
    worker: Line
    ready: float
    started: float
    #: null: it goes on.
    ended: float | None
    failed: bool
    #: One of those that made the run take as long as it did.
    critical: bool


class LanesInfo(Struct, forbid_unknown_fields=True):
    """One run of a graph, as bars in the rows of those who worked on it."""

    graph: Line
    run: int
    status: Line
    seconds: float
    nodes: int
    bars: Annotated[list[LaneBar], Meta(max_length=400)]
    left_out: int


class TaskInfo(Struct, forbid_unknown_fields=True):
    """One pool or graph of a program, as its `snapshot()` tells."""

    name: Line
    kind: Line
    workers: Annotated[dict[str, int], Meta(max_length=16)]
    in_flight: int
    pending_queue_depth: int
    waiting_queue_depth: int
    max_in_flight: int
    #: null: unbounded.
    max_queue_depth: float | None
    policy: Line
    paused: bool
    load_by_worker: Annotated[tuple[int, ...], Meta(max_length=1_000)]
    settled_by_worker: Annotated[tuple[int, ...], Meta(max_length=1_000)]
    totals: Annotated[dict[str, int], Meta(max_length=64)]
    last_crash: Words | None
    lanes: LanesInfo | None = None


class Attach(WireRequest):
    """A program and its pools and graphs as they are now. Told again about once a second, for as long as they should be shown."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\u0000]*$")]
    tasks: Annotated[list[TaskInfo], Meta(max_length=100)]


class Program(WireAnswer):
    name: str
    at: datetime
    tasks: list[TaskInfo]


class ProgramList(WireAnswer):
    programs: list[Program]
