"""
The kill loop: submits jobs to schedulers of its own, kills and freezes schedulers, workers and jobs at random
moments, sends reports that come too late, and lets every job end. `checks.py` then checks the promises.

Everything is in a new folder, and on PostgreSQL in a new schema: no other scheduler is touched.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeVar

from penstock.chaos import markers
from penstock.chaos.checks import COST, Aftermath
from penstock.chaos.markers import Journal
from penstock.chaos.processes import (
    LEASE_SEC,
    PATIENCE,
    Command,
    Daemon,
    Freezer,
    SdkWorker,
    TrialPlace,
    TrialProcess,
)
from penstock.chaos.sdk_worker import JOB_TYPE
from penstock.client.client import Client
from penstock.core.errors import PenstockError, Unavailable

_OPEN: Final = ("QUEUED", "DISPATCHING", "RUNNING")
#: Seconds of a job. Two jobs in three are short. The third takes longer than the restart of a killed
#: scheduler, so its first attempt would still work then, if nothing had ended it.
_SHORT_SEC: Final = (0.05, 0.8)
_LONG_SEC: Final = (2.5, 5.0)
#: Seconds of a freeze: longer than a lease. If another process can take over the jobs, it lasts until one
#: has.
_FROZEN_SEC: Final = (1.5 * LEASE_SEC, 2.5 * LEASE_SEC)

T = TypeVar("T")


class TrialPlan(NamedTuple):
    """The plan of a trial. `kills`: the number of kills and freezes."""

    jobs: int = 60
    kills: int = 20
    seed: int = 1
    daemons: int = 1
    #: SDK workers. Without any, all jobs are commands.
    workers: int = 2
    #: Seconds without the end of a single job after which the rest counts as stuck.
    patience: float = PATIENCE


class KillLoop:
    def __init__(self, place: TrialPlace, plan: TrialPlan) -> None:
        self._place, self._plan = place, plan
        self._dice = Random(plan.seed)  # noqa: S311  # no secret: the same seed kills at about the same moments
        self._daemons = [Daemon(place, f"host{number}") for number in range(1, plan.daemons + 1)]
        self._workers: list[SdkWorker] = []
        self._clients: list[Client] = []
        self._journal, self._freezer = Journal(place.folder), Freezer()
        self._done_to: Counter[tuple[str, str]] = Counter()
        functions = [False, True] if plan.workers else [False]
        targets = ["the scheduler", "a job", *(["a worker"] if plan.workers else [])]
        self._kinds = self._shuffled(
            [(f, sec) for f in functions for sec in (_SHORT_SEC, _SHORT_SEC, _LONG_SEC)]
        )
        self._next_deeds = self._shuffled(
            [(verb, target) for verb in ("killed", "froze") for target in targets]
        )

    def _shuffled(self, cards: list[T]) -> Iterator[T]:
        """All cards in random order, again and again, so that even a small trial uses each."""
        while True:
            self._dice.shuffle(cards)
            yield from cards

    def run(self, report: Callable[[str], object]) -> Aftermath:
        acknowledged: list[str] = []
        plan, settled, trouble = self._plan, False, ""
        try:
            with self._up():
                for number in range(1, plan.kills + 1):
                    verb, target = next(self._next_deeds)
                    while len(acknowledged) < plan.jobs * number // plan.kills:
                        acknowledged.append(self._submit(len(acknowledged), *self._kind_for(verb, target)))
                    if self._dice.random() < 0.7:  # else kill right after the answer of the last submit
                        time.sleep(self._dice.uniform(0.05, 0.8))
                    deed = self._disturb(verb, target)
                    self._done_to[deed] += 1
                    report(f"{number} of {plan.kills}: {' '.join(deed)}")
                    self._report_late(self._journal.read().superseded())
                self._freezer.wait()
                settled = self._settle(report) and self._stay_settled(report)
        except Unavailable as error:  # the scheduler does not come back: the checks report what is missing
            trouble = str(error)
        return Aftermath(self._place.folder, acknowledged, self._done_to, settled, trouble)

    @contextmanager
    def _up(self) -> Iterator[None]:
        with ExitStack() as stack:
            for daemon in self._daemons:
                stack.callback(daemon.stop)
                daemon.start()
                self._clients.append(stack.enter_context(daemon.client()))
            for number in range(self._plan.workers):
                worker = SdkWorker(self._daemons[number % len(self._daemons)], self._place.folder, number)
                self._workers.append(worker)
                stack.callback(worker.stop)
                worker.start()
            stack.callback(self._freezer.wait)  # a frozen process does not see that it should stop
            yield

    def _kind_for(self, verb: str, target: str) -> tuple[bool, tuple[float, float]]:
        """The next kind of job. Before a freeze: one that would still work after the freeze."""
        if target == "a worker":
            return True, _LONG_SEC
        if (verb, target) == ("froze", "the scheduler") and len(self._daemons) > 1:
            return False, _LONG_SEC
        return next(self._kinds)

    def _submit(self, number: int, function: bool, bounds: tuple[float, float]) -> str:
        """Submit with a key, so that a repeated submit makes no second job."""
        seconds, folder = round(self._dice.uniform(*bounds), 2), str(self._place.folder)
        job_type = JOB_TYPE if function else "penstock.command"
        argv = [sys.executable, markers.__file__, folder, str(seconds)]
        payload = {"folder": folder, "seconds": seconds} if function else {"argv": argv}
        client = self._dice.choice(self._clients)
        return client.submit("chaos", job_type, payload, cost_units=COST, idempotency_key=str(number)).job_id

    def _disturb(self, verb: str, target: str) -> tuple[str, str]:
        """
        Kill or freeze the target while it works, if it does within three seconds. A frozen target is left
        alone, because the trial tests what it does afterwards. Without a running command the scheduler is the
        target.
        """
        victims: Sequence[TrialProcess] = self._daemons
        if target == "a worker":
            victims = self._with_attempts(self._workers, "function")
        elif target == "a job":
            victims = [Command(pid) for pid in self._await_work("command").values()]
        elif verb == "froze" and len(self._daemons) > 1:
            victims = self._with_attempts(self._daemons, "command")
        if not victims:
            victims, target = self._daemons, "the scheduler"
        unfrozen = self._freezer.unfrozen(victims)
        # Take turns, so that a small trial freezes a worker with threads and one with processes.
        victim = unfrozen[self._done_to[verb, target] % len(unfrozen)]
        if verb == "froze":
            others = target != "a job" and len(self._workers if target == "a worker" else self._daemons) > 1
            overtaken = self._overtaken(self._attempts_under(victim) if others else frozenset())
            self._freezer.freeze(victim.pid, self._dice.uniform(*_FROZEN_SEC), overtaken)
        else:
            victim.kill()
        return verb, target

    def _with_attempts(self, processes: Sequence[TrialProcess], kind: str) -> Sequence[TrialProcess]:
        """The processes that run an attempt of this kind now; all of them if none does."""
        self._await_work(kind)
        return [process for process in processes if self._attempts_under(process)] or processes

    def _attempts_under(self, process: TrialProcess) -> frozenset[str]:
        """The attempts that work in this process and its descendants."""
        at_work = [item for attempts in self._journal.at_work.values() for item in attempts.items()]
        return frozenset(attempt for attempt, pid in at_work if process.pid in _ancestry(pid))

    def _overtaken(self, attempts: frozenset[str]) -> Callable[[], bool]:
        """
        A condition: a later attempt of one of these jobs has begun, or all of these attempts have ended in
        time.
        """
        journal = Journal(self._place.folder)

        def holds() -> bool:
            return attempts <= journal.read().ended or not attempts.isdisjoint(journal.superseded())

        return holds

    def _await_work(self, kind: str) -> dict[str, int]:
        """
        The attempts of this kind that work now, with their processes. A process id may be reused, so its
        command line is checked.
        """
        until = time.monotonic() + 3.0
        while True:
            attempts = self._journal.read().at_work[kind]
            if kind == "command":
                for dispatch_id in [one for one, pid in attempts.items() if not self._is_marker(pid)]:
                    del attempts[dispatch_id]
            if attempts or time.monotonic() > until:
                return attempts
            time.sleep(0.02)

    def _is_marker(self, pid: int) -> bool:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return os.fsencode(markers.__file__) in words and os.fsencode(self._place.folder) in words
        return False

    def _report_late(self, over: Collection[str]) -> None:
        """
        Send the report of an attempt that is over, as from a worker that was disconnected: it must change
        nothing.
        """
        if not over:
            return
        dispatch_id = self._dice.choice(sorted(over))
        job_id = dispatch_id.rpartition(".")[0]
        client = self._dice.choice(self._clients)
        self._done_to["reported late", "an attempt"] += 1
        with suppress(PenstockError):
            if self._dice.random() < 0.5:
                client.complete(job_id, dispatch_id, "late")
            else:
                client.fail(job_id, dispatch_id, "late")

    def _stay_settled(self, report: Callable[[str], object]) -> bool:
        """
        Check that ended jobs stay ended, whatever is reported or requested now, and after another start.
        """
        for _ in range(self._plan.kills):
            self._report_late(self._journal.read().began)
            job_id = self._dice.choice(sorted(self._journal.began)).rpartition(".")[0]
            client = self._dice.choice(self._clients)
            self._done_to["asked to run or stop again", "a finished job"] += 1
            with suppress(PenstockError):
                self._dice.choice([client.retry, client.cancel])(job_id)
        for daemon in self._daemons:
            daemon.kill()
        return self._settle(report)

    def _settle(self, report: Callable[[str], object]) -> bool:
        """Wait without further kills until every job has ended."""
        open_jobs, since = -1, time.monotonic()
        while time.monotonic() < since + self._plan.patience:
            with suppress(PenstockError):
                jobs = self._clients[0].stats().jobs
                still_open = sum(jobs.get(state, 0) for state in _OPEN)
                if still_open == 0:
                    return True
                if still_open != open_jobs:
                    open_jobs, since = still_open, time.monotonic()
                    report(f"no more kills; {open_jobs} jobs to go")
            time.sleep(0.1)
        return False


def _ancestry(pid: int) -> list[int]:
    """The process, its parent, the parent of that, and so on."""
    pids = []
    with suppress(OSError):
        while pid > 1:
            pids.append(pid)
            # The name of the program comes before the state, in brackets, and may contain brackets.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pids
