"""
The parts of one scheduler, put together once, for the library, the daemon and the test kit.

Jobs start with each wake-up (the round, the library's workers, submits that wait for room). Upkeep is done
when it is due: most of it by the clock alone; maintenance, the host's registration and schedules also soon
after a commit, which may have brought a lease that ends early, an operator's drain, or the end of a job that a
schedule waits for.
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

#: How late maintenance sees a commit that makes something due early. What it looks for comes by the second.
_MAINTENANCE: Final[Span] = 100 * MILLISECOND
#: How late a schedule sees that the job which its moment waits for has ended, and how often it looks at most.
_SCHEDULES: Final[Span] = 500 * MILLISECOND
#: How late a host sees that an operator drained it.
_REGISTRATION: Final[Span] = 1 * SECOND


class SchedulerService:
    """
    `job_service` serves from the beginning, in any number of processes. `start` takes the right to dispatch
    (DispatcherHeld names the process that has it), recovers what the last scheduler left in flight, and
    starts the driver.

    `survivors` ends what the runner of this host left running. `pids`: the roots of what the runner has
    running now, whose load is our own. `reserves`: False where a part of this process claims all jobs that it
    runs: a round that starts nothing would only cost, and a job that no worker here can run waits in the
    queue instead of holding units. `preempts`: runs are asked to yield to jobs of clearly higher priority;
    only where the scheduler can make runs end. `on_commit` is called after every commit instead of `wake`,
    and wakes the driver itself.
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
        self.fetchers = PullingWorkers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.fetchers)
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
            store, rules, self.machine, introduction, workers=self.fetchers.registered
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
            self.fetchers.came(WorkerKinds(own=True), FOR_EVER)
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
        # Beside the driver: a job that may start does not wait until the trail is read. Not at the start, when jobs wait
        # that the last process left.
        learning = TimedPart(self.learner, due=store.now() + LEARN_EVERY)
        self._learning = Driver(store.now, [], [learning], name="penstock-learning")
        self.wake = self.driver.wake
        if store.shared:
            self.fetchers.on_new = self.wake
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
        except BaseException:  # `stop` will not be called, also after a Ctrl-C: let other processes dispatch
            self.store.release_dispatch()
            raise
        self._started = True  # before the driver starts: `stop` ends it, also after a Ctrl-C in these lines
        self.store.on_change(self._on_commit)
        self.store.on_change(self.learner.changed.set)
        self.driver.start()
        self._learning.start()
        return self

    def stop(self) -> None:
        """
        Give up the right to dispatch and start nothing more. Runs go on under their leases; the caller that
        opened the store closes it.
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
        except Unavailable as error:  # the registration runs out by itself
            log.warning("could not remove this host's registration: %s", error)

    def drain(self, on: bool = True) -> None:
        """
        Start nothing more on this host; runs go on. For a host that is about to stop: the process forgets it
        when it ends.
        """
        self.machine.draining = on
        self.wake()

    def _serve_waitlist(self) -> None:
        """
        A submit waits for room. The first one starts the driver of such submits: most programs need none.
        """
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
