"""
Our own processes, with all that they have started, as Linux tells of them in /proc.

Each is asked for its children, so that the cost follows what is ours and not what runs on the machine. What the first few of them say is read from files
that stay open: an idle scheduler has one or two, and looks every two seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from penstock.engine.kernel_files import KernelFiles, text_once
from penstock.engine.sample import Own, Process

__all__ = ["Family"]

_HZ: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
#: More would only hold files open: where so much runs, nobody counts what a look costs.
MOST_KEPT: Final = 8


class Family:
    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._kept: dict[int, KernelFiles] = {}
        self._threads: dict[int, list[str]] = {}

    def look(self, roots: set[int]) -> dict[Process, Own] | None:
        """Births are in seconds since the machine started. None: this kernel does not tell who is whose child."""
        us = os.getpid()
        if not os.access(f"{self._proc}/self/task/{us}/children", os.F_OK):
            return None
        found: dict[Process, Own] = {}
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            pid = todo.pop()
            if pid in seen:
                continue
            seen.add(pid)
            text = self._reader(pid)
            one = _one(text, f"{self._proc}/{pid}", pid)
            if one is not None:  # else it ended while we looked
                found[one[0]] = one[1]
                todo += self._children(text, pid)
        for gone in self._kept.keys() - {process.pid for process in found}:
            del self._kept[gone]
            self._threads.pop(gone, None)
        return found

    def _reader(self, pid: int) -> Callable[[str], str]:
        """An open file is about the process that it was opened for, also when its number has been given to another: then it says nothing."""
        kept = self._kept.get(pid)
        if kept is None and len(self._kept) < MOST_KEPT:
            kept = self._kept[pid] = KernelFiles()
        return text_once if kept is None else kept.text

    def _children(self, text: Callable[[str], str], pid: int) -> list[int]:
        tasks = f"{self._proc}/{pid}/task"
        try:
            threads = os.listdir(tasks)  # noqa: PTH208  # names alone
        except OSError:
            return []
        kept = self._kept.get(pid)
        if kept is not None and threads != self._threads.setdefault(pid, threads):
            kept.close()  # those of threads that have ended among them
            self._threads[pid] = threads
        return [int(child) for thread in threads for child in text(f"{tasks}/{thread}/children").split()]


def _one(text: Callable[[str], str], place: str, pid: int) -> tuple[Process, Own] | None:
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
