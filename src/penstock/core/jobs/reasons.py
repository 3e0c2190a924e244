"""
Reasons: why a job does not start now. A closed set of classes, each with all words about itself.

To add a reason, write its class and name it in `Reason`. Its words, its short clause for lists, its way out
and what must happen next are then in explain, in `penstock ls`, on the page and in `docs/reasons.md`. The
trail records the code and the fields of a reason, so explain can make the words later, also in a newer
wording.

A job or a worker in a reason may belong to another addon than the reader's. `hidden` removes such names
before words are made. The short clause contains none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self, TypeAlias, get_args

from msgspec import convert
from msgspec.structs import replace

from penstock.core.jobs.load import QuietState
from penstock.core.jobs.reason_base import BaseReason, Hides, cut, due_in, named, units_of, with_setting
from penstock.core.jobs.types import BATCH_TAG, JobId, Moment, seconds
from penstock.core.jobs.worker_reasons import (
    AwaitsWorker,
    NoFunction,
    NotDispatched,
    NoWorkerSeen,
    RunnerDisabled,
    WorkerElsewhere,
    WorkerGone,
    WorkersFull,
)


class Draining(BaseReason, frozen=True):
    """The host is stopping, or an operator drained it."""

    host: str = ""
    #: False: the process is about to stop.
    by_operator: bool = True

    code: ClassVar = "draining"
    waited: ClassVar = "for a host that takes jobs"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        if not self.host:
            return "This host starts no more jobs: it is stopping or drained."
        if self.by_operator:
            return f"Host {self.host} starts no more jobs: an operator drained it."
        return f"Host {self.host} starts no more jobs: its scheduler is stopping."

    def short(self, now: Moment) -> str:
        return "the host is drained" if self.by_operator else "the scheduler is stopping"

    def next_step(self) -> str:
        return "the drain ends" if self.by_operator else "a scheduler starts again"

    def way_out(self, job: str, units: int = 0) -> str:
        return f"penstock undrain {self.host or 'HOST'}" if self.by_operator else "penstock up"


class LabelMissing(BaseReason, frozen=True):
    labels: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # living hosts that have all labels of the job
    present: tuple[str, ...] = ()  # labels of this host

    code: ClassVar = "label_missing"
    waited: ClassVar = "for a host with its labels"
    pause_sec: ClassVar = 30.0
    of_host: ClassVar = True

    @property
    def _labels(self) -> str:
        return f"the label{'s' * (len(self.labels) > 1)} {' and '.join(self.labels)}"

    def words(self, now: Moment) -> str:
        if not self.hosts:
            return f"No running host has {self._labels}."
        have = "have" if len(self.hosts) > 1 else "has"
        return f"This host lacks {self._labels}; {', '.join(self.hosts)} {have} {'them' if len(self.labels) > 1 else 'it'}."

    def short(self, now: Moment) -> str:
        return cut(f"waits for a host with {self._labels}")

    def next_step(self) -> str:
        return f"a host with {self._labels} takes it"

    def way_out(self, job: str, units: int = 0) -> str:
        return with_setting(f"host.labels={','.join((*self.present, *self.labels))}")


class Paused(BaseReason, frozen=True):
    scope: str  # an addon, or "*" for everything

    code: ClassVar = "paused"
    waited: ClassVar = "while paused"
    pause_sec: ClassVar = 30.0

    def words(self, now: Moment) -> str:
        if self.scope == "*":
            return "Everything is paused; `penstock resume` ends that."
        return f"Addon {self.scope} is paused; `penstock resume {self.scope}` ends that."

    def short(self, now: Moment) -> str:
        return "everything is paused" if self.scope == "*" else cut(f"addon {self.scope} is paused")

    def next_step(self) -> str:
        return "the pause ends"

    def way_out(self, job: str, units: int = 0) -> str:
        return "penstock resume" if self.scope == "*" else f"penstock resume {self.scope}"


class NotReady(BaseReason, frozen=True):
    until: Moment

    code: ClassVar = "not_ready"
    waited: ClassVar = "for its earliest start"

    def words(self, now: Moment) -> str:
        return f"It starts {due_in(self.until, now)} at the earliest."

    def short(self, now: Moment) -> str:
        return f"starts {due_in(self.until, now)} at the earliest"

    def next_step(self) -> str:
        return "its time comes"

    def way_out(self, job: str, units: int = 0) -> str:
        return f"penstock edit {job} --not-before-none"

    def next_at(self) -> Moment | None:
        return self.until


class NotQuiet(BaseReason, frozen=True):
    state: QuietState
    wants: QuietState
    busy: float
    by: str

    code: ClassVar = "not_quiet"
    waited: ClassVar = "for a quieter machine"
    pause_sec: ClassVar = 15.0
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        if self.by.startswith("no fresh"):
            return (
                f"The load of the machine is unknown ({self.by} reading), which counts as "
                f"{_LOAD[self.state]}. This job starts when the load is known to be {self.wants} at most."
            )
        return (
            f"The machine is {_LOAD[self.state]} (busy score {self.busy:.1f} of 10, from {self.by}). "
            f"This job starts when the load drops to {self.wants}."
        )

    def short(self, now: Moment) -> str:
        if self.by.startswith("no fresh"):
            return f"the load of the machine is unknown ({self.by} reading)"
        return f"the machine is {_LOAD[self.state]}; waits for {self.wants}"

    def next_step(self) -> str:
        return f"the load of the machine drops to {self.wants}"

    def way_out(self, job: str, units: int = 0) -> str:
        if self.state in _SETTING and not self.by.startswith("no fresh"):
            return f"penstock edit {job} --when {_SETTING[self.state]}"
        return with_setting(f"capacity.units={max(_SOME_UNITS, units)}")

    def hidden(self, hides: Hides) -> Self:
        return replace(self, by=hides.signal(self.by))


_LOAD: Final = {
    QuietState.QUIET: "quiet",
    QuietState.NORMAL: "in normal use",
    QuietState.BUSY: "busy",
    QuietState.PANIC: "overloaded",
}
#: The `run_when` that lets a job start now, by the state of the machine. None lets it start in a panic.
_SETTING: Final = {QuietState.NORMAL: "normal", QuietState.BUSY: "any"}
#: A capacity by a setting that leaves the other half of the machine to others.
_SOME_UNITS: Final = 50


class NotQuietLongEnough(BaseReason, frozen=True):
    streak_sec: float
    wants_sec: int

    code: ClassVar = "not_quiet_long_enough"
    waited: ClassVar = "for a longer quiet time"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        return (
            f"The machine has been quiet for {self.streak_sec:.0f} s; "
            f"this job waits for {self.wants_sec} s of quiet."
        )

    def short(self, now: Moment) -> str:
        return f"waits for {self.wants_sec} s of quiet, {self.streak_sec:.0f} s so far"

    def next_step(self) -> str:
        return f"the machine has been quiet for {self.wants_sec} s"

    def way_out(self, job: str, units: int = 0) -> str:
        return f"penstock edit {job} --quiet-for 0s"

    def retry_sec(self, now: Moment) -> float:
        return self.wants_sec - self.streak_sec


class CapReached(BaseReason, frozen=True):
    scope: str  # concurrent, addon, type, constraint
    name: str
    limit: int

    code: ClassVar = "cap_reached"
    waited: ClassVar = "for a cap"

    def words(self, now: Moment) -> str:
        if self.scope == "concurrent":
            return "The only slot is taken." if self.limit == 1 else f"All {self.limit} slots are taken."
        if not self.limit:
            return f"{self.scope.capitalize()} {self.name} may have no job in flight: its limit is 0."
        return f"{self.scope.capitalize()} {self.name} has {self.limit} in flight, its limit."

    def short(self, now: Moment) -> str:
        if self.scope == "concurrent":
            return "the only slot is taken" if self.limit == 1 else f"all {self.limit} slots are taken"
        return cut(f"{self.scope} {self.name}", f" is at its limit of {self.limit}")

    def next_step(self) -> str:
        return "a job that counts for this cap ends" if self.limit else "the limit is raised"

    def way_out(self, job: str, units: int = 0) -> str:
        more = self.limit + 1
        match self.scope:
            case "concurrent":
                setting = f"caps.concurrent={more}"
            case "addon":
                setting = f"addons.{self.name}.concurrent={more}"
            case scope:
                setting = f"caps.{scope}s.{self.name}={more}"
        return with_setting(setting)


class BudgetSpent(BaseReason, frozen=True):
    window: str  # day or month
    spent: int
    limit: int
    until: Moment
    addon_id: str = ""  # empty in events of older versions

    code: ClassVar = "budget_spent"
    waited: ClassVar = "for a budget"

    def words(self, now: Moment) -> str:
        of = f" of addon {self.addon_id}" if self.addon_id else ""
        return (
            f"The budget{of} of this {self.window} is spent "
            f"({self.spent / 1e6:.2f} of {self.limit / 1e6:.2f}). "
            f"The next {self.window} begins {due_in(self.until, now)}."
        )

    def short(self, now: Moment) -> str:
        return f"this {self.window}'s budget is spent ({self.spent / 1e6:.2f} of {self.limit / 1e6:.2f})"

    def next_step(self) -> str:
        return f"the next {self.window} begins"

    def way_out(self, job: str, units: int = 0) -> str:
        key = f"addons.{self.addon_id or 'ADDON'}.budget_{self.window}"
        return with_setting(f"{key}={2 * self.limit / 1e6:g}")

    def next_at(self) -> Moment | None:
        return self.until


class NotEnoughUnits(BaseReason, frozen=True):
    needs: int
    free: int
    capacity: int
    until: Moment | None = None  # when enough runs are expected to have ended
    #: The units that the host gives at most, by its settings, if that is less than the job needs.
    most: int | None = None

    code: ClassVar = "no_room"
    waited: ClassVar = "for units"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        if self.most is not None:
            return f"It needs {units_of(self.needs)}; this host gives {self.most} at most, by its settings."
        if self.needs > self.capacity:
            return f"It needs {units_of(self.needs)}; {self.capacity} may be used now, because the machine is busy."
        when = "" if self.until is None else f", and enough are expected {due_in(self.until, now)}"
        return f"It needs {units_of(self.needs)}; {self.free} of {self.capacity} are free{when}."

    def short(self, now: Moment) -> str:
        if self.most is not None:
            return f"needs {units_of(self.needs)}; the host gives {self.most} at most"
        if self.needs > self.capacity:
            return f"needs {units_of(self.needs)}; {self.capacity} may be used now"
        return f"needs {units_of(self.needs)}; {self.free} of {self.capacity} are free"

    def next_step(self) -> str:
        if self.most is not None:
            return "a host with more units takes it"
        if self.needs > self.capacity:
            return "the load of the machine falls, so that jobs get more units"
        return "running jobs end and free their units"

    def way_out(self, job: str, units: int = 0) -> str:
        if self.needs > self.capacity:
            return with_setting(f"capacity.units={self.needs}")
        return f"penstock edit {job} --priority urgent"

    def next_at(self) -> Moment | None:
        return self.until

    def retry_sec(self, now: Moment) -> float:
        return self.pause_sec if self.until is None else min(seconds(self.until - now), 60.0)


class UnitsKept(BaseReason, frozen=True):
    kept_for: JobId | None  # None: a job that the reader may not know
    needs: int
    until: Moment | None = None

    code: ClassVar = "room_kept"
    waited: ClassVar = "while units were kept for another job"
    of_host: ClassVar = True

    @property
    def _are(self) -> str:
        return "is" if self.needs == 1 else "are"

    def words(self, now: Moment) -> str:
        when = "" if self.until is None else f", which is to start {due_in(self.until, now)}"
        return f"{units_of(self.needs)} {self._are} kept for {named(self.kept_for)}{when}."

    def short(self, now: Moment) -> str:
        return f"{units_of(self.needs)} {self._are} kept for another job"

    def next_step(self) -> str:
        return "the job that units are kept for starts"

    def way_out(self, job: str, units: int = 0) -> str:
        return f"penstock edit {job} --priority urgent"

    def next_at(self) -> Moment | None:
        return self.until

    def retry_sec(self, now: Moment) -> float:
        return self.pause_sec if self.until is None else min(seconds(self.until - now), 60.0)

    def hidden(self, hides: Hides) -> Self:
        return replace(self, kept_for=hides.job(self.kept_for))


class QueuedAhead(BaseReason, frozen=True):
    """A queued job waits for the same units and goes first."""

    job_id: JobId | None  # None: a job that the reader may not know
    priority: int

    code: ClassVar = "queued_ahead"
    waited: ClassVar = "behind other jobs"
    of_host: ClassVar = True

    def words(self, now: Moment) -> str:
        name = named(self.job_id).capitalize()
        return f"{name} of priority {self.priority} goes first and needs the same units."

    def short(self, now: Moment) -> str:
        return f"a job of priority {self.priority} goes first"

    def next_step(self) -> str:
        return "the jobs that go first have started"

    def way_out(self, job: str, units: int = 0) -> str:
        return f"penstock edit {job} --priority urgent"

    def hidden(self, hides: Hides) -> Self:
        return replace(self, job_id=hides.job(self.job_id))


class WaitsForParents(BaseReason, frozen=True):
    """Parents have not ended as they must. The first of them are named, with condition and state."""

    parents: tuple[JobId | None, ...]  # None: a job that the reader may not know
    conditions: tuple[str, ...]
    states: tuple[str, ...]
    unmet: int

    code: ClassVar = "waits_for_parents"
    waited: ClassVar = "for other jobs"
    pause_sec: ClassVar = 30.0

    def words(self, now: Moment) -> str:
        parents = zip(self.parents, self.conditions, self.states, strict=True)
        wanted = [
            f"{_parent(job_id, state)} ({state}) to be {_WANTED[condition]}"
            for job_id, condition, state in parents
        ]
        more = self.unmet - len(wanted)
        others = f" and for {more} more job{'s' * (more > 1)}" if more else ""
        return f"It waits for {', for '.join(wanted)}{others}."

    def short(self, now: Moment) -> str:
        return "waits for another job" if self.unmet == 1 else f"waits for {self.unmet} other jobs"

    def next_step(self) -> str:
        return "the job that it waits for ends" if self.unmet == 1 else "the jobs that it waits for end"

    def way_out(self, job: str, units: int = 0) -> str:
        """A command for a parent that waits for a user, if there is one."""
        for parent, state in zip(self.parents, self.states, strict=True):
            if parent is None:
                continue
            name = parent.removeprefix(BATCH_TAG)
            if name != parent and state.startswith("open"):
                return f"penstock batch close {name}"
            if state.startswith("FAILED, "):  # the state of a batch or array, with its progress
                return (
                    f"penstock batch retry {name}" if name != parent else f"penstock array retry {name[-8:]}"
                )
            if state in ("FAILED", "BLOCKED"):
                return f"penstock retry {parent[-8:]}"
        return super().way_out(job, units)

    def hidden(self, hides: Hides) -> Self:
        return replace(self, parents=tuple(map(hides.job, self.parents)))


def _parent(job_id: JobId | None, state: str) -> str:
    if job_id is not None and job_id.startswith(BATCH_TAG):
        return f"batch {job_id.removeprefix(BATCH_TAG)}"
    if job_id is not None and " ended" in state:
        return f"array {job_id[-8:]}"
    return named(job_id)


#: The state that a condition requires of a parent.
_WANTED: Final = {"ok": "DONE", "done": "over", "failed": "FAILED"}

Reason: TypeAlias = (
    WaitsForParents
    | Draining
    | LabelMissing
    | Paused
    | NotReady
    | NotQuiet
    | NotQuietLongEnough
    | CapReached
    | BudgetSpent
    | NotEnoughUnits
    | UnitsKept
    | QueuedAhead
    | AwaitsWorker
    | WorkerElsewhere
    | WorkersFull
    | NoWorkerSeen
    | WorkerGone
    | RunnerDisabled
    | NotDispatched
    | NoFunction
)

REASONS: Final[dict[str, type[Reason]]] = {kind.code: kind for kind in get_args(Reason)}


def retry_after_sec(reason: Reason, now: Moment) -> float:
    """
    The seconds after which another request may help; at least 1, so that a client does not poll in a loop.
    """
    return max(1.0, round(reason.retry_sec(now), 3))


def words(reason: Reason, now: Moment) -> str:
    """The reason in one or two sentences."""
    return reason.words(now)


def from_json(code: str, data: Mapping[str, Any]) -> Reason:
    """
    The reason with this code and data. Unknown fields are dropped, so that older programs can read a newer
    trail.
    """
    return convert(data, REASONS[code])
