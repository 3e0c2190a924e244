"""
The hosts and workers of a play.

A user describes them by `PlayedHost` and `PlayedWorker`. The player makes a `HostInPlay` of each host: its
ledger, its dispatches, and the units that its last round kept. `FreeUnits` finds the hosts with the most free
units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.core.jobs.admission import AdmissionClass, Conditions, Kept, Ledger
from penstock.core.jobs.load import Capacity, Quiet
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.preemption import Cycle
from penstock.core.jobs.round import Placement, RoundInputs, RunningJob, no_place
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import OWN_TYPES, EndReason, HostId, Moment, Span
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.dispatcher import FOR_EVER, PullingWorkers, RoundWorkers
from penstock.scheduler.played_queues import PlayedQueue, PlayedView, WaitingJobs

#: More places than any host has units for.
NO_LIMIT: Final = 1 << 30
NEVER: Final[Moment] = -1
ANY_JOB: Final = WorkerKinds(own=True)
COMMANDS: Final = WorkerKinds(job_types=frozenset({f"{OWN_TYPES}command", f"{OWN_TYPES}shell"}))
FUNCTIONS: Final = WorkerKinds(job_types=frozenset({f"{OWN_TYPES}function"}))


#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_RESERVED, _COMPLETED = DispatchPhase.RESERVED, EndReason.COMPLETED


class PlayedWorker(NamedTuple):
    """
    A worker that is always there.

    - `places`: how many jobs it runs at once.
    - `claims_when_full`: it counts as present also while all of its places are taken, as the runner does.
      Another worker counts as absent when it has been full for `fetch_for`.
    - `delay`: how long after a change it claims. With a report of its own it claims at once: as many jobs as
      it reports to have ended, or, if it is the runner, for all of its places. Without a delay it always
      claims at once.
    - `functions`: how many functions the runner runs at once, beside as many commands as it has places; None
      for every other worker.
    """

    name: str = "any"
    kinds: WorkerKinds = ANY_JOB
    places: int = NO_LIMIT
    claims_when_full: bool = True
    delay: Span = 0
    functions: int | None = None


class PlayedHost(NamedTuple):
    """
    A host and its workers. `capacity`: None: that of the rules. `preempts`: it makes running jobs yield, as
    the daemon does. `reserves`: it reserves jobs that no worker here claims, as the daemon does.
    """

    name: HostId = HostId("local")
    workers: tuple[PlayedWorker, ...] = (PlayedWorker(),)
    labels: tuple[str, ...] = ()
    capacity: Capacity | None = None
    preempts: bool = True
    reserves: bool = True


class RunInPlay:
    """A dispatch in a play. `as_seen`: as rounds see it, with its expected end; `over_at`: when it ends."""

    __slots__ = (
        "as_seen",
        "fence",
        "host",
        "job",
        "over_at",
        "phase",
        "priority",
        "queue",
        "ready_at",
        "reason",
        "started_at",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        job: int,
        queue: PlayedQueue,
        host: HostInPlay,
        waiting: QueuedJob,
        ready_at: Moment,
        *,
        as_seen: RunningJob,
    ) -> None:
        self.job, self.queue, self.host, self.as_seen = job, queue, host, as_seen
        self.priority, self.fence, self.ready_at = waiting.priority, waiting.fence + 1, ready_at
        self.worker: WorkerInPlay | None = None
        self.phase = _RESERVED
        self.started_at = self.over_at = 0
        self.reason = _COMPLETED


class WorkerInPlay:
    """
    A worker in a play. `claims_at`: the moment of its next claim, or of its last one. `seen`: the counts of
    changes on its host and of jobs that became ready, at its last claim. `reported`: at which moment it
    reports ends, and how many.
    """

    __slots__ = (
        "_functions",
        "_places",
        "claims_at",
        "claims_when_full",
        "delay",
        "fits",
        "kinds",
        "name",
        "reported",
        "seen",
    )  # fmt: skip

    def __init__(self, worker: PlayedWorker) -> None:
        self.name, self.kinds, self._places, self.claims_when_full, self.delay, self._functions = worker
        self.claims_at, self.seen, self.reported = NEVER, (0, 0), (NEVER, 0)
        #: By the number of a queue, whether the worker runs jobs of that queue.
        self.fits: dict[int, bool] = {}

    @property
    def free(self) -> int:
        return self.claims[1]

    @property
    def claims(self) -> tuple[WorkerKinds, int]:
        """
        The kinds that it claims, and how many jobs. While the runner has room for commands and for functions,
        it claims both, and no more than it has room for of each.
        """
        functions, places = self._functions, self._places
        if functions is None:
            return self.kinds, places
        if functions and places:
            return self.kinds, min(functions, places)
        return (FUNCTIONS, functions) if functions else (COMMANDS, places)

    def take(self, queue: PlayedQueue, n: int = 1) -> None:
        """Take `n` places; a negative number gives them back."""
        if self._functions is not None and FUNCTIONS.fits(queue.admission_class):
            self._functions -= n
        else:
            self._places -= n

    def report(self, queue: PlayedQueue, now: Moment) -> None:
        """Report the end of a job of this queue, and claim with the report."""
        self.take(queue, -1)
        if self.delay and self._functions is None:
            at, reported = self.reported
            self.reported = (now, reported + 1 if at == now else 1)
        self.claims_at = now

    def next_limit(self, now: Moment) -> int:
        """
        How many jobs it claims now. With a report it claims only for the places that the report frees: for
        the others another claim waits already.
        """
        (at, reported), self.reported = self.reported, (NEVER, 0)
        return reported if at == now else self.free

    def runs(self, queue: PlayedQueue) -> bool:
        fits = self.fits.get(queue.number)
        if fits is None:
            fits = self.fits[queue.number] = self.kinds.fits(queue.admission_class)
        return fits


class Rivals(NamedTuple):
    """
    The heads of which one is the first that may start or for which units may be kept; only fair share decides
    between them. Valid until a head changes, and until the moment `until`, from which units may be kept for
    another head or a head enters the next band.
    """

    heads: list[QueuedJob]
    head_changes: int
    until: Moment


class HostInPlay:
    """A host in a play. `view`: what its rounds see."""

    def __init__(
        self,
        number: int,
        host: PlayedHost,
        capacity: Capacity,
        ledger: Ledger,
        waiting: WaitingJobs,
        *,
        has_budgets: bool,
    ) -> None:
        self.number, self.name, self.labels = number, host.name, frozenset(host.labels)
        self.capacity, self.preempts, self.ledger = capacity, host.preempts, ledger
        self.workers = [WorkerInPlay(worker) for worker in host.workers]
        #: Whether it has a single worker, which runs every job: then rounds need not ask which workers are
        #: present.
        self.alone = len(self.workers) == 1 and self.workers[0].kinds == ANY_JOB
        self.reserves = host.reserves and not self.alone
        # With several workers each round has a copy of the ledger, which its gates read.
        keeps_gates = self.alone and not has_budgets
        self.view = PlayedView(ledger, waiting, self.running, keeps_gates=keeps_gates)
        self.present = PullingWorkers()
        #: None: there is no other host.
        self.others: WorkersOfOtherHosts | None = None
        if not host.reserves:
            self.present.came(ANY_JOB, FOR_EVER)
        self.runs: dict[int, RunInPlay] = {}
        self.reserved: dict[int, RunInPlay] = {}
        self.quiet: Quiet | None = None
        #: The units that may be in use now.
        self.units = capacity.most
        self.draining = False
        #: Counts the starts and ends on this host.
        self.changes = 0
        #: The units that the last round kept, until something on this host changes.
        self.kept: Kept | None = None
        #: Whether a round of one of its workers kept units when they last claimed.
        self.keeps = False
        #: Whether another round would keep the same units, because no job has started since.
        self.kept_holds = False
        self.tick_planned = False
        self.rivals: Rivals | None = None
        #: The inputs of its rounds, if they hold until conditions change.
        self.inputs: RoundInputs | None = None
        self.cycle: Cycle | None = None

    def offers(
        self, now: Moment, worker: WorkerInPlay | None = None
    ) -> tuple[Callable[[AdmissionClass], Placement], Callable[[AdmissionClass], bool]]:
        """The `offer` and `take_place` of a round on this host. `worker`: the one that claims in it."""
        if self.alone:
            return _always_lease, no_place
        kinds, name = (None, "") if worker is None else (worker.claims[0], worker.name)
        workers = RoundWorkers(self.present, now, kinds, name, others=self.others)
        return workers.offer, workers.take_place

    def conditions(self, now: Moment) -> Conditions:
        if self.quiet is None:  # no load is given: the host counts as quiet for longer than a job can ask
            return Conditions(self.units, streak=FOR_EVER, draining=self.draining, labels=self.labels)
        state, streak, busy = self.quiet.state, self.quiet.streak(now), self.quiet.busy
        return Conditions(self.units, state, streak, busy, draining=self.draining, labels=self.labels)

    def forget_conditions(self) -> None:
        """Forget what was kept for later rounds: the load, a drain, a pause or a budget has changed."""
        self.view.forget_gates()
        self.rivals = self.inputs = None

    def set_quiet(self, quiet: Quiet) -> None:
        self.quiet, self.units = quiet, self.capacity.units(quiet.busy.score)

    def running(self) -> list[RunningJob]:
        return [run.as_seen for run in self.runs.values()]


class WorkersOfOtherHosts:
    """
    The other hosts that have a worker for a job, as `OtherHosts` in the scheduler. Workers are always present
    in a play, so the answer for a class never changes.
    """

    def __init__(self, here: HostInPlay, hosts: Sequence[HostInPlay]) -> None:
        self._others = [host for host in hosts if host is not here]
        self._by_class: dict[AdmissionClass, tuple[HostId, ...]] = {}

    def with_worker(
        self,
        admission_class: AdmissionClass,
        now: Moment,  # noqa: ARG002 - the same at any moment
        *,
        anew: bool = False,  # noqa: ARG002 - as above
    ) -> tuple[HostId, ...]:
        if admission_class not in self._by_class:
            self._by_class[admission_class] = tuple(
                host.name
                for host in self._others
                if host.labels.issuperset(admission_class.labels)
                and any(worker.kinds.fits(admission_class) for worker in host.workers)
            )
        return self._by_class[admission_class]


class FreeUnits:
    """The hosts by their free units, so that those with the most are found without looking at all hosts."""

    def __init__(self, hosts: Sequence[HostInPlay]) -> None:
        self._hosts = hosts
        self._free = [0] * len(hosts)
        self._by_free: list[dict[int, None]] = [{} for _ in range(101)]
        for host in hosts:
            self._by_free[0][host.number] = None
            self.changed(host)

    def of(self, number: int) -> int:
        return self._free[number]

    def changed(self, host: HostInPlay) -> None:
        number, free = host.number, max(0, host.units - host.ledger.units)
        if free != self._free[number]:
            del self._by_free[self._free[number]][number]
            self._by_free[free][number] = None
            self._free[number] = free

    def at_least(self, units: int) -> Iterator[int]:
        """The hosts with at least so many free units, those with the most first."""
        for free in range(100, max(units, 1) - 1, -1):
            yield from list(self._by_free[free])


def _always_lease(_: AdmissionClass) -> Placement:
    """The offer for every job on a host with a single worker that runs every job."""
    return Placement.LEASE
