"""
What Python allows with a pool's default bounds, without any library: the floors that keep a pool's promises.

`pool_floors` and `process_floors` have programs that only make the calls.  These also do what a pool must do for each,
whoever writes it: keep two in flight and four pending to the number, give the caller a handle, and tell a hook of each
step and of the counts after it.  No cancelling, no timeout, no crash to survive, one caller.  Ours stands beside them.
"""

from __future__ import annotations

import asyncio
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter

from bench import work
from bench.gauges import CpuOfTheTree
from bench.pool_turns import saturation, saturation_from_asyncio
from bench.process_floors import (
    AHEAD,
    WORKERS,
    End,
    bare_workers,
    executor_burst,
    heard_workers,
    pool_apply,
    pool_imap,
)

CALLS = 20_000
EXECUTOR_CALLS = 4_000
IN_FLIGHT = 2
PENDING = 4


class Handle:
    __slots__ = ("argument", "future", "result")

    def __init__(self, argument: int) -> None:
        self.argument = argument
        self.future: asyncio.Future[int] | None = None
        self.result: int | None = None


class LeastQueue:
    """Who may start, who is pending, who waits; and the hook that hears of it."""

    def __init__(self, most_in_flight: int = IN_FLIGHT, most_pending: int = PENDING) -> None:
        self.heard = 0
        self._most_in_flight = most_in_flight
        self._most_pending = most_pending
        self._lock = Lock()
        self._in_flight = 0
        self._pending: deque[Handle] = deque()
        self._waiting: deque[Handle] = deque()

    def enter(self, call: Handle) -> tuple[bool, bool]:
        """Whether it may start now, and whether it has to wait for its place."""
        starts = waiter = False
        with self._lock:
            if self._in_flight < self._most_in_flight:
                self._in_flight += 1
                starts = True
            elif len(self._pending) < self._most_pending:
                self._pending.append(call)
            else:
                self._waiting.append(call)
                waiter = True
            counts = self._in_flight, len(self._pending), len(self._waiting)
        if not waiter:
            self.hear(call)
        if starts:
            self.hear(call)
        self.hear(counts)
        return starts, waiter

    def leave(self, calls: Sequence[Handle]) -> tuple[list[Handle], list[Handle]]:
        """These have ended: who may start in their stead, and who got a place by that."""
        following: list[Handle] = []
        granted: list[Handle] = []
        with self._lock:
            for _ in calls:
                if self._pending:
                    following.append(self._pending.popleft())
                else:
                    self._in_flight -= 1
                if self._waiting:
                    granted.append(self._waiting.popleft())
                    self._pending.append(granted[-1])
            counts = self._in_flight, len(self._pending), len(self._waiting)
        for each in (granted, following, calls):
            for call in each:
                self.hear(call)
        self.hear(counts)
        return following, granted

    def hear(self, _: object) -> None:
        self.heard += 1


class Desk:
    """One call in a worker's hands: which that is, and who has none."""

    def __init__(self, workers: list[End]) -> None:
        self.flying: dict[int, Handle] = {}
        self._queue = LeastQueue()
        self._free = [*workers]

    def enter(self, call: Handle) -> bool:
        """Whether it has to wait for its place."""
        starts, waiter = self._queue.enter(call)
        if starts:
            self._send(self._free.pop(), call)
        return waiter

    def answered(self, worker: End) -> list[Handle]:
        """The next call goes out before those that have ended are told."""
        ended = []
        for number, result in worker.receive():
            call = self.flying.pop(number)
            following, _ = self._queue.leave([call])
            if following:
                self._send(worker, following[0])
            else:
                self._free.append(worker)
            call.result = result
            ended.append(call)
        return ended

    def _send(self, worker: End, call: Handle) -> None:
        self.flying[call.argument] = call
        worker.send([(call.argument, call.argument)])


# From asyncio, over processes: calls/s


def executor_from_asyncio() -> float:
    async def turn(pool: ProcessPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, work.bump, 1)
        start = perf_counter()
        await asyncio.gather(
            *(loop.run_in_executor(pool, work.bump, number) for number in range(EXECUTOR_CALLS))
        )
        return EXECUTOR_CALLS / (perf_counter() - start)

    with ProcessPoolExecutor(WORKERS) as pool:
        return asyncio.run(turn(pool))


def bounded_from_asyncio() -> float:
    """The loop reads the workers' pipes itself and writes the next call to the one that answered."""

    async def turn(workers: list[End]) -> float:
        loop = asyncio.get_running_loop()
        job_service = Desk(workers)

        def tell(worker: End) -> None:
            for call in job_service.answered(worker):
                assert call.future is not None
                call.future.set_result(call.result or 0)

        for worker in workers:
            loop.add_reader(worker.read, tell, worker)

        async def make(number: int) -> int:
            call = Handle(number)
            call.future = loop.create_future()
            job_service.enter(call)
            return await call.future

        start = perf_counter()
        check(sum(await asyncio.gather(*(make(number) for number in range(CALLS)))))
        return CALLS / (perf_counter() - start)

    with bare_workers(WORKERS) as workers:
        return asyncio.run(turn(workers))


# From one thread, over processes: calls for each second of CPU, parent and workers


def bounded_burst() -> float:
    """Whoever waits reads: the caller that finds the queue full settles what comes until it has its place."""
    with heard_workers() as (workers, answered):
        job_service = Desk(workers)

        def settle() -> None:
            """What has come, once something has: of each worker one answer at most."""
            for worker in answered():
                job_service.answered(worker)

        with CpuOfTheTree() as cpu:
            calls = [Handle(number) for number in range(CALLS)]
            for call in calls:
                if job_service.enter(call):
                    settle()  # whoever has ended made room for it
            while job_service.flying:
                settle()
        check(sum(call.result or 0 for call in calls))
        return CALLS / cpu.seconds


# The same with room to prefetch: calls/s


def bounded_roomy() -> float:
    """One thread makes all calls, then reads the answers in batches and fills the pipes up again."""
    queue = LeastQueue(most_in_flight=WORKERS * AHEAD, most_pending=100_000)
    flying: dict[int, Handle] = {}

    def send(worker: End, calls: Sequence[Handle]) -> None:
        flying.update((call.argument, call) for call in calls)
        worker.send([(call.argument, call.argument) for call in calls])

    with heard_workers() as (workers, answered):
        start = perf_counter()
        calls = []
        for number in range(CALLS):
            call = Handle(number)
            calls.append(call)
            if queue.enter(call)[0]:
                send(workers[number % WORKERS], [call])
        while flying:
            for worker in answered():
                settled = []
                for number, result in worker.receive():
                    settled.append(flying.pop(number))
                    settled[-1].result = result
                if following := queue.leave(settled)[0]:
                    send(worker, following)
        check(sum(call.result or 0 for call in calls))
        return CALLS / (perf_counter() - start)


# From one thread, over threads: calls/s


def bounded_hand_over() -> float:
    """As few wake-ups as the bounds allow: of the thread when the caller must wait, of the caller when all is done."""
    queue = LeastQueue()
    inbox: deque[Handle] = deque()
    to_run, room = allocate_lock(), allocate_lock()
    to_run.acquire()
    room.acquire()
    calls = [Handle(number) for number in range(CALLS)]

    def serve() -> None:
        done = 0
        while done < CALLS:
            to_run.acquire()
            while inbox:
                call = inbox.popleft()
                result = work.bump(call.argument)
                following, _ = queue.leave([call])
                inbox.extend(following)
                call.result = result
                done += 1
            room.release()

    thread = Thread(target=serve)
    thread.start()
    start = perf_counter()
    for call in calls:
        starts, waiter = queue.enter(call)
        if starts:
            inbox.append(call)
        if waiter or call is calls[-1]:
            to_run.release()
            room.acquire()
    rate = CALLS / (perf_counter() - start)
    thread.join()
    check(sum(call.result or 0 for call in calls))
    return rate


# From asyncio, over threads: calls/s


def bounded_threads_from_asyncio() -> float:
    """
    With room to prefetch, so that the thread has plenty to do and rings the loop once for many answers: what it has done
    lies in a list until the loop comes for it.
    """
    queue = LeastQueue(most_in_flight=128, most_pending=100_000)
    inbox: SimpleQueue[Handle | None] = SimpleQueue()
    done: deque[Handle] = deque()

    async def turn() -> float:
        loop = asyncio.get_running_loop()

        def deliver() -> None:
            while done:
                call = done.popleft()
                assert call.future is not None
                call.future.set_result(call.result or 0)

        def serve() -> None:
            while (call := inbox.get()) is not None:
                call.result = work.bump(call.argument)
                following, _ = queue.leave([call])
                for more in following:
                    inbox.put(more)
                done.append(call)
                if len(done) == 1:
                    loop.call_soon_threadsafe(deliver)

        async def make(number: int) -> int:
            call = Handle(number)
            call.future = loop.create_future()
            starts, _ = queue.enter(call)
            if starts:
                inbox.put(call)
            return await call.future

        thread = Thread(target=serve)
        thread.start()
        start = perf_counter()
        check(sum(await asyncio.gather(*(make(number) for number in range(CALLS)))))
        rate = CALLS / (perf_counter() - start)
        inbox.put(None)
        thread.join()
        return rate

    return asyncio.run(turn())


# Ours, in the same turns


def ours(name: str, *, from_asyncio: bool = False) -> Callable[[], float]:
    turn = saturation_from_asyncio if from_asyncio else saturation
    return lambda: turn(name, CALLS)["rate"]


def ours_by_cpu(name: str) -> Callable[[], float]:
    return lambda: 1e6 / saturation(name, CALLS)["cpu"]


def check(total: int) -> None:
    if total != CALLS * (CALLS + 1) // 2:
        raise RuntimeError("wrong answers")


CONTESTS: list[tuple[str, dict[str, Callable[[], float]]]] = [
    (
        "calls/s from asyncio, default bounds",
        {
            "run_in_executor, no bound": executor_from_asyncio,
            "least queue": bounded_from_asyncio,
            "penstock": ours("penstock", from_asyncio=True),
        },
    ),
    (
        "calls for a second of CPU, default bounds",
        {
            "ProcessPoolExecutor, no bound": executor_burst,
            "least queue": bounded_burst,
            "penstock": ours_by_cpu("penstock"),
        },
    ),
    (
        "calls/s on processes, room to prefetch, bounds kept",
        {
            "Pool.imap_unordered, no handle": pool_imap,
            "Pool.apply_async": pool_apply,
            "least queue": bounded_roomy,
            "penstock": ours("penstock, roomy"),
            "penstock, map": ours("penstock map, roomy"),
        },
    ),
]
