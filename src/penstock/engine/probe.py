"""What the kernel says about this machine, taken once. `signals` turns two samples into readings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

from penstock.engine import procfs
from penstock.engine.cgroups import Cgroups
from penstock.engine.family import Family
from penstock.engine.kernel_files import KernelFiles
from penstock.engine.sample import Box, Own, Process, Sample, Whole

__all__ = ["Box", "Own", "Pids", "Probe", "Process", "Sample"]

#: The roots of the process trees that Penstock runs. A root that waits for its children also stands for those that have ended.
Pids: TypeAlias = Callable[[], Iterable[int]]

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Probe:
    """Kept for as long as somebody measures: it has the kernel's files open."""

    def __init__(self, pids: Pids = tuple, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._pids, self._proc = pids, str(proc)
        self._files, self._disks = KernelFiles(), procfs.Disks()
        self._cgroups, self._family = Cgroups(self._proc, cgroups), Family(self._proc)

    def __call__(self) -> Sample:
        whole = procfs.whole(self._files, self._proc, self._disks) or _whole_elsewhere()
        groups, box = self._cgroups.look()
        taken_at, own = self._own()
        return Sample(
            taken_at=taken_at,
            cores=whole.cores,
            cpu_busy=whole.cpu_busy,
            cpu_total=whole.cpu_total,
            load=_load(),
            memory=whole.memory,
            memory_used=whole.memory_used,
            moved=whole.moved,
            pressure=procfs.pressure(self._files, self._proc, groups),
            own=own,
            box=box,
        )

    def _own(self) -> tuple[float, dict[Process, Own]]:
        """And when it was taken, by the clock of their births."""
        roots = {os.getpid(), *self._pids()}
        since_start = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0
        own = self._family.look(roots)
        if own is not None:
            return since_start, own
        from penstock.engine import elsewhere  # noqa: PLC0415 - only where it is needed

        return time.time(), elsewhere.own_processes(roots)


def _whole_elsewhere() -> Whole:
    from penstock.engine import elsewhere  # noqa: PLC0415 - as above

    return elsewhere.whole()


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
