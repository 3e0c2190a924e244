"""
What Python itself allows, without any library: `python -m bench.pool_floors`.

Each floor does the least that a measure of `bench.pools` asks for, with the same bounds and no other guarantee, beside
the stdlib executor that the measure compares with.  A wanted ratio above the floor's cannot be had in Python.  Words after
the command choose by title: `python -m bench.pool_floors threads`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from _thread import allocate_lock
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Thread
from time import perf_counter

from bench import bounded_floors, process_floors, work

ROUNDS = 5
CALLS = 50_000
AT_ONCE = 20_000
TRIPS = 5_000
#: What two workers accept with default bounds: two in flight, four pending, and the one that waits for room.
BOUND = 7


def main() -> None:
    contests: list[tuple[str, dict[str, Callable[[], float]]]] = [
        (
            "calls/s on threads, one caller, 7 calls out at most",
            {
                "ThreadPoolExecutor, no bound": executor,
                "bare hand-off": handed_over,
                "least queue": bounded_floors.bounded_hand_over,
                "penstock": bounded_floors.ours("penstock threads"),
            },
        ),
        (
            "calls/s from asyncio, gathered",
            {
                "run_in_executor on threads": executor_from_asyncio,
                "a bare future each": futures_alone,
                "least queue, with room": bounded_floors.bounded_threads_from_asyncio,
                "penstock, with room": bounded_floors.ours("penstock threads, roomy", from_asyncio=True),
            },
        ),
        (
            "round trips/s between two processes",
            {"socket pair": partners(_sockets), "two pipes": partners(_pipes)},
        ),
        *process_floors.CONTESTS,
        *bounded_floors.CONTESTS,
    ]
    for title, contestants in contests:
        if not all(word in title for word in sys.argv[1:]):
            continue
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(ROUNDS):
            for name, turn in contestants.items():
                rates[name].append(turn())
        base = median(next(iter(rates.values())))
        print(title)
        for name, seen in rates.items():
            low, mid, high = min(seen), median(seen), max(seen)
            print(f"  {name:30} {mid:9,.0f}   ({low:,.0f} to {high:,.0f})   {mid / base:.2f} x")


def executor() -> float:
    with ThreadPoolExecutor(2) as pool:
        start = perf_counter()
        futures = [pool.submit(work.bump, number) for number in range(CALLS)]
        for future in futures:
            future.result()
        return CALLS / (perf_counter() - start)


def handed_over() -> float:
    """A caller that must wait for room, and a thread that must wait for calls: two wake-ups for each round of seven."""
    calls: deque[int] = deque()
    answers: list[int] = []
    to_run, room = allocate_lock(), allocate_lock()
    to_run.acquire()
    room.acquire()

    def serve() -> None:
        while len(answers) < CALLS:
            to_run.acquire()
            while calls:
                answers.append(work.bump(calls.popleft()))
            room.release()

    thread = Thread(target=serve)
    thread.start()
    start = perf_counter()
    for number in range(CALLS):
        calls.append(number)
        if len(calls) == BOUND or number == CALLS - 1:
            to_run.release()
            room.acquire()
    rate = CALLS / (perf_counter() - start)
    thread.join()
    return rate


def executor_from_asyncio() -> float:
    with ThreadPoolExecutor(2) as pool:

        async def call(number: int) -> int:
            return await asyncio.get_running_loop().run_in_executor(pool, work.bump, number)

        return gathered(call)


def futures_alone() -> float:
    """No thread and no queue: the loop settles each future itself."""

    async def call(number: int) -> int:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, number + 1)
        answer: int = await future
        return answer

    return gathered(call)


def gathered(call: Callable[[int], Awaitable[int]]) -> float:
    async def turn() -> float:
        start = perf_counter()
        await asyncio.gather(*(call(number) for number in range(AT_ONCE)))
        return AT_ONCE / (perf_counter() - start)

    return asyncio.run(turn())


Ends = tuple[int, int]


def partners(connect: Callable[[], tuple[Ends, Ends]]) -> Callable[[], float]:
    """Thirty bytes there and back: about what a small call is."""

    def turn() -> float:
        (read, write), theirs = connect()
        if not (child := os.fork()):
            os.close(write)
            while data := os.read(theirs[0], 65536):
                os.write(theirs[1], data)
            os._exit(0)
        for fd in {*theirs} - {read, write}:
            os.close(fd)
        start = perf_counter()
        for _ in range(TRIPS):
            os.write(write, b"x" * 30)
            os.read(read, 65536)
        rate = TRIPS / (perf_counter() - start)
        for fd in {read, write}:
            os.close(fd)
        os.waitpid(child, 0)
        return rate

    return turn


def _sockets() -> tuple[Ends, Ends]:
    ours, theirs = (end.detach() for end in socket.socketpair())
    return (ours, ours), (theirs, theirs)


def _pipes() -> tuple[Ends, Ends]:
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    return (read, write), (their_read, their_write)


if __name__ == "__main__":
    main()
