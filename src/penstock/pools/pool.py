"""
WorkerPool: bounded calls to N workers, as a `concurrent.futures.Executor` and from asyncio.

This file is what people hold in their hands; who may enter is the gate's business, who runs it the crew's.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

from penstock.core.calls.ticket import WAIT, QueueState
from penstock.core.errors import PoolClosedError
from penstock.pools.call_queue import CallQueue
from penstock.pools.context import awaited, in_daemon
from penstock.pools.future import Call, CancelSignal
from penstock.pools.map import OrderedMap
from penstock.pools.options import CrashPolicy, WorkerOptions, make_limits, one_of, seconds
from penstock.pools.reservation import Reservation
from penstock.pools.task import Task
from penstock.pools.workers.process_workers import ProcessWorkers
from penstock.pools.workers.threads import ThreadWorkers
from penstock.telemetry import registry
from penstock.telemetry.hooks import QueueHooks

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.cluster.workers import ClusterWorkers
    from penstock.telemetry.registry import TaskSnapshot

    class Tracing(Protocol):
        def begin(self, call: Call[Any]) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")


class WorkerPool(Executor):
    """
    Runs functions on `workers` processes (or threads, or workers on a Ray cluster: see `Cluster`), with at most `max_in_flight` handed out and `max_queue_depth`
    accepted behind them. What happens to one more call is the `policy`: it waits at the call site (`block`), or is
    refused (`reject`, `drop-latest`), or takes the place of the oldest (`drop-oldest`).

    Code written for ProcessPoolExecutor works with it. It differs where bounds make it better: `submit` waits when the
    queue is full, `map` pulls its items as results are taken, a running call can be cancelled, and a dying worker
    takes nobody else along. Ctrl-C in a `with` block ends the running calls too: a worker process is killed, and the
    program does not wait for a thread.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        kind: str = "process",
        cluster: Cluster | None = None,
        max_in_flight: int | None = None,
        max_queue_depth: float | None = None,
        policy: str = "block",
        timeout: float | None = None,
        key_of: Callable[..., Hashable] | None = None,
        start: str = "lazy",
        idle_stop: float | None = None,
        crash_policy: str = CrashPolicy.RESTART_FAIL,
        crash_max_retries: int = 3,
        max_attempts: int = 3,
        requeue: str = "front",
        restart_delay: float = 0.1,
        grace: float = 5.0,
        recycle_after_calls: int | None = None,
        recycle_above_rss: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        hooks: QueueHooks | Iterable[QueueHooks] = (),
        name: str | None = None,
        max_workers: int | None = None,
        _target: Callable[..., object] | None = None,
        _args: tuple[Any, ...] = (),
        _singleton: bool = False,
    ) -> None:
        """`max_workers` is the standard executors' name for `workers`; `start` is "lazy" or "eager"; `grace` is how
        long a cancelled call may go on before its worker is ended; sizes in bytes, times in seconds."""
        if workers is not None and max_workers is not None:
            raise TypeError("workers and max_workers are two names of one option; give one of them")
        workers = next((n for n in (workers, max_workers) if n is not None), None)
        workers = _default_workers(kind, cluster) if workers is None else workers
        one_of("start", start, ("lazy", "eager"))
        one_of("crash_policy", crash_policy, [str(known) for known in CrashPolicy])
        seconds("timeout", timeout, or_none=True)
        if key_of is not None and not callable(key_of):
            raise TypeError(f"key_of is {key_of!r}; it must be a function of the call's arguments, or None")
        name = registry.name_for(name, "singleton" if _singleton else "pool")
        options = WorkerOptions(
            workers=workers,
            kind=kind,
            cluster=cluster,
            eager=start == "eager",
            idle_stop=idle_stop,
            crash_policy=CrashPolicy(crash_policy),
            crash_max_retries=crash_max_retries,
            restart_delay=restart_delay,
            restart_delay_max=max(2.0, restart_delay),
            grace=grace,
            max_calls=recycle_after_calls,
            max_memory=recycle_above_rss,
            initializer=initializer,
            initargs=initargs,
            target=_target,
            args=_args,
            name=name,
        )
        limits = make_limits(
            workers=workers,
            max_in_flight=max_in_flight,
            max_queue_depth=max_queue_depth,
            policy=policy,
            max_attempts=max_attempts,
            requeue=requeue,
            singleton=_singleton,
        )
        self.name = name
        self._options = options
        self._timeout = timeout
        self._key_of = key_of
        self._call_queue = CallQueue(
            limits, name=name, hooks=[hooks] if isinstance(hooks, QueueHooks) else hooks
        )
        self._group = _make_group(self._call_queue, options)
        self._call_queue.group = self._group
        self._maps: set[OrderedMap[Any]] = set()
        self._closed = False
        # Is told of each call before it enters, and may give it a trace to carry.
        self._tracing: Tracing | None = None
        self._plain = timeout is None and key_of is None  # nothing to be said of each call
        registry.register(self)
        _open.add(self)
        if start == "eager":
            self._group.start()

    # Calling

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """
        Waits here while the queue is full (with policy `block`), and returns once the call is accepted. On the thread
        of a running event loop, and in a done-callback, it returns at once, and the Future waits.
        """
        if self._plain and self._tracing is None:
            call = Call(self._call_queue, fn)
            prepare = self._group.describe(call, fn, args, kwargs)
        else:
            call, prepare = self._make(fn, args, kwargs)
        call_queue = self._call_queue
        if prepare is not None:
            call_queue.submit(call, prepare)
        else:  # `CallQueue.submit` for the commonest call: nothing is left to be made
            call.eager = True
            if call_queue.enter(call) is WAIT:
                call_queue._sleep(call)
        return call

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """`await pool.call(fn, ...)`. Cancelling the task that awaits it cancels the call."""
        call, prepare = self._make(fn, args, kwargs)
        return awaited(self._call_queue, call, prepare)

    def _make(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        key: Hashable = None,
        signal: CancelSignal | None = None,
    ) -> tuple[Call[Any], Callable[[], None] | None]:
        call: Call[Any] = Call(self._call_queue, fn)
        prepare = self._group.describe(call, fn, args, kwargs)
        timeout = self._timeout if timeout is None else timeout
        if key is None and self._key_of is not None:
            key = self._key_of(*args, **kwargs)
        if timeout is not None or key is not None or signal is not None:
            self._call_queue.guard(call, key=key, timeout=timeout, signal=signal)
        if self._tracing is not None:
            self._tracing.begin(call)
        return call, prepare

    def map(
        self,
        fn: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[R]:
        """
        Results in the order of the items, which are pulled as results are taken, so a million items hold a few at a
        time. A map that nobody iterates still runs to its end, when the pool is shut down.
        """
        return OrderedMap(self, fn, iterables, timeout=timeout, chunksize=chunksize)

    def task(
        self,
        fn: Callable[P, R],
        *,
        timeout: float | None = None,
        key_of: Callable[P, Hashable] | None = None,
        signal: CancelSignal | None = None,
    ) -> Task[P, R]:
        """The function as something to call, submit or await, typed like itself, with options of its own."""
        return Task(self, fn, timeout=timeout, key_of=key_of, signal=signal)

    def reserve(self, *, timeout: float | None = None, key: Hashable = None) -> Reservation:
        """A place in the queue before there is a payload: `with pool.reserve() as place: place.submit(fn, load())`."""
        return Reservation(self, timeout=timeout, key=key)

    # Cancelling

    def cancel(self, key: Hashable, reason: str | None = None) -> int:
        """
        End every call with this key, waiting, queued or running, and refuse later ones until `clear(key)`.
        Returns how many calls it ended.
        """
        return self._call_queue.cancel_key(key, reason)

    def clear(self, key: Hashable) -> bool:
        """Let calls with this key in again. False if it was not cancelled."""
        return self._call_queue.clear_key(key)

    # Looking

    @property
    def state(self) -> QueueState:
        return self._call_queue.state()

    def snapshot(self) -> TaskSnapshot:
        return registry.describe(self)

    def add_hooks(self, hooks: QueueHooks) -> None:
        self._call_queue.hook_dispatcher.add(hooks)

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<{type(self).__name__} {self.name!r}: {self._options.workers} {self._group.kind} workers, "
            f"{state.in_flight} in flight, {state.pending} pending, {state.waiting} waiting>"
        )

    # Holding back

    def pause(self) -> None:
        """Hand out nothing; go on accepting."""
        self._call_queue.pause()

    def resume(self) -> None:
        self._call_queue.resume()

    def stop_workers(self) -> None:
        """End the worker processes. What ran goes back to the queue and waits for `start_workers`."""
        self._group.stop()

    def start_workers(self) -> None:
        self._check_open()
        self._call_queue.reopen()
        self._group.resume()

    def restart(self) -> None:
        """After a halt: forget the crashes, accept calls again."""
        self.start_workers()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError(f"{self.name} is closed", pool=self.name)

    # Closing

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept nothing new; what was accepted is run (or cancelled, if asked for). `wait`: until it has, and all workers are gone."""
        maps = [] if cancel_futures else list(self._maps)
        if wait:
            for unread in maps:
                unread.finish()
        self._closed = True
        self._call_queue.refuse(PoolClosedError(f"{self.name} is shut down", pool=self.name))
        if cancel_futures:
            for call in self._call_queue.queued():
                self._call_queue.cancel(call, "the pool was shut down")
        self._call_queue.resume()  # a paused pool would never be done
        self._call_queue.when_idle(lambda: self._group.close(kill=False))
        if wait:
            self._group.gone.wait()

    def dispose(self, *, timeout: float | None = 5.0) -> None:
        """End everything now: each waiting, pending and running call fails with PoolClosedError; workers are killed."""
        self._end_all()
        self._group.gone.wait(timeout)

    def _end_all(self) -> None:
        self._closed = True
        why = PoolClosedError(f"{self.name} was closed", pool=self.name)
        self._call_queue.fail_all(why, lambda _: why.copy(), dispose=True)
        self._group.close(kill=True)

    def _abort(self) -> None:
        """
        Ctrl-C: end everything, and wait for no function. Workers that can be killed are gone after that. A thread cannot be;
        its function sees the cancel, and the program ends without it.
        """
        self.dispose(timeout=5.0 if self._group.mortal else 0.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`shutdown`; on Ctrl-C, which our workers do not get from the terminal, they are ended instead."""
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            if not interrupted:
                self.shutdown()
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:
            if interrupted:
                self._abort()

    async def aclose(self) -> None:
        """`shutdown` without blocking the event loop."""
        await in_daemon(self.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`aclose`; if the task is canceled, as `asyncio.run` does on Ctrl-C, all calls are ended instead."""
        from asyncio import CancelledError  # noqa: PLC0415  # slow to import for those who do not use it

        interrupted = isinstance(error, (KeyboardInterrupt, CancelledError))
        try:
            if not interrupted:
                await self.aclose()
        except (KeyboardInterrupt, CancelledError):
            interrupted = True
            raise
        finally:
            if interrupted:
                await in_daemon(self._abort)

    def __del__(self) -> None:
        # Like the standard executors: a pool that nobody holds lets its workers go once they are done.
        if not getattr(self, "_closed", True):
            self._call_queue.refuse(PoolClosedError(f"{self.name} is gone", pool=self.name))
            group = self._group
            threading.Thread(
                target=self._call_queue.when_idle,
                args=(lambda: group.close(kill=False),),
                name="penstock-undertaker",
                daemon=True,
            ).start()


def _default_workers(kind: str, cluster: Cluster | None) -> int:
    if kind != "cluster":
        return os.cpu_count() or 1
    from penstock.cluster import engine  # noqa: PLC0415  # Ray is for those who ask for it
    from penstock.cluster.engine import Cluster  # noqa: PLC0415  # as above

    return engine.most_workers(engine.connect(cluster or Cluster()), cluster or Cluster())


def _make_group(
    call_queue: CallQueue, options: WorkerOptions
) -> ProcessWorkers | ThreadWorkers | ClusterWorkers:
    match options.kind:
        case "process":
            return ProcessWorkers(call_queue, options)
        case "thread":
            return ThreadWorkers(call_queue, options)
        case _:
            from penstock.cluster.workers import ClusterWorkers  # noqa: PLC0415  # as above

            return ClusterWorkers(call_queue, options)


_open: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _finish_all() -> None:
    """The program ends: as with the standard executors, what was submitted is run first, except after Ctrl-C."""
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not hasattr(sys, "ps1")
    for pool in list(_open):
        if not pool._closed:
            pool._abort() if interrupted else pool.shutdown()


# Before the interpreter waits for threads, as concurrent.futures does it; `atexit` would come too late for our own.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # the standard executors' own way
