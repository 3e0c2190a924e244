"""What the tests run in workers: importable there, because pytest's own test modules are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import penstock


def echo(value):
    return value


def add(a, b=0):
    return a + b


def invert(number):
    return 1 / number


def fail(message):
    raise ValueError(message)


def pid():
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def slow_echo(value):
    time.sleep(0.001)
    return value


def wait_for(path, value=None):
    """Wait until that file exists: how a test holds a worker busy for exactly as long as it wants."""
    while not Path(path).exists():
        time.sleep(0.001)
    return value


def mark(path, value):
    with Path(path).open("a") as file:
        file.write(f"{value}\n")
    return value


def mark_and_wait(mark_path, value, gate_path):
    mark(mark_path, value)
    return wait_for(gate_path, value)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_until(path, times):
    """Kill the worker that runs this, the first so many times."""
    mark(path, penstock.current_call().attempt)
    if len(Path(path).read_text().split()) <= times:
        die()
    return penstock.current_call().attempt


def fork(path, then="return"):
    """Fork, and come back from this function in the copy too, or leave it by an error. The copy's pid is put into the file."""
    pid = os.fork()
    if pid:
        Path(path).write_text(str(pid))
        return "original"
    if then == "raise":
        raise ValueError("in the copy")
    if then == "exit":
        sys.exit(3)
    if then == "look":
        return penstock.current_call().canceled
    return "copy"


def fork_and_wait(path, then):
    """What the copy exits with."""
    result = fork(path, then)
    return (
        result
        if result != "original"
        else os.waitstatus_to_exitcode(os.waitpid(int(Path(path).read_text()), 0)[1])
    )


def large(path, size):
    """A result that travels in shared memory, after this mark."""
    mark(path, "made")
    return b"x" * size


def leave(code):
    os._exit(code)


def until_cancelled(path):
    mark(path, "began")
    call = penstock.current_call()
    while not call.canceled:
        time.sleep(0.001)
    mark(path, "saw it")


def until_check_raises(path):
    mark(path, "began")
    while True:
        penstock.current_call().check()
        time.sleep(0.001)


def about():
    call = penstock.current_call()
    return call.id > 0, call.key, call.attempt, call.deadline is not None


def stubborn(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark(path, "began")
    time.sleep(60)


def spawn_child_and_wait(path):
    """Start a child that outlives everything unless the whole process group is ended."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    time.sleep(60)


async def coroutine():
    await asyncio.sleep(0)


def unpicklable():
    return lambda: None


class Awkward(Exception):
    """Cannot be rebuilt from its args, as so many."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raise_awkward():
    raise Awkward(1, 2)


class Unspeakable(Exception):
    @property
    def __notes__(self):
        raise ValueError("no notes")


def raise_unspeakable():
    raise Unspeakable


def leave_program():
    sys.exit(3)


def interrupt():
    raise KeyboardInterrupt


initialized = None


def initialize(value):
    global initialized
    initialized = value


def read_initialized():
    return initialized


def bad_initializer():
    raise RuntimeError("no weights")


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, n=1):
        self.count += n
        return self.count

    def where(self):
        return os.getpid()

    def die(self):
        die()

    def submit(self, x):
        return f"mine {x}"


class Broken:
    def __init__(self):
        raise RuntimeError("cannot be made")


kept = []


def keep_and_sum(array):
    """Keeps the array that came through shared memory: it must stay as it is."""
    kept.append(array)
    return float(array.sum())


def sum_of_kept():
    return [float(array.sum()) for array in kept]


def double_in_place_then_die(array, path):
    array *= 2
    mark(path, float(array[0]))
    if len(Path(path).read_text().split()) < 2:
        die()
    return float(array[0])


def grow(megabytes):
    kept.append(bytearray(os.urandom(1024) * 1024 * megabytes))
    return os.getpid()


def shape(array):
    return array.shape, str(array.dtype)


def type_and_length(value):
    return type(value).__name__, len(value)


def make_bytes(size):
    return b"x" * size


def make_lock():
    import threading

    return threading.Lock()
