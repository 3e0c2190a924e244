"""The running half of a scheduler: everything that a start makes and a stop takes down again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import seconds
from penstock.library.attempt import JobAttempt, grace_sec, remote_call
from penstock.library.function import JobFunction
from penstock.library.job_runner import JobRunner
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.maintenance import workers_named
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Store
from penstock.work.executors import JobExecutor, ProcessExecutor, ThreadExecutor
from penstock.work.leases import KeeperThread
from penstock.work.outcome import Outcome

#: Threads end with their process, and so do its worker processes: what such a worker held when a scheduler starts is nobody's.
WORKER: Final = "library:"
#: For what will not stop, beyond the time that it was given.
_CLOSING_SEC: Final = 0.5
QUICK_SEC: Final = 0.1


class RunningWork(Protocol):
    """What a scheduler holds between start and stop; the test kit has one that does nothing by itself."""

    service: SchedulerService

    def start(self) -> None:
        """Called once. If it raises, `stop` takes down what it has started."""
        ...

    def ring(self) -> None: ...

    def stop(self, timeout: float) -> None: ...


class BackgroundWork:
    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        clock: SteadyClock | None,
        functions: Mapping[str, JobFunction[..., Any, Any]],
        *,
        workers: int,
        kind: str,
    ) -> None:
        def executors(
            began: Callable[[JobAttempt], bool], finished: Callable[[JobAttempt, Outcome], None]
        ) -> JobExecutor[JobAttempt]:
            if kind == "thread":
                return ThreadExecutor(workers, began, finished)
            return ProcessExecutor(workers, began, finished, remote_call, grace_sec)

        name = f"{WORKER}{os.getpid()}"
        self.job_runner = JobRunner(
            functions, executors, workers=workers, name=name, now=store.now, far=store.shared
        )
        self.service = SchedulerService(
            store,
            rules,
            clock=clock,
            more=[self.job_runner],
            survivors=workers_named(WORKER),
            pids=lambda: [os.getpid()],
            reserves=False,
            on_commit=self.job_runner.heard if store.shared else None,
        )
        self.job_runner.join(self.service.job_service, self.service.wake)
        self._changed = False  # since dispatches that were told to stop were last read
        self._keeper_thread = KeeperThread(
            self.job_runner.leases, self._read_stops, longest_pause=min(0.5, seconds(rules.lease_for) / 6)
        )

    def start(self) -> None:
        self.service.start(f"{Path(sys.argv[0]).name or 'python'}, process {os.getpid()}")
        self.service.store.on_change(self._on_change)
        self._keeper_thread.start()
        if (
            not self.service.store.shared
        ):  # where others dispatch too, a round locks rows that submits must not wait for
            self.service.dispatcher.idle_worker = self.job_runner

    def ring(self) -> None:
        self.service.wake()

    def _on_change(self) -> None:
        self._changed = True
        self._keeper_thread.wake()

    def _read_stops(self) -> None:
        """
        After a change in the store: a cancel or a limit reaches the function before its next renewal. Functions
        shorter than `QUICK_SEC` end before a stop could reach them, and cost nothing here.
        """
        changed, self._changed = self._changed, False
        if not changed:
            return
        leases = self.job_runner.leases
        since = leases.clock() - QUICK_SEC
        began = [lease.began_at for lease in list(leases.live.values())]
        if any(moment < since for moment in began):
            stops = self.service.store.live(phases=[DispatchPhase.ENDING])
            leases.note_stops({dispatch.dispatch_id: dispatch.reason for dispatch in stops})
        if any(moment >= since for moment in began):
            self._on_change()  # these are looked at next time

    def stop(self, timeout: float) -> None:
        """Bounded, whatever the functions do; and done to its end, whatever interrupts the waiting."""
        self.service.dispatcher.idle_worker = None
        try:
            self.job_runner.drain(timeout)
        finally:
            self.service.driver.stop()
            self._keeper_thread.stop()
            self.job_runner.close(_CLOSING_SEC)
            self.service.stop()
