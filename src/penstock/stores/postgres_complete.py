"""Jobs that are done: one statement for all that were told together, since nearly every job ends like this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from penstock.core.job import EventKind
from penstock.core.landing import EndReason
from penstock.core.states import JobState
from penstock.core.words import DispatchId, HostId, JobId, Moment
from penstock.stores.postgres_apply import Judged
from penstock.stores.postgres_link import Database, DatabaseSession
from penstock.stores.postgres_pages import EventRow, PostgresAdmissionClasses
from penstock.stores.postgres_wire import Values, columns
from penstock.stores.protocol import CompletedDispatch

__all__ = ["Completing", "Completion"]


class Completion(NamedTuple):
    done: Sequence[CompletedDispatch]


class Completing:
    """Those who came together; perhaps nobody."""

    def __init__(
        self, link: Database, demands: PostgresAdmissionClasses, completions: Sequence[Completion]
    ) -> None:
        self._link, self._demands, self._completions = link, demands, completions
        #: Told twice counts once, and the first one is it.
        self._first: dict[str, CompletedDispatch] = {}
        for done in (done for completion in completions for done in completion.done):
            self._first.setdefault(done.dispatch_id, done)

    def __len__(self) -> int:
        return len(self._first)

    def calls(self) -> list[tuple[str, Values]]:
        rows = sorted(self._first.values())  # as everybody locks them
        if not rows:
            return []
        ids, results = columns(rows)
        return [("complete", {"now": self._link.handed(), "ids": ids, "results": results})]

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        judged = Judged(now)
        found = list(map(_completed, rows[0])) if rows else []
        demands = self._demands.of(session, {one.admission_class for one in found})
        for (host, class_no, flight), n in Counter(map(_KIND, found)).items():
            admission_class = demands[class_no]
            judged.pages.moved(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
            judged.end(host, admission_class, flight, n)
        if found:
            judged.pages.settled([one.no for one in found], found[0].at)
            judged.pages.note_many(lambda: _told(found, now))
        ended = {one.dispatch_id for one in found}
        for completion in self._completions:
            answers = []
            for done in completion.done:
                answers.append(done.dispatch_id in ended)
                ended.discard(done.dispatch_id)
            judged.answers.append(answers)
        return judged


class _Completed(NamedTuple):
    """A row of `complete`."""

    dispatch_id: DispatchId
    no: int
    events: int
    host: HostId
    admission_class: int
    flight: int
    at: Moment


#: From a whole row, in half the time.
_completed: Final[Callable[[Any], _Completed]] = partial(tuple.__new__, _Completed)
#: What most of them have in common.
_KIND: Final = attrgetter("host", "admission_class", "flight")


def _told(found: Sequence[_Completed], now: Moment) -> Iterator[EventRow]:
    why = str(EndReason.COMPLETED)
    for one in found:
        job_id, _, attempt = one.dispatch_id.rpartition(".")
        yield now, EventKind.DONE, JobId(job_id), one.events, JobState.DONE, why, attempt, None
