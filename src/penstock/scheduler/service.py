"""
The parts of one scheduler, put together once, for the library, the daemon and the test kit; and the driver, the only thread that waits.

The driver calls each part when the part asked for it, and all of them when it is woken. A wake-up only sets an event, so a
thousand of them during a step cost one more step. A part that raises is logged and called again later: the store has rolled
back, and the next step decides on what is true.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Protocol, Self

from penstock.core.errors import Unavailable
from penstock.core.jobs.types import SECOND, Moment, Span, seconds
from penstock.scheduler.budgets import BudgetEnforcer
from penstock.scheduler.clock import SteadyClock
from penstock.scheduler.dispatcher import FOR_EVER, Dispatcher, PullingWorkers, WorkerKinds
from penstock.scheduler.hosts import HostLoad, HostRegistration, Introduction
from penstock.scheduler.job_service import JobService, YieldRequests
from penstock.scheduler.load_sampler import LoadProbe, LoadSampler, Pids
from penstock.scheduler.maintenance import Maintenance, Survivors, put_in_order, recover
from penstock.scheduler.preemption import Preempter
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.waitlist import SubmitWaitlist
from penstock.stores.api import Clock, Store

log = logging.getLogger("penstock.driver")


class Part(Protocol):
    def step(self, now: Moment) -> Moment:
        """Do what is due; return when to be called again."""
        ...


class Driver:
    def __init__(
        self,
        clock: Clock,
        parts: Sequence[Part],
        *,
        after_failure: Span = 5 * SECOND,
        name: str = "penstock-driver",
    ) -> None:
        self._clock, self._parts, self._after_failure = clock, parts, after_failure
        self._wakeup, self._stopping = Event(), Event()
        self._thread = Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Something changed. From any thread; never blocks."""
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():  # a Ctrl-C may have come before its start
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._wakeup.clear()  # before the steps: a ring during them must bring another round
            wait = self.round() - self._clock()
            if wait > 0:
                self._wakeup.wait(seconds(wait))

    def round(self) -> Moment:
        """
        Every part once; when the first of them wants to be asked again. All are told the same moment: those who asked for the same pause
        then come due together, and an idle scheduler is woken once for all of them.
        """
        now = self._clock()
        return min(self._step(part, now) for part in self._parts)

    def _step(self, part: Part, now: Moment) -> Moment:
        try:
            return part.step(now)
        except (Unavailable, OSError) as error:  # a full disk, a database that is away: said in one line
            log.error(  # noqa: TRY400  # as above
                "%s failed: %s; it is asked again in %s s",
                type(part).__name__,
                error,
                seconds(self._after_failure),
            )
            return now + self._after_failure
        except Exception:  # one part's mistake must not stop the other parts
            log.exception(
                "%s failed; it is asked again in %s s", type(part).__name__, seconds(self._after_failure)
            )
            return now + self._after_failure


class SchedulerService:
    """
    `job_service` serves from the beginning, in any number of processes. `start` takes the right to dispatch (DispatcherHeld says who
    has it), deals with what a scheduler before it left in flight, and begins to tick. `survivors` ends what our own runner
    left running: `recovery` says what becomes of whose runs. `pids`: the roots of what our runner has running now, whose load
    is not somebody else's. `reserves`: False where a part of this process fetches all that is run: a round that starts nothing would
    only cost, and a job that nobody here can run waits in line instead of holding units. `preempts`: a run is asked to make room for a job that counts for
    clearly more, which only those should do whose runs can be made to end. `heard`: is told of every commit instead of the driver, and rings it itself.
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
        heard: Callable[[], None] | None = None,
    ) -> None:
        self.store, self.rules = store, rules
        self._survivors = survivors
        self.machine = HostLoad(rules)
        self.fetchers = PullingWorkers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.fetchers)
        self.waitlist = SubmitWaitlist(
            store, self.dispatcher.commit_submits, rules.depth, self._somebody_waits
        )
        self.yields = YieldRequests()
        self.job_service = JobService(
            store, rules, self.machine, self.dispatcher, self.waitlist, yields=self.yields
        )
        self.maintenance = Maintenance(store, rules, clock, shifts=self.dispatcher.reserved.shift)
        self.registration = HostRegistration(store, rules, self.machine, introduction)
        # Signals before the dispatcher: a machine that grew quiet admits in the same round of the driver.
        parts: list[Part] = [
            self.registration,
            *more,
            self.waitlist,
            self.maintenance,
            BudgetEnforcer(store, rules),
        ]
        if reserves:
            parts.append(self.dispatcher)
        else:
            self.fetchers.came(WorkerKinds(own=True), FOR_EVER)
        if preempts:
            parts.append(Preempter(store, rules, self.dispatcher, self.job_service, self.yields))
        if rules.capacity.fixed is None:
            parts.insert(0, LoadSampler(self.machine, LoadProbe(pids), every=rules.sense_every))
        self.driver = Driver(store.now, parts)
        self._heard = heard or self.driver.ring
        self._usher: Driver | None = None
        self._started, self._lock = False, Lock()

    def start(self, holder: str = "") -> Self:
        holder = holder or f"process {os.getpid()}"
        self.store.acquire_dispatch(holder, self.dispatcher.relay)
        try:
            self.registration.join()
            put_in_order(self.store, self.rules.ordering.aging)
            recover(self.store, self.rules, self._survivors, holder)
            self.dispatcher.begin()
        except BaseException:  # nobody will stop what did not start, Ctrl-C included: others may dispatch
            self.store.release_dispatch()
            raise
        self._started = True  # before the driver begins: `stop` ends it, also after a Ctrl-C in these lines
        self.store.on_change(self._heard)
        self.driver.start()
        return self

    def stop(self) -> None:
        """No further tick, and no right to dispatch. What runs goes on under its leases; the store is closed by who opened it."""
        if self._started:
            self._started = False
            self.driver.stop()
            self.dispatcher.reserved.end()
            self._leave()
        self.waitlist.close()
        with self._lock:
            usher, self._usher = self._usher, None
        if usher is not None:
            usher.stop()

    def _leave(self) -> None:
        """A store that is away learns it from our silence."""
        try:
            self.registration.leave()
            self.store.release_dispatch()
        except Unavailable as error:
            log.warning("left without saying so: %s", error)

    def kick(self) -> None:
        """Look now for what may start."""
        self.driver.ring()

    def drain(self, on: bool = True) -> None:
        """Nothing more starts on this host; what runs goes on. For a host that is to be stopped, so it ends with the process."""
        self.machine.draining = on
        self.driver.ring()

    def _somebody_waits(self) -> None:
        """For room. A house that dispatches lets them in as it ticks; in any other process a driver of their own does."""
        if self._started:
            self.driver.ring()
            return
        with self._lock:
            if self._usher is None:
                self._usher = Driver(self.store.now, [self.waitlist])
                self.store.on_change(self._usher.ring)
                self._usher.start()
            self._usher.ring()
