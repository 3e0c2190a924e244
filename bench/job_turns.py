"""
What one turn of a job queue does: fill it and see it drained, fill it against the clock, or wait for one job at a time.

The clock runs from the first job that ran to the last one, so nobody pays for starting its interpreter. Workers and submitters are
processes of their own, as they are in life.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from random import Random
from select import select
from statistics import median, quantiles
from time import monotonic, monotonic_ns, sleep
from types import ModuleType
from urllib.parse import urlsplit

import psutil

from bench.fresh import ROOT

__all__ = ["drain", "latency", "shape", "submit"]

_STUCK = 60.0  # seconds without a single job


def drain(queue: str, server: str, work: str, processes: int, count: int) -> dict[str, float]:
    """Jobs a second, claimed, run and completed. `work`: which of the queue's ways to do so, in so many processes."""
    with _turn(queue, server) as (peer, ticks):
        _fill(peer, count)
        with _workers(queue, work, processes):
            ran = sorted(ticks.read(count))
    return {"jobs_s": (count - 1) / (ran[-1] - ran[0]) * 1e9}


def latency(queue: str, server: str, processes: int, count: int) -> dict[str, float]:
    """From before the submit to the job's first line, the workers being idle."""
    with _turn(queue, server) as (peer, ticks):
        peer.prepare()
        with _workers(queue, "work", processes), peer.session() as submit_one:
            took = _waiter(submit_one, ticks, count)
    return {
        "p50_ms": median(took),
        "p95_ms": quantiles(took, n=20)[-1],
        "p99_ms": quantiles(took, n=100)[-1],
    }


def _waiter(submit_one: Callable[[], object], ticks: Ticks, count: int) -> list[float]:
    pause, took = Random(7), []
    for number in range(count + 5):
        sleep(pause.uniform(0.005, 0.03))
        began = monotonic_ns()
        submit_one()
        ran = ticks.read(1)[0]
        if number >= 5:  # the first ones warm up
            took.append((ran - began) / 1e6)
    return took


def shape(queue: str, server: str, processes: int, name: str, count: int) -> dict[str, float]:
    """
    Jobs that depend on each other, the workers being idle: a chain, a fan with a join behind it, an array. From before the
    submit to the last job, with the processor time of submitter, workers and server.
    """
    jobs = count + (name == "fan")
    with _turn(queue, server) as (peer, ticks):
        peer.prepare()
        with _workers(queue, "work", processes) as workers, peer.session() as submit_one:
            for _ in range(5):  # the first ones warm up, and the workers have come up
                submit_one()
                ticks.read(1)
            cpu, began = _cpu(workers, server), monotonic_ns()
            getattr(peer, name)(count)
            submitted = monotonic_ns()
            ran = sorted(ticks.read(jobs))
            cpu = _cpu(workers, server) - cpu
    return {
        "jobs_s": jobs / (ran[-1] - began) * 1e9,
        "step_ms": (ran[-1] - ran[0]) / (jobs - 1) / 1e6,
        "submit_ms": (submitted - began) / 1e6,
        "cpu_us": cpu / jobs * 1e6,
    }


def _cpu(workers: list[subprocess.Popen[bytes]], server: str) -> float:
    """Seconds of processor time of this process, the workers, and the server at this address."""
    processes = {psutil.Process(), *(psutil.Process(worker.pid) for worker in workers)}
    port = urlsplit(server).port
    if port is not None:
        listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid)
        processes |= {psutil.Process(c.pid) for c in listening if c.laddr.port == port}
    processes |= {child for process in list(processes) for child in process.children(recursive=True)}
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def submit(queue: str, server: str, how: str, count: int) -> dict[str, float]:
    """Jobs a second, answered. `how`: one (by one), bulk, eight (processes, one by one each)."""
    with _turn(queue, server) as (peer, _):
        peer.prepare()
        if how == "eight":
            took = _from_eight(queue, count // 8)
        else:
            run = peer.submit_bulk if how == "bulk" else partial(_one_by_one, peer)
            run(10)
            began = monotonic()
            run(count)
            took = monotonic() - began
    return {"submits_s": count / took}


def _fill(peer: ModuleType, count: int) -> None:
    peer.prepare()
    if hasattr(peer, "submit_bulk"):
        peer.submit_bulk(count)
    else:
        _one_by_one(peer, count)


def _one_by_one(peer: ModuleType, count: int) -> None:
    with peer.session() as submit_one:
        for _ in range(count):
            submit_one()


def _from_eight(queue: str, each: int) -> float:
    """From the moment at which all eight are ready to the end of the last."""
    command = [sys.executable, "-m", "bench.job_turns", queue, "submit", str(each)]
    submitters = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)
    ]
    for one in submitters:
        assert one.stdout is not None
        one.stdout.readline()
    began = monotonic()
    for one in submitters:
        assert one.stdin is not None
        one.stdin.close()
    codes = [one.wait() for one in submitters]
    took = monotonic() - began
    for one in submitters:
        assert one.stdout is not None
        one.stdout.close()
    if any(codes):
        raise RuntimeError(f"{sum(map(bool, codes))} of 8 submitters failed")
    return took


@contextmanager
def _turn(queue: str, server: str) -> Iterator[tuple[ModuleType, Ticks]]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as where:
        os.environ["BENCH_SERVER"] = server or f"{where}/jobs.db"
        os.environ["BENCH_TICKS"] = f"{where}/ticks"
        os.mkfifo(os.environ["BENCH_TICKS"])
        ticks = Ticks(os.environ["BENCH_TICKS"])
        try:
            yield import_module(f"bench.queues.{queue}"), ticks
        finally:
            ticks.close()


@contextmanager
def _workers(queue: str, work: str, processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "bench.job_turns", queue, work]
    workers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        for _ in range(processes)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, 9)
            worker.wait()


class Ticks:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)  # also a writer, so that it never ends while workers come and go
        self._rest = b""

    def read(self, count: int) -> list[int]:
        got = bytearray(self._rest)
        while len(got) < 8 * count:
            if not select([self._fd], [], [], _STUCK)[0]:
                raise RuntimeError(f"stuck after {len(got) // 8} of {count} jobs")
            got += os.read(self._fd, 65_536)
        self._rest = bytes(got[8 * count :])
        return [int.from_bytes(got[at : at + 8], "little") for at in range(0, 8 * count, 8)]

    def close(self) -> None:
        os.close(self._fd)


def _child() -> None:
    queue, what, *rest = sys.argv[1:]
    peer = import_module(f"bench.queues.{queue}")
    if what.startswith("work"):
        getattr(peer, what)()
        return
    with peer.session() as submit_one:
        submit_one()
        print("ready", flush=True)
        sys.stdin.read()
        for _ in range(int(rest[0])):
            submit_one()


if __name__ == "__main__":
    _child()
