"""What a job's function is given: what it must know of its job, and what it can say while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import msgspec

from penstock.core.errors import JobStopped
from penstock.core.json_text import checked_json
from penstock.wire import ClaimedJob

__all__ = ["JobContext", "LeaseControl", "LeaseFacts", "encoded", "facts_of"]


class LeaseControl(Protocol):
    """What binds a running function to its lease: an object beside it, or shared memory from a process of its own."""

    @property
    def cancelled(self) -> bool: ...

    @property
    def yielding(self) -> bool: ...

    def progress(self, fraction: float) -> None: ...

    def spend(self, total: float) -> None: ...

    def save(self, checkpoint: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """What stays true for the whole attempt. It travels to other processes."""

    job_id: str
    lease_id: str
    fence: int
    addon_id: str
    job_type: str
    tags: tuple[str, ...]
    deadline_at: datetime | None
    payload: bytes
    checkpoint: bytes


def facts_of(job: ClaimedJob) -> LeaseFacts:
    return LeaseFacts(
        job.job_id,
        job.lease_id,
        job.fence,
        job.addon_id,
        job.job_type,
        job.tags,
        job.deadline_at,
        bytes(job.payload),
        bytes(job.checkpoint),
    )


def encoded(value: Any, what: str = "the result") -> bytes:
    """As JSON. ValueError names a NaN or an infinity, which JSON does not have."""
    return checked_json(lambda: msgspec.json.encode(value), lambda: msgspec.to_builtins(value), what)


class JobContext:
    """
    `fence` grows with every start of the job: hand it to an outside system that can refuse older numbers, and a run that was
    given up can do no harm there. `resumed` is the last checkpoint of the attempts before, or None.
    """

    def __init__(self, facts: LeaseFacts, ties: LeaseControl) -> None:
        self._ties, self._spent = ties, 0.0
        self.job_id, self.lease_id, self.fence = facts.job_id, facts.lease_id, facts.fence
        self.addon_id, self.job_type, self.tags = facts.addon_id, facts.job_type, facts.tags
        self.deadline_at = facts.deadline_at
        self.payload: Any = msgspec.json.decode(facts.payload or b"null")
        self.resumed: Any = msgspec.json.decode(facts.checkpoint or b"null")

    @property
    def cancelled(self) -> bool:
        """Canceled, out of time or money, or the lease could not be renewed: stop now, for whatever it returns will not count."""
        return self._ties.cancelled

    @property
    def should_yield(self) -> bool:
        """Somebody wants this run to end: a more urgent job, or a stop of the worker. Save a checkpoint and leave by `check()`."""
        return self._ties.yielding or self._ties.cancelled

    def check(self) -> None:
        """The way out of a deep loop: raises JobStopped when the run must end. A job that yields so goes back to the queue."""
        if self.should_yield:
            raise JobStopped("this run was asked to end", job_id=self.job_id)

    def progress(self, fraction: float) -> None:
        """0 to 1. Cheap: it rides on the next heartbeat."""
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ValueError(f"progress is {fraction!r}; it must be a number from 0 to 1")
        self._ties.progress(float(fraction))

    def spend(self, amount: float) -> None:
        """So much more was spent, in the job's unit. It is told within a second; at the job's limit `cancelled` becomes true."""
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
            raise ValueError(f"amount is {amount!r}; it must be a number of 0 or more")
        self._spent += amount
        self._ties.spend(self._spent)

    def checkpoint(self, value: Any) -> None:
        """Anything that JSON can carry. On the scheduler's disk when it returns; the next attempt begins with it."""
        self._ties.save(encoded(value, "the checkpoint"))

    def __repr__(self) -> str:
        return f"<JobContext {self.job_type} {self.job_id[-8:]}, fence {self.fence}>"
