"""
The processes of the runner: started, told what to do, and believed to be gone only when they are.

A run is over when its warden says that nothing is left below it. If the warden itself was killed, the marker in the environment finds what is
left, and the run is over when nothing is found any more.
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

#: Between two looks for what a killed warden left; longer each time, for who survives SIGKILL may do so for hours.
_SWEEP_FIRST, _SWEEP_LAST = 0.05, 2.0
#: So long after a start that failed for want of descriptors no more commands are started than ran then.
_SHORT_SEC = 5.0


class ProcessSupervisor:
    """
    `asked`: a function says or asks something. `over`: a run has ended, and nothing of it is left. All in the thread of `watch`.
    """

    def __init__(
        self,
        runs: Leftovers,
        settings: RunnerOptions,
        watch: IoLoop,
        *,
        asked: Callable[[ActiveDispatch, Frame], Frame],
        over: Callable[[ActiveDispatch, Outcome], None],
    ) -> None:
        self._runs, self._mark, self._settings, self._watch = str(runs.path), runs.mark, settings, watch
        self._over = over
        self._environments: dict[SystemUser | None, dict[str, str]] = {}
        self._commands: dict[WardenLink, ActiveDispatch] = {}
        self._spare: list[
            WardenLink
        ] = []  # wardens that wait for a command, the one that was used last at the end
        self.functions = WarmWorkers(settings, watch, hire=self._hire, asked=asked, over=over)
        self._fallen: dict[str, WardenLink] = {}  # wardens that were killed, by the mark of what they leave
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST
        self._launcher: LauncherLink | None = None  # between the end of one and the start of the next
        self._most_commands: int | None = (
            None  # as many as this process had descriptors for, when it last ran out
        )
        self._most_until = 0.0

    def open(self) -> None:
        launcher = LauncherLink(self._mark)
        self._watch.add(launcher, self._launcher_ended)
        self._launcher = launcher

    # starting

    @property
    def commands(self) -> int:
        """How many run."""
        return len(self._commands)

    @property
    def slots(self) -> int:
        """How many more commands may start."""
        if self._most_commands is not None and time.monotonic() >= self._most_until:
            self._most_commands = None
        most = self._settings.slots
        return (most if self._most_commands is None else min(most, self._most_commands)) - self.commands

    def start(self, run: ActiveDispatch, command: CommandPayload, extra: Mapping[str, str]) -> None:
        """`extra`: what it finds in its environment. OSError: nothing was started, for want of descriptors."""
        marks = {DISPATCH_MARK: run.dispatch_id, **extra}
        try:
            warden = self._free_warden(run.dispatch_id)
        except OSError:
            self._most_commands, self._most_until = self.commands, time.monotonic() + _SHORT_SEC
            raise
        try:
            self._order_command(warden, run, command, marks)
        except BaseException:  # it cannot be put into a frame: the warden has heard nothing, and goes
            self._forget(warden)
            raise
        run.warden = warden
        self._commands[warden] = run

    def _order_command(
        self, warden: WardenLink, run: ActiveDispatch, command: CommandPayload, marks: dict[str, str]
    ) -> None:
        user = self._settings.user_of(run.job.intent.addon_id)
        # Another user could not enter the folder that a job has below ours.
        home = None if user is None else user.home
        self._order(
            warden,
            argv=command.argv,
            cwd=command.cwd or home,
            env=self._environment(user) | dict(command.env) | marks,
            user=_ids(user),
            stdin=command.stdin,
            limits=dict(command.limits),
            nice=command.nice,
            folder=run.folder,
            until=run.until,
        )

    def _free_warden(self, mark: str) -> WardenLink:
        if not self._spare:
            return self._heard(WardenLink(mark, self._launching, self._watch))
        warden = self._spare.pop()
        warden.watch_over(mark)
        return warden

    @property
    def _launching(self) -> LauncherLink:
        if self._launcher is None:
            self.open()
        assert self._launcher is not None
        return self._launcher

    def _heard(self, warden: WardenLink) -> WardenLink:
        self._watch.add(warden, partial(self._warden_said, warden))
        return warden

    def _environment(self, user: SystemUser | None) -> dict[str, str]:
        if user not in self._environments:
            self._environments[user] = self._settings.environment(user) | {RUNNER_MARK: self._mark}
        return self._environments[user]

    def _hire(self, limits: Mapping[str, int], user: SystemUser | None) -> WorkerLink:
        settings, mark = self._settings, f"worker-{token_hex(8)}"
        worker = WorkerLink(mark, self._launching, self._watch)
        self._order(
            self._heard(worker.warden),
            argv=[settings.python, "-c", python_code(settings.path, "penstock.runner.worker", "")],
            cwd=settings.cwd,
            env=self._environment(user) | {DISPATCH_MARK: mark},
            user=_ids(user),
            stdin=None,
            limits=dict(limits),
            nice=0,
            folder=None,
            until=None,
        )
        return worker

    def _order(self, warden: WardenLink, **order: Any) -> None:
        output_limits = self._settings.output
        warden.order(
            "run",
            runs=self._runs,
            output_limits=[output_limits.head, output_limits.tail],
            stragglers=self._settings.stragglers_sec,
            **order,
        )

    # telling

    def ask_to_stop(self, run: ActiveDispatch, *, canceled: bool) -> None:
        """
        Lets the run see that it should yield, or (`canceled`) that it counts for nothing any more. A command sees it
        when it asks; a function that has not begun ends at once.
        """
        if self.functions.take_back(run):
            self._over(run, RELEASED)
        elif run.worker is not None:
            run.worker.send({"op": "stop", "dispatch": run.dispatch_id, "canceled": canceled})

    def renew(self, run: ActiveDispatch, until: float) -> None:
        run.until = until
        if run.worker is None or run.call == next(iter(run.worker.calls), 0):
            run.order("until", until=until)

    def note(self, run: ActiveDispatch, text: str) -> None:
        run.noted = True
        run.order("note", call=run.call, text=text)

    # hearing

    def _warden_said(self, warden: WardenLink) -> None:
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
            self._fallen_warden(warden)

    def _fallen_warden(self, warden: WardenLink) -> None:
        if warden in self._spare:
            self._spare.remove(warden)
            return
        log.warning("the warden of %s was killed; what it leaves is ended", warden.mark)
        self._fallen[warden.mark] = warden
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST

    def _forget(self, warden: WardenLink) -> None:
        self._watch.drop(warden)
        warden.close()

    def _gone(self, warden: WardenLink) -> None:
        run = self._commands.pop(warden, None)
        for each in self.functions.gone(warden) if run is None else [run]:
            self._over(each, each.outcome or _judge(each, warden))

    def _launcher_ended(self) -> None:
        """Somebody killed it. What it started goes on, for each warden talks to us; the next ones need a new launcher."""
        log.warning("the launcher was killed; another one takes its place")
        self._close_launcher(None)
        self.open()

    def _close_launcher(self, wait_sec: float | None) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            self._watch.drop(launcher)
            launcher.close(wait_sec)

    # upkeep

    def step(self) -> float | None:
        """Seconds until it wants to be called again."""
        now = time.monotonic()
        if self._fallen and now >= self._sweep_at:
            self._sweep()
            self._sweep_at = now + self._sweep_every
            self._sweep_every = min(2 * self._sweep_every, _SWEEP_LAST)
        wishes = [self.functions.step()]
        if self._fallen:
            wishes.append(self._sweep_at - now)
        while len(self._spare) > self._settings.warm:
            since = now - self._spare[0].idle_since
            if since < self._settings.idle_sec:
                wishes.append(self._settings.idle_sec - since)
                break
            self._forget(self._spare.pop(0))
        return min((wish for wish in wishes if wish is not None), default=None)

    def _sweep(self) -> None:
        left = set()
        for process, mark in marked(DISPATCH_MARK, self._fallen):
            send(process, signal.SIGKILL)
            left.add(mark)
        for mark in [mark for mark in self._fallen if mark not in left]:
            self._gone(self._fallen.pop(mark))

    def pids(self) -> list[int]:
        """The roots of everything that runs for us."""
        return [warden.root for warden in list(self._commands) if warden.root] + self.functions.pids()

    def close(self, wait_sec: float) -> None:
        """Wardens that hear no more from us end what is below them."""
        self.functions.close()
        for warden in (*self._commands, *self._spare, *self.functions.wardens):
            if warden.fileno() >= 0:
                self._forget(warden)
        self._close_launcher(wait_sec)


def _ids(user: SystemUser | None) -> list[Any] | None:
    return None if user is None else [user.uid, user.gid, list(user.groups)]


def _judge(run: ActiveDispatch, warden: WardenLink) -> Outcome:
    """How a tree ended that is gone, from what is known of it."""
    if warden.refused is not None:
        how = EndReason.WORKER_CRASHED if warden.refused["ours"] else EndReason.JOB_ERROR
        return Outcome(how, error=warden.refused["error"])
    if warden.report is None:
        return Outcome(EndReason.WORKER_CRASHED, error="the process that watched over it was killed")
    code, killed, stderr = (warden.report[name] for name in ("code", "killed", "stderr"))
    if killed is not None and code in {None, -signal.SIGKILL}:
        return Outcome(EndReason.WORKER_CRASHED, error=f"{killed}\n{stderr}".rstrip())
    if run.worker is not None:
        words = f"the worker {_words(code)} while it ran the function"
        return Outcome(EndReason.WORKER_CRASHED, error=f"{words}\n{stderr}".rstrip())
    if run.yielded and code == 0:
        return Outcome(EndReason.COOPERATIVE_PREEMPTION)
    how, result = end_of_exit(code), json.dumps({"exit_code": code})
    if how is EndReason.COMPLETED:
        return Outcome(how, result=result)
    return Outcome(how, result=result, error=f"the command {_words(code)}\n{stderr}".rstrip())


def _words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
