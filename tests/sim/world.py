"""
A scheduler, its workers and everything that can go wrong between them, on a clock that jumps; all of it from one seed.

The real store, desk, dispatcher and keeper run here. Simulated are the network (messages lost, doubled, late, answers lost), the processes (the
scheduler dies before or after any commit, workers die or stand still past their lease), people and time. After every
commit the store is audited and the promises are checked; at the end everything heals, and every job must get somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import Refused
from penstock.core.jobs.admission import AdmissionLimits, Budget, Caps
from penstock.core.jobs.dependencies import Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.schedules import Missed, Overlap, Schedule
from penstock.core.jobs.states import ENDED, FINAL, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import (
    HOUR,
    MINUTE,
    SECOND,
    AddonId,
    Constraint,
    DispatchId,
    EndReason,
    JobId,
    Moment,
    member_of,
)
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrays import ArrayService
from penstock.scheduler.batches import BatchRequest, BatchService
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import JobService
from penstock.scheduler.maintenance import BudgetEnforcer, Maintenance, put_in_order, recover
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.schedules import ScheduleFirer, ScheduleService
from penstock.scheduler.waitlist import SubmitWaitlist
from penstock.stores.api import Depth, Operation, Query, Receipt, SetAddon, Store, committed

__all__ = ["CAPACITY", "Broken", "World"]

CAPACITY = 90
HOST_CAPS = Caps(per_addon=4, constraints={"disk_write_heavy": 1})
DEPTH = 6
DAY = 24 * HOUR
#: A worker that has not renewed for this part of its lease stops its run.
SELF_FENCE = 0.66


class Broken(AssertionError):
    """A promise does not hold."""


class Crash(BaseException):
    """The scheduler's process is gone. A BaseException, so that no `except Exception` of ours survives what nothing survives."""


class Tap:
    """The store as the scheduler's process sees it: it may die before a commit, or after one and before the answer."""

    def __init__(self, world: World, store: Store) -> None:
        self._world, self._store = world, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        self._world.maybe_crash()
        answers = self._store.commit(*operations, wait=wait)
        for answer in answers:
            answer.exception()  # written, or refused
        self._world.check()
        self._world.maybe_crash()
        return answers


@dataclass
class Run:
    """A job as its worker has it. `renewed`: when the last heartbeat that was answered had been sent."""

    job_id: JobId
    dispatch_id: DispatchId
    cost: int
    began: Moment
    ends: Moment
    renewed: Moment


@dataclass
class Worker:
    name: str
    runs: list[Run] = field(default_factory=list)
    still_until: Moment = 0  # stopped by SIGSTOP; nothing of it runs


@dataclass
class World:
    seed: int
    make_store: Callable[[Callable[[], Moment], Callable[[], str]], Store]
    steps: int = 150
    trouble: float = 0.15
    #: Also arrays, batches with callbacks, and schedules of every kind of overlap.
    sources: bool = False

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.now: Moment = 1_900_000_000 * SECOND
        self.last_id = 0
        self.store = self.make_store(lambda: self.now, self.new_id)
        self.budget = self.rng.choice([700, 10_000])  # what addon "a" may spend in a day
        self.depth = 3 * DEPTH if self.sources else DEPTH
        self.rules = SchedulerRules(
            capacity=Capacity(fixed=CAPACITY),
            limits=AdmissionLimits(HOST_CAPS, {AddonId("a"): Budget(day=self.budget)}),
            depth=Depth(total=self.depth),
            retention=30 * HOUR,
            grace=3 * SECOND,
        )
        self.runner = Worker("runner:0")  # our own: its runs do not outlive the scheduler that comes next
        self.workers = [self.runner, *(Worker(f"w{i}") for i in range(2))]
        self.waiting: list[Future[list[Receipt]]] = []  # submits that wait for room, in the order they came
        self.told: set[str] = set()  # keys of alerts
        self.down = False
        self.late: list[tuple[Moment, Callable[[], object]]] = []
        self.acknowledged: set[JobId] = set()
        self.seen: dict[JobId, tuple[JobState, int]] = {}
        self.journal: list[
            tuple[JobId, Moment, Moment]
        ] = []  # when a job really ran, written outside of the system
        self.cursor = 0
        self.healthy = False
        self.history: list[str] = []
        self.moments: set[tuple[str, str]] = set()  # that became jobs
        self.ended: set[JobId] = set()  # jobs, arrays and batches
        self.again: set[JobId] = set()  # retried by a person
        self.boot()

    def new_id(self) -> str:
        self.last_id += 1
        return f"id-{self.last_id:06}"

    def boot(self) -> None:
        """What a process has in memory is new; only the store is old. It may die again at once."""
        while True:
            try:
                self.start()
            except Crash:
                self.history.append("crash")
            else:
                return

    def start(self) -> None:
        tap: Any = Tap(self, self.store)
        self.waiting.clear()  # nobody will answer them
        machine, pulling_workers = HostLoad(self.rules), PullingWorkers()
        self.dispatcher = Dispatcher(tap, self.rules, machine, pulling_workers)
        self.maintenance = Maintenance(tap, self.rules)
        self.room, self.budgets = (
            SubmitWaitlist(tap, self.dispatcher.commit_submits, self.rules.depth),
            BudgetEnforcer(tap, self.rules),
        )
        self.job_service = JobService(tap, self.rules, self.dispatcher, self.room)
        self.arrays = ArrayService(tap, self.rules, self.job_service)
        self.batches = BatchService(tap, self.rules, self.job_service)
        self.schedules = ScheduleService(tap, self.rules)
        self.firer = ScheduleFirer(tap, self.rules, self.job_service.cancel)
        put_in_order(tap, self.rules.ordering.aging)
        recover(tap, self.rules, self.end_survivors)

    def end_survivors(self, dispatches: Sequence[Dispatch]) -> list[DispatchId]:
        self.journal += [(run.job_id, run.began, self.now) for run in self.runner.runs]
        self.runner.runs = []
        return [d.dispatch_id for d in dispatches if d.worker == self.runner.name]

    # the run

    def play(self) -> None:
        for _ in range(self.steps):
            self.act()
        self.heal()

    def act(self) -> None:
        acts: list[tuple[int, Callable[[], object]]] = [
            (3, self.submit),
            (6, self.tick),
            (10, self.work),
            (4, self.pass_time),
            (2, self.person),
            (1, self.worker_trouble),
            (2, self.deliver_late),
        ]
        if self.sources:
            acts += [(1, self.submit_array), (1, self.submit_batch), (1, self.set_schedule)]
        act = self.rng.choices([a for _, a in acts], [w for w, _ in acts])[0]
        self.history.append(act.__name__)
        act()

    def maybe(self, chance: float) -> bool:
        return not self.healthy and self.rng.random() < chance

    def maybe_crash(self) -> None:
        if self.maybe(self.trouble / 10):
            raise Crash

    def call(self, act: Callable[[], Any]) -> Any:
        """One request to the scheduler. None: no answer, for whatever reason."""
        try:
            return act()
        except Crash:
            self.history.append("crash")
            self.stay_down()
            self.boot()
        except Refused as refusal:
            self.history.append(type(refusal).__name__)
        return None

    def stay_down(self) -> None:
        """Nobody listens, and what our runner had started runs on: its processes know nothing of leases."""
        if not self.healthy:
            self.down = True
            self.move_clock(self.rng.choice([0, 0, 5, 40, 100]) * SECOND)
            self.down = False

    def send(self, act: Callable[[], Any]) -> Any:
        """A request over a network that loses, doubles and delays."""
        if self.maybe(self.trouble):
            return None
        if self.maybe(self.trouble):
            self.late.append((self.now + self.rng.randrange(120) * SECOND, act))
            return None
        answer = self.call(act)
        if self.maybe(self.trouble):
            self.call(act)
        return None if self.maybe(self.trouble) else answer

    # what happens

    def submit(self) -> None:
        rng = self.rng
        intent = Intent(
            addon_id=AddonId(rng.choice("ab")),
            job_type=rng.choice("xy"),
            cost_units=rng.choice([1, 10, 30, 90]),
            priority=rng.choice([1, 50, 80, 100]),
            constraints=rng.choice([Constraint.NONE, Constraint.NONE, Constraint.DISK_WRITE_HEAVY]),
            expected_duration_sec=rng.choice([None, 5.0, 60.0]),
            earliest_start_at=rng.choice([None, None, self.now + 40 * SECOND]),
            deadline_at=rng.choice([None, None, None, self.now + 300 * SECOND]),
            max_runtime_sec=rng.choice([None, 15]),
            max_active_sec=rng.choice([None, 40]),
            retry_delays_sec=rng.choice([(), (5,)]),
            cost_limit=rng.choice([None, 300]),
            idempotency_key=f"key-{self.new_id()}",
            after=self.parents(),
            if_unmet=rng.choice(list(IfUnmet)),
        )
        # An answer that was lost is asked for again, with the same key: no second job may come of it.
        wait_sec = rng.choice([0, 0, 20, 60])
        for _ in range(3):
            room = self.room
            answer = self.send(lambda: self.job_service.submit_soon([intent], wait_sec))
            if answer is not None and room is self.room:  # else it died with the scheduler that was asked
                self.waiting.append(answer)
                break
        self.collect()

    def work_intent(self) -> Intent:
        return Intent(
            addon_id=AddonId(self.rng.choice("ab")),
            job_type=self.rng.choice("xy"),
            cost_units=self.rng.choice([1, 10, 30]),
            retry_delays_sec=(5,),
        )

    def submit_array(self) -> None:
        """Or cancel one, or run its failed indices again."""
        known = self.store.arrays(10)
        if known and self.rng.random() < 0.4:
            array_id = self.rng.choice(known).array.array_id
            act = self.rng.choice([self.arrays.cancel, self.arrays.retry])
            self.send(lambda: act(array_id))
            return
        intent = replace(self.work_intent(), idempotency_key=f"array-{self.new_id()}")
        indices = self.rng.choice(["0-3%1", "1-5%2", "7,9"])
        for _ in range(3):  # a lost answer is asked for again
            if self.send(lambda: self.arrays.submit(intent, indices)) is not None:
                break

    def submit_batch(self) -> None:
        """Or close one, or cancel it."""
        known = self.store.batches(10)
        if known and self.rng.random() < 0.5:
            name = self.rng.choice(known).name
            act = self.rng.choice([self.batches.close, self.batches.cancel])
            self.send(lambda: act(name))
            return
        jobs = [self.work_intent() for _ in range(self.rng.choice([1, 2]))]
        name, is_open = self.new_id(), self.rng.random() < 0.3
        callback = self.work_intent()
        request = BatchRequest(name, AddonId("a"), jobs, callback, callback, is_open=is_open, key=name)
        for _ in range(3):
            if self.send(lambda: self.batches.submit(request)) is not None:
                break

    def set_schedule(self) -> None:
        known = self.store.schedules()
        if known and self.rng.random() < 0.7:
            name = self.rng.choice(known).name
            service = self.schedules
            act = self.rng.choice([service.pause, service.resume, service.remove, service.run_now])
            self.send(lambda: act(name))
            return
        schedule = Schedule(
            self.new_id(),
            self.work_intent(),
            every_sec=self.rng.choice([20, 60]),
            overlap=self.rng.choice(list(Overlap)),
            missed=self.rng.choice(list(Missed)),
            missed_limit=3,
        )
        self.send(lambda: self.schedules.add(schedule))

    def parents(self) -> tuple[Dependency, ...]:
        """Mostly none."""
        known = sorted(self.acknowledged)
        if self.sources:
            known += [record.array.array_id for record in self.store.arrays(5)]
            known += [group.group_id for group in self.store.batches(5)]
        if not known or self.rng.random() < 0.7:
            return ()
        names = self.rng.sample(known, min(len(known), self.rng.choice([1, 2])))
        return tuple(Dependency(name, self.rng.choice(list(ParentCondition))) for name in names)

    def collect(self) -> None:
        """Answers to submits. Nobody was let in before one that had waited longer."""
        for position, answer in enumerate(self.waiting):
            if not answer.done():
                continue
            refusal = answer.exception()
            self.history.append("let in" if refusal is None else type(refusal).__name__)
            if refusal is None:
                [receipt] = answer.result()
                self.acknowledged.add(receipt.job_id)
                if receipt.created and not all(before.done() for before in self.waiting[:position]):
                    raise Broken("a submit was let in before one that waited longer")
        self.waiting = [answer for answer in self.waiting if not answer.done()]

    def tick(self) -> None:
        self.call(lambda: self.room.step(self.now))
        self.collect()
        self.call(lambda: self.maintenance.step(self.now))
        if self.sources:
            self.call(lambda: self.firer.step(self.now))
        if self.call(lambda: self.budgets.step(self.now)) == self.now + self.rules.tick:
            self.check_purse()
        self.call(lambda: self.dispatcher.step(self.now))

    def pass_time(self) -> None:
        self.move_clock(self.rng.choice([1, 2, 3, 5, 5, 8, 31, 70]) * SECOND)

    def move_clock(self, span: int) -> None:
        """Runs end by themselves at their time, and by self-fencing when their worker could not renew."""
        self.now += span
        for worker in self.workers:
            if worker.still_until <= self.now:
                worker.runs = [run for run in worker.runs if not self.fenced(worker, run)]

    def fenced(self, worker: Worker, run: Run) -> bool:
        limit = run.renewed + int(SELF_FENCE * self.rules.lease_for)
        if self.now <= limit or (self.down and worker is self.runner):
            return False
        self.journal.append((run.job_id, run.began, min(limit, max(run.began, run.ends))))
        return True

    def work(self) -> None:
        worker = self.rng.choice(self.workers)
        if worker.still_until > self.now:
            return
        for run in list(worker.runs):
            if run not in worker.runs:
                continue  # it ended with the scheduler, or while nobody listened
            if run.ends <= self.now or self.rng.random() < 0.2:
                self.finish(worker, run)
            else:
                self.beat(worker, run)
        if len(worker.runs) < 3:
            self.find_work(worker)

    def way(self, worker: Worker) -> Callable[[Callable[[], Any]], Any]:
        """Our own runner lives in the scheduler's process: nothing gets lost between them but both of them."""
        return self.call if worker is self.runner else self.send

    def find_work(self, worker: Worker) -> None:
        ask, sent = self.way(worker), self.now
        if self.rng.random() < 0.5:
            kinds = WorkerKinds(AddonId("a"), frozenset(self.rng.choice([[], ["x"]])))
            claimed = ask(lambda: self.job_service.claim(kinds, self.rng.choice([1, 2]), worker.name))
            for job, dispatch, *_ in claimed or []:
                self.begin(worker, job.job_id, dispatch, sent)
            return
        offered = ask(lambda: self.job_service.dispatchable(None)) or []
        if offered and (job_id := self.rng.choice(offered).job_id) is not None:
            dispatch = ask(lambda: self.job_service.lease(job_id, worker.name))
            if dispatch is not None:
                self.begin(worker, job_id, dispatch, sent)

    def begin(self, worker: Worker, job_id: JobId, dispatch: Dispatch, sent: Moment) -> None:
        ends = self.now + self.rng.choice([0, 3, 20, 90]) * SECOND
        cost = dispatch.admission_class.cost_units
        worker.runs.append(Run(job_id, dispatch.dispatch_id, cost, self.now, ends, sent))

    def beat(self, worker: Worker, run: Run) -> None:
        spent = self.rng.choice([None, 100, 250, 400])
        checkpoint = self.rng.choice([None, "[1]"])
        sent = self.now
        answer = self.way(worker)(
            lambda: self.job_service.heartbeat(run.dispatch_id, spent=spent, checkpoint=checkpoint)
        )
        if answer is None or run not in worker.runs:
            return
        if answer.stop is None:
            self.check_limit(run.job_id)
            run.renewed = sent
        elif self.rng.random() < 0.7:  # some runs do not listen, until their time is up
            self.finish(worker, run, EndReason.RELEASED)

    def finish(self, worker: Worker, run: Run, how: EndReason | None = None) -> None:
        worker.runs.remove(run)
        self.journal.append((run.job_id, run.began, self.now))
        end = how or self.rng.choice(
            [EndReason.COMPLETED] * 5 + [EndReason.JOB_ERROR, EndReason.UNAVAILABLE, EndReason.RELEASED]
        )
        for _ in range(2):
            if self.way(worker)(lambda: self.job_service.end(run.dispatch_id, end)) is not None:
                break

    def person(self) -> None:
        jobs = self.store.find(Query(limit=100))
        if not jobs:
            return
        lively = [job for job in jobs if job.state is JobState.RUNNING]
        job_id = self.rng.choice(lively if lively and self.rng.random() < 0.5 else jobs).job_id
        acts: list[Callable[[], object]] = [
            lambda: self.job_service.cancel(job_id),
            lambda: self.job_service.retry(job_id),
            lambda: self.job_service.edit(job_id, priority=99),
            lambda: self.job_service.explain(job_id),
            lambda: committed(self.store, SetAddon(AddonId("b"), paused=self.rng.random() < 0.5)),
        ]
        act = self.rng.choice(acts)
        self.send(act)

    def worker_trouble(self) -> None:
        worker = self.rng.choice(self.workers)
        if self.maybe(0.5):
            # Killed: its runs end with it.
            self.journal += [(run.job_id, run.began, self.now) for run in worker.runs]
            worker.runs = []
        elif worker is not self.runner and self.maybe(0.7):
            # Stopped past its lease. When it goes on it must not take its old runs for its own.
            for run in worker.runs:
                self.journal.append((run.job_id, run.began, self.now))
                stale = run.dispatch_id
                self.late.append((self.now + 90 * SECOND, lambda d=stale: self.job_service.end(d)))  # type: ignore[misc]  # bound now
                self.late.append((self.now + 95 * SECOND, lambda d=stale: self.job_service.heartbeat(d)))  # type: ignore[misc]
            worker.runs, worker.still_until = [], self.now + 90 * SECOND

    def deliver_late(self) -> None:
        due = [item for item in self.late if item[0] <= self.now]
        self.late = [item for item in self.late if item[0] > self.now]
        self.rng.shuffle(due)
        for _, act in due:
            self.call(act)

    # what must hold

    def check(self) -> None:
        problems = self.store.audit()
        if problems:
            raise Broken("; ".join(problems))
        self.check_books()
        self.check_machine()
        self.check_events()

    def check_books(self) -> None:
        ledger = self.store.ledger(self.rules.host)
        live = self.store.live()
        if not ledger.units == sum(d.admission_class.cost_units for d in live) <= CAPACITY:
            raise Broken(
                f"{ledger.units} units are used of {CAPACITY}, dispatches say {[d.admission_class.cost_units for d in live]}"
            )
        for (scope, name), count in ledger.counts.items():
            limit = HOST_CAPS.limit(scope, name)
            if limit is not None and count > limit:
                raise Broken(f"{count} of {scope} {name} are in flight, the cap is {limit}")

    def check_machine(self) -> None:
        """What really runs, whatever the books say: never more than the machine has, never a job twice."""
        runs = [run for worker in self.workers if worker.still_until <= self.now for run in worker.runs]
        if sum(run.cost for run in runs) > CAPACITY:
            raise Broken(f"runs of {[run.cost for run in runs]} units are on a machine of {CAPACITY}")
        if len({run.job_id for run in runs}) != len(runs):
            raise Broken(f"a job runs twice: {[run.job_id for run in runs]}")

    def check_events(self) -> None:
        for event in self.store.events(self.cursor, 10_000):
            if event.seq <= self.cursor:
                raise Broken(f"event {event.seq} appeared at or below {self.cursor}")
            self.cursor = event.seq
            if event.job_id is not None:
                self.check_move(event, event.job_id)
            self.check_sources(event)
            is_index = event.job_id is not None and member_of(event.job_id) is not None
            if event.kind == "SUBMITTED" and not is_index and self.queued() > self.depth:
                raise Broken(f"{self.queued()} jobs are queued, of {self.depth}, and one more was taken")
            if event.kind == "ALERT":
                self.check_alert(event)

    def check_sources(self, event: Event) -> None:
        """Each moment becomes a job once, an array keeps to its limit, and no child starts before its parents end."""
        match event.kind:
            case EventKind.SCHEDULE_FIRED if event.reason == "due":
                moment = (event.data["schedule"], event.data["moment"])
                if moment in self.moments:
                    raise Broken(f"{moment} became two jobs")
                self.moments.add(moment)
            case EventKind.ARRAY_ENDED:
                self.ended.add(event.data["array_id"])
            case EventKind.BATCH_ENDED:
                self.ended.add(JobId(f"batch:{event.data['batch']}"))
            case EventKind.RETRIED if event.job_id is not None:
                self.again.add(event.job_id)
            case EventKind.SUBMITTED if event.job_id is not None:
                self.check_limit_of_array(event.job_id)
            case EventKind.DISPATCHING if event.job_id is not None:
                self.check_parents(event.job_id)
            case _:
                pass
        if event.job_id is not None and event.state in ENDED:
            self.ended.add(event.job_id)

    def check_limit_of_array(self, job_id: JobId) -> None:
        """What a person retries by itself is not counted by the array."""
        member = member_of(job_id)
        record = None if member is None else self.store.array(member[0])
        if record is None or record.array.spec.at_once is None:
            return
        mine = [each for each in self.seen if each.startswith(f"{record.array.array_id}_")]
        live = [each for each in mine if self.seen[each][0] not in ENDED and each not in self.again]
        if len(live) > record.array.spec.at_once:
            raise Broken(f"{live} live at once of an array {record.array.indices}")

    def check_parents(self, job_id: JobId) -> None:
        job = self.store.job(job_id)
        after = () if job is None else job.intent.after
        if (
            job is None or not after or job.intent.if_unmet is IfUnmet.ANY
        ):  # the first that has failed may be enough
            return
        waiting = [each.job_id for each in after if each.job_id not in self.ended]
        if waiting:
            raise Broken(f"job {job_id} was dispatched before {waiting} had ended")

    def queued(self) -> int:
        return sum(addon.jobs.get(JobState.QUEUED, 0) for addon in self.store.addons())

    def check_alert(self, event: Event) -> None:
        if event.data["key"] in self.told:
            raise Broken(f"{event.data['key']} was told twice")
        self.told.add(event.data["key"])

    def over_budget(self) -> bool:
        spent = self.store.ledger(self.rules.host).spent.get(AddonId("a"), {})
        return spent.get("day", 0) >= self.budget

    def check_purse(self) -> None:
        live = self.store.live(addon_id=AddonId("a"), phases=[DispatchPhase.RESERVED, DispatchPhase.LEASED])
        if live and self.over_budget():
            raise Broken(f"the budget is spent and {[d.dispatch_id for d in live]} go on")

    def check_limit(self, job_id: JobId) -> None:
        job = self.store.job(job_id)
        if job is None or job.state is not JobState.RUNNING or job.intent.cost_limit is None:
            return
        if job.spent - job.spent_before >= job.intent.cost_limit:
            raise Broken(f"job {job_id} spent {job.spent} and was not told to stop")

    def check_move(self, event: Event, job_id: JobId) -> None:
        state, fence = self.seen.get(job_id, (None, 0))
        if event.state is None or (state in FINAL and event.state is not state):
            raise Broken(f"job {job_id} went from {state} to {event.state}")
        if event.kind == "DISPATCHING":
            newer = int(str(event.dispatch_id).rpartition(".")[2])
            if newer <= fence:
                raise Broken(f"job {job_id} was dispatched with fence {newer} after {fence}")
            fence = newer
            job = self.store.job(job_id)
            if job is not None and job.intent.addon_id == "a" and self.over_budget():
                raise Broken(f"job {job_id} was dispatched on a budget that is spent")
        self.seen[job_id] = (event.state, fence)

    def check_journal(self) -> None:
        """Two attempts of one job never ran at the same time, as seen by somebody outside."""
        running = [(run.job_id, run.began, self.now) for worker in self.workers for run in worker.runs]
        last: dict[JobId, Moment] = {}
        for job_id, began, ended in sorted([*self.journal, *running], key=lambda entry: entry[1]):
            if began < last.get(job_id, 0):
                raise Broken(f"job {job_id} ran twice at once, from {began}")
            last[job_id] = max(ended, last.get(job_id, 0))

    # the end

    def heal(self) -> None:
        self.check_journal()
        self.healthy = True
        self.late.clear()
        if self.over_budget():
            self.now = (self.now // DAY + 1) * DAY
        self.boot()
        for record in self.store.schedules():
            self.schedules.remove(record.name)
        for batch in self.store.batches(1_000):
            self.batches.close(batch.name)
        for addon_id in "ab":
            committed(self.store, SetAddon(AddonId(addon_id), paused=False))
        for worker in self.workers:
            worker.still_until = 0
        for _ in range(600):
            self.tick()
            self.serve()
            if not self.store.find(Query(states=[s for s in JobState if s not in SETTLED])):
                break
            self.now = max(self.now + SECOND, min(self.maintenance.step(self.now), self.now + 10 * MINUTE))
        self.check_healed()

    def serve(self) -> None:
        """Workers that do as they are told: every reservation is taken up, every run ends well."""
        for worker in self.workers:
            worker.runs = []
        for dispatch in self.store.live():
            if dispatch.phase is DispatchPhase.RESERVED and dispatch.job_id is not None:
                self.call(lambda job_id=dispatch.job_id: self.job_service.lease(job_id))  # type: ignore[misc]  # bound now
            self.call(lambda d=dispatch.dispatch_id: self.job_service.end(d))  # type: ignore[misc]
        for _, dispatch, *_ in self.call(lambda: self.job_service.claim(WorkerKinds(), 10, "healer")) or []:
            self.call(lambda d=dispatch.dispatch_id: self.job_service.end(d))  # type: ignore[misc]

    def waits_for_a_person(self, job: Job, jobs: Mapping[JobId, Job]) -> bool:
        """A parent is BLOCKED or FAILED, or waits for such a one itself."""
        names = [
            dependency.parent
            for dependency in self.store.dependencies(job.job_id)
            if dependency.child == job.job_id and dependency.status == "open"
        ]
        parents = [jobs[name] for name in names if name in jobs]
        # A group has a job that is BLOCKED, or a child that waits for a retry of the group.
        return len(parents) < len(names) or any(
            parent.state in (JobState.BLOCKED, JobState.FAILED)
            or (parent.unmet > 0 and self.waits_for_a_person(parent, jobs))
            for parent in parents
        )

    def check_healed(self) -> None:
        jobs = {job.job_id: job for job in self.store.find(Query(limit=10_000))}
        lost = self.acknowledged - jobs.keys()
        if lost:
            raise Broken(f"acknowledged and gone: {lost}")
        waiting = {job.job_id for job in jobs.values() if job.unmet and self.waits_for_a_person(job, jobs)}
        stuck = [
            f"{job.job_id} {job.state}"
            for job in jobs.values()
            if job.state not in SETTLED and job.job_id not in waiting
        ]
        if stuck:
            raise Broken(f"after everything healed these got nowhere: {stuck}")
        keys = [key for job in jobs.values() if (key := job.intent.idempotency_key) is not None]
        if len(keys) != len(set(keys)):
            raise Broken("one submit became two jobs")
        if self.store.ledger(self.rules.host).units:
            raise Broken("units are still held though nothing runs")
