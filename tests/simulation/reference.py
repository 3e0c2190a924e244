"""
A load played by the real scheduler on a virtual clock: memory store, dispatcher, job service, maintenance. Only
the workers are simulated. It is slow, and what the player must agree with. Arrays, batches and schedules are real too;
the payload of their jobs says which one submitted them.
"""

from __future__ import annotations

import heapq
from datetime import UTC, datetime
from itertools import count

from msgspec.structs import replace

from penstock.core.errors import Refused
from penstock.core.jobs.arrays import live_index
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.ordering import urgent_from
from penstock.core.jobs.round import MOST_PICKS
from penstock.core.jobs.schedules import ScheduleChange
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason, HostId, JobId, moment_of
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrays import ArrayService
from penstock.scheduler.arrivals import Arrival, Load, PlayedAttempt
from penstock.scheduler.batches import BatchRequest, BatchService
from penstock.scheduler.dispatcher import FOR_EVER, Dispatcher, PullingWorkers
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import EndReport, JobService, YieldRequests
from penstock.scheduler.maintenance import Maintenance
from penstock.scheduler.playing import PlayedHost
from penstock.scheduler.preemption import Preempter
from penstock.scheduler.schedules import ScheduleFirer
from penstock.stores.api import ChangeSchedule, Query, committed
from penstock.stores.memory.store import MemoryStore

ENDLESS = 1 << 60
ONE_HOST = PlayedHost()


class RealHost:
    """The scheduler of one host, with simulated workers."""

    def __init__(self, scene, host):
        self.scene, self.name = scene, host.name
        self.rules = replace(
            scene.rules,
            host=HostId(host.name),
            labels=host.labels,
            capacity=host.capacity or scene.rules.capacity,
        )
        self.machine, self.present = HostLoad(self.rules), PullingWorkers()
        self.dispatcher = Dispatcher(scene.store, self.rules, self.machine, self.present)
        self.yields = YieldRequests()
        self.job_service = JobService(scene.store, self.rules, self.dispatcher, yields=self.yields)
        self.preempter = Preempter(scene.store, self.rules, self.dispatcher, self.job_service, self.yields)
        self.yields.on_ask(self._asked)
        self.reserves, self.preempts = host.reserves, host.preempts
        if not host.reserves:
            self.present.came(WorkerKinds(own=True), FOR_EVER)
        self.workers = [Worker(self, worker) for worker in host.workers]

    def _asked(self, dispatch_id):
        self.scene.asked(dispatch_id)

    def start(self):
        started = False
        for worker in self.workers:
            started |= worker.claim()
        if self.reserves:
            before = self.scene.store.newest()
            self.dispatcher.step(self.scene.now)
            dispatching = [e for e in self.scene.store.events(before, 10_000) if e.kind == "DISPATCHING"]
            if dispatching:
                started = True
                self.scene.moment(self.scene.now + self.rules.reserve_for)
        return started


class Worker:
    def __init__(self, host, worker):
        self.host, self.worker = host, worker
        self.running = {"functions": 0, "others": 0}
        if worker.claims_when_full:
            host.present.came(worker.kinds, FOR_EVER)
        self.shows_room()

    @property
    def claims(self):
        """The kinds and the limit of its next claim, as `Runner._free` has them for the runner."""
        places = self.worker.places - self.running["others"]
        if self.worker.functions is None:
            return self.worker.kinds, places
        functions = self.worker.functions - self.running["functions"]
        if functions and places:
            return self.worker.kinds, min(functions, places)
        if functions:
            return WorkerKinds(job_types=frozenset({"penstock.function"})), functions
        return WorkerKinds(job_types=frozenset({"penstock.command", "penstock.shell"})), places

    @property
    def free(self):
        return self.claims[1]

    def shows_room(self):
        self.host.present.has_room(self.worker.name, *self.claims, FOR_EVER)

    def count(self, job_type, more):
        is_function = self.worker.functions is not None and job_type == "penstock.function"
        self.running["functions" if is_function else "others"] += more

    def claim(self):
        scene, started = self.host.scene, False
        while self.free:
            kinds, free = self.claims
            limit = min(free, MOST_PICKS)
            granted = self.host.job_service.claim(kinds, limit, self.worker.name)
            for job, dispatch, *_ in granted:
                self.count(job.intent.job_type, 1)
                scene.began(self, job, dispatch)
            self.shows_room()
            started |= bool(granted)
            if not self.free and not self.worker.claims_when_full:
                scene.moment(scene.now + self.host.rules.fetch_for)  # until then it counts as present
            if len(granted) < limit:
                break
        return started


class Scene:
    """Plays a load; `started` has the first start of each job, `states` what became of it."""

    def __init__(self, load, rules, hosts=(ONE_HOST,)):
        sources = load if isinstance(load, Load) else Load(load)
        self.load = list(sources)
        self.rules = replace(rules, lease_for=ENDLESS, retention=ENDLESS)
        self.now = sources.began
        self.store = MemoryStore(lambda: self.now, ordering=rules.ordering)
        self.hosts = [RealHost(self, host) for host in hosts]
        self.maintenance = Maintenance(self.store, self.rules)
        self.numbers, self.jobs = {}, {}
        self.started, self.refused = {}, set()
        self.ends, self.moments, self.calls = [], [], []
        self.tries, self.left, self.runs, self.over = {}, {}, {}, {}
        self.look_at, self.end_numbers = None, count()
        self.add_sources(sources)

    def add_sources(self, load):
        """Arrays are submitted at their moments, batches and schedules are there from the beginning."""
        service = self.hosts[0].job_service
        self.arrays = ArrayService(self.store, self.rules, service)
        self.batches = BatchService(self.store, self.rules, service)
        self.firer = ScheduleFirer(self.store, self.rules, self.cancel_job)
        self.names = {number: name for name, number in load.groups.items()}
        self.array_ids, self.works = {}, {}
        self.fires_until = max((each.until for each in load.schedules), default=0)
        for array in load.arrays:
            self.works[array.intent.payload] = array.works
            self.at(array.at, lambda array=array: self.submit_array(array))
        for batch in load.batches:
            name = batch.group_id.removeprefix("batch:")
            self.batches.submit(BatchRequest(name, batch.addon_id, (), is_open=True))
            if batch.closed_at is not None:
                self.at(batch.closed_at, lambda name=name: self.batches.close(name))
        for schedule in load.schedules:
            record = replace(schedule.record, version=1)
            self.works[record.schedule.intent.payload] = schedule.works
            committed(self.store, ChangeSchedule(ScheduleChange(self.now, record.name, 0, record)))
            if record.next_moment is not None:  # perhaps the moment at which the play begins
                heapq.heappush(self.moments, record.next_moment)

    def submit_array(self, array):
        record, _ = self.arrays.submit(array.intent, array.indices)
        array_id = self.array_ids[array.array_id] = record.array.array_id
        for at in array.retried_at:
            self.at(at, lambda: self.retry_array(array_id))
        if array.canceled_at is not None:
            self.at(array.canceled_at, lambda: self.cancel_array(array_id))

    def retry_array(self, array_id):
        try:
            self.arrays.retry(array_id)
        except Refused:
            return

    def cancel_array(self, array_id):
        for job_id in self.arrays.cancel(array_id).live_jobs():
            self.cancel_job(job_id)

    def fire(self):
        if not self.fires_until:
            return
        now, before = min(self.now, self.fires_until), 0
        while before < self.store.newest():  # a job that it cancels makes room for the next one
            before = self.store.newest()
            self.firer.step(now)
        # Not when it looks for ends of its jobs: it sees those at once, and no worker claims at such a moment.
        for record in self.store.schedules():
            if record.next_moment is not None and record.next_moment <= self.fires_until:
                self.moment(record.next_moment)

    def number_of(self, job):
        """Of a job that an array or a schedule submitted, which gets one when it is first seen."""
        number = self.numbers.get(job.job_id)
        if number is None:
            number = self.numbers[job.job_id] = len(self.load)
            self.jobs[number] = job.job_id
            key = tuple(live_index(job.job_id)) if "_" in job.job_id else moment_of_job(job)
            work = self.works[job.intent.payload].of(key, job.created_at)
            self.load.append(Arrival(job.created_at, job.intent, *work))
            self.moment(work.canceled_at)
        return number

    def new_jobs(self):
        """Give numbers to the jobs that arrays and schedules have submitted."""
        if self.works:
            for job in sorted(self.store.find(Query(limit=1_000_000)), key=lambda job: job.no):
                self.number_of(job)

    def moment(self, at):
        if at is not None and at > self.now:
            heapq.heappush(self.moments, at)

    def at(self, moment, call):
        self.calls.append((moment, call))
        self.calls.sort(key=lambda call: call[0])

    def play(self):
        coming = iter(list(enumerate(self.load)))
        arriving = next(coming, None)
        while True:
            self.new_jobs()
            due = [end[0] for end in self.ends[:1]] + self.moments[:1] + [call[0] for call in self.calls[:1]]
            if arriving is not None:
                due.append(arriving[1].at)
            if not due:
                return self
            self.now = max(self.now, min(due))
            while arriving is not None and arriving[1].at <= self.now:
                self.arrive(*arriving)
                arriving = next(coming, None)
            self.end()
            while self.calls and self.calls[0][0] <= self.now:
                self.calls.pop(0)[1]()
            while self.moments and self.moments[0] <= self.now:
                heapq.heappop(self.moments)
            for number, arrival in enumerate(self.load):
                if (
                    arrival.canceled_at is not None
                    and arrival.canceled_at <= self.now
                    and number in self.jobs
                ):
                    self.cancel(number)
            self.maintenance.step(self.now)
            self.fire()
            self.new_jobs()
            self.requeued()
            self.look()
            while sum(host.start() for host in self.hosts):
                pass
            if self.store.find(Query(states=[JobState.QUEUED], limit=1)) and self.runs:
                self.moment(self.now - self.now % self.rules.tick + self.rules.tick)

    def arrive(self, number, arrival):
        try:
            after = tuple(self.dependency(*parent) for parent in arrival.parents)
            [receipt] = self.hosts[0].job_service.submit([replace(arrival.intent, after=after)])
        except Refused:
            self.refused.add(number)
            return
        self.numbers[receipt.job_id], self.jobs[number] = number, receipt.job_id
        intent = arrival.intent
        for moment in (intent.earliest_start_at, intent.deadline_at, arrival.canceled_at):
            self.moment(moment)
        self.moment(urgent_from(intent, self.rules.ordering))

    def dependency(self, parent, condition):
        """A parent that was refused has a name that no job has."""
        name = self.jobs.get(parent, "refused") if parent >= 0 else self.names[parent]
        return Dependency(JobId(self.array_ids.get(name, name)), condition)

    def began(self, worker, job, dispatch):
        number = self.number_of(job)
        self.started.setdefault(number, self.now)
        arrival = self.load[number]
        attempts = arrival.attempts or (PlayedAttempt(arrival.runs_for),)
        attempt = attempts[min(self.tries.get(number, 0), len(attempts) - 1)]
        span, reason = self.left.pop(number, attempt.runs_for), attempt.end
        ends_at = self.now + span
        if dispatch.stop_at is not None and dispatch.stop_at < ends_at:
            ends_at, reason = dispatch.stop_at, dispatch.stop_for
        self.runs[dispatch.dispatch_id] = (worker, number, reason, self.now, span)
        self.over[dispatch.dispatch_id] = ends_at
        heapq.heappush(self.ends, (ends_at, next(self.end_numbers), dispatch.dispatch_id))

    def asked(self, dispatch_id):
        number = self.runs[dispatch_id][1]
        yields_after = self.load[number].yields_after
        if yields_after is not None and self.now + yields_after < self.over[dispatch_id]:
            worker, number, _, began, span = self.runs[dispatch_id]
            self.runs[dispatch_id] = (worker, number, EndReason.COOPERATIVE_PREEMPTION, began, span)
            self.over[dispatch_id] = self.now + yields_after
            heapq.heappush(self.ends, (self.now + yields_after, next(self.end_numbers), dispatch_id))

    def end(self):
        while self.ends and self.ends[0][0] <= self.now:
            _, _, dispatch_id = heapq.heappop(self.ends)
            if dispatch_id in self.runs:
                self.finish(dispatch_id, self.runs[dispatch_id][2])

    def finish(self, dispatch_id, reason):
        worker, number, _, began, span = self.runs.pop(dispatch_id)
        worker.count(self.load[number].intent.job_type, -1)
        worker.shows_room()
        worker.host.job_service.end_many([EndReport(dispatch_id, reason)])
        if reason in (EndReason.COOPERATIVE_PREEMPTION, EndReason.PREEMPTION_TIMEOUT):
            if self.load[number].resumes:
                self.left[number] = span - (self.now - began)
        elif reason is not EndReason.COMPLETED:
            self.tries[number] = self.tries.get(number, 0) + 1
        self.moment(self.store.job(self.jobs[number]).not_before)

    def requeued(self):
        """Reservations that timed out come back after a delay."""
        alarm = self.store.alarm()
        if alarm is not None and alarm < self.now + ENDLESS // 2:
            self.moment(alarm)

    def cancel(self, number):
        self.cancel_job(self.jobs[number])

    def cancel_job(self, job_id, by=""):
        job = self.store.job(job_id)
        if job.state in ("QUEUED", "DISPATCHING", "RUNNING"):
            self.hosts[0].job_service.cancel(job.job_id, by)
            if job.dispatch_id in self.runs:
                self.finish(job.dispatch_id, EndReason.CANCELED)

    def look(self):
        """The preemption's tick, at whole ticks as the player's."""
        if self.rules.preemption.threshold is None:
            return
        tick = self.rules.tick
        if self.now % tick == 0 or any(
            h.preempter.cycle and h.preempter.cycle.due <= self.now for h in self.hosts
        ):
            for host in self.hosts:
                if host.preempts:
                    host.preempter.step(self.now)
                    for dispatch in self.store.live(phases=["ending"]):
                        if dispatch.dispatch_id in self.runs:
                            self.finish(dispatch.dispatch_id, EndReason.PREEMPTION_TIMEOUT)

    def states(self):
        return {n: str(self.store.job(job_id).state) for n, job_id in self.jobs.items()}


def moment_of_job(job):
    """The moment that a job of a schedule was submitted for."""
    [text] = [tag.removeprefix("moment:") for tag in job.intent.tags if tag.startswith("moment:")]
    return moment_of(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC))
