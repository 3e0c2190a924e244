"""
The explainer: reads what an explanation of a job needs, and predicts whether a deadline can be kept.

The core decides, on the same view of the store that a round has. An explanation also needs facts that no
round reads: which jobs hold a cap or the units, which workers are present, full or gone, whether the other
hosts could start the job, and what the trail says about the wait. They are read only when a client asks for
an explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

from msgspec.structs import replace

from penstock.core.errors import NotFound
from penstock.core.jobs.admission import AdmissionClass, Gates, admission_class_of, keys_of
from penstock.core.jobs.dependencies import DependencyStatus
from penstock.core.jobs.explain import Explanation, Findings, HostStanding, PreemptionInfo, explain
from penstock.core.jobs.forecast import Outlook, likely_starts, outlook, reachable
from penstock.core.jobs.groups import group_of_array
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.learning import TypeStats
from penstock.core.jobs.preemption import Cycle
from penstock.core.jobs.reasons import (
    CapReached,
    Draining,
    LabelMissing,
    NotEnoughUnits,
    Paused,
    QueuedAhead,
    Reason,
    UnitsKept,
    WaitsForParents,
)
from penstock.core.jobs.refusals import all_refusals, refusal_on
from penstock.core.jobs.round import AdmissionView, Placement, RoundInputs
from penstock.core.jobs.standing import MOST_BEFORE, recorded_reason, recorded_standing, waits_for_turn
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import (
    MINUTE,
    OWN_TYPES,
    DispatchId,
    HostId,
    JobId,
    Moment,
    Priority,
    dispatch_id_of,
)
from penstock.core.jobs.viewer import Viewer
from penstock.core.jobs.waits import waits_of
from penstock.core.jobs.worker_reasons import (
    RUNNER,
    AwaitsWorker,
    NoWorkerSeen,
    RunnerDisabled,
    WorkerElsewhere,
    WorkerGone,
    WorkersFull,
)
from penstock.scheduler.dispatcher import Dispatcher, RoundWorkers
from penstock.scheduler.forecaster import Forecaster
from penstock.scheduler.learning import Learner
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Receipt, Store

#: The most events of a job that are read, to say what it has waited for.
_MOST_EVENTS: Final = 5_000
_MOST_HOLDERS: Final = 20
#: For this long after a start, absent workers may not have connected again yet.
_STARTED_LATELY: Final = 10 * MINUTE
#: For how many jobs of one list a missing worker is searched: it takes a few reads for each.
_MOST_SEARCHES: Final = 20
#: The most parents that an explanation names.
_NAMED: Final = 3


#: The runner has places of their own for functions.
_FUNCTION: Final = f"{OWN_TYPES}function"


def _in_same_place(dispatch: Dispatch, admission_class: AdmissionClass) -> bool:
    """Whether the attempt takes a place of its worker that a job of this class could have."""
    is_function = dispatch.admission_class.job_type == _FUNCTION
    return dispatch.worker != RUNNER or is_function == (admission_class.job_type == _FUNCTION)


class _View(NamedTuple):
    """What one read of the store says about a queued job."""

    outlook: Outlook
    refusals: tuple[Reason, ...]
    hosts: tuple[HostStanding, ...]


def _is_shown_to_all(reason: Reason | None, *, shared: bool) -> TypeGuard[Reason]:
    """Whether a list shows this reason for every job that it holds, in place of a recorded one."""
    match reason:
        case Paused():
            return True
        case Draining():  # of several hosts another may start the job
            return not shared
        case NotEnoughUnits(most=most):
            return most is not None
        case _:
            return False


def _of_hosts(seen: _View, hosts: Collection[str]) -> _View:
    """
    The view of a job that only workers of these hosts run: without what this host lacks, and without other
    hosts.
    """
    refusals = tuple(reason for reason in seen.refusals if not reason.of_host)
    outlook = Outlook(next(iter(refusals), None), line_ahead=seen.outlook.line_ahead, head=seen.outlook.head)
    return _View(outlook, refusals, tuple(host for host in seen.hosts if host.host in hosts))


class Explainer:
    """Explains the state of a job, and predicts the starts of jobs with a deadline."""

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        dispatcher: Dispatcher,
        forecaster: Forecaster,
        learner: Learner,
    ) -> None:
        self._store, self._rules, self._dispatcher = store, rules, dispatcher
        self._forecaster, self._learner = forecaster, learner
        self._since = store.now()
        #: Returns the preemption that is under way on this host.
        self.preemption: Callable[[], Cycle | None] = lambda: None
        #: Whether this daemon has no runner for commands and functions.
        self.runner_disabled = False
        #: Whether this scheduler asks attempts to yield.
        self.preempts = False

    def explain(self, job_id: JobId, viewer: Viewer | None = None) -> Explanation:
        """Explain why the job is in its state, by the same decision that a round would make now."""
        job = self._store.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        if viewer is not None:
            job = viewer.ended_job(job)
        now = self._store.now()
        last = self._store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
        findings = Findings(
            preemption=self._preemption_of(job, now),
            waits=waits_of(job, self._store.events(0, _MOST_EVENTS, job_id), now),
            schedules=self._rules.schedules,
        )
        if job.state is not JobState.QUEUED:
            return explain(
                job, now, last, viewer=viewer, findings=self._in_flight(job, last, findings, viewer)
            )
        admission_class = admission_class_of(job.intent)
        seen = self._store.read_view(self._rules.host, lambda view: self._look(view, job, admission_class))
        worker = self._worker_reason(job, last, admission_class, viewer)
        if isinstance(worker, WorkerElsewhere):
            seen = _of_hosts(seen, worker.hosts)
        current, holders = self._outlook(seen, admission_class, worker, now)
        current = self._with_range(job_id, current)
        gates = [self._named(gate, admission_class, now) for gate in seen.refusals]
        if job.unmet:
            waits = self._unmet_parents(job)
            current, holders = Outlook(waits), ()
            gates.insert(0, waits)
        if worker is not None and not isinstance(worker, AwaitsWorker):
            gates.append(worker)
        findings = replace(
            findings,
            gates=tuple(gates),
            holders=holders,
            hosts=seen.hosts if current.reason is not None and current.reason.of_host else (),
            deadline_reachable=reachable(job.intent, current.likely_start_at),
        )
        findings = self._with_priorities(job, current, findings)
        return explain(job, now, last, current, viewer=viewer, findings=findings)

    def standings(
        self, jobs: Sequence[Job], last: Mapping[DispatchId, Dispatch], viewer: Viewer | None = None
    ) -> list[str]:
        """
        The clause of each job for a list. No round is tried: a list has many rows. `last`: the last dispatches
        of the jobs whose attempt has ended.
        """
        now = self._store.now()
        waiting = [job.no for job in jobs if waits_for_turn(job, now)]
        before = self._store.jobs_before(waiting, MOST_BEFORE)
        present = self._present_reasons(jobs, before, last, viewer)
        return [
            recorded_standing(
                job,
                now,
                last.get(dispatch_id_of(job.job_id, job.fence)),
                self._rules.schedules,
                before=before.get(job.no, 0),
                present=present.get(job.no),
            )
            for job in jobs
        ]

    def _present_reasons(
        self,
        jobs: Sequence[Job],
        before: Mapping[int, int],
        last: Mapping[DispatchId, Dispatch],
        viewer: Viewer | None,
    ) -> dict[int, Reason]:
        """
        By job number: why queued jobs do not start now, where the recorded denials do not say it. After a
        pause or a drain rounds record nothing for most jobs, and they never record that a worker is missing.
        `before`: how many jobs are before each in its ready queue.
        """
        queued = [job for job in jobs if job.state is JobState.QUEUED and not job.unmet]
        if not queued:
            return {}
        now, rules = self._store.now(), self._rules
        ledger, conditions = self._store.ledger(rules.host), self._dispatcher.conditions(now)
        reasons, searches = dict[int, Reason](), 0
        for job in queued:
            admission_class = admission_class_of(job.intent)
            gates = Gates(admission_class, ledger, conditions, rules.limits, now, ready_at=job.ready_at)
            reason = gates.refusal()
            if isinstance(reason, Draining | NotEnoughUnits):
                reason = self._named(reason, admission_class, now)
            if _is_shown_to_all(reason, shared=self._store.shared):
                reasons[job.no] = reason
                continue
            if job.ready_at > now or before.get(job.no) or recorded_reason(job, now) is not None:
                continue
            if (reason is None or (reason.of_host and self._store.shared)) and searches < _MOST_SEARCHES:
                searches += 1
                attempt = last.get(dispatch_id_of(job.job_id, job.fence))
                worker = self._worker_reason(job, attempt, admission_class, viewer)
                reason = worker if isinstance(worker, WorkerElsewhere) else reason or worker
            if reason is not None:
                reasons[job.no] = reason
        return reasons

    def _unmet_parents(self, job: Job) -> WaitsForParents:
        """The reason that names the first parents that the job still waits for."""
        unmet = [
            dependency
            for dependency in self._store.dependencies(job.job_id)
            if dependency.child == job.job_id and dependency.status is DependencyStatus.OPEN
        ][:_NAMED]
        ids = [dependency.parent for dependency in unmet]
        states = {parent.job_id: str(parent.state) for parent in self._store.jobs(ids)}
        states |= {group_id: self._group_state(group_id) for group_id in ids if group_id not in states}
        return WaitsForParents(
            tuple(dependency.parent for dependency in unmet),
            tuple(str(dependency.condition) for dependency in unmet),
            tuple(states[dependency.parent] for dependency in unmet),
            job.unmet,
        )

    def _group_state(self, group_id: JobId) -> str:
        """The state of a batch or an array that a job waits for, and how much of it has ended."""
        record = self._store.array(group_id)
        group = self._store.group(group_id) if record is None else group_of_array(record)
        if group is None:  # pruned meanwhile
            return "gone"
        state = str(group.state) if group.state is not None else "open" if group.is_open else "RUNNING"
        return f"{state}, {group.ended:,} of {group.total:,} ended"

    def _look(self, view: AdmissionView, job: Job, admission_class: AdmissionClass) -> _View:
        inputs = self._dispatcher.inputs(view)
        seen = outlook(inputs, job.job_id, admission_class, job.ready_at)
        others = self._other_hosts(inputs, admission_class)
        return _View(seen, all_refusals(inputs, admission_class, ready_at=job.ready_at), others)

    def _other_hosts(self, inputs: RoundInputs, admission_class: AdmissionClass) -> tuple[HostStanding, ...]:
        """For each other living host why it would not start the job; an empty reason: it could."""
        if self._dispatcher.others is None:
            return ()
        now = inputs.view.now
        with_worker = self._dispatcher.others.with_worker(admission_class, now, anew=True)
        offer = inputs.offer(admission_class)
        present = bool(with_worker) or offer is not Placement.RESERVE or inputs.take_place(admission_class)
        standings = []
        for host in self._store.hosts():
            if host.host == self._rules.host or not host.alive(now):
                continue
            reason = refusal_on(host, inputs, admission_class)
            if reason is not None:
                standings.append(HostStanding(host.host, reason.code, reason.short(now)))
            elif present and host.host not in with_worker:
                standings.append(
                    HostStanding(host.host, WorkerElsewhere.code, "it has no worker for the job")
                )
            else:
                standings.append(HostStanding(host.host, "", ""))
        return tuple(standings)

    def _outlook(
        self, seen: _View, admission_class: AdmissionClass, worker: Reason | None, now: Moment
    ) -> tuple[Outlook, tuple[JobId | None, ...]]:
        """
        The outlook with the reasons that concern workers and hosts, and the jobs that hold what the job waits
        for.
        """
        current = seen.outlook
        match current.reason:
            case None:
                if worker is None:
                    return current, ()
                current = replace(current, reason=worker, likely_start_at=None)
                return current, self._holders(worker, admission_class)
            case NotEnoughUnits() as reason:
                ends = self._run_that_ends_at(current.likely_start_at)
                named = self._named(reason, admission_class, now)
                return replace(current, reason=named, next_when_ends=ends), self._holders(
                    reason, admission_class
                )
            case reason:
                current = replace(current, reason=self._named(reason, admission_class, now))
                return current, self._holders(reason, admission_class)

    def _named(self, reason: Reason, admission_class: AdmissionClass, now: Moment) -> Reason:
        """The reason with names and settings of hosts, which the core does not know."""
        match reason:
            case LabelMissing():
                hosts = self._hosts_with(admission_class, now)
                return replace(reason, hosts=hosts, present=self._dispatcher.labels)
            case NotEnoughUnits(needs) if needs > self._rules.capacity.most:
                return replace(reason, most=self._rules.capacity.most)
            case Draining():
                return Draining(self._rules.host, self._dispatcher.drained_by_operator)
            case _:
                return reason

    def _with_range(self, job_id: JobId, current: Outlook) -> Outlook:
        """The outlook with a start range, if the start depends on the order and on ends of attempts alone."""
        playable = isinstance(
            current.reason, NotEnoughUnits | UnitsKept | QueuedAhead | CapReached | WorkersFull
        )
        if not playable and not (current.reason is None and current.line_ahead):
            return current
        start = self._forecaster.predict([job_id]).get(job_id)
        return (
            current if start is None else replace(current, likely_start_at=start.middle_at, start_range=start)
        )

    def _hosts_with(self, admission_class: AdmissionClass, now: Moment) -> tuple[str, ...]:
        return tuple(
            h.host
            for h in self._store.hosts()
            if h.until > now and set(admission_class.labels) <= set(h.labels)
        )

    def _run_that_ends_at(self, moment: Moment | None) -> JobId | None:
        if moment is None:
            return None
        return next((d.job_id for d in self._store.live() if d.ends_at == moment), None)

    def _holders(self, reason: Reason, admission_class: AdmissionClass) -> tuple[JobId | None, ...]:
        """The running jobs that hold what the job waits for, those with the most units first."""
        host = self._rules.host
        holds: Callable[[Dispatch], bool]
        match reason:
            case CapReached("concurrent"):
                holds = lambda d: d.host == host  # noqa: E731 - one of four conditions
            case CapReached(scope, name):
                holds = lambda d: (scope, name) in keys_of(d.admission_class)  # noqa: E731 - as above
            case NotEnoughUnits(needs, _, capacity) if needs <= capacity:
                holds = lambda d: d.host == host  # noqa: E731 - as above
            case WorkersFull():
                names = self._dispatcher.workers.names_for(admission_class)
                holds = lambda d: d.worker in names and _in_same_place(d, admission_class)  # noqa: E731 - as above
            case _:
                return ()
        held = [d for d in self._store.live() if holds(d)]
        held.sort(key=lambda d: -d.admission_class.cost_units)
        return tuple(d.job_id for d in held[:_MOST_HOLDERS])

    def _with_priorities(self, job: Job, current: Outlook, findings: Findings) -> Findings:
        """
        The findings with whether a higher priority would help: the job passes others, or a running one yields
        to it.
        """
        threshold, priority = self._rules.preemption.threshold, job.intent.priority
        jobs = self._store.jobs([job_id for job_id in findings.holders if job_id is not None])
        below = [
            holder
            for holder in jobs
            if threshold is not None and holder.intent.priority <= Priority.URGENT - threshold
        ]
        yields = self.preempts and any(holder.intent.preemptible for holder in below)
        ahead = bool(current.ahead or current.line_ahead) or isinstance(
            current.reason, QueuedAhead | UnitsKept
        )
        spared = next(
            (
                holder.job_id
                for holder in jobs
                if self.preempts
                and isinstance(current.reason, NotEnoughUnits)
                and threshold is not None
                and not holder.intent.preemptible
                and holder.intent.priority <= priority - threshold
            ),
            None,
        )
        helps = priority < Priority.URGENT and (ahead or yields)
        return replace(findings, priority_helps=helps, unyielding=spared)

    # workers

    def _worker_reason(
        self, job: Job, last: Dispatch | None, admission_class: AdmissionClass, viewer: Viewer | None
    ) -> Reason | None:
        """
        Why no worker runs the job yet; `AwaitsWorker`: one will claim it. None: a round reserves the job, and
        a worker was present lately.
        """
        now, workers = self._store.now(), self._dispatcher.workers
        others = self._dispatcher.others
        placement = RoundWorkers(workers, now, others=others).offer(admission_class)
        came = workers.last_came_at(admission_class, now, self._rules.fetch_for)
        if placement is not Placement.RESERVE:
            return self._claimed_by_others(placement, admission_class, now if came is None else came)
        if any(kinds.fits(admission_class) for kinds in workers.at(now).polling):
            return None
        if self.runner_disabled and admission_class.job_type.startswith(OWN_TYPES):
            return RunnerDisabled(self._rules.host)
        if came is None and last is not None and last.started_at is not None:
            came = last.ended_at or last.started_at
        if came is not None and now - came <= self._rules.fetch_for:
            return None
        if came is not None:
            return WorkerGone(came, job.counters.start)
        if (elsewhere := self._seen_elsewhere(admission_class)) is not None:
            return AwaitsWorker(elsewhere)
        addon_id, job_type = admission_class.addon_id, admission_class.job_type
        if any((one.addon_id, one.job_type) == (addon_id, job_type) for one in self._types_run()):
            return WorkerGone(None, job.counters.start)
        since = self._since if now - self._since < _STARTED_LATELY else None
        return NoWorkerSeen(job_type, self._known_types(viewer), since)

    def _claimed_by_others(
        self, placement: Placement, admission_class: AdmissionClass, came: Moment
    ) -> Reason:
        others = self._dispatcher.others
        if placement is Placement.ELSEWHERE and others is not None:
            hosts = others.with_worker(admission_class, self._store.now())
            return WorkerElsewhere(hosts, self._running_on(hosts, admission_class))
        full = self._full_workers(admission_class) if placement is Placement.LEAVE else None
        return full or AwaitsWorker(came)

    def _running_on(self, hosts: tuple[HostId, ...], admission_class: AdmissionClass) -> int:
        """How many jobs of this type run on these hosts."""
        addon_id, job_type = admission_class.addon_id, admission_class.job_type
        leased = self._store.live(addon_id=addon_id, phases=[DispatchPhase.LEASED])
        return sum(d.host in hosts and d.admission_class.job_type == job_type for d in leased)

    def _seen_elsewhere(self, admission_class: AdmissionClass) -> Moment | None:
        """When the newest job of this type that runs on another host started there; None: there is none."""
        if not self._store.shared:
            return None
        addon_id, job_type = admission_class.addon_id, admission_class.job_type
        taken = [
            dispatch.admitted_at
            for dispatch in self._store.live(addon_id=addon_id, phases=[DispatchPhase.LEASED])
            if dispatch.host != self._rules.host and dispatch.admission_class.job_type == job_type
        ]
        return max(taken, default=None)

    def _types_run(self) -> list[TypeStats]:
        """The job types of which the learner has seen an attempt, on any host."""
        return [one for one in self._learner.stats() if one.attempts]

    def _full_workers(self, admission_class: AdmissionClass) -> WorkersFull | None:
        """The busiest of the workers that claimed such jobs before; None: none of them runs a job."""
        names = self._dispatcher.workers.names_for(admission_class)
        running = Counter(
            dispatch.worker
            for dispatch in self._store.live(phases=[DispatchPhase.LEASED, DispatchPhase.ENDING])
            if dispatch.worker in names and _in_same_place(dispatch, admission_class)
        )
        if not running:
            return None
        [(name, most)] = running.most_common(1)
        functions = name == RUNNER and admission_class.job_type == _FUNCTION
        return WorkersFull(name, most, len(running), names[name].addon_id or "", functions)

    def _known_types(self, viewer: Viewer | None) -> tuple[str, ...]:
        """The types that a worker asked for, or that run or ran; for a viewer, those of its addon only."""
        addon_id = None if viewer is None else viewer.addon_id
        claimed = self._dispatcher.workers.types_asked_for(addon_id)
        leased = self._store.live(addon_id=addon_id, phases=[DispatchPhase.LEASED])
        before = {one.job_type for one in self._types_run() if addon_id in (None, one.addon_id)}
        names = claimed | before | {dispatch.admission_class.job_type for dispatch in leased}
        return tuple(sorted(name for name in names if not name.startswith(OWN_TYPES)))

    # in flight

    def _in_flight(
        self, job: Job, last: Dispatch | None, findings: Findings, viewer: Viewer | None
    ) -> Findings:
        if last is None or last.phase is DispatchPhase.ENDED:
            return findings
        if job.fence > 1:
            findings = replace(
                findings, before=self._store.dispatch(dispatch_id_of(job.job_id, job.fence - 1))
            )
        if last.phase is not DispatchPhase.RESERVED or last.host != self._rules.host:
            return findings
        worker = self._worker_reason(job, findings.before, last.admission_class, viewer)
        return findings if isinstance(worker, AwaitsWorker) else replace(findings, worker=worker)

    def _preemption_of(self, job: Job, now: Moment) -> PreemptionInfo | None:
        """
        The preemption that concerns the job: as the attempt that should yield, or as the job that needs its
        units.
        """
        cycle = self.preemption()
        if cycle is not None and (cycle.wanted_by == job.job_id or cycle.victim == job.dispatch_id):
            return self._preemption(cycle.victim, cycle.wanted_by, cycle.asked, cycle.due)
        if job.state is not JobState.RUNNING or not self._store.shared:
            return None
        for event in reversed(self._store.events(0, _MOST_EVENTS, job.job_id)):
            if event.kind in (EventKind.DISPATCHING, EventKind.RUNNING):
                return None  # no request to this attempt
            if event.kind is EventKind.PREEMPT_REQUESTED:
                data = event.data
                victim, until = job.dispatch_id, data["until"]
                if victim is None or until < now:  # its host has given up asking
                    return None
                return self._preemption(victim, data["for"], data["asked"], until)
        return None

    def _preemption(self, victim: str, wanted_by: JobId, asked: int, until: Moment) -> PreemptionInfo:
        job_id = JobId(victim.rpartition(".")[0])
        forced_at = until if asked > 1 else until + self._rules.preemption.patience
        saved = self._store.checkpoint(job_id) is not None
        return PreemptionInfo(job_id, wanted_by, asked, until, forced_at, saved)

    # deadlines

    def with_forecasts(self, intents: Sequence[Intent], receipts: list[Receipt]) -> list[Receipt]:
        """The receipts, those of jobs with a deadline with a forecast of their start (SPEC OR-4)."""
        intents_of = {
            receipt.job_id: intent
            for intent, receipt in zip(intents, receipts, strict=True)
            if intent.deadline_at is not None and receipt.state is JobState.QUEUED
        }
        if not intents_of:
            return receipts
        now = self._store.now()
        jobs = [
            (job_id, admission_class_of(i), max(now, i.earliest_start_at or 0))
            for job_id, i in intents_of.items()
        ]
        starts = self._store.read_view(
            self._rules.host, lambda view: likely_starts(self._dispatcher.inputs(view), jobs)
        )
        ranges = self._forecaster.predict(intents_of, quickly=True)
        starts |= {job_id: start.middle_at for job_id, start in ranges.items()}
        return [
            replace(
                receipt,
                deadline_reachable=reachable(intents_of[receipt.job_id], starts[receipt.job_id]),
                likely_start_at=starts[receipt.job_id],
            )
            if receipt.job_id in intents_of
            else receipt
            for receipt in receipts
        ]
