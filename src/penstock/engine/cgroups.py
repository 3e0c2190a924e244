"""
The cgroups that limit us. A container sees the processor and the memory of its whole host; what it may use of them stands here.

Version 2 is read along the path up to the root, because any cgroup above ours may hold the tightest limit; version 1 at our own place. The limits are read
anew each time, for they can be changed while we run; where we are is looked for only when the kernel says another place than before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from penstock.engine.kernel_files import KernelFiles
from penstock.engine.sample import Box

__all__ = ["Cgroups"]

#: No limit, as version 1 says it: the largest whole page below 2 ** 63.
_V1_UNLIMITED: Final = 1 << 60


class _Group(NamedTuple):
    """Of version 2, with what it limits now."""

    place: str
    cores: float | None
    memory: int | None


class Cgroups:
    def __init__(self, proc: str, root: Path) -> None:
        self._told_in, self._root = f"{proc}/self/cgroup", root
        self._files = KernelFiles()
        self._told: str | None = None
        self._chain: list[str] = []
        self._v1: dict[str, str] = {}

    def look(self) -> tuple[list[str], Box]:
        """The directories of those of version 2 that limit us, innermost first; and the limits."""
        told = self._files.text(self._told_in)
        if told != self._told:
            self._files.close()  # those of another place
            self._told = told
            self._chain = _chain(told, self._root)
            self._v1 = {name: _v1_place(told, self._root, name) for name in ("memory", "cpu", "cpuacct")}
        groups = [group for group in map(self._group, self._chain) if group[1:] != (None, None)]
        return [group.place for group in groups], self._box(groups)

    def _group(self, place: str) -> _Group:
        quota, _, period = self._text(f"{place}/cpu.max").strip().partition(" ")
        cores = int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
        return _Group(place, cores, self._number(f"{place}/memory.max"))

    def _box(self, groups: list[_Group]) -> Box:
        if not groups:
            return self._v1_box()
        # Of equal ones the innermost, which comes first: the others have more in them that is not ours.
        cores = min(((g.cores, g.place) for g in groups if g.cores is not None), default=None, key=_limit)
        memory = min(((g.memory, g.place) for g in groups if g.memory is not None), default=None, key=_limit)
        return Box(
            cores=None if cores is None else cores[0],
            cpu=None if cores is None else self._field(f"{cores[1]}/cpu.stat", "usage_usec", 1e-6),
            memory=None if memory is None else memory[0],
            memory_used=None if memory is None else self._v2_used(memory[1]),
        )

    def _v2_used(self, place: str) -> int | None:
        used = self._number(f"{place}/memory.current")
        # Files that can be dropped at any time are not in anybody's way.
        droppable = self._field(f"{place}/memory.stat", "inactive_file") or 0
        return None if used is None else max(0, used - int(droppable))

    def _v1_box(self) -> Box:
        memory, cpu, account = self._v1["memory"], self._v1["cpu"], self._v1["cpuacct"]
        limit = self._number(f"{memory}/memory.limit_in_bytes")
        limited = limit is not None and limit < _V1_UNLIMITED
        quota = self._number(f"{cpu}/cpu.cfs_quota_us")
        period = self._number(f"{cpu}/cpu.cfs_period_us") if quota else None
        cores = quota / period if quota and period else None
        spent = None if cores is None else self._number(f"{account}/cpuacct.usage")
        return Box(
            cores=cores,
            cpu=None if spent is None else spent / 1e9,
            memory=limit if limited else None,
            memory_used=self._v1_used(memory) if limited else None,
        )

    def _v1_used(self, place: str) -> int | None:
        used = self._number(f"{place}/memory.usage_in_bytes")
        droppable = self._field(f"{place}/memory.stat", "total_inactive_file") or 0
        return None if used is None else max(0, used - int(droppable))

    def _text(self, path: str) -> str:
        return self._files.text(path)

    def _number(self, path: str) -> int | None:
        text = self._text(path).strip()
        return int(text) if text.isdigit() else None

    def _field(self, path: str, name: str, scale: float = 1) -> float | None:
        for line in self._text(path).splitlines():
            key, _, value = line.partition(" ")
            if key == name and value.strip().isdigit():
                return int(value) * scale
        return None


def _limit(found: tuple[float, str]) -> float:
    return found[0]


def _chain(told: str, cgroups: Path) -> list[str]:
    root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
    place = _place(told, "")
    if place is None or not (root / "cgroup.controllers").exists():
        return []
    inner = root / place.lstrip("/")
    chain = [inner, *inner.parents]
    return [str(one) for one in (chain[: chain.index(root) + 1] if root in chain else [root])]


def _place(told: str, controller: str) -> str | None:
    for line in told.splitlines():
        _, controllers, place = line.split(":", 2)
        if controller in controllers.split(","):
            return place
    return None


def _v1_place(told: str, cgroups: Path, controller: str) -> str:
    """In a container the path is the host's and does not exist here: then the mount itself is our place."""
    inner = cgroups / controller / (_place(told, controller) or "").lstrip("/")
    return str(inner if inner.is_dir() else cgroups / controller)
