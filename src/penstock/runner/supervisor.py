"""
The processes of the runner: it starts them, gives them orders, and believes that they are gone only when they
are.

A run is over when its warden reports that nothing is left below it. If the warden itself was killed, the mark
in the environment finds what it left, and the run is over when no process with that mark is found any more.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from secrets import token_hex
from typing import Any

from penstock.core.jobs.batching import Batching
from penstock.core.jobs.tracker import end_of_exit
from penstock.core.jobs.types import EndReason
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.leftovers import Leftovers
from penstock.runner.links import ActiveDispatch, LauncherLink, WardenLink, WorkerLink, python_code
from penstock.runner.payload import CommandPayload, RunnerOptions
from penstock.runner.process_tree import DISPATCH_MARK, RUNNER_MARK, marked, send
from penstock.runner.warm_workers import WarmWorkers
from penstock.scheduler.permissions import SystemUser
from penstock.work.outcome import RELEASED, Outcome

log = logging.getLogger("penstock.runner")

#: Seconds between two searches for what a killed warden left; they grow, for a process may survive SIGKILL
#: for hours.
_SWEEP_FIRST, _SWEEP_LAST = 0.05, 2.0
#: For this long after a start failed for want of descriptors, no more commands are started than ran then.
_SHORT_SEC = 5.0


class ProcessSupervisor:
    """
    `answer`: to a request of a function. `on_end`: a run has ended, and nothing of it is left. All in the
    thread of `loop`.
    """

    def __init__(
        self,
        runs: Leftovers,
        settings: RunnerOptions,
        loop: IoLoop,
        batching: Batching,
        *,
        answer: Callable[[ActiveDispatch, Frame], Frame],
        on_end: Callable[[ActiveDispatch, Outcome], None],
    ) -> None:
        self._runs, self._mark, self._settings, self._loop = str(runs.path), runs.mark, settings, loop
        self._on_end = on_end
        self._commands: dict[WardenLink, ActiveDispatch] = {}
        #: Wardens that wait for a command, the one that was used last at the end.
        self._spare: list[WardenLink] = []
        self.functions = WarmWorkers(settings, loop, batching, hire=self._hire, answer=answer, on_end=on_end)
        self._fallen: dict[str, WardenLink] = {}  # wardens that were killed, by the mark of what they left
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST
        self._launcher: LauncherLink | None = None  # between the end of one and the start of the next
        #: As many commands as this process had descriptors for when it last ran out of them.
        self._most_commands: int | None = None
        self._most_until = 0.0

    def open(self) -> LauncherLink:
        """Start the launcher, unless it runs."""
        if self._launcher is None:
            self._launcher = LauncherLink(self._mark)
            self._loop.add(self._launcher, self._replace_launcher)
        return self._launcher

    # starting

    @property
    def slots(self) -> int:
        """How many more commands may start."""
        if self._most_commands is not None and time.monotonic() >= self._most_until:
            self._most_commands = None
        most = self._settings.slots
        if self._most_commands is not None:
            most = min(most, self._most_commands)
        return most - len(self._commands)

    def start(self, run: ActiveDispatch, command: CommandPayload, extra: Mapping[str, str]) -> None:
        """`extra`: for its environment. OSError: nothing was started, for want of descriptors."""
        try:
            warden = self._free_warden(run.dispatch_id)
        except OSError:
            self._most_commands, self._most_until = len(self._commands), time.monotonic() + _SHORT_SEC
            raise
        user = self._settings.user_of(run.job.intent.addon_id)
        try:
            self._order(
                warden,
                user,
                argv=command.argv,
                # Another user cannot enter the folder that a job has below the daemon's.
                cwd=command.cwd or (None if user is None else user.home),
                env={**command.env, DISPATCH_MARK: run.dispatch_id, **extra},
                stdin=command.stdin,
                limits=dict(command.limits),
                nice=command.nice,
                folder=run.folder,
                until=run.until,
            )
        except BaseException:  # the order does not fit into a frame: the warden has no command, and goes
            self._forget(warden)
            raise
        run.warden = warden
        self._commands[warden] = run

    def _free_warden(self, mark: str) -> WardenLink:
        if not self._spare:
            return self._watched(WardenLink(mark, self.open(), self._loop))
        warden = self._spare.pop()
        warden.watch_over(mark)
        return warden

    def _watched(self, warden: WardenLink) -> WardenLink:
        self._loop.add(warden, partial(self._read_warden, warden))
        return warden

    def _hire(self, limits: Mapping[str, int], user: SystemUser | None) -> WorkerLink:
        settings, mark = self._settings, f"worker-{token_hex(8)}"
        worker = WorkerLink(mark, self.open(), self._loop)
        self._order(
            self._watched(worker.warden),
            user,
            argv=[settings.python, "-c", python_code(settings.path, "penstock.runner.worker", "")],
            cwd=settings.cwd,
            env={DISPATCH_MARK: mark},
            stdin=None,
            limits=dict(limits),
            nice=0,
            folder=None,
            until=None,
        )
        return worker

    def _order(
        self, warden: WardenLink, user: SystemUser | None, *, env: Mapping[str, str], **order: Any
    ) -> None:
        output_limits = self._settings.output
        warden.order(
            "run",
            runs=self._runs,
            output_limits=[output_limits.head, output_limits.tail],
            stragglers=self._settings.stragglers_sec,
            user=None if user is None else [user.uid, user.gid, list(user.groups)],
            env={**self._settings.environment(user), RUNNER_MARK: self._mark, **env},
            **order,
        )

    # orders

    def ask_to_stop(self, run: ActiveDispatch, *, canceled: bool) -> None:
        """
        Let the run see that it should yield, or (`canceled`) that its outcome does not count any more. A
        command sees it when it asks; a function that has not begun ends at once.
        """
        if self.functions.take_back(run):
            self._on_end(run, RELEASED)
        elif run.worker is not None:
            run.worker.send({"op": "stop", "dispatch": run.dispatch_id, "canceled": canceled})

    def renew(self, run: ActiveDispatch, until: float) -> None:
        run.until = until
        if run.worker is None or run.call == next(iter(run.worker.calls), 0):
            run.order("until", until=until)

    def note(self, run: ActiveDispatch, text: str) -> None:
        run.noted = True
        run.order("note", call=run.call, text=text)

    # reports

    def _read_warden(self, warden: WardenLink) -> None:
        alive = warden.update()
        if warden.written:
            self.functions.written(warden)
        if warden.report is not None and warden in self._commands:
            self._gone(warden)
            warden.watch_over("")
            warden.idle_since = time.monotonic()
            self._spare.append(warden)
        elif warden.report is not None:
            self._forget(warden)
            self._gone(warden)
        elif not alive:
            self._forget(warden)
            self._begin_sweep(warden)

    def _begin_sweep(self, warden: WardenLink) -> None:
        if warden in self._spare:
            self._spare.remove(warden)
            return
        log.warning("the warden of %s was killed; its processes are ended", warden.mark)
        self._fallen[warden.mark] = warden
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST

    def _forget(self, warden: WardenLink) -> None:
        self._loop.drop(warden)
        warden.close()

    def _gone(self, warden: WardenLink) -> None:
        run = self._commands.pop(warden, None)
        if run is not None and warden.report is not None:
            run.peak = warden.report["peak"]
        for each in self.functions.gone(warden) if run is None else [run]:
            self._on_end(each, each.outcome or _judge(each, warden))

    def _replace_launcher(self) -> None:
        """
        The wardens of a killed launcher continue, for each has its own channel. New ones need a new launcher.
        """
        log.warning("the launcher was killed; another one takes its place")
        self._close_launcher(None)
        self.open()

    def _close_launcher(self, wait_sec: float | None) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            self._loop.drop(launcher)
            launcher.close(wait_sec)

    # upkeep

    def step(self) -> float | None:
        """Returns the seconds until the next step is due."""
        now = time.monotonic()
        if self._fallen and now >= self._sweep_at:
            self._sweep()
            self._sweep_at = now + self._sweep_every
            self._sweep_every = min(2 * self._sweep_every, _SWEEP_LAST)
        pauses = [self.functions.step()]
        if self._fallen:
            pauses.append(self._sweep_at - now)
        while len(self._spare) > self._settings.warm:
            idle_for = now - self._spare[0].idle_since
            if idle_for < self._settings.idle_sec:
                pauses.append(self._settings.idle_sec - idle_for)
                break
            self._forget(self._spare.pop(0))
        return min((pause for pause in pauses if pause is not None), default=None)

    def _sweep(self) -> None:
        alive = set()
        for process, mark in marked(DISPATCH_MARK, self._fallen):
            send(process, signal.SIGKILL)
            alive.add(mark)
        for mark in [mark for mark in self._fallen if mark not in alive]:
            self._gone(self._fallen.pop(mark))

    def pids(self) -> list[int]:
        """The topmost process of each command and each worker."""
        return [warden.root for warden in (*self._commands, *self.functions.wardens) if warden.root]

    def close(self, wait_sec: float) -> None:
        """A warden whose channel closes ends what is below it."""
        self.functions.close()
        for warden in (*self._commands, *self._spare, *self.functions.wardens):
            if warden.fileno() >= 0:
                self._forget(warden)
        self._close_launcher(wait_sec)


def _judge(run: ActiveDispatch, warden: WardenLink) -> Outcome:
    """How a tree that is gone has ended."""
    if warden.refused is not None:
        how = EndReason.WORKER_CRASHED if warden.refused["ours"] else EndReason.JOB_ERROR
        return Outcome(how, error=warden.refused["error"])
    if warden.report is None:
        return Outcome(EndReason.WORKER_CRASHED, error="the process that watched over it was killed")
    code, killed, stderr = (warden.report[name] for name in ("code", "killed", "stderr"))
    if killed is not None and code in {None, -signal.SIGKILL}:
        return Outcome(EndReason.WORKER_CRASHED, error=f"{killed}\n{stderr}".rstrip())
    if run.worker is not None:
        why = f"the worker {_exit_words(code)} while it ran the function"
        return Outcome(EndReason.WORKER_CRASHED, error=f"{why}\n{stderr}".rstrip())
    if run.yielded and code == 0:
        return Outcome(EndReason.COOPERATIVE_PREEMPTION)
    how, result = end_of_exit(code), json.dumps({"exit_code": code})
    if how is EndReason.COMPLETED:
        return Outcome(how, result=result)
    return Outcome(how, result=result, error=f"the command {_exit_words(code)}\n{stderr}".rstrip())


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
