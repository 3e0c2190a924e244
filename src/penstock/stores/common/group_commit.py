"""
Group commit: one thread owns the write connection, and whatever has arrived together is committed together.

An fsync costs about as much as a hundred inserts, so sixty-four submitters share one and each still gets its answer only
after it. When one operation of a batch fails, the batch is rolled back and each runs alone: nobody pays for another's
mistake, and no savepoint is paid for when all is well. Unless it may have been written after all: then all are told so.

Whoever is idle may ride along (`ride`): its operation goes into the commit of the one that brings it something to do, which would
otherwise be followed by a commit of its own. Riders are left behind when anything in the batch fails, so they harm nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import zip_longest
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from penstock.core.errors import OutcomeUnknown, StoreFailed
from penstock.stores.api import Rest
from penstock.stores.common.checks import with_jobs

__all__ = ["Passage", "Writer", "settling"]

T = TypeVar("T")
log = logging.getLogger("penstock.stores")


class Passage(NamedTuple):
    """
    What a rider adds to a transaction. `landed` is called once: with the answer when it is on disk, or None, and nothing was done; and
    with whether the thread may stay with it.
    """

    run: Callable[[Any], Any]
    landed: Callable[[Any, bool], Rest | None]


#: Asked inside the transaction, so it must be quick. None: not this time.
Board: TypeAlias = Callable[[], Passage | None]


#: Called once, with the answer when it is on disk or with what went wrong.
Told: TypeAlias = Callable[[Any, BaseException | None], None]


#: For so long a failed write counts as the state of things, if no other write succeeds.
RECENT_SEC: Final = 30.0


class _Op(NamedTuple):
    run: Callable[[Any], Any]
    told: Told
    brings: bool
    #: It is small, and says nothing of whether others would succeed.
    probe: bool = False


class Writer:
    """`after` is called behind every commit, before its answers are given where nobody stays with what it brought."""

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[Any]],
        after: Callable[[], None] = lambda: None,
        *,
        most: int = 512,
    ) -> None:
        self._begin, self._after, self._most = begin, after, most
        self._ops: deque[_Op] = deque()
        #: Held by whoever writes a batch: its own thread, or one that carries.
        self._writing = Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False: for the last time
        self._rung = self._left_untold = False
        self._boards: tuple[Board, ...] = ()
        self._failed: tuple[float, StoreFailed] | None = None
        self._gate, self._closed = Lock(), False
        self._thread = Thread(target=self._loop, name="penstock-writer", daemon=True)
        self._thread.start()

    def write(self, run: Callable[[Any], T]) -> T:
        """Returns when it is on disk. `run` may be called twice, the first time for nothing; leaving `begin` commits."""
        return self.soon(run).result()

    def soon(self, run: Callable[[Any], T], *, brings: bool = False, probe: bool = False) -> Future[T]:
        """`brings`: riders may find something to do behind it. `probe`: its success does not end a failure (`failure`)."""
        answer: Future[T] = Future()
        self.put(run, settling(answer), brings=brings, probe=probe)
        self._ring()
        return answer

    def put(
        self, run: Callable[[Any], Any], told: Told, *, brings: bool = False, probe: bool = False
    ) -> None:
        """For who calls `carry` in a moment, and has no use for a Future: making and settling one costs as much as a row."""
        with self._gate:  # nothing may be put behind the end mark: nobody would ever answer it
            if self._closed:
                raise StoreFailed("the store is closed", kind="closed")
            self._ops.append(_Op(run, told, brings, probe))

    def carry(self) -> list[Rest]:
        """
        Write what is there, in the thread of who calls: it has nothing else to do meanwhile, and waking another one costs as much as a small
        commit. Not for the main thread, where a Ctrl-C could come between a commit and its answers. What riders would have that thread do
        now is the answer; whoever then carries in its place must do so at once, for `after` was left to it.
        """
        rest: list[Rest] = []
        if (self._ops or self._left_untold) and self._writing.acquire(blocking=False):
            try:
                if self._left_untold:
                    self._tell()
                self._batch(rest)
            finally:
                self._writing.release()
        if self._ops:
            self._ring()
        return rest

    @property
    def idle(self) -> bool:
        """Nothing was handed in that has not been answered, or is about to be."""
        return not (self._ops or self._writing.locked())

    @property
    def failure(self) -> StoreFailed | None:
        """Why the last write failed, if that was of late."""
        failed = self._failed
        return failed[1] if failed is not None and monotonic() - failed[0] < RECENT_SEC else None

    def ride(self, board: Board) -> Callable[[], None]:
        """From now on, until the answer is called."""
        with self._gate:
            self._boards = (*self._boards, board)

        def leave() -> None:
            with self._gate:
                self._boards = tuple(known for known in self._boards if known is not board)

        return leave

    def close(self) -> None:
        """What was handed in before is still done."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._wake.put(False)
        self._thread.join()

    def _ring(self) -> None:
        if not self._rung:  # one ring for all that comes until the thread is up
            self._rung = True
            self._wake.put(True)

    def _loop(self) -> None:
        going = True
        while going:
            going = self._wake.get()
            self._rung = False  # before it looks: what comes after that must ring again
            while self._ops:
                with self._writing:
                    self._batch()

    def _tell(self) -> None:
        self._left_untold = False
        self._after()

    def _batch(self, rest: list[Rest] | None = None) -> None:
        """`rest`: where riders may leave what the thread shall do; None: it has no time for that."""
        batch: list[_Op] = []
        while self._ops and len(batch) < self._most:
            batch.append(self._ops.popleft())
        if batch:
            self._run(batch, self._boards, rest)

    def _run(self, batch: list[_Op], boards: tuple[Board, ...], rest: list[Rest] | None = None) -> None:
        riders: list[Passage] = []
        results: list[Any] = []
        boarding = False
        try:
            with self._begin() as transaction:
                results = [op.run(transaction) for op in batch]
                boarding = bool(boards) and any(op.brings for op in batch)
                for board in boards if boarding else ():
                    passage = board()
                    if passage is not None:
                        riders.append(passage)
                brought = [passage.run(transaction) for passage in riders]
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the answer
            _land(riders, [None] * len(riders), None)
            if isinstance(error, StoreFailed):
                self._failed = monotonic(), error
            if (len(batch) == 1 and not boarding) or _perhaps_written(error):
                for op, result in zip_longest(batch, results):
                    op.told(None, _with_jobs(error, result))
            else:
                for op in batch:
                    self._run([op], ())
            return
        if self._failed is not None and not all(op.probe for op in batch):
            self._failed = None
        _land(riders, brought, rest)
        if rest:
            # It wakes threads that would take the interpreter from the one that has something to begin.
            self._left_untold = True
        else:
            self._tell()
        for op, result in zip(batch, results, strict=True):
            op.told(result, None)


def _perhaps_written(error: BaseException) -> bool:
    """Then nobody's turn may be taken again."""
    return isinstance(error, StoreFailed) and error.data.get("kind") == "unknown"


def _with_jobs(error: BaseException, result: Any) -> BaseException:
    if isinstance(error, OutcomeUnknown) and isinstance(result, list):
        return with_jobs(error, result)
    return error


def settling(answer: Future[Any]) -> Told:
    def told(result: Any, error: BaseException | None) -> None:
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    return told


def _land(riders: list[Passage], answers: list[Any], rest: list[Rest] | None) -> None:
    for passage, answer in zip(riders, answers, strict=True):
        try:
            left = passage.landed(answer, rest is not None)
            if left is not None and rest is not None:
                rest.append(left)
        except Exception:  # the commit stands; one rider's mistake must not cost the others their answers
            log.exception("a rider could not take its answer")
