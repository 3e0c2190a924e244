"""
The tracker: the dispatches in flight on this host, and how each of them is ended.

The runner reports events and the time to the tracker, which answers with the steps to carry out. The tracker
keeps three promises. The first reason to end a dispatch wins; only a cancel replaces a reason that would run
the job again. A dispatch settles once. A report under an id that is no longer in flight changes nothing.

The steps of the kill ladder are the cancel signal, for a run that listens; SIGTERM; SIGKILL; and LOST, for a
run that survived all of them. A plan holds the moments of the remaining steps, so a shutdown or `cancel
--now` only sets earlier moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from penstock.core.jobs.states import replaces
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, Span

#: From sysexits.h: "try again later". A command exits with it when something it needs is unavailable.
EX_TEMPFAIL: Final = 75


class Step(StrEnum):
    """One step towards the end of a run."""

    YIELD = "yield"  # a request: the run may finish its work first
    CANCEL = "cancel"
    TERM = "term"
    KILL = "kill"
    FORCE = "force"  # the warden did not carry out the kill, so it is killed too
    LOST = "lost"  # the run survived SIGKILL, or the time of a shutdown is over


class Effect(NamedTuple):
    """A step that the runner must carry out now."""

    dispatch_id: DispatchId
    step: Step
    reason: EndReason | None


class Graces(Struct, frozen=True):
    """How long the ladder waits after each step before the next one."""

    cancel: Span = 10 * SECOND
    term: Span = 5 * SECOND
    kill: Span = 10 * SECOND

    def plan(self, now: Moment, *, listens: bool) -> dict[Step, Moment]:
        """A run that does not listen gets no time for the cancel signal."""
        term = now + (self.cancel if listens else 0)
        kill = term + self.term
        return {Step.CANCEL: now, Step.TERM: term} | self.killed(kill)

    def killed(self, at: Moment) -> dict[Step, Moment]:
        return {Step.KILL: at, Step.FORCE: at + self.kill // 4, Step.LOST: at + self.kill}


def _plan_until(now: Moment, timeout: Span, *, listens: bool) -> dict[Step, Moment]:
    """
    The ladder of a shutdown, within one timeout: the first half to yield, a quarter after TERM, and a quarter
    after KILL.
    """
    term = now + (timeout // 2 if listens else 0)
    return {
        Step.CANCEL: now,
        Step.TERM: term,
        Step.KILL: now + timeout * 3 // 4,
        Step.FORCE: now + timeout * 7 // 8,
        Step.LOST: now + timeout,
    }


class _TrackedDispatch(Struct):
    listens: bool
    reason: EndReason | None = None
    yield_requested: bool = False
    plan: dict[Step, Moment] | None = None


class Tracker:
    """The dispatches in flight, each with its first reason to end and its plan."""

    def __init__(self, graces: Graces | None = None) -> None:
        self._graces = graces or Graces()
        self._dispatches: dict[DispatchId, _TrackedDispatch] = {}

    def __contains__(self, dispatch_id: object) -> bool:
        return dispatch_id in self._dispatches

    def __len__(self) -> int:
        return len(self._dispatches)

    def __iter__(self) -> Iterator[DispatchId]:
        return iter(list(self._dispatches))

    def register(self, dispatch_id: DispatchId, *, listens: bool = False) -> None:
        """`listens`: the run polls whether it should stop, so the cancel signal can have an effect."""
        if dispatch_id in self._dispatches:
            raise ValueError(f"{dispatch_id} is in flight already: an identity is used once")
        self._dispatches[dispatch_id] = _TrackedDispatch(listens)

    def hears(self, dispatch_id: DispatchId) -> None:
        """Record that the run polled, so it listens. A plan that exists stays as it is."""
        if tracked := self._dispatches.get(dispatch_id):
            tracked.listens = True

    def reason(self, dispatch_id: DispatchId) -> EndReason | None:
        tracked = self._dispatches.get(dispatch_id)
        return None if tracked is None else tracked.reason

    def should_yield(self, dispatch_id: DispatchId) -> bool:
        """Whether the run should stop. True also for a dispatch that is no longer in flight."""
        tracked = self._dispatches.get(dispatch_id)
        return tracked is None or tracked.yield_requested or tracked.reason is not None

    def ask(self, dispatch_id: DispatchId) -> list[Effect]:
        """Ask the run to yield at its next safe place. A second call repeats a request that may be lost."""
        tracked = self._dispatches.get(dispatch_id)
        if tracked is None or tracked.reason is not None:
            return []
        tracked.yield_requested = True
        return [Effect(dispatch_id, Step.YIELD, None)]

    def terminate(
        self, dispatch_id: DispatchId, reason: EndReason, now: Moment, *, at_once: bool = False
    ) -> list[Effect]:
        """End a dispatch early. `at_once`: begin with SIGKILL, also if the run is on the ladder already."""
        tracked = self._dispatches.get(dispatch_id)
        if tracked is None:
            return []
        if at_once:
            self._hurry(tracked, {Step.CANCEL: now, Step.TERM: now} | self._graces.killed(now))
        elif tracked.reason is None:
            self._hurry(tracked, self._graces.plan(now, listens=tracked.listens))
        if tracked.reason is None or replaces(reason, tracked.reason):
            tracked.reason = reason
        return self._due(dispatch_id, tracked, now)

    def drain(self, now: Moment, timeout: Span) -> list[Effect]:
        """End everything in flight within one shared timeout."""
        effects: list[Effect] = []
        for dispatch_id, tracked in self._dispatches.items():
            self._hurry(tracked, _plan_until(now, timeout, listens=tracked.listens))
            tracked.reason = tracked.reason or EndReason.GRACEFUL_SHUTDOWN
            effects += self._due(dispatch_id, tracked, now)
        return effects

    def advance(self, now: Moment) -> list[Effect]:
        return [
            effect
            for dispatch_id, tracked in self._dispatches.items()
            for effect in self._due(dispatch_id, tracked, now)
        ]

    def alarm(self) -> Moment | None:
        return min(
            (moment for f in self._dispatches.values() for moment in (f.plan or {}).values()), default=None
        )

    def settle(self, dispatch_id: DispatchId, how: EndReason) -> EndReason | None:
        """
        The run is over: the end reason is its first reason, else `how`. None: it is not in flight any more.
        """
        tracked = self._dispatches.pop(dispatch_id, None)
        return None if tracked is None else tracked.reason or how

    def _hurry(self, tracked: _TrackedDispatch, plan: dict[Step, Moment]) -> None:
        """Set each remaining step to the earlier moment of both plans."""
        before = tracked.plan
        if before is None:
            tracked.plan = plan
        else:
            tracked.plan = {step: min(moment, plan[step]) for step, moment in before.items()}

    def _due(self, dispatch_id: DispatchId, tracked: _TrackedDispatch, now: Moment) -> list[Effect]:
        if not tracked.plan:
            return []
        due = [step for step, moment in tracked.plan.items() if moment <= now]
        for step in due:
            del tracked.plan[step]
        return [Effect(dispatch_id, step, tracked.reason) for step in due]


def end_of_exit(code: int) -> EndReason:
    """The end reason for an exit code; a negative one is minus a signal, as in the standard library."""
    if code == 0:
        return EndReason.COMPLETED
    if code < 0:
        return EndReason.WORKER_CRASHED
    return EndReason.UNAVAILABLE if code == EX_TEMPFAIL else EndReason.JOB_ERROR
