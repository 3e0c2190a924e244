"""Reasons about workers: admission lets the job start, and no worker runs it."""

from __future__ import annotations

from difflib import get_close_matches
from typing import ClassVar, Final, Self

from msgspec.structs import replace

from penstock.core.jobs.reason_base import BaseReason, Hides, cut, with_setting
from penstock.core.jobs.types import Moment, spelled

#: The name under which the runner of a daemon claims.
RUNNER: Final = "runner"


class AwaitsWorker(BaseReason, frozen=True):
    """The job could start, and workers claim jobs of its kind, but none of them has asked yet."""

    last_came_at: Moment

    code: ClassVar = "awaits_worker"
    waited: ClassVar = "for a worker"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        return (
            "It waits for a worker to claim it. "
            f"A worker that may claim it last asked {spelled(now - self.last_came_at)} ago."
        )

    def short(self, now: Moment) -> str:
        return "waits for a worker to claim it"

    def next_step(self) -> str:
        return "a worker claims it"


class WorkerElsewhere(BaseReason, frozen=True):
    """Workers for such jobs are present on other hosts of the database, and none on this one."""

    hosts: tuple[str, ...]
    running: int = 0  # how many such jobs run there

    code: ClassVar = "worker_elsewhere"
    waited: ClassVar = "for a worker of another host"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        runs = "" if not self.running else f", which runs {self.running} such job{'s' * (self.running > 1)}"
        return f"Its worker is on {self._place}{runs}; this host has none for it."

    def short(self, now: Moment) -> str:
        return cut(f"waits for a worker on {self._place}")

    def next_step(self) -> str:
        return f"a worker on {self._place} claims it"

    @property
    def _place(self) -> str:
        *others, last = self.hosts
        return f"hosts {', '.join(others)} and {last}" if others else f"host {last}"


class WorkersFull(BaseReason, frozen=True):
    """Workers for such jobs are present, and all of them are full."""

    #: The worker with the most jobs; empty: a worker that the reader may not know.
    worker: str
    running: int
    workers: int = 1
    #: The addon to which the worker is bound; empty: none.
    of: str = ""
    #: Whether they are the runner's places for functions.
    functions: bool = False

    code: ClassVar = "workers_full"
    waited: ClassVar = "for a free worker"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        noun, of = "thread", f"worker {self.worker}" if self.worker else "its worker"
        if self.worker == RUNNER:
            noun, of = "slot", "the runner for functions" if self.functions else "the runner"
        places = f"The only {noun}" if self.running == 1 else f"All {self.running} {noun}s"
        verb = "is" if self.running == 1 else "are"
        more = "" if self.workers == 1 else f", and so are those of {self.workers - 1} more"
        return f"{places} of {of} {verb} taken{more}."

    def short(self, now: Moment) -> str:
        if self.worker == RUNNER:
            return f"all slots of the runner{' for functions' * self.functions} are taken"
        return "its workers have no free thread"

    def next_step(self) -> str:
        return "a job of its worker ends"

    def way_out(self, job: str, units: int = 0) -> str:
        if self.worker == RUNNER:
            setting = "runner.workers" if self.functions else "runner.slots"
            return with_setting(f"{setting}={self.running + 1}")
        return super().way_out(job, units)

    def hidden(self, hides: Hides) -> Self:
        return self if self.worker == RUNNER or self.of == hides.addon_id else replace(self, worker="", of="")


class NoWorkerSeen(BaseReason, frozen=True):
    """No worker has asked for jobs of this type."""

    job_type: str
    #: The types that workers of this scheduler asked for or run.
    known: tuple[str, ...] = ()
    since: Moment | None = None  # when this scheduler started

    code: ClassVar = "no_worker"
    waited: ClassVar = "for a worker of its type"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    @property
    def nearest(self) -> str:
        return (
            "" if self._for_other_addons else next(iter(get_close_matches(self.job_type, self.known, 1)), "")
        )

    @property
    def _for_other_addons(self) -> bool:
        """Whether workers asked for this type, but none for jobs of this addon."""
        return self.job_type in self.known

    def words(self, now: Moment) -> str:
        since = "" if self.since is None else f" since the scheduler started {spelled(now - self.since)} ago"
        if self._for_other_addons:
            return (
                f"No worker for type {self.job_type!r} of this addon has been seen{since}; "
                "the workers for this type ask for jobs of other addons."
            )
        known = ", ".join(self.known) or "none"
        mean = f" Did you mean {self.nearest}?" if self.nearest else ""
        return f"No worker for type {self.job_type!r} has been seen{since}; known types: {known}.{mean}"

    def short(self, now: Moment) -> str:
        if self._for_other_addons:
            return cut(f"no worker for type {self.job_type}", " of its addon has been seen")
        near = f"; did you mean {self.nearest}?" if self.nearest else ""
        return (
            cut(f"no worker for type {self.job_type}", " seen" + near)
            if near
            else cut(f"no worker for type {self.job_type}", " has been seen")
        )

    def next_step(self) -> str:
        return f"a worker asks for jobs of type {self.job_type}"


class WorkerGone(BaseReason, frozen=True):
    """A worker for such jobs was here, and has not asked for a while."""

    last_came_at: Moment | None  # None: before this scheduler started
    timeouts: int = 0  # reservations that no worker took up

    code: ClassVar = "worker_gone"
    waited: ClassVar = "for a worker that had gone"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        times = (
            "" if not self.timeouts else f"; {self.timeouts} reservation{'s' * (self.timeouts > 1)} ran out"
        )
        if self.last_came_at is None:
            return (
                f"Such jobs ran before, and no worker has asked for them since the scheduler started{times}."
            )
        since = spelled(now - self.last_came_at)
        return f"Its worker has gone: the last request for such jobs was {since} ago{times}."

    def short(self, now: Moment) -> str:
        if self.last_came_at is None:
            return "its worker has not come since the scheduler started"
        return f"its worker was last seen {spelled(now - self.last_came_at)} ago"

    def next_step(self) -> str:
        return "a worker for it comes back"


class RunnerDisabled(BaseReason, frozen=True):
    """The job is a command or function, and this daemon runs none."""

    host: str = ""

    code: ClassVar = "runner_disabled"
    waited: ClassVar = "for a runner"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        where = f" of host {self.host}" if self.host else ""
        return f"The runner{where} is disabled (`runner.enabled = false`): it runs no commands and functions."

    def short(self, now: Moment) -> str:
        return "the runner is disabled"

    def next_step(self) -> str:
        return "a runner or a worker that claims commands starts"

    def way_out(self, job: str, units: int = 0) -> str:
        return with_setting("runner.enabled=true")


class NotDispatched(BaseReason, frozen=True):
    """No process dispatches the jobs of this database."""

    place: str

    code: ClassVar = "nobody_runs"
    waited: ClassVar = "for a scheduler"
    pause_sec: ClassVar = 30.0

    def words(self, now: Moment) -> str:
        return f"No process runs the jobs of {self.place} now; `with scheduler:` does."

    def short(self, now: Moment) -> str:
        return "no scheduler runs the jobs of this database"

    def next_step(self) -> str:
        return "a program or a daemon runs the jobs of this database"

    def way_out(self, job: str, units: int = 0) -> str:
        return "with scheduler: ..."


class NoFunction(BaseReason, frozen=True):
    """The program that dispatches has no function of this name."""

    job_type: str
    known: tuple[str, ...] = ()

    code: ClassVar = "no_function"
    waited: ClassVar = "for a function"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        near = next(iter(get_close_matches(self.job_type, self.known, 1)), "")
        mean = f" Did you mean {near}?" if near else ""
        return f"No function is registered here for {self.job_type!r}; it starts when one is.{mean}"

    def short(self, now: Moment) -> str:
        return cut(f"no function is registered for {self.job_type}")

    def next_step(self) -> str:
        return f"a program registers a function for {self.job_type}"

    def way_out(self, job: str, units: int = 0) -> str:
        return f'@scheduler.job(name="{self.job_type}")'
