"""One look at the machine, as values: counters and gauges, whose they are, and no judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["UNLIMITED", "Box", "Own", "Process", "Sample", "Whole"]


class Process(NamedTuple):
    """A pid alone comes back with another meaning; with its birth it does not."""

    pid: int
    born: float


class Own(NamedTuple):
    """A process of ours. `cpu` and `moved` include the children that it has waited for."""

    parent: int
    cpu: float  # seconds
    moved: int  # bytes to and from disks
    private: int  # bytes of memory that go with it
    runnable: bool


class Box(NamedTuple):
    """A cgroup that limits us. None: it does not limit that."""

    cores: float | None = None
    cpu: float | None = None  # seconds used by everybody in it
    memory: int | None = None
    memory_used: int | None = None


UNLIMITED: Final = Box()


class Whole(NamedTuple):
    """All of the machine, since it started."""

    cores: int
    cpu_busy: float  # seconds of all cores
    cpu_total: float
    memory: int
    memory_used: int
    moved: int  # bytes to and from disks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    taken_at: float  # seconds, by the clock that births of processes are told in
    cores: int
    cpu_busy: float  # seconds of all cores since the machine started
    cpu_total: float
    load: float | None
    memory: int
    memory_used: int
    moved: int  # bytes to and from disks since the machine started
    #: Of cpu, io, memory: the percentage of time in which somebody waited. What is not there is not known.
    pressure: Mapping[str, float]
    own: Mapping[Process, Own] = field(default_factory=dict)
    box: Box = UNLIMITED
