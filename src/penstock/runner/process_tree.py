"""
Processes and their children, as the kernel shows them.

There are two ways to find everything that a job has started, whatever it did to get away (setsid, double
fork, another process group). By descent: a child subreaper inherits every orphan below it, so all that is
below it is its own. And by the mark in the environment, which processes keep when their warden has been
killed.

A signal is sent through a descriptor of the process, after a check that it is still the same one: pids are
used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

#: In the environment of every process of a runner: its dispatch (or warm worker), and its runner.
DISPATCH_MARK: Final = "PENSTOCK_DISPATCH"
RUNNER_MARK: Final = "PENSTOCK_RUNNER"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_libc = ctypes.CDLL(None, use_errno=True)


class TreeProcess(NamedTuple):
    """`born`: in clock ticks since boot. A pid with it means one process and no later one."""

    pid: int
    parent: int
    group: int
    start_ticks: int
    state: str


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_the_parent(parent: int) -> None:
    """Called in the child. If the parent ended before this call, the child exits at once."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_ambient_capabilities() -> None:
    """Called in the child. The service may switch users; its jobs may not."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def has_children() -> bool:
    """Whether this process has a child, also one that has ended and is not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def drain_pipe(reader: int) -> None:
    """Read what is in a pipe of wake-ups."""
    with contextlib.suppress(BlockingIOError):
        os.read(reader, 4_096)


def read_process(pid: int) -> TreeProcess | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # pathlib costs more than the reading
            text = file.read()
    except OSError:
        return None
    # The name may hold spaces and brackets; what follows the last bracket cannot.
    fields = text[text.rindex(b")") + 2 :].split()
    return TreeProcess(pid, int(fields[1]), int(fields[2]), int(fields[19]), fields[0].decode())


def children(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # as above
            try:
                with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123  # as above
                    pids += map(int, file.read().split())
            except OSError:
                continue
    return pids


def descendants(pid: int) -> list[TreeProcess]:
    """Parents before children: a parent that is signaled first cannot start another child."""
    processes: list[TreeProcess] = []
    seen = {pid}
    line = children(pid)
    while line:
        following: list[int] = []
        for child in line:
            process = read_process(child)
            if process is not None and child not in seen:
                seen.add(child)
                processes.append(process)
                following += children(child)
        line = following
    return [process for process in processes if process.state not in "ZX"]


def find_marked(
    variable: str, values: Collection[str] | Callable[[str], bool]
) -> Iterator[tuple[TreeProcess, str]]:
    """
    Every living process of the host but this one whose environment has the variable with one of the values.
    """
    wanted = values if callable(values) else values.__contains__
    prefix = b"\0" + variable.encode() + b"="
    for name in os.listdir("/proc"):  # noqa: PTH208  # as above
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123  # as above
                environment = b"\0" + file.read()
        except OSError:
            continue  # gone, or of another user
        # Most processes are foreign, and some have an environment of thousands of lines.
        _, has_variable, rest = environment.partition(prefix)
        if not has_variable or not wanted(value := os.fsdecode(rest.partition(b"\0")[0])):
            continue
        process = read_process(int(name))
        if process is not None and process.state not in "ZX":
            yield process, value


def send_signal(process: TreeProcess, signum: int) -> bool:
    """False: it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(handle, signum)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
