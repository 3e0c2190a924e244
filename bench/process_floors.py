"""
What Python allows between processes, without any library: the floors under the process measures of `bench.pools`.

Each worker is a fork that reads a marshalled list of calls, runs them, and writes an answer for each; the parent has no
queue, no cancelling, no crash to survive, no thread.  What it does beyond that is said at each floor.
"""

from __future__ import annotations

import asyncio
import marshal
import multiprocessing.pool
import os
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain
from struct import Struct
from time import perf_counter
from typing import Any

from bench import work
from bench.gauges import CpuOfTheTree

WORKERS = 2
TRIPS = 1_000
CALLS = 10_000
#: What lies in a worker's pipe when there is room to prefetch: `max_in_flight` of 128 over two workers.
AHEAD = 64

_length = Struct("<I")


class End:
    """One end of two pipes, through which values go in frames."""

    def __init__(self, read: int, write: int) -> None:
        self.read = read
        self.write = write
        self._rest = b""

    def send(self, value: Any) -> None:
        data = marshal.dumps(value)
        os.write(self.write, _length.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """Whatever has come; nothing means the end."""
        values: list[Any] = []
        while not values:
            data = os.read(self.read, 65536)
            if not data:
                break
            data, at = self._rest + data, 0
            while len(data) - at >= 4 and at + 4 + (size := _length.unpack_from(data, at)[0]) <= len(data):
                values.append(marshal.loads(memoryview(data)[at + 4 : at + 4 + size]))
                at += 4 + size
            self._rest = data[at:]
        return values

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


@contextmanager
def bare_workers(count: int) -> Iterator[list[End]]:
    """Forked, each with two pipes of its own."""
    ours: list[End] = []
    children: list[int] = []
    try:
        for _ in range(count):
            (read, their_write), (their_read, write) = os.pipe(), os.pipe()
            if not (child := os.fork()):
                for end in [*ours, End(read, write)]:
                    end.close()
                serve(End(their_read, their_write))
            ours.append(End(read, write))
            children.append(child)
            End(their_read, their_write).close()
        yield ours
    finally:
        for end in ours:
            end.close()
        for child in children:
            os.waitpid(child, 0)


@contextmanager
def heard_workers() -> Iterator[tuple[list[End], Callable[[], list[End]]]]:
    """The workers, and a wait for those that have answered."""
    with bare_workers(WORKERS) as workers, select.epoll() as poll:
        by_fd = {worker.read: worker for worker in workers}
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN)
        yield workers, lambda: [by_fd[fd] for fd, _ in poll.poll()]


def serve(parent: End) -> None:
    """Answers go out one by one: none may wait for the call behind it."""
    while batches := parent.receive():
        for number, argument in chain(*batches):
            parent.send((number, work.bump(argument)))
    os._exit(0)


# One call at a time through idle workers: trips/s


def executor_trips() -> float:
    with ProcessPoolExecutor(WORKERS) as pool:
        pool.submit(work.bump, 1).result()
        start = perf_counter()
        for number in range(TRIPS):
            pool.submit(work.bump, number).result()
        return TRIPS / (perf_counter() - start)


def bare_trips() -> float:
    with bare_workers(1) as (worker,):
        start = perf_counter()
        for number in range(TRIPS):
            worker.send([(number, number)])
            worker.receive()
        return TRIPS / (perf_counter() - start)


# The same from asyncio: trips/s


def executor_trips_from_asyncio() -> float:
    async def turn(pool: ProcessPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, work.bump, 1)
        start = perf_counter()
        for number in range(TRIPS):
            await loop.run_in_executor(pool, work.bump, number)
        return TRIPS / (perf_counter() - start)

    with ProcessPoolExecutor(WORKERS) as pool:
        return asyncio.run(turn(pool))


def bare_trips_from_asyncio() -> float:
    """The loop reads the worker's pipe itself, and a future is all that the coroutine waits for."""

    async def turn(worker: End) -> float:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        loop.add_reader(worker.read, lambda: answer.set_result(worker.receive()[0][1]))
        start = perf_counter()
        for number in range(TRIPS):
            worker.send([(number, number)])
            await answer
            answer = loop.create_future()
        return TRIPS / (perf_counter() - start)

    with bare_workers(1) as (worker,):
        return asyncio.run(turn(worker))


# Default bounds, no more than one call in a worker's hands: calls for each second of CPU, parent and workers


def executor_burst() -> float:
    with ProcessPoolExecutor(WORKERS) as pool:
        pool.submit(work.bump, 1).result()
        count = CALLS // 10
        with CpuOfTheTree() as cpu:
            for future in [pool.submit(work.bump, number) for number in range(count)]:
                future.result()
        return count / cpu.seconds


def one_at_a_time() -> float:
    """One that has answered gets the next call: nothing else can be done if nobody may hold two."""
    with heard_workers() as (workers, answered):
        with CpuOfTheTree() as cpu:
            sent = done = 0
            for sent, worker in enumerate(workers, 1):
                worker.send([(sent, sent)])
            while done < CALLS:
                for worker in answered():
                    done += len(worker.receive())
                    if sent < CALLS:
                        sent += 1
                        worker.send([(sent, sent)])
        return CALLS / cpu.seconds


# Room to prefetch: calls/s


def pool_apply() -> float:
    def burst(pool: multiprocessing.pool.Pool, numbers: range) -> None:
        for handle in [pool.apply_async(work.bump, (number,)) for number in numbers]:
            handle.get()

    return _of_pool(burst)


def pool_imap() -> float:
    def burst(pool: multiprocessing.pool.Pool, numbers: range) -> None:
        sum(pool.imap_unordered(work.bump, numbers, chunksize=1))

    return _of_pool(burst)


def _of_pool(burst: Callable[[multiprocessing.pool.Pool, range], None]) -> float:
    with multiprocessing.Pool(WORKERS) as pool:
        burst(pool, range(50))
        start = perf_counter()
        burst(pool, range(CALLS))
        return CALLS / (perf_counter() - start)


class Handle:
    """The least that a caller can hold: what was asked for, and the answer."""

    __slots__ = ("argument", "result")

    def __init__(self, argument: int) -> None:
        self.argument = argument
        self.result: int | None = None


def with_handles() -> float:
    """A handle for each call, calls in batches as large as the pipes allow; nobody is told of anything."""
    return _roomy(lambda _: None, told=0)


def with_hooks() -> float:
    """The same, and a function of Python's is told of each call when it enters, is sent and ends, with the counts."""
    heard = [0]

    def hear(_: object) -> None:
        heard[0] += 1

    return _roomy(hear, told=1)


def _roomy(hear: Callable[[object], None], told: int) -> float:
    with heard_workers() as (workers, answered):
        start = perf_counter()
        handles = []
        for number in range(CALLS):
            handles.append(Handle(number))
            if told:
                hear(handles[-1])
                hear((0, number, 0, 0))
        waiting = iter(enumerate(handles))
        flying: dict[int, Handle] = {}

        def top_up(worker: End, room: int) -> None:
            batch = []
            for number, handle in waiting:
                flying[number] = handle
                batch.append((number, handle.argument))
                if told:
                    hear(handle)
                if len(batch) == room:
                    break
            if batch:
                worker.send(batch)

        for worker in workers:
            top_up(worker, AHEAD)
        while flying:
            for worker in answered():
                settled = 0
                for number, result in worker.receive():
                    handle = flying.pop(number)
                    handle.result = result
                    settled += 1
                    if told:
                        hear(handle)
                top_up(worker, settled)
        if any(handle.result is None for handle in handles):
            raise RuntimeError("a call has no answer")
        return CALLS / (perf_counter() - start)


CONTESTS: list[tuple[str, dict[str, Callable[[], float]]]] = [
    ("round trips/s on an idle process", {"ProcessPoolExecutor": executor_trips, "bare": bare_trips}),
    (
        "round trips/s on an idle process, from asyncio",
        {"run_in_executor": executor_trips_from_asyncio, "bare": bare_trips_from_asyncio},
    ),
    (
        "calls for a second of CPU, one call in a worker's hands",
        {"ProcessPoolExecutor, no bound": executor_burst, "bare": one_at_a_time},
    ),
    (
        "calls/s on processes, room to prefetch",
        {
            "Pool.imap_unordered, no handle": pool_imap,
            "Pool.apply_async": pool_apply,
            "bare, with a handle each": with_handles,
            "bare, with hooks told": with_hooks,
        },
    ),
]
