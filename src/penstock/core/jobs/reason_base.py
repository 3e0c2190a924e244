"""
The base of all reasons: words, a short clause, a way out, and what must happen next. `core/jobs/reasons.py`
has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote
from typing import ClassVar, Final, NamedTuple, Self

from msgspec import Struct

from penstock.core.jobs.types import MINUTE, AddonId, JobId, Moment, seconds, spelled

#: The most characters of a short clause.
SHORT: Final = 60


class Hides(NamedTuple):
    """What replaces a name that a reader bound to one addon may not know: None, or other words."""

    addon_id: AddonId
    job: Callable[[JobId | None], JobId | None]
    signal: Callable[[str], str]


class BaseReason(Struct, frozen=True):
    """Why a job does not start now."""

    code: ClassVar[str]
    #: What a job waited for: the words after "It waited 3 min".
    waited: ClassVar[str]
    #: The seconds after which another request may help, if no moment is known.
    pause_sec: ClassVar[float] = 5.0
    #: Whether the reason holds on one host only, so that another host may start the job.
    of_host: ClassVar[bool] = False

    def words(self, now: Moment) -> str:
        """The reason in one or two sentences."""
        raise NotImplementedError

    def short(self, now: Moment) -> str:
        """The reason in a clause of at most 60 characters, without names of other jobs."""
        raise NotImplementedError

    def next_step(self) -> str:
        """What must happen before the job starts, as a clause."""
        raise NotImplementedError

    def way_out(self, job: str, units: int = 0) -> str:
        """A command that would help. `job`: the end of the id, as people type it. `units`: what it costs."""
        del units
        return f"penstock cancel {job}"

    def next_at(self) -> Moment | None:
        """When the next step is expected, if the reason knows."""
        return None

    def retry_sec(self, now: Moment) -> float:
        moment = self.next_at()
        return self.pause_sec if moment is None else seconds(moment - now)

    def hidden(self, hides: Hides) -> Self:
        """The reason without names that the reader may not know."""
        del hides
        return self


def named(job_id: JobId | None) -> str:
    return "another job" if job_id is None else f"job {job_id[-8:]}"


def with_setting(setting: str) -> str:
    """The command that changes a setting: a scheduler reads its settings when it starts."""
    return f"penstock stop && penstock up --set {quote(setting)}"


def units_of(count: int) -> str:
    return "1 unit" if count == 1 else f"{count} units"


def due_in(moment: Moment, now: Moment) -> str:
    """A time to come, as a duration: the reader's time zone is unknown."""
    about = "about " if moment - now >= 2 * MINUTE else ""
    return f"in {about}{spelled(moment - now, nearest=True)}"


def cut(text: str, end: str = "") -> str:
    """The text, cut to SHORT characters with `end`, which is never cut."""
    room = SHORT - len(end)
    return f"{text if len(text) <= room else text[: room - 3] + '...'}{end}"
