"""
The machine as Linux tells of it in /proc.

Read without psutil, which opens each file anew and goes through all of it: that was most of what an idle scheduler used. Where something is not as it is
known here the answer is None, and psutil is asked (`elsewhere`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from penstock.engine.kernel_files import KernelFiles
from penstock.engine.sample import Whole

__all__ = ["Disks", "pressure", "whole"]

_HZ: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
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
