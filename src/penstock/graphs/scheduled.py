"""A call on a lane without a graph: `GraphExecutor.schedule` (GR-6)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.errors import CallCanceled, PoolClosedError
from penstock.core.text import is_kind
from penstock.pools.future import AwaitableFuture
from penstock.pools.timers import call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.executor import GraphExecutor
    from penstock.graphs.lanes import AnyLane, LaneWorker


T = TypeVar("T")
U = TypeVar("U")


class Scheduled(AwaitableFuture[T], Generic[T]):
    """
    A Future that can be awaited from any event loop and chained: `ex.schedule(fetch, url,
    lane="io").then(parse)`. It waits in the same queue as the runs, and takes its turn like them.
    """

    run = None  # it belongs to none

    def __init__(
        self,
        executor: GraphExecutor,
        lane: AnyLane,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.cancel_start: Callable[[], object] | None = None
        self._executor = executor
        self._lane = lane
        self._call = (fn, args, kwargs)
        self._context = copy_context()
        self._begun = False
        self._worker: LaneWorker | None = None  # the worker whose thread runs it
        self._once = threading.Lock()  # taken for good by the thread that settles it

    def then(self, fn: Callable[[T], U], *, lane: str | None = None) -> Scheduled[U]:
        """
        Call `fn` with the result, on this lane. After an error `fn` is not called, and the returned Future
        has the error.
        """
        following: Scheduled[U] = self._executor.make_scheduled(lane, fn)
        self.add_done_callback(following._follow)
        return following

    def cancel(self, reason: str | None = None) -> bool:
        """
        Cancel it, whether it waits or runs: the caller is released now. A function on the event loop or in a
        pool's process is stopped; one in a thread goes on, and its result is dropped.
        """
        phase = "in-flight" if self.running() else "queued"
        if not self._end(None, CallCanceled(reason or "it was canceled", phase=phase, reason=reason)):
            return self.cancelled()
        worker = self._worker
        if self.cancel_start is not None:
            self.cancel_start()
        elif worker is not None:
            call_at(clock() + self._executor.grace, self._replace_if_stuck, worker)
        return True

    def running(self) -> bool:
        return self._begun and not self.done()

    def _replace_if_stuck(self, worker: LaneWorker) -> None:
        if self._worker is worker:
            worker.lane.replace_worker(worker)

    def start(self) -> None:
        if self.done():
            return
        self._executor.live_calls.add(self)
        if self._executor.closed:
            # The executor may be closing, and may have listed its live calls before this one was added.
            self._end(None, PoolClosedError("the executor is closed"))
        else:
            self._lane.push(self)

    def _follow(self, earlier: Future[Any]) -> None:
        if earlier.cancelled():
            self._end(None, CallCanceled("the call that it follows was canceled", phase="queued"))
        elif (error := earlier.exception()) is not None:
            self._end(None, error)
        else:
            self._call = (self._call[0], (earlier.result(),), {})
            self.start()

    def _end(self, value: T | None, error: BaseException | None) -> bool:
        if not self._once.acquire(blocking=False):
            return False
        self._executor.live_calls.discard(self)
        self.set_outcome(value, error)
        return True

    # As the entry and the call of a lane

    @property
    def unwanted(self) -> bool:
        return self.done()

    def node_name(self) -> str | None:
        return None

    def context(self) -> Context:
        return self._context

    def has_more(self) -> bool:
        return False

    def next_call(self) -> Scheduled[T] | None:
        if self.done():
            return None
        self._begun = True
        return self

    def end_broken_run(self, worker: LaneWorker, error: BaseException) -> None:  # noqa: ARG002  # it has no nodes
        self._end(None, error)

    def turn(self, worker: LaneWorker) -> None:
        if self.next_call() is None:
            return
        self._worker = worker
        try:
            value = self._context.run(self.invoke)
        except BaseException as error:  # noqa: BLE001  # any exception is its outcome
            self.settle(None, error)
        else:
            self.settle(value, None)
        self._worker = None

    def invoke(self) -> Any:
        fn, args, kwargs = self._call
        return fn(*args, **kwargs)

    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return self._call

    def settle(self, value: Any, error: BaseException | None) -> None:
        if is_kind(error, asyncio.CancelledError):  # unconverted it would cancel the awaiting task
            error = CallCanceled("it canceled itself", phase="in-flight")
        self._end(value, error)
