"""Jobs that are done: one statement for all that were told together, since nearly every job ends like this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from penstock.core.changes import Note
from penstock.core.job import Kind
from penstock.core.landing import End
from penstock.core.states import State
from penstock.core.words import JobId, Moment
from penstock.stores.postgres_apply import Judged
from penstock.stores.postgres_link import Link, Session
from penstock.stores.postgres_pages import Demands
from penstock.stores.postgres_wire import Values, columns
from penstock.stores.protocol import Done

__all__ = ["Completing", "Completion"]

COMPLETED: Final = Note(Kind.DONE, str(End.COMPLETED))
#: Where in a row of `complete` the number of its demand is.
_DEMAND: Final = 4


class Completion(NamedTuple):
    done: Sequence[Done]


class Completing:
    """Those who came together; perhaps nobody."""

    def __init__(self, link: Link, demands: Demands, completions: Sequence[Completion]) -> None:
        self._link, self._demands, self._completions = link, demands, completions
        #: Told twice counts once, and the first one is it.
        self._first: dict[str, Done] = {}
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

    def judge(self, session: Session, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        judged, ended = Judged(now), set()
        found = rows[0] if rows else []
        demands = self._demands.of(session, {row[_DEMAND] for row in found})
        for dispatch_id, no, n, host, demand_no, flight, at in found:
            ended.add(dispatch_id)
            job_id = JobId(dispatch_id.rpartition(".")[0])
            demand = demands[demand_no]
            judged.pages.note(now, COMPLETED, (no, job_id, n, State.DONE), dispatch_id, mentioned=False)
            judged.pages.moved(demand.addon_id, State.RUNNING, State.DONE)
            judged.pages.settled(no, at)
            judged.end(host, demand, flight)
        for completion in self._completions:
            answers = []
            for done in completion.done:
                answers.append(done.dispatch_id in ended)
                ended.discard(done.dispatch_id)
            judged.answers.append(answers)
        return judged
