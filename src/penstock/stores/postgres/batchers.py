"""
What arrives together in a process goes out together: a lane is a thread that carries one group after the other to the server. While only one thread
comes it does so by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import current_thread, main_thread
from typing import Any, Generic, Self, TypeAlias, TypeVar

from penstock.core.jobs.changes import Change, completed
from penstock.core.jobs.types import Moment
from penstock.stores.api import Receipt
from penstock.stores.common.checks import SubmitsUnknown, with_jobs
from penstock.stores.common.group_commit import Writer, settling
from penstock.stores.postgres.changes import Applying, Changes, Completing, Completion
from penstock.stores.postgres.rounds import Admitting, RoundRequest
from penstock.stores.postgres.start import Admission
from penstock.stores.postgres.submit import Submission

__all__ = ["Group", "RoundBatcher", "SubmitBatcher", "answered"]

T = TypeVar("T")
Op = TypeVar("Op")
Answer = TypeVar("Answer")
#: What waits for one transaction: changes and completions, in their order, and rounds behind them.
_Op: TypeAlias = Sequence[Change] | Completion | Admission


class Group(Generic[Op, Answer]):
    """
    What arrived together. Answers are filled in when all of it is written, which is before anybody looks at them; and when submits may have been
    written, for the jobs in them.
    """

    def __init__(self, carry_out: Callable[[list[Op]], list[list[Answer]]]) -> None:
        self._carry_out = carry_out
        self._ops: list[Op] = []
        self._answers: list[list[Answer]] = []

    def add(self, op: Op) -> list[Answer]:
        self._ops.append(op)
        self._answers.append([])
        return self._answers[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        try:
            self._fill(self._carry_out(self._ops))
        except SubmitsUnknown as unknown:
            self._fill(unknown.receipts)
            raise

    def _fill(self, answers: Sequence[Sequence[Any]]) -> None:
        for answer, found in zip(self._answers, answers, strict=True):
            answer.extend(found)


class SubmitBatcher:
    """Submits. `carry_out`: in one transaction, and answered when that is on disk."""

    def __init__(self, carry_out: Callable[[list[Submission]], list[list[Receipt]]]) -> None:
        self._carry_out = carry_out
        self._writer = Writer(lambda: Group(carry_out))
        #: Who has it submits for itself. One that is lost, by a Ctrl-C at the wrong moment, is not missed: then the lane's own thread does it all.
        self._pass = deque([object()])
        self._closed = False

    def soon(self, submission: Submission) -> Future[list[Receipt]]:
        return self._writer.soon(lambda group: group.add(submission))

    def here(self, submission: Submission) -> list[Receipt]:
        """
        In the thread of who calls, while nobody else submits: two threads need not wake each other. Also in the main thread, unlike a turn: nobody
        else waits for what is answered here, and a submit that a Ctrl-C comes into is as open as one that is waited for.
        """
        mine = self._take_pass()
        if mine is None:
            return self.soon(submission).result()
        try:
            [receipts] = self._carry_out([submission])
        except SubmitsUnknown as unknown:
            raise with_jobs(unknown, unknown.receipts[0]) from unknown
        finally:
            self._pass.append(mine)
        return receipts

    def _take_pass(self) -> object | None:
        """Not before what was handed in earlier, perhaps by the same thread."""
        if self._closed or not self._writer.idle:
            return None
        try:
            return self._pass.pop()
        except IndexError:
            return None

    def close(self) -> None:
        self._closed = True
        self._writer.close()


class RoundBatcher:
    """Turns: what has ended, and the rounds behind it. `committed`: told after each whether there is something to tell of."""

    def __init__(self, admitting: Admitting, committed: Callable[[bool], None]) -> None:
        self.admitting, self._committed = admitting, committed
        self._applying = Applying(admitting.link, admitting.demands, admitting.ordering)
        self._writer = Writer(lambda: Group(self._turn))
        #: Behind it, all that was handed in so far has been answered.
        self.last: Future[Any] = answered([])

    def soon(self, hand_in: Callable[[Group[_Op, Any]], T]) -> Future[T]:
        answer = self._writer.soon(hand_in)
        self.last = answer
        return answer

    def here(self, hand_in: Callable[[Group[_Op, Any]], T]) -> Future[T]:
        """
        In the thread of who calls, if the lane is free: it has nothing else to do meanwhile, and two threads need not wake each other. Not in the
        main thread, where a Ctrl-C could come between a commit and its answers.
        """
        if current_thread() is main_thread():
            return self.soon(hand_in)
        self.last = answer = Future[T]()
        self._writer.put(hand_in, settling(answer))
        self._writer.carry()
        return answer

    def close(self) -> None:
        self._writer.close()

    def _turn(self, ops: list[_Op]) -> list[list[Any]]:
        """What ended before the rounds, so that these have the room that was given back."""
        link, demands = self.admitting.link, self.admitting.demands
        admissions = [op for op in ops if isinstance(op, Admission)]
        ending = [op for op in ops if not isinstance(op, Admission)]
        completions = [op for op in ending if isinstance(op, Completion)]
        if len(completions) == len(ending):
            turn = self.admitting.turn(Completing(link, demands, completions), admissions)
        else:
            now = link.now()
            changes = Changes(demands, [_changes(op, now) for op in ending])
            if admissions:
                turn = self.admitting.turn(changes, admissions)
            else:
                turn = RoundRequest(*link.transact(lambda session: self._applying.run(session, changes)))
            self.admitting.scan_hint.disturbed()
        self._committed(turn.told)
        answers, started = iter(turn.answers), iter(turn.started)
        return [next(started if isinstance(op, Admission) else answers) for op in ops]


def _changes(op: Sequence[Change] | Completion, now: Moment) -> Sequence[Change]:
    """Among others in one transaction a completion is one of them, so that all are judged in the order of their arrival."""
    if isinstance(op, Completion):
        return [completed(done.dispatch_id, now, done.result) for done in op.done]
    return op


def answered(answer: T) -> Future[T]:
    """Whoever asks for nothing is answered without a commit."""
    future: Future[T] = Future()
    future.set_result(answer)
    return future
