"""
The parts of one scheduler, put together once: around them lie the library, the daemon and the test kit.

It owns when the parts run, and nothing else. Whoever makes it hands in the store and the clock that the store goes by.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Self

from penstock.core.refusals import Unavailable
from penstock.engine.clock import SteadyClock
from penstock.engine.desk import JobService
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.driver import Driver, Part
from penstock.engine.fetchers import FOR_EVER, PullingWorkers, WorkerKinds
from penstock.engine.keeper import Maintenance
from penstock.engine.machine import HostLoad
from penstock.engine.preempter import Preempter
from penstock.engine.probe import LoadProbe, Pids
from penstock.engine.purse import BudgetEnforcer
from penstock.engine.recovery import Survivors, put_in_order, recover
from penstock.engine.roll import HostRegistration, Introduction
from penstock.engine.room import SubmitWaitlist
from penstock.engine.rules import SchedulerRules
from penstock.engine.signals import LoadSampler
from penstock.engine.yields import YieldRequests
from penstock.stores.protocol import Store

__all__ = ["SchedulerService"]

log = logging.getLogger("penstock.house")


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
        self.waitlist = SubmitWaitlist(store, rules.depth, self._somebody_waits)
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
        self.store.quarantine_dispatch(holder)
        try:
            self.registration.join()
            put_in_order(self.store, self.rules.ordering.aging)
            recover(self.store, self.rules, self._survivors, holder)
            self.dispatcher.begin()
        except BaseException:  # nobody will stop what did not start, Ctrl-C included: others may dispatch
            self.store.release_dispatch()
            raise
        self.store.on_change(self._heard)
        self.driver.start()
        self._started = True
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
