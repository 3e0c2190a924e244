"""
What every reason has: words, a short clause, a way out, and what must happen next. `core/jobs/reasons.py` has
the closed set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple, Self

from msgspec import Struct

from penstock.core.jobs.types import MINUTE, AddonId, JobId, Moment, seconds, spelled

#: The most characters of a short clause.
SHORT: Final = 60


class Hides(NamedTuple):
    """What a reader that is bound to one addon may know: None, or other words, in place of a name."""

    addon_id: AddonId
    job: Callable[[JobId | None], JobId | None]
    signal: Callable[[str], str]


class BaseReason(Struct, frozen=True):
    code: ClassVar[str]
    #: What a job waited for, behind "It waited 3 min": the account of a finished wait.
    waited: ClassVar[str]
    #: After how long another request may help, if no moment is known.
    pause_sec: ClassVar[float] = 5.0
    #: Whether the reason holds on one host only, so that another host may start the job.
    of_host: ClassVar[bool] = False

    def words(self, now: Moment) -> str:
        """One or two sentences."""
        raise NotImplementedError

    def short(self, now: Moment) -> str:
        """One clause of at most 60 characters, without names of other jobs."""
        raise NotImplementedError

    def next_step(self) -> str:
        """What must happen before the job starts, as a clause."""
        raise NotImplementedError

    def way_out(self, job: str) -> str:
        """One command that would change it. `job`: the end of the id, as people type it."""
        return f"penstock cancel {job}"

    def next_at(self) -> Moment | None:
        """When that is expected, where the reason itself knows."""
        return None

    def retry_sec(self, now: Moment) -> float:
        moment = self.next_at()
        return self.pause_sec if moment is None else seconds(moment - now)

    def hidden(self, hides: Hides) -> Self:
        """The same without names that the reader may not know."""
        del hides
        return self


def named(job_id: JobId | None) -> str:
    return "another job" if job_id is None else f"job {job_id[-8:]}"


def due_in(moment: Moment, now: Moment) -> str:
    """A duration and not a clock time: the reader's time zone is unknown."""
    about = "about " if moment - now >= 2 * MINUTE else ""
    return f"in {about}{spelled(moment - now, nearest=True)}"


def cut(text: str, end: str = "") -> str:
    """At most SHORT characters; `end` stays whole."""
    room = SHORT - len(end)
    return f"{text if len(text) <= room else text[: room - 3] + '...'}{end}"
