"""What a process and its descendants have used, read from the kernel, the same way for everybody."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

import psutil

PAGE = os.sysconf("SC_PAGE_SIZE")


class CpuOfTheTree:
    """
    Seconds of CPU, user and system, that this process and all its descendants use while the block runs.

    Reads each process's CPU clock, which is exact to the nanosecond and keeps the time of threads that ended;
    /proc counts in ticks of 10 ms.  Whoever starts inside the block counts whole.  Nobody may end inside it,
    for then its share would be lost: that is an error.
    """

    seconds: float

    def __enter__(self) -> Self:
        self._before = _cpu_by_pid()
        return self

    def __exit__(self, *error: object) -> None:
        after = _cpu_by_pid()
        if gone := self._before.keys() - after.keys():
            raise RuntimeError(f"{len(gone)} processes ended while their CPU was being measured")
        self.seconds = sum(after.values()) - sum(self._before.values())


def _cpu_by_pid() -> dict[int, float]:
    used = {}
    for pid in [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]:
        # The clock of process `pid`, as clock_getcpuclockid(3) makes it: CPUCLOCK_SCHED, of the whole process.
        used[pid] = time.clock_gettime((~pid << 3) | 2)
    return used


class MemoryGrowth:
    """
    Bytes by which this process's resident memory rose at its highest above what it was at the start of the block.

    The kernel keeps the high-water mark, so no peak falls between two samples and no sampler takes the GIL.
    """

    grown: int

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the present
        self._before = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return self

    def __exit__(self, *error: object) -> None:
        self.grown = _high_water() - self._before


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel keeps no high-water mark of memory")
