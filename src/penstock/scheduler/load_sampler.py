"""
The load sampler: measures the load that other programs put on this machine. Two samples, with our own
processes subtracted, become readings for `HostLoad`.

Without the subtraction the scheduler would take its own jobs for other programs, and could not fill the
machine. Processor time, load and memory are subtracted. Kernel pressure is time in which some task waited, so
it cannot be subtracted: it counts by the share of other programs in the resource that the task waited for.
Nine of our jobs on two cores make pressure, and none of it counts. Memory pressure counts whole, whichever
program causes it: it comes before the kernel kills a process.

A `Sample` holds the counters and gauges of the kernel at one moment, without judging them. This is the only
file that uses psutil, /proc and cgroups. A container sees the processor and the memory of its whole host, so
if a cgroup limits us, its own figures are read as well (`Box`). Version 2 is read along the path up to the
root, because any cgroup above ours may have the tightest limit; version 1 only at our own path.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.core.jobs.load import Reading
from penstock.core.jobs.types import MILLISECOND, SECOND, Moment, Span
from penstock.scheduler.hosts import HostLoad

#: The machine's load is an average over a minute, so our own load is averaged over a minute too.
_LOAD_SEC: Final = 60.0
#: The same for the usual load: the longest average that the kernel keeps.
_USUAL_SEC: Final = 900.0
#: The time between the first two samples. It is short: until the first reading the machine counts as busy.
_FIRST: Final[Span] = 500 * MILLISECOND


class LoadSampler:
    """
    Upkeep that measures the load of other programs. A measurement that fails reports nothing: then the
    readings become stale, and the machine counts as busy.
    """

    def __init__(self, machine: HostLoad, probe: Callable[[], Sample], every: Span = 2 * SECOND) -> None:
        self._machine, self._probe, self._every = machine, probe, every
        self._before: Sample | None = None
        self._own_load = self._own_usual = 0.0

    def step(self, now: Moment) -> Moment:
        after, before = self._probe(), self._before
        self._before = after
        if before is None:
            return now + _FIRST
        others = _others(before, after)
        self._own_load = _averaged(self._own_load, others.own_load, others.elapsed, _LOAD_SEC)
        self._own_usual = _averaged(self._own_usual, others.own_load, others.elapsed, _USUAL_SEC)
        usual = usual_figures(after, others, self._own_usual)
        for name, value in figures(after, others, self._own_load).items():
            self._machine.report(Reading(name, value, now, usual=usual.get(name)))
        return now + self._every


@dataclass(frozen=True, slots=True)
class Others:
    """
    What other programs used between two samples, and our own load. Seconds and cores are those of the
    machine.
    """

    elapsed: float
    cpu: float  # share of the machine
    boxed_cpu: float | None  # share of what our cgroup may use
    cpu_part: float  # share of the used processor time
    disk_part: float  # share of the bytes to and from disks
    own_load: float
    own_memory: int


def _others(before: Sample, after: Sample) -> Others:
    total = max(after.cpu_total - before.cpu_total, 1e-6)
    used = max(0.0, after.cpu_busy - before.cpu_busy)
    elapsed = total / after.cores
    cpu, moved = _used_by_own(before, after)
    moved_by_all = max(0, after.moved - before.moved)
    return Others(
        elapsed=elapsed,
        cpu=max(0.0, used - cpu) / total,
        boxed_cpu=_others_in_box(before, after, cpu, elapsed),
        cpu_part=_share(used - cpu, used),
        disk_part=_share(moved_by_all - moved, moved_by_all),
        # The kernel's load counts tasks that run or want to run. The processor time of a process with many
        # threads shows on how many cores it ran.
        own_load=max(cpu / elapsed, float(sum(own.runnable for own in after.own.values()))),
        own_memory=sum(own.private for own in after.own.values()),
    )


def figures(sample: Sample, others: Others, own_load: float) -> dict[str, float]:
    """The present load of other programs, by reading."""
    box = sample.box
    readings = {"cpu": max(others.cpu, others.boxed_cpu or 0.0)}
    if sample.load is not None:
        readings["load_per_core"] = max(0.0, sample.load - own_load) / sample.cores
    readings["memory"] = max(0, sample.memory_used - others.own_memory) / sample.memory
    if box.memory and box.memory_used is not None:
        boxed = max(0, box.memory_used - others.own_memory) / box.memory
        readings["memory"] = max(readings["memory"], boxed)
    parts = {"cpu": others.cpu_part, "io": others.disk_part, "memory": 1.0}
    return readings | {f"{name}_pressure": value * parts[name] for name, value in sample.pressure.items()}


def usual_figures(sample: Sample, others: Others, own_load: float) -> dict[str, float]:
    """
    The load of other programs over the last minutes, from the kernel's own long averages. So a scheduler that
    has just started knows it too.
    """
    usual: dict[str, float] = {}
    if sample.usual_load is not None:
        usual["load_per_core"] = max(0.0, sample.usual_load - own_load) / sample.cores
        usual["cpu"] = min(1.0, usual["load_per_core"])
    if sample.usual_cpu_pressure is not None:
        usual["cpu_pressure"] = sample.usual_cpu_pressure * others.cpu_part
    return usual


def _others_in_box(before: Sample, after: Sample, own: float, elapsed: float) -> float | None:
    box = after.box
    if not box.cores or box.cpu is None or before.box.cpu is None:
        return None
    return max(0.0, box.cpu - before.box.cpu - own) / (box.cores * elapsed)


def _used_by_own(before: Sample, after: Sample) -> tuple[float, int]:
    """
    What our processes used between two samples: processor seconds, and bytes to and from disks. The figures
    of a parent include its ended children, whose use before the first sample is subtracted.
    """
    cpu, moved = 0.0, 0
    for process, own in after.own.items():
        then = before.own.get(process)
        if then is not None:
            cpu, moved = cpu + own.cpu - then.cpu, moved + own.moved - then.moved
        elif process.born >= before.taken_at:
            # An older process that became ours only now used its time as another program, so it does not
            # count.
            cpu, moved = cpu + own.cpu, moved + own.moved
    parents = {process.pid for process in after.own}
    for process, own in before.own.items():
        if process not in after.own and own.parent in parents:
            cpu, moved = cpu - own.cpu, moved - own.moved
    return max(0.0, cpu), max(0, moved)


def _averaged(before: float, value: float, elapsed: float, over: float) -> float:
    """An exponential average, as the kernel makes its load averages."""
    return value + (before - value) * math.exp(-elapsed / over)


def _share(others: float, total: float) -> float:
    return min(1.0, max(0.0, others / total)) if total > 0 else 1.0


#: The roots of the process trees that Penstock runs. The figures of a root include the children that it
#: waited for.
Pids: TypeAlias = Callable[[], Iterable[int]]

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
#: Version 1 writes "no limit" as the largest whole page below 2 ** 63; a limit of this many bytes is none.
_V1_UNLIMITED: Final = 1 << 60


class ProcessIdentity(NamedTuple):
    """The identity of a process: its pid and its birth, because the kernel uses a pid again."""

    pid: int
    born: float


class OwnProcess(NamedTuple):
    """The figures of a process of ours. `cpu` and `moved` include the children that it has waited for."""

    parent: int
    cpu: float  # seconds
    moved: int  # bytes to and from disks
    private: int  # bytes of memory that its end frees
    runnable: bool


class Box(NamedTuple):
    """The limits of the cgroups that we are in, and what is used of them. None: no limit."""

    cores: float | None = None
    cpu: float | None = None  # seconds used by all processes in it
    memory: int | None = None
    memory_used: int | None = None


UNLIMITED: Final = Box()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The figures of the kernel at one moment."""

    taken_at: float  # seconds, by the clock in which the kernel reports births of processes
    cores: int
    cpu_busy: float  # seconds of all cores since the machine started
    cpu_total: float
    load: float | None
    memory: int
    memory_used: int
    moved: int  # bytes to and from disks since the machine started
    #: For cpu, io and memory: the percentage of time in which some task waited. No entry: unknown.
    pressure: Mapping[str, float]
    #: Averages over 15 and 5 minutes.
    usual_load: float | None = None
    usual_cpu_pressure: float | None = None
    own: Mapping[ProcessIdentity, OwnProcess] = field(default_factory=dict)
    box: Box = UNLIMITED


class LoadProbe:
    """Takes a sample of this machine when it is called."""

    def __init__(self, pids: Pids = tuple, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._pids, self._proc, self._cgroups = pids, proc, cgroups

    def __call__(self) -> Sample:
        import psutil  # noqa: PLC0415 - only the process that measures needs it, and it costs 20 ms

        cpu, memory, disks = psutil.cpu_times(), psutil.virtual_memory(), psutil.disk_io_counters()
        # The time of guests is part of user and nice already; iowait is idle time.
        total = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
        groups = _limiting_groups(self._proc, self._cgroups)
        return Sample(
            taken_at=time.time(),
            cores=psutil.cpu_count() or 1,
            cpu_busy=total - cpu.idle - getattr(cpu, "iowait", 0.0),
            cpu_total=total,
            load=_load(0),
            usual_load=_load(2),
            memory=memory.total,
            memory_used=memory.total - memory.available,
            moved=0 if disks is None else disks.read_bytes + disks.write_bytes,
            pressure=_pressures(self._proc, groups),
            usual_cpu_pressure=_pressure(self._proc, groups, "cpu", "avg300"),
            own=_own_processes(self._proc, {os.getpid(), *self._pids()}),
            box=_box(self._proc, self._cgroups, groups),
        )


def _load(which: int) -> float | None:
    """`which`: 0 over one minute, 2 over fifteen."""
    try:
        return os.getloadavg()[which]
    except OSError:
        return None


def _own_processes(proc: Path, roots: set[int]) -> dict[ProcessIdentity, OwnProcess]:
    """The figures of all processes below these roots."""
    import psutil  # noqa: PLC0415 - as above

    children = (
        _children_of
        if (proc / "self/task" / str(os.getpid()) / "children").exists()
        else _children_by_search()
    )
    processes: dict[ProcessIdentity, OwnProcess] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in seen:
            seen.add(pid)
            todo += children(proc, pid)
            with suppress(psutil.Error):  # the process ended meanwhile
                process = psutil.Process(pid)
                processes[ProcessIdentity(pid, process.create_time())] = _own_process(process)
    return processes


def _children_of(proc: Path, pid: int) -> list[int]:
    """
    Children of one process, from its own files: the cost depends on our processes, not on all of the machine.
    """
    with suppress(OSError):
        tasks = list((proc / str(pid) / "task").iterdir())
        return [int(child) for task in tasks for child in _text(task / "children").split()]
    return []


def _children_by_search() -> Callable[[Path, int], list[int]]:
    """A lookup of children for a kernel that does not list them: reads the parent of every process once."""
    import psutil  # noqa: PLC0415 - as above

    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process.pid)
    return lambda _, pid: children.get(pid, [])


def _own_process(process: Any) -> OwnProcess:
    import psutil  # noqa: PLC0415 - as above

    with process.oneshot():
        cpu, memory = process.cpu_times(), process.memory_info()
        moved = 0
        with suppress(psutil.AccessDenied, AttributeError, NotImplementedError):
            io = process.io_counters()
            moved = io.read_bytes + io.write_bytes
        return OwnProcess(
            parent=process.ppid(),
            cpu=cpu.user + cpu.system + cpu.children_user + cpu.children_system,
            moved=moved,
            # Shared memory may stay when the process ends. Too little here is safe: the rest counts as that
            # of other programs.
            private=memory.rss - getattr(memory, "shared", 0),
            runnable=process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP),
        )


# pressure


def _pressures(proc: Path, groups: list[Path]) -> dict[str, float]:
    readings = {name: _pressure(proc, groups, name, "avg10") for name in ("cpu", "io", "memory")}
    return {name: value for name, value in readings.items() if value is not None}


def _pressure(proc: Path, groups: list[Path], name: str, average: str) -> float | None:
    """The pressure on the innermost cgroup that limits us and has such a file; else on the machine."""
    files = (*(group / f"{name}.pressure" for group in groups), proc / "pressure" / name)
    return next((value for file in files if (value := _pressure_in(file, average)) is not None), None)


def _pressure_in(file: Path, average: str) -> float | None:
    """
    The average from the line `some avg10=1.23 ...`: the percentage of time in which at least one task waited.
    """
    for line in _text(file).splitlines():
        if line.startswith("some "):
            words = dict(word.partition("=")[::2] for word in line.split()[1:])
            with suppress(KeyError, ValueError):
                return float(words[average])
    return None


# cgroups


def _limiting_groups(proc: Path, cgroups: Path) -> list[Path]:
    """The cgroups of version 2 that limit us, innermost first."""
    root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
    place = _place(proc, "")
    if place is None or not (root / "cgroup.controllers").exists():
        return []
    inner = root / place.lstrip("/")
    chain = [inner, *inner.parents]
    chain = chain[: chain.index(root) + 1] if root in chain else [root]
    return [group for group in chain if _v2_cores(group) is not None or _v2_memory(group) is not None]


def _place(proc: Path, controller: str) -> str | None:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controller in controllers.split(","):
            return place
    return None


def _box(proc: Path, cgroups: Path, groups: list[Path]) -> Box:
    cores = min(((c, g) for g in groups if (c := _v2_cores(g)) is not None), default=None, key=lambda p: p[0])
    memory = min(
        ((m, g) for g in groups if (m := _v2_memory(g)) is not None), default=None, key=lambda p: p[0]
    )
    if cores is None and memory is None:
        return _v1_box(proc, cgroups)
    return Box(
        cores=None if cores is None else cores[0],
        cpu=None if cores is None else _field(cores[1] / "cpu.stat", "usage_usec", 1e-6),
        memory=None if memory is None else memory[0],
        memory_used=None if memory is None else _v2_used(memory[1]),
    )


def _v2_cores(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _v2_memory(group: Path) -> int | None:
    return _number(group / "memory.max")


def _v2_used(group: Path) -> int | None:
    used = _number(group / "memory.current")
    # The kernel can drop cached files at any time, so they take no memory from a job.
    droppable = _field(group / "memory.stat", "inactive_file") or 0
    return None if used is None else max(0, used - int(droppable))


def _v1_box(proc: Path, cgroups: Path) -> Box:
    memory, cpu, account = (_v1_group(proc, cgroups, name) for name in ("memory", "cpu", "cpuacct"))
    limit = _number(memory / "memory.limit_in_bytes")
    used = _number(memory / "memory.usage_in_bytes")
    droppable = _field(memory / "memory.stat", "total_inactive_file") or 0
    limited = limit is not None and limit < _V1_UNLIMITED
    quota, period = _number(cpu / "cpu.cfs_quota_us"), _number(cpu / "cpu.cfs_period_us")
    spent = _number(account / "cpuacct.usage")
    cores = quota / period if quota and period else None
    return Box(
        cores=cores,
        cpu=None if cores is None or spent is None else spent / 1e9,
        memory=limit if limited else None,
        memory_used=max(0, used - int(droppable)) if limited and used is not None else None,
    )


def _v1_group(proc: Path, cgroups: Path, controller: str) -> Path:
    """
    Our cgroup of version 1. In a container the path is that of the host and does not exist: then the mount
    itself.
    """
    inner = cgroups / controller / (_place(proc, controller) or "").lstrip("/")
    return inner if inner.is_dir() else cgroups / controller


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str, scale: float = 1) -> float | None:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value) * scale
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace")
    except OSError:
        return ""
