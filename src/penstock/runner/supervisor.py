"""
The processes of the runner: starts them, gives them orders, and reports their end.

An attempt is over when its warden reports that no process is left below it. If the warden itself was killed,
its processes are found by the mark in their environment, and the attempt is over when there are none.
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
from penstock.core.jobs.workers import Batching
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.folder import RunnerFolder
from penstock.runner.links import ActiveDispatch, LauncherLink, WardenLink, WorkerLink, python_code
from penstock.runner.payload import CommandPayload, RunnerOptions
from penstock.runner.process_tree import DISPATCH_MARK, RUNNER_MARK, find_marked, send_signal
from penstock.runner.warm_workers import WarmWorkers
from penstock.scheduler.permissions import SystemUser
from penstock.work.outcome import RELEASED, Outcome

log = logging.getLogger("penstock.runner")

#: Seconds between two searches for the processes of a killed warden, first and last. The pauses grow, because
#: a process may survive SIGKILL for hours.
_SWEEP_FIRST, _SWEEP_LAST = 0.05, 2.0
#: Seconds without further commands after a start failed because this process was out of descriptors.
_SHORT_SEC = 5.0


class ProcessSupervisor:
    """
    Starts and ends the processes of the runner, all in the thread of `loop`.

    `answer` answers a request of a function. `on_end` is called when an attempt has ended and none of its
    processes is left.
    """

    def __init__(
        self,
        folder: RunnerFolder,
        settings: RunnerOptions,
        loop: IoLoop,
        batching: Batching,
        *,
        answer: Callable[[ActiveDispatch, Frame], Frame],
        on_end: Callable[[ActiveDispatch, Outcome], None],
    ) -> None:
        self._folder, self._mark, self._settings, self._loop = str(folder.path), folder.mark, settings, loop
        self._on_end = on_end
        self._commands: dict[WardenLink, ActiveDispatch] = {}
        #: Wardens that wait for a command; the one used last is at the end.
        self._spare: list[WardenLink] = []
        self.functions = WarmWorkers(
            settings, loop, batching, start_worker=self._start_worker, answer=answer, on_end=on_end
        )
        self._killed_wardens: dict[str, WardenLink] = {}  # by the mark of their processes
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST
        self._launcher: LauncherLink | None = None  # between the end of one and the start of the next
        #: How many commands ran when this process last ran out of descriptors.
        self._command_limit: int | None = None
        self._limit_until = 0.0

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
        if self._command_limit is not None and time.monotonic() >= self._limit_until:
            self._command_limit = None
        most = self._settings.slots
        if self._command_limit is not None:
            most = min(most, self._command_limit)
        return most - len(self._commands)

    def start(self, attempt: ActiveDispatch, command: CommandPayload, extra: Mapping[str, str]) -> None:
        """
        Start a command. `extra`: further variables of its environment. Raises OSError when this process is
        out of descriptors; then nothing was started.
        """
        try:
            warden = self._free_warden(attempt.dispatch_id)
        except OSError:
            self._command_limit, self._limit_until = len(self._commands), time.monotonic() + _SHORT_SEC
            raise
        user = self._settings.user_of(attempt.job.intent.addon_id)
        try:
            self._order(
                warden,
                user,
                argv=command.argv,
                # Another user cannot enter a folder below the daemon's.
                cwd=command.cwd or (None if user is None else user.home),
                env={**command.env, DISPATCH_MARK: attempt.dispatch_id, **extra},
                stdin=command.stdin,
                limits=dict(command.limits),
                nice=command.nice,
                folder=attempt.folder,
                until=attempt.until,
            )
        except BaseException:  # the order does not fit into a frame, so the warden has no command
            self._close_warden(warden)
            raise
        attempt.warden = warden
        self._commands[warden] = attempt

    def _free_warden(self, mark: str) -> WardenLink:
        if not self._spare:
            return self._watch(WardenLink(mark, self.open(), self._loop))
        warden = self._spare.pop()
        warden.watch_over(mark)
        return warden

    def _watch(self, warden: WardenLink) -> WardenLink:
        self._loop.add(warden, partial(self._read_warden, warden))
        return warden

    def _start_worker(self, limits: Mapping[str, int], user: SystemUser | None) -> WorkerLink:
        settings, mark = self._settings, f"worker-{token_hex(8)}"
        worker = WorkerLink(mark, self.open(), self._loop)
        self._order(
            self._watch(worker.warden),
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
            runs_folder=self._folder,
            output_limits=[output_limits.head, output_limits.tail],
            stragglers=self._settings.stragglers_sec,
            user=None if user is None else [user.uid, user.gid, list(user.groups)],
            env={**self._settings.environment(user), RUNNER_MARK: self._mark, **env},
            **order,
        )

    # orders

    def ask_to_stop(self, attempt: ActiveDispatch, *, canceled: bool) -> None:
        """
        Tell the attempt that it should yield, or (`canceled`) that its outcome no longer counts. A command
        learns it when it asks; a function that has not begun ends at once.
        """
        if self.functions.take_back(attempt):
            self._on_end(attempt, RELEASED)
        elif attempt.worker is not None:
            attempt.worker.send({"op": "stop", "dispatch": attempt.dispatch_id, "canceled": canceled})

    def renew(self, attempt: ActiveDispatch, until: float) -> None:
        attempt.until = until
        if attempt.worker is None or attempt.call == next(iter(attempt.worker.calls), 0):
            attempt.order("until", until=until)

    def note(self, attempt: ActiveDispatch, text: str) -> None:
        attempt.has_notes = True
        attempt.order("note", call=attempt.call, text=text)

    # reports

    def _read_warden(self, warden: WardenLink) -> None:
        alive = warden.update()
        if warden.written_calls:
            self.functions.on_written(warden)
        if warden.report is not None and warden in self._commands:
            self._on_tree_gone(warden)
            warden.watch_over("")
            warden.idle_since = time.monotonic()
            self._spare.append(warden)
        elif warden.report is not None:
            self._close_warden(warden)
            self._on_tree_gone(warden)
        elif not alive:
            self._close_warden(warden)
            self._begin_sweep(warden)

    def _begin_sweep(self, warden: WardenLink) -> None:
        if warden in self._spare:
            self._spare.remove(warden)
            return
        log.warning("the warden of %s was killed; killing its processes", warden.mark)
        self._killed_wardens[warden.mark] = warden
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST

    def _close_warden(self, warden: WardenLink) -> None:
        self._loop.drop(warden)
        warden.close()

    def _on_tree_gone(self, warden: WardenLink) -> None:
        attempt = self._commands.pop(warden, None)
        if attempt is not None and warden.report is not None:
            attempt.peak_memory = warden.report["peak"]
        for each in self.functions.on_warden_gone(warden) if attempt is None else [attempt]:
            self._on_end(each, each.outcome or _outcome_of(each, warden))

    def _replace_launcher(self) -> None:
        """
        Start another launcher. The wardens of a killed one continue, because each has its own channel.
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
        if self._killed_wardens and now >= self._sweep_at:
            self._sweep()
            self._sweep_at = now + self._sweep_every
            self._sweep_every = min(2 * self._sweep_every, _SWEEP_LAST)
        pauses = [self.functions.step()]
        if self._killed_wardens:
            pauses.append(self._sweep_at - now)
        while len(self._spare) > self._settings.warm:
            idle_for = now - self._spare[0].idle_since
            if idle_for < self._settings.idle_sec:
                pauses.append(self._settings.idle_sec - idle_for)
                break
            self._close_warden(self._spare.pop(0))
        return min((pause for pause in pauses if pause is not None), default=None)

    def _sweep(self) -> None:
        alive = set()
        for process, mark in find_marked(DISPATCH_MARK, self._killed_wardens):
            send_signal(process, signal.SIGKILL)
            alive.add(mark)
        for mark in [mark for mark in self._killed_wardens if mark not in alive]:
            self._on_tree_gone(self._killed_wardens.pop(mark))

    def pids(self) -> list[int]:
        """The topmost process of each command and each worker."""
        return [warden.root for warden in (*self._commands, *self.functions.wardens) if warden.root]

    def close(self, wait_sec: float) -> None:
        """Close all channels. A warden whose channel closes kills the processes below it."""
        self.functions.close()
        for warden in (*self._commands, *self._spare, *self.functions.wardens):
            if warden.fileno() >= 0:
                self._close_warden(warden)
        self._close_launcher(wait_sec)


def _outcome_of(attempt: ActiveDispatch, warden: WardenLink) -> Outcome:
    """The outcome of an attempt, from the last report of its warden."""
    if warden.refused is not None:
        end = EndReason.WORKER_CRASHED if warden.refused["ours"] else EndReason.JOB_ERROR
        return Outcome(end, error=warden.refused["error"])
    if warden.report is None:
        return Outcome(EndReason.WORKER_CRASHED, error="its supervising process (the warden) was killed")
    code, killed, stderr = (warden.report[name] for name in ("code", "killed", "stderr"))
    if killed is not None and code in {None, -signal.SIGKILL}:
        return Outcome(EndReason.WORKER_CRASHED, error=f"{killed}\n{stderr}".rstrip())
    if attempt.worker is not None:
        why = f"the worker {_exit_words(code)} while it ran the function"
        return Outcome(EndReason.WORKER_CRASHED, error=f"{why}\n{stderr}".rstrip())
    if attempt.yielded and code == 0:
        return Outcome(EndReason.COOPERATIVE_PREEMPTION)
    end, result = end_of_exit(code), json.dumps({"exit_code": code})
    if end is EndReason.COMPLETED:
        return Outcome(end, result=result)
    return Outcome(end, result=result, error=f"the command {_exit_words(code)}\n{stderr}".rstrip())


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
