"""
The machine and our own processes as Linux tells of them in /proc.

Read without psutil, which opens each file anew and goes through all of it: that was most of what an idle scheduler used. Where something is not as it is
known here the answer is None, and psutil is asked (`elsewhere`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from penstock.engine.kernel_files import KernelFiles, text_once
from penstock.engine.sample import Own, Process, Whole

__all__ = ["Disks", "own_processes", "pressure", "whole"]

_HZ: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
_SECTOR: Final = 512  # whatever the disk's own are


def whole(files: KernelFiles, proc: str, disks: Disks) -> Whole | None:
    stat, memory = files.text(f"{proc}/stat"), files.text(f"{proc}/meminfo")
    try:
        # Guests are counted in user and nice as well; waiting for a disk is idle time with a reason.
        user, nice, system, idle, iowait, *rest = map(int, stat[: stat.index("\n")].split()[1:9])
        total, available = _kilobytes(memory, "MemTotal:"), _kilobytes(memory, "MemAvailable:")
    except ValueError:
        return None
    busy = user + nice + system + sum(rest)
    return Whole(
        cores=stat.count("\ncpu") or 1,
        cpu_busy=busy / _HZ,
        cpu_total=(busy + idle + iowait) / _HZ,
        memory=total,
        memory_used=max(0, total - available),
        moved=disks.moved(files.text(f"{proc}/diskstats")),
    )


def _kilobytes(text: str, name: str) -> int:
    at = text.index(name) + len(name)
    return int(text[at : text.index("kB", at)]) * 1_024


class Disks:
    """Bytes to and from all of them. A partition is counted in its disk; which is which does not change."""

    def __init__(self) -> None:
        self._whole: dict[str, bool] = {}

    def moved(self, text: str) -> int:
        sectors = 0
        for line in text.splitlines():
            words = line.split()
            if len(words) >= 14 and self._is_whole(words[2]):
                sectors += int(words[5]) + int(words[9])
        return sectors * _SECTOR

    def _is_whole(self, name: str) -> bool:
        known = self._whole.get(name)
        if known is None:
            known = self._whole[name] = os.access(f"/sys/block/{name.replace('/', '!')}", os.F_OK)
        return known


def pressure(files: KernelFiles, proc: str, groups: Iterable[str]) -> dict[str, float]:
    """Of the innermost cgroup that limits us, where it has such files; else of the machine."""
    found: dict[str, float] = {}
    for name in ("cpu", "io", "memory"):
        for path in (*(f"{group}/{name}.pressure" for group in groups), f"{proc}/pressure/{name}"):
            value = _some(files.text(path))
            if value is not None:
                found[name] = value
                break
    return found


def _some(text: str) -> float | None:
    """`some avg10=1.23 ...`: the share of the last ten seconds in which at least one task waited."""
    for line in text.splitlines():
        if line.startswith("some "):
            words = dict(word.partition("=")[::2] for word in line.split()[1:])
            with suppress(KeyError, ValueError):
                return float(words["avg10"])
    return None


# our own processes


def own_processes(files: KernelFiles, proc: str, roots: set[int]) -> dict[Process, Own] | None:
    """With all that they have started. Births are in seconds since the machine started."""
    us = os.getpid()
    if not files.text(f"{proc}/self/stat") or not os.access(f"{proc}/self/task/{us}/children", os.F_OK):
        return None
    found: dict[Process, Own] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        one = _one(files, f"{proc}/self", pid) if pid == us else _one(None, f"{proc}/{pid}", pid)
        if one is not None:  # else it ended while we looked
            found[one[0]] = one[1]
        if pid != us or _have_children():
            todo += _children_of(f"{proc}/{pid}")
    return found


def _one(files: KernelFiles | None, place: str, pid: int) -> tuple[Process, Own] | None:
    text = text_once if files is None else files.text
    # The name stands in brackets, and may hold any of the signs that separate the rest.
    words = text(f"{place}/stat").rpartition(")")[2].split()
    try:
        state, parent, *times = words[0], int(words[1]), *map(int, words[11:15])
        born = int(words[19]) / _HZ
    except (IndexError, ValueError):
        return None
    sizes = text(f"{place}/statm").split()
    # What is shared stays when the process goes. Too little is the safe side: the rest counts as somebody else's.
    private = (int(sizes[1]) - int(sizes[2])) * _PAGE if len(sizes) > 2 else 0
    own = Own(parent, sum(times) / _HZ, _moved(text(f"{place}/io")), private, state in "RD")
    return Process(pid, born), own


def _moved(io: str) -> int:
    """Nothing, where it is not ours to read."""
    figures = dict(line.partition(": ")[::2] for line in io.splitlines())
    return int(figures.get("read_bytes", 0)) + int(figures.get("write_bytes", 0))


def _have_children() -> bool:
    """One question instead of a file for each of our threads, and nothing is taken from who waits for them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children_of(place: str) -> list[int]:
    """Asked of the process itself, so that the cost follows what is ours and not what runs on the machine."""
    try:
        threads = os.listdir(f"{place}/task")  # noqa: PTH208  # names alone
    except OSError:
        return []
    return [int(child) for one in threads for child in text_once(f"{place}/task/{one}/children").split()]
