"""
The writers of a process on PostgreSQL: operations that arrive together go to the server together. Submits and rounds have a writer each, so
that a submit never waits for a row of the ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.core.jobs.changes import Change, completed
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.api import Admit, Apply, Complete, Grant, Operation, Receipt, Submit
from penstock.stores.common.checks import BatchUnknown, with_jobs
from penstock.stores.common.group_commit import GroupCommit, answered, failed
from penstock.stores.postgres.changes import Applying, Changes, Completing
from penstock.stores.postgres.rounds import Admitting, RoundAnswers, StartedRound

__all__ = ["RoundBatcher", "SubmitBatcher"]


class SubmitBatcher(GroupCommit):
    """`write`: all of them in one transaction, answered when that is durable."""

    def __init__(self, write: Callable[[list[Submit]], list[list[Receipt]]]) -> None:
        super().__init__(write)  # type: ignore[arg-type]  # nothing but submits comes here
        #: The thread that has it submits for itself. If a Ctrl-C at the wrong moment loses it, the writer's own thread does it all.
        self._pass = deque([object()])

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        """
        In the calling thread while no other one submits, so that two threads need not wake each other. Also in the main
        thread, unlike a round: no other thread waits for these answers, and a submit that a Ctrl-C comes into is as open
        as one that is waited for.
        """
        mine = self._take_pass() if wait else None
        if mine is None:
            return super().commit(operations)
        try:
            return [answered(answer) for answer in self._write(list(operations))]
        except BatchUnknown as unknown:
            return [
                failed(with_jobs(unknown, receipts))
                for _, receipts in zip(operations, unknown.answers, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - it is the answer
            if len(operations) == 1:
                return [failed(error)]
        finally:
            self._pass.append(mine)
        return super().commit(operations)  # one of them is bad, and fails alone

    def _take_pass(self) -> object | None:
        """Not before submits that were handed in earlier, perhaps by the same thread."""
        if self._closed or not self.idle:
            return None
        try:
            return self._pass.pop()
        except IndexError:
            return None


class RoundBatcher(GroupCommit):
    """
    Changes, completions and rounds. `read_jobs`: for a round whose answer was lost with its connection. `committed`: called
    after each transaction with whether it wrote events.
    """

    def __init__(
        self,
        admitting: Admitting,
        read_jobs: Callable[[Sequence[JobId]], list[Job]],
        committed: Callable[[bool], None],
    ) -> None:
        self.admitting, self._read_jobs, self._committed = admitting, read_jobs, committed
        self._applying = Applying(admitting.link, admitting.demands, admitting.ordering)
        #: Behind it, all operations that were handed in so far have been answered.
        self.last: Future[Any] = answered([])
        super().__init__(self._write_all)

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        answers = super().commit(operations, wait=wait)
        self.last = answers[-1]
        return answers

    def _write_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """The ends before the rounds, so that the rounds have the room that was given back."""
        link, demands = self.admitting.link, self.admitting.demands
        admissions = [op for op in operations if isinstance(op, Admit)]
        completions = [op for op in operations if isinstance(op, Complete)]
        if len(completions) + len(admissions) == len(operations):
            written = self.admitting.write(Completing(link, demands, completions), admissions)
        else:
            now = link.now()
            changes = Changes(demands, [_changes(op, now) for op in operations if not isinstance(op, Admit)])
            if admissions:
                written = self.admitting.write(changes, admissions)
            else:
                written = RoundAnswers(*link.transact(lambda session: self._applying.run(session, changes)))
            self.admitting.scan_hint.disturbed()
        started = iter([self._grants(started) for started in written.started])
        self._committed(written.told)
        applied = iter(written.applied)
        return [next(started) if isinstance(op, Admit) else next(applied) for op in operations]

    def _grants(self, started: StartedRound) -> list[Grant]:
        jobs = started.jobs
        if missing := [d.job_id for d in started.dispatches if _runs(d) and d.job_id not in jobs]:
            jobs |= {job.job_id: job for job in self._read_jobs([job_id for job_id in missing if job_id])}
        return [
            Grant(d, jobs.get(d.job_id) if d.job_id is not None and _runs(d) else None)
            for d in started.dispatches
        ]


def _runs(dispatch: Dispatch) -> bool:
    return dispatch.job_id is not None and dispatch.started_at is not None


def _changes(operation: Operation[Any], now: Moment) -> Sequence[Change]:
    """Beside changes, completions are changes too, so that all are judged in the order of their arrival."""
    if isinstance(operation, Complete):
        return [completed(done.dispatch_id, now, done.result) for done in operation.done]
    assert isinstance(operation, Apply)
    return operation.changes
