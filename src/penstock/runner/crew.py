"""
The processes of the runner: started, told what to do, and believed to be gone only when they are.

A run is over when its warden says that nothing is left below it. If the warden itself was killed, the marker in the environment finds what is
left, and the run is over when nothing is found any more.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from secrets import token_hex
from typing import Any

from penstock.core.intent import MAX_PAYLOAD
from penstock.core.landing import End
from penstock.core.tracker import end_of_exit
from penstock.runner.frames import Frame
from penstock.runner.links import LauncherLink, WardenLink, WorkerLink, python_code
from penstock.runner.options import RunnerSettings
from penstock.runner.payload import Command, Function
from penstock.runner.runs import Outcome, Run
from penstock.runner.survivors import RunsFolder
from penstock.runner.trees import DISPATCH_MARK, RUNNER_MARK, marked, send
from penstock.runner.watch import Watch

__all__ = ["Crew"]

log = logging.getLogger("penstock.runner")

#: Between two looks for what a killed warden left; longer each time, for who survives SIGKILL may do so for hours.
_SWEEP_FIRST, _SWEEP_LAST = 0.05, 2.0


class Crew:
    """
    `asked`: a function says or asks something. `over`: a run has ended, and nothing of it is left. All in the thread of `watch`.
    """

    def __init__(
        self,
        runs: RunsFolder,
        settings: RunnerSettings,
        watch: Watch,
        *,
        asked: Callable[[Run, Frame], Frame],
        over: Callable[[Run, Outcome], None],
    ) -> None:
        self._runs, self._mark, self._settings, self._watch = str(runs.path), runs.mark, settings, watch
        self._asked, self._over = asked, over
        self._environment = settings.environment() | {RUNNER_MARK: runs.mark}
        self._tenants: dict[WardenLink, Run | None] = {}
        self._workers: dict[WardenLink, WorkerLink] = {}
        self._idle: list[WorkerLink] = []
        self._fallen: dict[str, WardenLink] = {}  # wardens that were killed, by the mark of what they leave
        self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST
        self._launcher: LauncherLink

    def open(self) -> None:
        self._launcher = LauncherLink(self._mark)
        self._watch.add(self._launcher, self._launcher_ended)

    # starting

    def start(self, run: Run, until: float, extra: Mapping[str, str]) -> None:
        """`until`: when the warden ends it unless told otherwise; `extra`: what a command finds in its environment."""
        match run.work:
            case Command() as command:
                self._start_command(run, command, until, extra)
            case Function() as function:
                self._call(run, function, until)

    def _start_command(self, run: Run, command: Command, until: float, extra: Mapping[str, str]) -> None:
        marks = {DISPATCH_MARK: run.dispatch_id, **extra}
        run.warden = self._warden(run.dispatch_id, run)
        self._order(
            run.warden,
            argv=command.argv,
            cwd=command.cwd,
            env=self._environment | dict(command.env) | marks,
            stdin=command.stdin,
            limits=dict(command.limits),
            nice=command.nice,
            folder=run.folder,
            until=until,
        )

    def _warden(self, mark: str, run: Run | None, talk: socket.socket | None = None) -> WardenLink:
        warden = WardenLink(mark, self._launcher, talk)
        self._tenants[warden] = run
        self._watch.add(warden, partial(self._warden_said, warden))
        return warden

    def _order(self, warden: WardenLink, **order: Any) -> None:
        room = self._settings.output
        warden.tell(
            "run",
            runs=self._runs,
            room=[room.head, room.tail],
            stragglers=self._settings.stragglers_sec,
            **order,
        )
        self._watch.mind(warden)

    def _call(self, run: Run, function: Function, until: float) -> None:
        worker = self._idle.pop() if self._idle and not function.limits else self._new_worker(function)
        run.worker, run.warden = worker, worker.warden
        self._tenants[worker.warden] = run
        worker.jobs += 1
        worker.warden.tell("begin", folder=run.folder, until=until)
        worker.tell(
            {
                "op": "call",
                "job": run.job.job_id,
                "dispatch": run.dispatch_id,
                "function": function.function,
                "args": function.args,
                "kwargs": function.kwargs,
                "checkpoint": run.checkpoint,
            }
        )
        self._watch.mind(worker)

    def _new_worker(self, function: Function) -> WorkerLink:
        settings = self._settings
        ours, theirs = socket.socketpair()
        mark = f"worker-{token_hex(8)}"
        warden = self._warden(mark, None, theirs)
        worker = self._workers[warden] = WorkerLink(warden, ours)
        self._watch.add(worker, partial(self._worker_said, worker))
        if function.limits:
            worker.jobs = settings.jobs_per_worker  # it is not used again: what it may use cannot be raised
        code = python_code(settings.path, "penstock.runner.worker", "")
        self._order(
            warden,
            argv=[settings.python, "-c", code],
            cwd=settings.cwd,
            env=self._environment | {DISPATCH_MARK: mark},
            stdin=None,
            limits=dict(function.limits),
            nice=0,
            folder=None,
            until=None,
        )
        return worker

    # telling

    def cancel(self, run: Run) -> None:
        """The cancel signal. A command hears of it when it asks."""
        if run.worker is not None:
            run.worker.tell({"op": "stop", "dispatch": run.dispatch_id})
            self._watch.mind(run.worker)

    def term(self, run: Run) -> None:
        if run.warden is not None:
            run.warden.tell("term")

    def kill(self, run: Run, why: str) -> None:
        if run.warden is not None:
            run.warden.kill(why)

    def force(self, run: Run) -> None:
        if run.warden is not None:
            run.warden.force()

    def renew(self, run: Run, until: float) -> None:
        if run.warden is not None:
            run.warden.tell("until", until=until)

    def note(self, run: Run, text: str) -> None:
        if run.warden is not None:
            run.warden.tell("note", text=text)

    # hearing

    def _worker_said(self, worker: WorkerLink) -> None:
        if not worker.hear(partial(self._worker_frame, worker)):
            self._watch.drop(worker)
            worker.close()
            if worker in self._idle:
                self._idle.remove(worker)
            worker.warden.kill("the worker broke off the conversation")

    def _worker_frame(self, worker: WorkerLink, frame: Frame) -> None:
        run = self._tenants.get(worker.warden)
        if run is None or frame.get("dispatch") != run.dispatch_id or run.outcome is not None:
            return  # a late word of a run that is over
        outcome = _told(frame)
        if outcome is None:
            worker.tell(self._asked(run, frame) | {"op": "answer"})
            self._watch.mind(worker)
            return
        run.outcome = outcome
        if worker.left_behind():
            worker.warden.tell("term")
            worker.warden.kill("its function left processes running")
        else:
            worker.warden.tell("over")

    def _warden_said(self, warden: WardenLink) -> None:
        open_ = warden.hear()
        if warden.written:
            warden.written = False
            self._worker_is_free(warden)
        if warden.report is not None:
            self._forget(warden)
            self._gone(warden)
        elif not open_:
            self._forget(warden)
            log.warning("the warden of %s was killed; what it leaves is ended", warden.mark)
            self._fallen[warden.mark] = warden
            self._sweep_at, self._sweep_every = 0.0, _SWEEP_FIRST

    def _forget(self, warden: WardenLink) -> None:
        self._watch.drop(warden)
        warden.close()
        if worker := self._workers.pop(warden, None):
            if worker in self._idle:
                self._idle.remove(worker)
            if worker.fileno() >= 0:
                self._watch.drop(worker)
                worker.close()

    def _gone(self, warden: WardenLink) -> None:
        run = self._tenants.pop(warden)
        if run is not None:
            self._over(run, run.outcome or _judge(run, warden))

    def _worker_is_free(self, warden: WardenLink) -> None:
        run, worker = self._tenants[warden], self._workers.get(warden)
        if run is None or run.outcome is None:
            return
        self._tenants[warden] = None
        if worker is not None and worker.fileno() >= 0:
            if worker.jobs < self._settings.jobs_per_worker:
                worker.idle_since = time.monotonic()
                self._idle.append(worker)
            else:
                self._retire(worker)
        self._over(run, run.outcome)

    def _retire(self, worker: WorkerLink) -> None:
        """It ends by itself when nobody talks to it any more."""
        self._watch.drop(worker)
        worker.close()

    def _launcher_ended(self) -> None:
        """Somebody killed it. What it started goes on, for each warden talks to us; the next ones need a new launcher."""
        log.warning("the launcher was killed; another one takes its place")
        self._watch.drop(self._launcher)
        self._launcher.close(None)
        self.open()

    # upkeep

    def step(self) -> float | None:
        """Seconds until it wants to be called again."""
        now = time.monotonic()
        if self._fallen and now >= self._sweep_at:
            self._sweep()
            self._sweep_at = now + self._sweep_every
            self._sweep_every = min(2 * self._sweep_every, _SWEEP_LAST)
        extra = self._idle[: max(0, len(self._idle) - self._settings.warm)]  # the oldest
        for worker in extra:
            if now - worker.idle_since >= self._settings.idle_sec:
                self._idle.remove(worker)
                self._retire(worker)
        if self._fallen:
            return self._sweep_at - now
        return self._settings.idle_sec if extra else None

    def _sweep(self) -> None:
        left = set()
        for process, mark in marked(DISPATCH_MARK, self._fallen):
            send(process, signal.SIGKILL)
            left.add(mark)
        for mark in [mark for mark in self._fallen if mark not in left]:
            self._gone(self._fallen.pop(mark))

    def pids(self) -> list[int]:
        """The roots of everything that runs for us."""
        return [warden.root for warden in self._tenants if warden.root]

    def close(self, wait_sec: float) -> None:
        for warden in list(self._tenants):
            if warden.fileno() >= 0:
                self._forget(warden)
        self._tenants.clear()
        self._watch.drop(self._launcher)
        self._launcher.close(wait_sec)


def _told(frame: Frame) -> Outcome | None:
    """What a function's end is, in the words of its worker; None: it has not ended."""
    error = str(frame.get("error", ""))
    match frame.get("op"):
        case "done":
            return _checked(frame.get("result"))
        case "failed":
            return Outcome(End.JOB_ERROR, error=error)
        case "unavailable":
            return Outcome(End.UNAVAILABLE, error=error)
        case "yielded":
            return Outcome(End.COOPERATIVE_PREEMPTION)
        case _:
            return None


def _checked(result: Any) -> Outcome:
    """A worker is not believed: what is stored as JSON is JSON, and no longer than it may be."""
    try:
        if not isinstance(result, str) or len(result) > MAX_PAYLOAD:
            raise ValueError(f"at most {MAX_PAYLOAD} characters")
        json.loads(result)
    except (ValueError, RecursionError) as error:
        return Outcome(End.JOB_ERROR, error=f"the result cannot be kept: {error}")
    return Outcome(End.COMPLETED, result=result)


def _judge(run: Run, warden: WardenLink) -> Outcome:
    """How a tree ended that is gone, from what is known of it."""
    if warden.refused is not None:
        how = End.WORKER_CRASHED if warden.refused["ours"] else End.JOB_ERROR
        return Outcome(how, error=warden.refused["error"])
    if warden.report is None:
        return Outcome(End.WORKER_CRASHED, error="the process that watched over it was killed")
    code, killed, stderr = (warden.report[name] for name in ("code", "killed", "stderr"))
    if killed is not None and code in {None, -signal.SIGKILL}:
        return Outcome(End.WORKER_CRASHED, error=f"{killed}\n{stderr}".rstrip())
    if run.worker is not None:
        words = f"the worker {_words(code)} while it ran the function"
        return Outcome(End.WORKER_CRASHED, error=f"{words}\n{stderr}".rstrip())
    if run.yielded and code == 0:
        return Outcome(End.COOPERATIVE_PREEMPTION)
    how, result = end_of_exit(code), json.dumps({"exit_code": code})
    if how is End.COMPLETED:
        return Outcome(how, result=result)
    return Outcome(how, result=result, error=f"the command {_words(code)}\n{stderr}".rstrip())


def _words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
