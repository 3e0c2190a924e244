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
from penstock.engine.desk import Desk
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.driver import Driver, Part
from penstock.engine.fetchers import FOR_EVER, Fetchers, Kinds
from penstock.engine.keeper import Keeper
from penstock.engine.machine import Machine
from penstock.engine.preempter import Preempter
from penstock.engine.probe import Pids, Probe
from penstock.engine.purse import Purse
from penstock.engine.recovery import Survivors, put_in_order, recover
from penstock.engine.roll import Introduction, Roll
from penstock.engine.room import Room
from penstock.engine.rules import Rules
from penstock.engine.signals import Signals
from penstock.engine.yields import Yields
from penstock.stores.protocol import Store

__all__ = ["House"]

log = logging.getLogger("penstock.house")


class House:
    """
    `desk` serves from the beginning, in any number of processes. `start` takes the right to dispatch (DispatcherHeld says who
    has it), deals with what a scheduler before it left in flight, and begins to tick. `survivors` ends what our own runner
    left running: `recovery` says what becomes of whose runs. `pids`: the roots of what our runner has running now, whose load
    is not somebody else's. `reserves`: False where a part of this process fetches all that is run: a round that starts nothing would
    only cost, and a job that nobody here can run waits in line instead of holding units. `preempts`: a run is asked to make room for a job that counts for
    clearly more, which only those should do whose runs can be made to end. `heard`: is told of every commit instead of the driver, and rings it itself.
    """

    def __init__(
        self,
        store: Store,
        rules: Rules,
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
        self.machine = Machine(rules)
        self.fetchers = Fetchers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.fetchers)
        self.room = Room(store, rules.depth, self._somebody_waits)
        self.yields = Yields()
        self.desk = Desk(store, rules, self.machine, self.dispatcher, self.room, yields=self.yields)
        self.keeper = Keeper(store, rules, clock, shifts=self.dispatcher.reserved.shift)
        self.roll = Roll(store, rules, self.machine, introduction)
        # Signals before the dispatcher: a machine that grew quiet admits in the same round of the driver.
        parts: list[Part] = [self.roll, *more, self.room, self.keeper, Purse(store, rules)]
        if reserves:
            parts.append(self.dispatcher)
        else:
            self.fetchers.came(Kinds(own=True), FOR_EVER)
        if preempts:
            parts.append(Preempter(store, rules, self.dispatcher, self.desk, self.yields))
        if rules.capacity.fixed is None:
            parts.insert(0, Signals(self.machine, Probe(pids), every=rules.sense_every))
        self.driver = Driver(store.now, parts)
        self._heard = heard or self.driver.ring
        self._usher: Driver | None = None
        self._started, self._lock = False, Lock()

    def start(self, holder: str = "") -> Self:
        holder = holder or f"process {os.getpid()}"
        self.store.hold_dispatch(holder)
        try:
            self.roll.join()
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
        self.room.close()
        with self._lock:
            usher, self._usher = self._usher, None
        if usher is not None:
            usher.stop()

    def _leave(self) -> None:
        """A store that is away learns it from our silence."""
        try:
            self.roll.leave()
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
                self._usher = Driver(self.store.now, [self.room])
                self.store.on_change(self._usher.ring)
                self._usher.start()
            self._usher.ring()
