"""
WorkerPool: bounded calls to N workers, as a `concurrent.futures.Executor` and from asyncio; and
SingletonWorker, one worker that keeps an object.

The call queue decides which calls may enter, the worker group which worker runs them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from penstock.core.calls.ticket import WAIT, Policy, QueueLimits, QueueState
from penstock.core.errors import PoolClosedError
from penstock.pools.call_queue import CallQueue
from penstock.pools.calling import (
    OrderedMap,
    PoolInternals,
    Reservation,
    Task,
    awaited,
    check_key_of,
    in_daemon,
)
from penstock.pools.future import Call
from penstock.pools.guards import CancelSignal
from penstock.pools.options import (
    CrashPolicy,
    CrashPolicyName,
    Kind,
    PolicyName,
    Requeue,
    Start,
    WorkerOptions,
    default_depth,
    one_of,
    seconds,
)
from penstock.pools.workers.base import WorkerGroup
from penstock.pools.workers.processes import ProcessWorkers
from penstock.pools.workers.threads import ThreadWorkers
from penstock.telemetry import registry
from penstock.telemetry.hooks import QueueHooks

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.telemetry.registry import TaskSnapshot

P = ParamSpec("P")
R = TypeVar("R")


class WorkerPool(Executor):
    """
    Runs functions on `workers` processes (or threads, or workers on a Ray cluster: see `Cluster`), with at
    most `max_in_flight` calls given to workers and `max_queue_depth` accepted behind them. `policy` says what
    happens to one more call: it waits at the call site (`block`), is refused (`reject`, `drop-latest`), or
    takes the place of the oldest (`drop-oldest`).

    Code written for ProcessPoolExecutor works with it. It differs where bounds make it better: `submit` waits
    when the queue is full, `map` pulls its items as results are taken, a running call can be canceled, and a
    dying worker takes no other call with it. Ctrl-C in a `with` block ends the running calls too: a worker
    process is killed, and the program does not wait for a thread.

    For example:

        with penstock.WorkerPool(workers=2, max_queue_depth=8) as pool:
            call = pool.submit(thumbnail, "a.jpg")  # waits here while the queue is full
            print(call.result())
            for small in pool.map(thumbnail, paths):  # lazy: pulls items as you read
                print(small)
    """

    #: For SingletonWorker: the class whose object the worker keeps, and its constructor's arguments.
    _target: Callable[..., object] | None = None
    _args: tuple[Any, ...] = ()
    _singleton = False

    def __init__(
        self,
        workers: int | None = None,
        *,
        kind: Kind = "process",
        cluster: Cluster | None = None,
        max_in_flight: int | None = None,
        max_queue_depth: float | None = None,
        policy: PolicyName = "block",
        timeout: float | None = None,
        key_of: Callable[..., Hashable] | None = None,
        start: Start = "lazy",
        idle_stop: float | None = None,
        crash_policy: CrashPolicyName = "restart-fail-in-flight",
        crash_max_retries: int = 3,
        max_attempts: int = 3,
        requeue: Requeue = "front",
        restart_delay: float = 0.1,
        grace: float = 5.0,
        recycle_after_calls: int | None = None,
        recycle_above_rss: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        hooks: QueueHooks | Iterable[QueueHooks] = (),
        name: str | None = None,
        max_workers: int | None = None,
    ) -> None:
        """
        `max_workers` is the standard executors' name for `workers`. `start` is "lazy" or "eager". `grace` is
        how long a canceled call may run on before its worker is ended. Sizes are in bytes, times in seconds.
        """
        if workers is not None and max_workers is not None:
            raise TypeError("workers and max_workers are two names of one option; give one of them")
        workers = next((n for n in (workers, max_workers) if n is not None), None)
        workers = _default_workers(kind, cluster) if workers is None else workers
        one_of("start", start, ("lazy", "eager"))
        one_of("requeue", requeue, ("front", "back"))
        one_of("policy", policy, [str(name) for name in Policy])
        one_of("crash_policy", crash_policy, [str(value) for value in CrashPolicy])
        seconds("timeout", timeout, or_none=True)
        check_key_of(key_of)
        name = registry.name_for(name, "singleton" if self._singleton else "pool")
        options = WorkerOptions(
            workers=workers,
            kind=kind,
            cluster=cluster,
            eager=start == "eager",
            idle_stop=idle_stop,
            crash_policy=CrashPolicy(crash_policy),
            crash_max_retries=crash_max_retries,
            restart_delay=restart_delay,
            grace=grace,
            max_calls=recycle_after_calls,
            max_memory=recycle_above_rss,
            initializer=initializer,
            initargs=initargs,
            target=self._target,
            args=self._args,
            name=name,
        )
        in_flight = workers if max_in_flight is None else max_in_flight
        depth = (
            default_depth(in_flight, singleton=self._singleton)
            if max_queue_depth is None
            else max_queue_depth
        )
        limits = QueueLimits(
            max_in_flight=in_flight,
            max_queue_depth=depth,
            policy=Policy(policy),
            max_attempts=max_attempts,
            requeue_to_front=requeue == "front",
        )
        self.name = name
        self._call_queue = CallQueue(
            limits, name=name, hooks=[hooks] if isinstance(hooks, QueueHooks) else hooks
        )
        self._group = self._call_queue.group = _make_group(self._call_queue, options)
        #: For the other parts of Penstock and its tests; no part of the API.
        self.internals = PoolInternals(name, self._call_queue, self._group, options, timeout, key_of)
        self._closed = False
        registry.register(self)
        _open.add(self)
        if start == "eager":
            self._group.start()

    # Calling

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """
        Wait while the queue is full (with policy `block`), and return once the call is accepted. On the
        thread of a running event loop, and in a done-callback, return at once: the Future waits.
        """
        internals, call_queue = self.internals, self._call_queue
        if internals.timeout is None and internals.key_of is None and internals.tracing is None:
            # `make_call` and `CallQueue.submit` for the commonest call, whose payload is made already: a tenth
            # of what a short call on a thread takes.
            call = Call(call_queue, fn)
            prepare = self._group.pack_call(call, fn, args, kwargs)
            if prepare is None:
                call.eager = True
                if call_queue.enter(call) is WAIT:
                    call_queue.wait_for_place(call)
                return call
        else:
            call, prepare = internals.make_call(fn, args, kwargs)
        call_queue.submit(call, prepare)
        return call

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """`await pool.call(fn, ...)`. Canceling the task that awaits it cancels the call."""
        return awaited()(self._call_queue, *self.internals.make_call(fn, args, kwargs))

    def map(
        self,
        fn: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[R]:
        """
        Call `fn` for each item; results are in the order of the items. Items are pulled as results are taken,
        so only a few of a million items are held at a time. A map that is never read still runs to its end
        when the pool is shut down.
        """
        return OrderedMap(self.internals, self.submit, fn, iterables, timeout=timeout, chunksize=chunksize)

    def task(
        self,
        fn: Callable[P, R],
        *,
        timeout: float | None = None,
        key_of: Callable[P, Hashable] | None = None,
        signal: CancelSignal | None = None,
    ) -> Task[P, R]:
        """Bind a function to this pool, with options: then call, submit or await it with its own types."""
        return Task(self.internals, fn, timeout=timeout, key_of=key_of, signal=signal)

    def reserve(self, *, timeout: float | None = None, key: Hashable = None) -> Reservation:
        """
        Reserve a place in the queue before there is a payload: `with pool.reserve() as place:
        place.submit(fn, load())`.
        """
        return Reservation(self.internals, timeout=timeout, key=key)

    # Canceling

    def cancel(self, key: Hashable, reason: str | None = None) -> int:
        """
        End every call with this key, waiting, queued or running, and refuse later ones until `clear(key)`.
        Returns how many calls it ended.
        """
        return self._call_queue.cancel_key(key, reason)

    def clear(self, key: Hashable) -> bool:
        """Accept calls with this key again. False if it was not canceled."""
        return self._call_queue.clear_key(key)

    # State

    @property
    def state(self) -> QueueState:
        return self._call_queue.state()

    def snapshot(self) -> TaskSnapshot:
        return registry.pool_snapshot(self.internals)

    def add_hooks(self, hooks: QueueHooks) -> None:
        self._call_queue.hooks.add(hooks)

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<{type(self).__name__} {self.name!r}: {self.internals.options.workers} {self._group.kind} workers, "
            f"{state.in_flight} in flight, {state.pending} pending, {state.waiting} waiting>"
        )

    # Pausing

    def pause(self) -> None:
        """Give no calls to workers, but accept new ones."""
        self._call_queue.pause()

    def resume(self) -> None:
        self._call_queue.resume()

    def stop_workers(self) -> None:
        """End the worker processes. Running calls go back to the queue and wait for `start_workers`."""
        self._group.stop()

    def start_workers(self) -> None:
        if self._closed:
            raise PoolClosedError(f"{self.name} is closed", pool=self.name)
        self._call_queue.reopen()
        self._group.resume()

    def restart(self) -> None:
        """Accept calls again after a halt, and forget the crashes."""
        self.start_workers()

    # Closing

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """
        Accept no new calls; run accepted ones, or with `cancel_futures` cancel them. `wait`: until this is
        done and all workers are gone.
        """
        maps = [] if cancel_futures else list(self.internals.maps)
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
        """
        End everything now: each waiting, pending and running call fails with PoolClosedError; workers are
        killed.
        """
        self._closed = True
        why = PoolClosedError(f"{self.name} was closed", pool=self.name)
        self._call_queue.fail_all(why, dispose=True)
        self._group.close(kill=True)
        self._group.gone.wait(timeout)

    def _abort(self) -> None:
        """
        End everything after Ctrl-C, without waiting for functions. Worker processes are gone afterwards. A
        thread cannot be killed; its function sees the cancel, and the program ends without it.
        """
        self.dispose(timeout=5.0 if self._group.can_be_killed else 0.0)

    def finish(self, *, interrupted: bool) -> None:
        """Called when the program ends: run all submitted calls, or after Ctrl-C end them."""
        if not self._closed:
            self._abort() if interrupted else self.shutdown()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`shutdown`; on Ctrl-C, which the workers do not get from the terminal, end them instead."""
        if isinstance(error, KeyboardInterrupt):
            self._abort()
            return
        try:
            self.shutdown()
        except KeyboardInterrupt:
            self._abort()
            raise

    async def aclose(self) -> None:
        """`shutdown` without blocking the event loop."""
        await in_daemon(self.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`aclose`; if the task is canceled, as `asyncio.run` does on Ctrl-C, all calls are ended instead."""
        from asyncio import CancelledError  # noqa: PLC0415  # asyncio is slow to import, and many programs never need it

        if isinstance(error, (KeyboardInterrupt, CancelledError)):
            await in_daemon(self._abort)
            return
        try:
            await self.aclose()
        except (KeyboardInterrupt, CancelledError):
            await in_daemon(self._abort)
            raise

    def __del__(self) -> None:
        # Like the standard executors: the workers of a dropped pool end when they are done.
        if not getattr(self, "_closed", True):
            self._call_queue.refuse(PoolClosedError(f"{self.name} is gone", pool=self.name))
            group = self._group
            threading.Thread(
                target=self._call_queue.when_idle,
                args=(lambda: group.close(kill=False),),
                name="penstock-closer",
                daemon=True,
            ).start()


def _default_workers(kind: str, cluster: Cluster | None) -> int:
    if kind != "cluster":
        return os.cpu_count() or 1
    from penstock.cluster import engine  # noqa: PLC0415  # Ray takes a second to import
    from penstock.cluster.engine import Cluster  # noqa: PLC0415  # as above

    return engine.most_workers(engine.connect(cluster or Cluster()), cluster or Cluster())


def _make_group(call_queue: CallQueue, options: WorkerOptions) -> WorkerGroup:
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
    """At the end of the program run all submitted calls, as the standard executors do, except after Ctrl-C."""
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not hasattr(sys, "ps1")
    for pool in list(_open):
        pool.finish(interrupted=interrupted)


# Called before the interpreter joins threads, as in concurrent.futures; `atexit` would be too late.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # noqa: SLF001  # as the standard executors do


class SingletonWorker(WorkerPool):
    """
    One worker whose state is kept between calls: a loaded model, an open device, a counter.

    `SingletonWorker(Model, "weights.bin")` makes a Model in a worker process; `worker.predict(x)` calls its
    method there and returns the result, `worker.predict.submit(x)` gives a Future, `await
    worker.predict.call(x)` waits in a coroutine. With a plain function as target, `worker(x)` calls it. After
    a crash the object is made anew.

    A method with the name of a pool's own method is called by `worker.method("submit")`. For keyword
    arguments of the constructor, wrap it: `functools.partial(Model, device="cpu")`.

    For example:

        with penstock.SingletonWorker(Model, "weights.bin") as model:
            print(model.predict(image))
    """

    _singleton = True

    def __init__(self, target: Callable[..., Any], *args: Any, **options: Any) -> None:
        if not callable(target):
            raise TypeError(f"target is {target!r}; it must be a class, whose object is kept, or a function")
        made = _makes_an_object(target)
        if args and not made:
            raise TypeError(
                "arguments after target go to a class's constructor; a function gets its own when called"
            )
        if "workers" in options or "max_workers" in options:
            raise TypeError("a SingletonWorker has one worker; use WorkerPool for more")
        self._function = None if made else target
        self._target, self._args = target if made else None, args
        super().__init__(1, **options)

    def method(self, name: str, *, timeout: float | None = None) -> Task[..., Any]:
        """A method of the object in the worker, with a timeout of its own if needed."""
        return Task(self.internals, name, timeout=timeout)

    def __getattr__(self, name: str) -> Task[..., Any]:
        if (
            name.startswith("_")
            or self.__dict__.get("_function") is not None
            or "internals" not in self.__dict__
        ):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return self.method(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            return self.method("__call__")(*args, **kwargs)
        return self.submit(self._function, *args, **kwargs).result()


def _makes_an_object(target: Callable[..., Any]) -> bool:
    while isinstance(target, functools.partial):
        target = target.func
    return isinstance(target, type)
