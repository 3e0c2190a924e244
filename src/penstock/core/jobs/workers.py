"""
What a worker can run, and which hosts have a worker for a job.

Each host that shares a database registers the kinds of jobs that its present workers ask for. A host without
a worker for a job leaves it in the queue while another host has one: a reservation would only keep the job
from that worker (SPEC OR-7).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.jobs.types import OWN_TYPES, AddonId, HostId, Moment

if TYPE_CHECKING:
    from penstock.core.jobs.admission import AdmissionClass
    from penstock.core.jobs.load import Host


class WorkerKinds(NamedTuple):
    """
    The kinds of jobs that a worker can run. Without an addon: of any. Without types: of any type; the
    runner's own types only with `own`.
    """

    addon_id: AddonId | None = None
    job_types: frozenset[str] = frozenset()
    own: bool = False

    def fits(self, admission_class: AdmissionClass) -> bool:
        if self.addon_id not in (None, admission_class.addon_id):
            return False
        if self.job_types:
            return admission_class.job_type in self.job_types
        return self.own or not admission_class.job_type.startswith(OWN_TYPES)

    @property
    def narrowness(self) -> int:
        """How many filters the worker names."""
        return (self.addon_id is not None) + bool(self.job_types)


def hosts_with_worker(
    hosts: Iterable[Host], here: HostId, admission_class: AdmissionClass, now: Moment
) -> tuple[HostId, ...]:
    """
    The other living hosts with a worker for such jobs. A host without the labels of the job can never start
    it, so its workers do not count.
    """
    return tuple(
        host.host
        for host in hosts
        if host.host != here
        and host.alive(now)
        and set(admission_class.labels) <= set(host.labels)
        and any(kinds.fits(admission_class) for kinds in host.workers)
    )
