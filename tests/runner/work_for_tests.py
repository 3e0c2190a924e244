"""What the warm workers of the tests run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from os import getcwd  # noqa: F401 - a name that the module imports and does not offer
from pathlib import Path

from penstock import Unavailable, current_job


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def user_and_pid():
    return os.getuid(), os.getpid()


def shout(words):
    sys.stdout.write(f"{words}\n")
    sys.stderr.write("aside\n")
    os.write(1, b"raw\n")


def fail():
    raise ValueError("no such luck")


def away():
    raise Unavailable("the library is closed")


def leave(code):
    os._exit(code)


def unsendable():
    return object()


def huge():
    return "x" * 1_000_001


async def asynchronous():
    return 1


def leave_a_child_behind(path):
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(path).write_text(str(child.pid))
    return "left"


def sleep(path, seconds=300):
    """Does not listen to anybody."""
    Path(path).write_text(str(os.getpid()))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return "slept"


def maybe_long(path, seconds=0.0, words="", behind=False, die=False):
    """Mostly short; says in a file of its own that it ran."""
    with Path(path).open("a") as file:
        file.write(f"{current_job().id} {os.getpid()}\n")
    if words:
        os.write(1, words.encode())
    if behind:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if die:
        os._exit(3)
    time.sleep(seconds)


def compute(seconds):
    """Never lets another thread of its process run."""
    sys.setswitchinterval(1_000)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(0.005)
    return "computed"


def listen(path):
    job = current_job()
    n = job.checkpoint or 0
    while n < 1_000:
        n += 1
        Path(path).write_text(str(n))
        if job.should_yield:
            job.save_checkpoint(n)
            job.check()
        time.sleep(0.01)
    return n


def phases(path, wait_for):
    """Three phases; each is written down, and the second waits for a file."""
    done = current_job().checkpoint or []
    for phase in ("fetch", "think", "write"):
        if phase in done:
            continue
        with Path(path).open("a") as file:
            file.write(f"{phase}\n")
        while phase == "think" and not Path(wait_for).exists():
            if current_job().should_yield:
                break
            time.sleep(0.01)
        done = [*done, phase]
        yield done
    return done


def spend(amounts, path=None):
    job = current_job()
    for amount in amounts:
        job.spend(amount)
    while path is not None and not job.should_yield:
        time.sleep(0.01)
    return "within the limit"


def tell():
    job = current_job()
    job.progress(0.5)
    job.log.info("half way")
    job.save_checkpoint({"at": 3})
    return [job.id, job.checkpoint]


def parents():
    return current_job().parents


def journal(path, beats=8):
    """Says all the time that it runs, to somebody who is not the scheduler."""
    dispatch = f"{current_job().id}.{current_job().fence}"
    for _ in range(beats):
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        with Path(path).open("a") as file:
            file.write(f"{dispatch} {now:.3f}\n")
        time.sleep(0.01)
    return "done"
