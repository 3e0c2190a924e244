"""
The rules: every number and limit by which the scheduler decides, in one value. The daemon makes it from the
settings, and a simulation varies it.
"""

from __future__ import annotations

from msgspec import Struct, field

from penstock.core.jobs.admission import AdmissionLimits
from penstock.core.jobs.load import Capacity, Senses, Thresholds
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import HOUR, SECOND, HostId, Span
from penstock.stores.api import Depth

LOCAL = HostId("local")


class SchedulerRules(Struct, frozen=True, kw_only=True):
    """The rules of one scheduler. Durations are in microseconds."""

    host: HostId = LOCAL
    #: The labels of this host. A job may require some.
    labels: tuple[str, ...] = ()
    capacity: Capacity = field(default_factory=Capacity)
    thresholds: Thresholds = field(default_factory=Thresholds)
    senses: Senses = field(default_factory=Senses)
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    ordering: Ordering = field(default_factory=Ordering)
    schedules: Schedules = field(default_factory=Schedules)
    preemption: Preemption = field(default_factory=Preemption)
    #: An addon that submits in a loop must not fill the disk, nor the queue of the others.
    depth: Depth = field(default_factory=lambda: Depth(total=1_000_000, per_addon=500_000))
    lease_for: Span = 30 * SECOND
    reserve_for: Span = 30 * SECOND
    #: The time from the cancel signal to SIGTERM, and from SIGTERM to SIGKILL. After that the scheduler ends
    #: the dispatch, whether its worker has reported or not.
    grace: Span = 15 * SECOND
    tick: Span = 2 * SECOND
    #: How often the machine is measured.
    sense_every: Span = 2 * SECOND
    #: A worker counts as present for this long after a claim or a poll.
    fetch_for: Span = 30 * SECOND
    retention: Span = 30 * 24 * HOUR
    prune_every: Span = 60 * SECOND
    prune_step: int = 200
