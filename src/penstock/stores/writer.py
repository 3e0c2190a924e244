"""
Group commit: one thread owns the write connection, and whatever has arrived together is committed together.

An fsync costs about as much as a hundred inserts, so sixty-four submitters share one and each still gets its answer only
after it. When one operation of a batch fails, the batch is rolled back and each runs alone: nobody pays for another's
mistake, and no savepoint is paid for when all is well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

from penstock.core.refusals import StoreFailed

__all__ = ["Writer"]

T = TypeVar("T")


class _Op(Generic[T]):
    __slots__ = ("answer", "run")

    def __init__(self, run: Callable[[Any], T]) -> None:
        self.run = run
        self.answer: Future[T] = Future()


class Writer:
    def __init__(self, begin: Callable[[], AbstractContextManager[Any]], *, most: int = 512) -> None:
        self._begin, self._most = begin, most
        self._ops: SimpleQueue[_Op[Any] | None] = SimpleQueue()
        self._gate, self._closed = Lock(), False
        self._thread = Thread(target=self._loop, name="penstock-writer", daemon=True)
        self._thread.start()

    def write(self, run: Callable[[Any], T]) -> T:
        """Returns when it is on disk. `run` may be called twice, the first time for nothing; leaving `begin` commits."""
        return self.soon(run).result()

    def soon(self, run: Callable[[Any], T]) -> Future[T]:
        op = _Op(run)
        with self._gate:  # nothing may be put behind the end mark: nobody would ever answer it
            if self._closed:
                raise StoreFailed("the store is closed", kind="closed")
            self._ops.put(op)
        return op.answer

    def close(self) -> None:
        """What was handed in before is still done."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._ops.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (op := self._ops.get()) is not None:
            batch = [op]
            while len(batch) < self._most and not self._ops.empty():
                op = self._ops.get()
                if op is None:
                    self._run(batch)
                    return
                batch.append(op)
            self._run(batch)

    def _run(self, batch: list[_Op[Any]]) -> None:
        try:
            with self._begin() as transaction:
                results = [op.run(transaction) for op in batch]
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the answer
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
            else:
                for op in batch:
                    self._run([op])
            return
        for op, result in zip(batch, results, strict=True):
            op.answer.set_result(result)
