"""
The parts of one scheduler, put together once: around them lie the library, the daemon and the test kit.

It owns when the parts run, and nothing else. Whoever makes it hands in the store and the clock that the store goes by.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from penstock.engine.clock import SteadyClock
from penstock.engine.desk import Desk
from penstock.engine.dispatcher import Dispatcher, Fetchers
from penstock.engine.driver import Driver, Part
from penstock.engine.keeper import Keeper
from penstock.engine.machine import Machine
from penstock.engine.probe import Pids, Probe
from penstock.engine.recovery import Survivors, recover
from penstock.engine.rules import Rules
from penstock.engine.signals import Signals
from penstock.stores.protocol import Store

__all__ = ["House"]


class House:
    """
    `desk` serves from the beginning, in any number of processes. `start` takes the right to dispatch (DispatcherHeld says who
    has it), deals with what a scheduler before it left in flight, and begins to tick. `survivors` ends what our own runner
    left running: `recovery` says what becomes of whose runs. `pids`: the roots of what our runner has running now, whose load
    is not somebody else's.
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
    ) -> None:
        self.store, self.rules = store, rules
        self._survivors = survivors
        self.machine = Machine(rules)
        self.fetchers = Fetchers()
        self.dispatcher = Dispatcher(store, rules, self.machine, self.fetchers)
        self.desk = Desk(store, rules, self.machine, self.dispatcher)
        self.keeper = Keeper(store, rules, clock)
        # Signals before the dispatcher: a machine that grew quiet admits in the same round of the driver.
        senses = (
            []
            if rules.capacity.fixed is not None
            else [Signals(self.machine, Probe(pids), every=rules.sense_every)]
        )
        self.driver = Driver(store.now, [*more, *senses, self.keeper, self.dispatcher])
        self._started = False

    def start(self, holder: str = "") -> Self:
        holder = holder or f"process {os.getpid()}"
        self.store.hold_dispatch(holder)
        recover(self.store, self.rules, self._survivors, holder)
        self.store.on_change(self.driver.ring)
        self.driver.start()
        self._started = True
        return self

    def stop(self) -> None:
        """No further tick, and no right to dispatch. What runs goes on under its leases; the store is closed by who opened it."""
        if self._started:
            self._started = False
            self.driver.stop()
            self.store.release_dispatch()
