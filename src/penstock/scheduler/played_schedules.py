"""
Schedules of a play: their moments become jobs by the rules of `core/jobs/schedules.py`.

`look` decides, as in the scheduler, what a moment does while an earlier job has not ended, and what happens
to moments at which no scheduler ran. It is called when a moment of the schedule is due and, while moments
wait, when one of the schedule's jobs ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Final

from msgspec.structs import replace

from penstock.core.jobs import schedules
from penstock.core.jobs.changes import Note
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.schedules import ScheduleRecord
from penstock.core.jobs.types import SECOND, JobId, Moment, Span
from penstock.scheduler.arrivals import Arrival, ScheduleArrival
from penstock.scheduler.played_state import Play, PlayedState
from penstock.scheduler.played_waiting import ENDED, PlayedQueues

#: How soon a moment is tried again after the queue was full.
_AGAIN: Final[Span] = 1 * SECOND
_NEVER: Final[Moment] = -1


class ScheduleInPlay:
    """A schedule in a play. `submitted`, `skipped` and `missed` count its moments."""

    def __init__(self, arrival: ScheduleArrival) -> None:
        self.record, self.works, self.until = arrival.record, arrival.works, arrival.until
        self.jobs, self.pauses = arrival.jobs, arrival.pauses
        #: Future moments whose jobs are parents, each with the number of its group.
        self.parents = dict(arrival.parents)
        self.submitted = self.skipped = self.missed = 0
        self.planned: Moment = _NEVER

    @property
    def name(self) -> str:
        return self.record.name

    def count(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note.kind is EventKind.SCHEDULE_SKIPPED:
                self.skipped += 1
            elif note.kind is EventKind.SCHEDULE_MISSED and isinstance(note.data["count"], int):
                self.missed += note.data["count"]


class PlayedSchedules:
    """Submits the jobs of all schedules of a play. `cancel` cancels a job by its number."""

    def __init__(self, play: Play, queues: PlayedQueues, cancel: Callable[[int], None]) -> None:
        self._play, self._queues, self._cancel = play, queues, cancel
        #: Sorted by name: in this order the scheduler looks at schedules that are due at one moment.
        arrivals = sorted(play.load.schedules, key=lambda each: each.record.name)
        self.all = [ScheduleInPlay(arrival) for arrival in arrivals]
        self._due: list[tuple[Moment, int]] = []
        for number, schedule in enumerate(self.all):
            for job in schedule.jobs:
                queues.followers[job] = partial(self._ended, number)
            for at, paused in schedule.pauses:
                play.at(max(at, play.now), partial(self._pause, number, paused))
            self._plan_next(number)

    def _plan(self, number: int, at: Moment) -> None:
        heappush(self._due, (at, number))
        self._play.at(self._awake(at), self._step)

    def _plan_next(self, number: int) -> None:
        schedule = self.all[number]
        at = schedule.record.next_moment
        if at is not None and at <= schedule.until and at != schedule.planned:
            schedule.planned = at
            self._plan(number, at)

    def _awake(self, at: Moment) -> Moment:
        """The first moment from this one on at which a scheduler runs."""
        away = self._play.load.away
        before = bisect_right(away, (at, at)) - 1
        return max(at, away[before][1]) if before >= 0 else at

    def _step(self) -> None:
        due, numbers = self._due, set[int]()
        while due and due[0][0] <= self._play.now:
            numbers.add(heappop(due)[1])
        for number in sorted(numbers):
            self._look(number)

    def _look(self, number: int) -> None:
        play, schedule = self._play, self.all[number]
        now = min(play.now, schedule.until)
        record = self._with_its_jobs(schedule)
        ended = {name for name in record.state.active if self._has_ended(name)}
        change = schedules.look(record, now, ended)
        if change is not None:
            schedule.record = record
            job = change.job
            if job is not None and self._queues.is_full(schedule.record.schedule.intent.addon_id):
                self._plan(number, play.now + _AGAIN)
            else:
                name = None if job is None else self._submit(number, job.moment)
                schedule.record = record = change.row(name) or record
                schedule.count(change.notes)
                self._refuse_dropped(schedule)
        for name in schedules.to_cancel(record, ended):
            self._cancel(int(name))
        self._plan_next(number)

    def _with_its_jobs(self, schedule: ScheduleInPlay) -> ScheduleRecord:
        """The record with its running and queued jobs that no moment of the play has submitted."""
        state, active = schedule.record.state, schedule.record.state.active
        states = self._play.state
        own = [
            JobId(str(job))
            for job in schedule.jobs
            if states[job] in (PlayedState.QUEUED, PlayedState.RUNNING)
        ]
        missing = tuple(name for name in own if name not in active)
        return (
            replace(schedule.record, state=replace(state, active=(*active, *missing)))
            if missing
            else schedule.record
        )

    def _has_ended(self, name: JobId) -> bool:
        return self._play.state[int(name)] not in (PlayedState.QUEUED, PlayedState.RUNNING)

    def _submit(self, number: int, moment: Moment) -> JobId:
        play, schedule = self._play, self.all[number]
        work = schedule.works.of(moment, play.now)
        job = self._queues.make(Arrival(play.now, schedule.record.schedule.intent, *work))
        self._queues.followers[job] = partial(self._ended, number, parent=schedule.parents.pop(moment, None))
        schedule.submitted += 1
        return JobId(str(job))

    def _refuse_dropped(self, schedule: ScheduleInPlay) -> None:
        """Refuse the children of moments that became no job."""
        state = schedule.record.state
        for moment in [each for each in schedule.parents if each <= state.last_moment]:
            if moment not in state.pending:
                self._queues.refuse_group(schedule.parents.pop(moment))

    def _ended(self, number: int, state: PlayedState, parent: int | None = None) -> None:
        """Note the end of a job of the schedule; moments may wait for it."""
        if parent is not None and state in ENDED:
            self._queues.end_group(parent, ENDED[state])
        if self.all[number].record.state.pending:
            self._plan(number, self._play.now)

    def _pause(self, number: int, paused: bool) -> None:
        schedule, now = self.all[number], self._play.now
        act = schedules.pause if paused else schedules.resume
        change = act(schedule.record, now, "")
        if change is not None and change.target is not None:
            schedule.record = change.target
            schedule.count(change.notes)
            self._plan_next(number)
