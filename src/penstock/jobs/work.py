"""The running half of a scheduler: everything that a start makes and a stop takes down again."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.engine.clock import SteadyClock
from penstock.engine.house import House
from penstock.engine.recovery import workers_named
from penstock.engine.rules import Rules
from penstock.jobs.beats import Beats
from penstock.jobs.crew import Crew
from penstock.jobs.function import JobFunction
from penstock.jobs.hands import Began, Finished, Hands, LocalHands
from penstock.stores.protocol import Store

__all__ = ["Running", "Work"]

#: Threads end with their process, and so do its worker processes: what such a worker held when a scheduler starts is nobody's.
WORKER: Final = "library:"
#: For what will not stop, beyond the time that it was given.
_CLOSING_SEC: Final = 0.5


class Running(Protocol):
    """What a scheduler holds between start and stop; the test kit has one that does nothing by itself."""

    house: House

    def ring(self) -> None: ...

    def stop(self, timeout: float) -> None: ...


class Work:
    def __init__(
        self,
        store: Store,
        rules: Rules,
        clock: SteadyClock | None,
        functions: Mapping[str, JobFunction[..., Any, Any]],
        *,
        workers: int,
        kind: str,
    ) -> None:
        def hands(began: Began, finished: Finished) -> Hands:
            if kind == "thread":
                return LocalHands(workers, began, finished)
            from penstock.jobs.processes import ProcessHands  # noqa: PLC0415  # pools are slow to import for those who use none

            return ProcessHands(workers, began, finished)

        name = f"{WORKER}{os.getpid()}"
        self.crew = Crew(functions, hands, workers=workers, name=name, now=store.now, far=store.shared)
        self.house = House(
            store,
            rules,
            clock=clock,
            more=[self.crew],
            survivors=workers_named(WORKER),
            pids=lambda: [os.getpid()],
            reserves=False,
            heard=self.crew.heard if store.shared else None,
        )
        self.crew.join(self.house.desk, self.house.driver.ring)
        self._beats = Beats(store, self.crew, rules.lease_for)
        try:
            self.house.start(f"{Path(sys.argv[0]).name or 'python'}, process {os.getpid()}")
        except BaseException:  # Ctrl-C included: no thread may wait for work that never comes
            self.crew.hands.close(wait=_CLOSING_SEC)
            raise
        self._beats.start()
        self._leave = self.house.desk.ride(self.crew)

    def ring(self) -> None:
        self.house.driver.ring()

    def stop(self, timeout: float) -> None:
        """Bounded, whatever the functions do; and done to its end, whatever interrupts the waiting."""
        self._leave()
        try:
            self.crew.drain(timeout)
        finally:
            self.house.driver.stop()
            self._beats.stop()
            self.crew.close(_CLOSING_SEC)
            self.house.stop()
