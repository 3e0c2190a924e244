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
from penstock.stores.postgres_link import Conflict, Link, Session
from penstock.stores.postgres_pages import Demands
from penstock.stores.postgres_wire import Values, columns
from penstock.stores.protocol import Done

__all__ = ["Completing", "Completion"]

COMPLETED: Final = Note(Kind.DONE, str(End.COMPLETED))


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
        rows = []
        # In the order of their jobs, more or less, as everybody locks them.
        for dispatch_id, result in sorted(self._first.values()):
            job_id, _, fence = dispatch_id.rpartition(".")
            rows.append((dispatch_id, job_id, int(fence) if fence.isdecimal() else 0, result))
        return [("complete", [*columns(rows), self._link.handed()])] if rows else []

    def judge(self, session: Session, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        judged, ended = Judged(now), set()
        found = [row for row in rows[0] if row[1] is not None] if rows else []
        if rows and len(found) != rows[0][0][0]:
            raise Conflict("somebody changed a dispatch while its job was being completed")
        demands = self._demands.of(session, {demand_no for *_, demand_no in found})
        for _, dispatch_id, no, n, addon_id, host, demand_no in found:
            ended.add(dispatch_id)
            job_id = JobId(dispatch_id.rpartition(".")[0])
            judged.pages.note(now, COMPLETED, (no, job_id, n, State.DONE), dispatch_id)
            judged.pages.moved(addon_id, State.RUNNING, State.DONE)
            judged.ended[host, demands[demand_no]] += 1
        for completion in self._completions:
            answers = []
            for done in completion.done:
                answers.append(done.dispatch_id in ended)
                ended.discard(done.dispatch_id)
            judged.answers.append(answers)
        return judged
