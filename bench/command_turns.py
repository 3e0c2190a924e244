"""
No-op commands, one way or another: how many a second, and so what each costs beyond running it.

The program is `true`: what is measured is the starting, minding and recording, and nothing of the command's own. Every contestant but the bare
loop keeps what it was asked to do in a queue, and may run eight at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

__all__ = ["SPOOLERS", "bare", "ours", "pueue", "task_spooler"]

_PARALLEL = 8
_TRUE = shutil.which("true") or "/bin/true"
#: The queues for commands that this machine has, by the programs that they need.
SPOOLERS = {
    name: turn
    for name, turn, programs in (
        ("pueue", "pueue", ("pueue", "pueued")),
        ("task-spooler (in memory)", "task_spooler", ("tsp",)),
    )
    if all(map(shutil.which, programs))
}


def bare(count: int) -> dict[str, float]:
    """No queue, no record: the least that starting a process from Python costs."""
    with _timed(count) as figures:
        for _ in range(count):
            subprocess.run([_TRUE], check=True)
    return figures


def ours(count: int) -> dict[str, float]:
    """From letting them go to the last of them being DONE, on disk, with its trail."""
    # The daemon still runs when the directory goes, and saves what it can of its database into it.
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as where:
        os.environ["BENCH_SERVER"] = f"{where}/jobs.db"
        from bench.queues import daemon  # it looks for its place when it is imported
        from penstock import Client
        from penstock.client.client import job_of

        daemon.start(f"runner.slots={_PARALLEL}")
        with Client() as client:
            client.pause()
            client.submit_many([job_of("bench", "penstock.command", {"argv": [_TRUE]}, cost_units=1)] * count)
            with _timed(count) as figures:
                client.resume()
                while client.stats().jobs.get("DONE", 0) < count:
                    sleep(0.02)
    return figures


def pueue(count: int) -> dict[str, float]:
    """They are added while it is paused, which costs one process and one rewritten state file each, and is not counted."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as where:
        environment = os.environ | {
            "XDG_CONFIG_HOME": where,
            "XDG_DATA_HOME": where,
            "XDG_RUNTIME_DIR": where,
        }
        daemon = subprocess.Popen(
            ["pueued"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

        def tell(*words: str) -> None:
            subprocess.run(["pueue", *words], env=environment, check=True, stdout=subprocess.DEVNULL)

        try:
            _until(
                lambda: (
                    subprocess.run(
                        ["pueue", "status"], env=environment, check=False, capture_output=True
                    ).returncode
                    == 0
                )
            )
            tell("parallel", str(_PARALLEL))
            tell("pause")
            for _ in range(count):
                tell("add", "--", _TRUE)
            with _timed(count) as figures:
                tell("start")
                tell("wait", "--all", "--quiet")
        finally:
            daemon.terminate()
            daemon.wait(10)
    return figures


def task_spooler(count: int) -> dict[str, float]:
    """It cannot be paused, so what is timed holds the adding, which is a process each. Its queue is gone with its server."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as where:
        environment = os.environ | {
            "TS_SOCKET": f"{where}/socket",
            "TS_SLOTS": str(_PARALLEL),
            "TS_MAXFINISHED": "10",
        }

        def tell(*words: str) -> None:
            subprocess.run(["tsp", *words], env=environment, check=True, stdout=subprocess.DEVNULL)

        tell("-n", _TRUE)
        try:
            with _timed(count) as figures:
                for _ in range(count):
                    tell("-n", _TRUE)
                tell("-w")
        finally:
            tell("-K")
    return figures


@contextmanager
def _timed(count: int) -> Iterator[dict[str, float]]:
    figures: dict[str, float] = {}
    began = monotonic()
    yield figures
    took = monotonic() - began
    figures |= {"commands_s": count / took, "each_ms": took / count * 1_000}


def _until(there: Callable[[], bool]) -> None:
    end = monotonic() + 20
    while not there():
        if monotonic() > end:
            raise RuntimeError("it did not start")
        sleep(0.05)
