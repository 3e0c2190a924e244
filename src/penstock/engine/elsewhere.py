"""The machine and our own processes where /proc is not as Linux has it: psutil knows. Loaded only there, for it costs 20 ms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from penstock.engine.sample import Own, Process, Whole

__all__ = ["own_processes", "whole"]


def whole() -> Whole:
    cpu, memory, disks = psutil.cpu_times(), psutil.virtual_memory(), psutil.disk_io_counters()
    # Guests are counted in user and nice as well; waiting for a disk is idle time with a reason.
    total = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
    return Whole(
        cores=psutil.cpu_count() or 1,
        cpu_busy=total - cpu.idle - getattr(cpu, "iowait", 0.0),
        cpu_total=total,
        memory=memory.total,
        memory_used=memory.total - memory.available,
        moved=0 if disks is None else disks.read_bytes + disks.write_bytes,
    )


def own_processes(roots: set[int]) -> dict[Process, Own]:
    """With all that they have started. Births are in seconds of the wall clock."""
    children = _searched()
    found: dict[Process, Own] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in seen:
            seen.add(pid)
            todo += children(pid)
            with suppress(psutil.Error):  # it ended while we looked
                process = psutil.Process(pid)
                found[Process(pid, process.create_time())] = _one(process)
    return found


def _searched() -> Callable[[int], list[int]]:
    """Every process is asked for its parent."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process.pid)
    return lambda pid: children.get(pid, [])


def _one(process: Any) -> Own:
    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
        moved = 0
        with suppress(psutil.AccessDenied, AttributeError, NotImplementedError):
            io = process.io_counters()
            moved = io.read_bytes + io.write_bytes
        return Own(
            parent=process.ppid(),
            cpu=cpu.user + cpu.system + cpu.children_user + cpu.children_system,
            moved=moved,
            # What is shared stays when the process goes. Too little is the safe side: the rest counts as somebody else's.
            private=memory.rss - getattr(memory, "shared", 0),
            runnable=process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP),
        )
