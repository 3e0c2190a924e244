"""
The scheduler service: puts the parts of one scheduler together, for the library, the daemon and the test kit.

The driver calls the parts that start jobs (the dispatcher and the library's workers) with each wake-up, and
upkeep when it is due. A commit brings three kinds of upkeep forward: maintenance (the commit may have made a
lease end early), the host's registration (an operator may have drained the host) and schedules (the job that
a schedule waits for may have ended).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, Self

from penstock.core.errors import Unavailable
from penstock.core.jobs.types import MILLISECOND, SECOND, Moment, Span
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.arrays import ArrayAdvancer, ArrayService
from penstock.scheduler.batches import BatchService
from penstock.scheduler.dispatcher import FOR_EVER, Dispatcher, PullingWorkers
from penstock.scheduler.driver import Driver, Part, SteadyClock, TimedPart
from penstock.scheduler.hosts import HostLoad, HostRegistration, Introduction
from penstock.scheduler.job_service import JobService, YieldRequests
from penstock.scheduler.learning import EVERY as LEARN_EVERY
from penstock.scheduler.learning import Learner
from penstock.scheduler.load_sampler import LoadProbe, LoadSampler, Pids
from penstock.scheduler.maintenance import BudgetEnforcer, Maintenance, Survivors, put_in_order, recover
from penstock.scheduler.preemption import Preempter
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.schedules import LoadRecorder, ScheduleFirer, ScheduleService
from penstock.scheduler.waitlist import SubmitWaitlist
from penstock.stores.api import Store

log = logging.getLogger("penstock.driver")

#: Maintenance sees a commit that makes something due early this late. Its deadlines are seconds apart.
_MAINTENANCE: Final[Span] = 100 * MILLISECOND
#: A schedule sees the end of the job that its moment waits for this late; it looks no more often than this.
_SCHEDULES: Final[Span] = 500 * MILLISECOND
#: A host sees this late that an operator drained it.
_REGISTRATION: Final[Span] = 1 * SECOND


class SchedulerService:
    """
    One scheduler with all its parts. `job_service` can be used before `start`, in any number of processes.
    `start` takes the right to dispatch, recovers the dispatches that the last scheduler left in flight, and
    starts the driver. It raises DispatcherHeld, with the name of the holder, if another process dispatches.

    `more`: further parts that the driver calls with each wake-up. `survivors` ends the processes that the
    last runner of this host left running. `pids`: the root processes of the jobs that the runner runs now;
    their load does not count as that of other programs. `reserves`: False if a part of this process claims
    all jobs that it runs. Then this service runs no rounds of its own, and a job that no worker here can run
    waits in the queue instead of holding units. `preempts`: the scheduler asks attempts to yield to jobs of
    clearly higher priority; only for a scheduler that can end attempts. `on_commit` is called after every
    commit instead of `wake`, and wakes the driver itself.
    """

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        *,
        clock: SteadyClock | None = None,
        more: Sequence[Part] = (),
        survivors: Survivors | None = None,
        pids: Pids = tuple,
        reserves: bool = True,
        preempts: bool = False,
        introduction: Introduction | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self.store, self.rules = store, rules
        self._survivors = survivors
        self.machine = HostLoad(rules)
        self.pulling_workers = PullingWorkers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.pulling_workers)
        self.waitlist = SubmitWaitlist(
            store, self.dispatcher.commit_submits, rules.depth, self._serve_waitlist
        )
        self.yields = YieldRequests()
        self.learner = Learner(store)
        self.job_service = JobService(
            store, rules, self.dispatcher, self.waitlist, yields=self.yields, learner=self.learner
        )
        self.learner.sample = self.job_service.forecaster.sample
        self.maintenance = Maintenance(store, rules, clock, on_shift=self.dispatcher.begin)
        self.registration = HostRegistration(
            store, rules, self.machine, introduction, workers=self.pulling_workers.registered
        )
        self.arrays = ArrayService(store, rules, self.job_service)
        self.batches = BatchService(store, rules, self.job_service)
        self.schedules = ScheduleService(store, rules)
        self.schedule_firer = ScheduleFirer(store, rules, self.job_service.cancel)
        self.preempter = Preempter(store, rules, self.dispatcher, self.job_service, self.yields)
        self.job_service.explainer.preemption = lambda: self.preempter.cycle
        parts: list[Part] = [*more]
        if reserves:
            parts.append(self.dispatcher)
        else:
            self.pulling_workers.came(WorkerKinds(own=True), FOR_EVER)
        upkeep = [
            TimedPart(self.registration, pause=_REGISTRATION),
            TimedPart(self.maintenance, pause=_MAINTENANCE),
            TimedPart(BudgetEnforcer(store, rules)),
            TimedPart(self.schedule_firer, pause=_SCHEDULES),
            TimedPart(ArrayAdvancer(self.arrays)),
        ]
        if rules.capacity.fixed is None:
            upkeep.append(TimedPart(LoadSampler(self.machine, LoadProbe(pids), rules.sense_every)))
            upkeep.append(TimedPart(LoadRecorder(store, rules.host, self._busy)))
        self.job_service.explainer.preempts = preempts
        if preempts:
            upkeep.append(TimedPart(self.preempter))
        self.driver = Driver(store.now, parts, upkeep)
        # The learner has a driver of its own, so that no start waits while it reads the trail. Its first step
        # comes late, because right after a start the jobs that the last process left come first.
        learning = TimedPart(self.learner, due=store.now() + LEARN_EVERY)
        self._learning = Driver(store.now, [], [learning], name="penstock-learning")
        self.wake = self.driver.wake
        if store.shared:
            self.pulling_workers.on_new = self.wake
        self._on_commit = on_commit or self.wake
        self._waitlist_driver: Driver | None = None
        self._started, self._lock = False, Lock()

    def _busy(self, now: Moment) -> float:
        return self.machine.conditions(now).busy.score

    def start(self, holder: str = "") -> Self:
        holder = holder or f"process {os.getpid()}"
        self.store.acquire_dispatch(holder, self.dispatcher.relay)
        try:
            self.registration.join()
            put_in_order(self.store, self.rules.ordering.aging)
            recover(self.store, self.rules, self._survivors, holder)
            self.dispatcher.begin()
        except BaseException:  # also Ctrl-C: `stop` is not called then, and other processes must dispatch
            self.store.release_dispatch()
            raise
        self._started = True  # before the driver starts, so that `stop` ends it after a Ctrl-C in these lines
        self.store.on_change(self._on_commit)
        self.store.on_change(self.learner.changed.set)
        self.driver.start()
        self._learning.start()
        return self

    def stop(self) -> None:
        """
        Give up the right to dispatch and start nothing more. Attempts go on under their leases. The caller
        that opened the store closes it.
        """
        if self._started:
            self._started = False
            self.driver.stop()
            self._learning.stop()
            self.dispatcher.end()
            self._leave()
        self.waitlist.close()
        with self._lock:
            driver, self._waitlist_driver = self._waitlist_driver, None
        if driver is not None:
            driver.stop()

    def _leave(self) -> None:
        try:
            self.registration.leave()
            self.store.release_dispatch()
        except Unavailable as error:  # the registration expires by itself
            log.warning("could not remove this host's registration: %s", error)

    def drain(self, on: bool = True) -> None:
        """
        Start nothing more on this host; attempts go on. For a process that is about to stop: the setting ends
        with the process.
        """
        self.machine.draining = on
        self.wake()

    def _serve_waitlist(self) -> None:
        """Wake the driver of the wait list. The first waiting submit starts it: most programs need none."""
        with self._lock:
            if self._waitlist_driver is None:
                self._waitlist_driver = Driver(self.store.now, [self.waitlist], name="penstock-waitlist")
                self.store.on_change(self._wake_waitlist)
                self._waitlist_driver.start()
            self._waitlist_driver.wake()

    def _wake_waitlist(self) -> None:
        driver = self._waitlist_driver
        if driver is not None and self.waitlist.waiters:
            driver.wake()
