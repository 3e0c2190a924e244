"""
Group commit: operations that arrive together are written in one transaction.

A sync to disk costs about as much as a hundred inserts, so sixty-four submitters share one, and each is still
answered only after it. If one operation of a batch fails, the transaction is rolled back and each operation
runs alone: none fails by the mistake of another, and a batch without a mistake needs no savepoints. If the
outcome of a batch is unknown, it is not tried again, and every operation of it fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from time import monotonic
from typing import Any, Final, TypeAlias

from penstock.core.errors import OutcomeUnknown, StoreFailed
from penstock.stores.api import Operation, Receipt, RegisterHost

#: How many seconds `failure` reports a failed write, unless another write succeeds: health then names the
#: reason, and a disk that is full for a moment does not look broken for ever.
RECENT_SEC: Final = 30.0
#: The most operations of one transaction, unless one commit has more. The first caller waits for the last
#: operation, and at this size the sync is already a small part of the time.
MOST_OPERATIONS: Final = 512

_Pending: TypeAlias = tuple[Operation[Any], Future[Any]]


class BatchUnknown(OutcomeUnknown):
    """
    The outcome of a whole transaction is unknown. `answers`: the answer to each operation, if it was written.
    """

    def __init__(self, error: OutcomeUnknown, answers: Sequence[Any]) -> None:
        super().__init__(str(error), **error.data)
        self.answers = answers


class GroupCommit:
    """
    Writes operations that arrive together. `write` writes operations in one transaction and returns their
    answers when they are durable; it may be called again with some of them. It raises BatchUnknown if they
    may have been written. `after` is called after each transaction, when its callers have their answers.
    """

    def __init__(
        self,
        write: Callable[[list[Operation[Any]]], Sequence[Any]],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._write, self._after = write, after
        #: One entry for each commit: its operations stay together.
        self._commits: deque[list[_Pending]] = deque()
        #: Held by the thread that writes a batch: this writer's own, or one that waits for its own answers.
        self._writing = Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False: the store closes
        self._woken = False
        self._failure: tuple[float, StoreFailed] | None = None
        self._gate, self._closed = Lock(), False
        self._thread = Thread(target=self._loop, name="penstock-writer", daemon=True)
        self._thread.start()

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        """
        Queue operations for the next transaction. `wait`: the calling thread waits for the answers, so it may
        write itself and no thread must be woken. The main thread never writes: a Ctrl-C could come between a
        transaction and the answers of other callers.
        """
        pending = [(operation, with_callback(operation, Future[Any]())) for operation in operations]
        for _, answer in pending:
            answer.set_running_or_notify_cancel()  # a queued write cannot be canceled
        with self._gate:  # after `close` no thread would answer
            if self._closed:
                raise StoreFailed("the store is closed", kind="closed")
            self._commits.append(pending)
        if wait and current_thread() is not main_thread():
            self._write_here()
        else:
            self._wake_thread()
        return [answer for _, answer in pending]

    @property
    def idle(self) -> bool:
        """Whether no commit waits to be written."""
        return not (self._commits or self._writing.locked())

    @property
    def failure(self) -> StoreFailed | None:
        """Why the last write failed, if that was in the last `RECENT_SEC` seconds."""
        failure = self._failure
        return failure[1] if failure is not None and monotonic() - failure[0] < RECENT_SEC else None

    def close(self) -> None:
        """Write the commits that are queued, then end."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._wake.put(False)
        self._thread.join()

    def _write_here(self) -> None:
        if self._writing.acquire(blocking=False):
            try:
                self._write_batch()
            finally:
                self._writing.release()
        if self._commits:
            self._wake_thread()

    def _wake_thread(self) -> None:
        if not self._woken:  # one wake-up is enough for all commits that come before the thread runs
            self._woken = True
            self._wake.put(True)

    def _loop(self) -> None:
        is_open = True
        while is_open:
            is_open = self._wake.get()
            self._woken = False  # before it reads the commits: a later one must wake it again
            while self._commits:
                with self._writing:
                    self._write_batch()

    def _write_batch(self) -> None:
        batch: list[_Pending] = []
        while self._commits and len(batch) < MOST_OPERATIONS:
            batch += self._commits.popleft()
        if batch:
            self._run(batch)

    def _run(self, batch: list[_Pending]) -> None:
        try:
            answers = self._write([operation for operation, _ in batch])
        except BaseException as error:  # noqa: BLE001 - the callers get it as their answer
            if isinstance(error, StoreFailed):
                self._failure = monotonic(), error
            if len(batch) == 1 or isinstance(error, OutcomeUnknown):
                _fail(batch, error)
            else:
                for pending in batch:
                    self._run([pending])
            return
        if self._failure is not None and not all(isinstance(op, RegisterHost) for op, _ in batch):
            self._failure = None  # the row of a host is small: that it fits does not mean that others fit
        for (_, answer), result in zip(batch, answers, strict=True):
            answer.set_result(result)
        self._after()


def with_callback(operation: Operation[Any], answer: Future[Any]) -> Future[Any]:
    """The same Future, which will call the operation's `on_answer`."""
    if operation.on_answer is not None:
        answer.add_done_callback(operation.on_answer)
    return answer


def _fail(batch: list[_Pending], error: BaseException) -> None:
    answers = error.answers if isinstance(error, BatchUnknown) else []
    for (_, answer), result in zip_longest(batch, answers):
        if isinstance(error, OutcomeUnknown) and isinstance(result, list):
            answer.set_exception(naming_jobs(error, result))
        else:
            answer.set_exception(error)


def naming_jobs(error: OutcomeUnknown, answer: Iterable[Any]) -> OutcomeUnknown:
    """
    The error of a submit whose outcome is unknown, with the ids of the jobs that exist if it was written.
    """
    jobs = list(dict.fromkeys(receipt.job_id for receipt in answer if isinstance(receipt, Receipt)))
    if not jobs:
        return error
    more = f" and {len(jobs) - 3} more" if len(jobs) > 3 else ""
    text = f"{error}. Ask for job {', '.join(jobs[:3])}{more}, or submit again with the same idempotency key"
    return OutcomeUnknown(text, **{**error.data, "job_ids": jobs})


# answers of writes outside of group commit


def written_now(write: Callable[[], Any]) -> Future[Any]:
    """Call `write` in this thread; return its answer, or what it raised, as a Future that is done."""
    try:
        return answered(write())
    except Exception as error:  # noqa: BLE001 - it is the answer
        return failed(error)


def answered(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
