"""
The runner: fetches jobs of its three types from the scheduler, runs them in processes of their own, and always knows how each ends.

One thread does everything here. It runs nobody's code and waits for nothing but its sockets and the store, so heartbeats go out whatever a job
does. Decisions about ending are the tracker's; processes are the crew's; this file carries messages between them and the desk.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Final, Self

from penstock.core.changes import Beat, Note, stop
from penstock.core.job import Kind
from penstock.core.landing import End, Phase
from penstock.core.refusals import NotFound, Refused, Unavailable
from penstock.core.tracker import Effect, Step, Tracker
from penstock.core.words import SECOND, DispatchId, Moment, seconds
from penstock.engine.desk import Answer, Claimed
from penstock.engine.dispatcher import Kinds
from penstock.engine.house import House
from penstock.runner.calls import Calls
from penstock.runner.crew import Crew
from penstock.runner.door import Door
from penstock.runner.frames import Frame
from penstock.runner.options import RunnerSettings
from penstock.runner.output import Output
from penstock.runner.payload import FUNCTION, JOB_TYPES, Command, read
from penstock.runner.runs import Outcome, Run
from penstock.runner.settling import Settling
from penstock.runner.survivors import WORKER, RunsFolder
from penstock.runner.warden import boot_time
from penstock.runner.watch import Watch

__all__ = ["Runner"]

log = logging.getLogger("penstock.runner")

_FUNCTIONS: Final = Kinds(job_types=frozenset({FUNCTION}))
_COMMANDS: Final = Kinds(job_types=JOB_TYPES - {FUNCTION})
#: After a claim that brought nothing, and after one that failed.
_BREATH: Final = 0.02
_AFTER_FAILURE: Final = 1.0
#: Progress is told at least so often.
_TOLD_WITHIN: Final = 1.0


class Runner:
    """
    Made beside its house; `start` after the house's, `stop` before it. The house should be given `runs.survivors()`, so that what a
    runner before this one left is ended before anything is dispatched.
    """

    def __init__(self, house: House, runs: RunsFolder, settings: RunnerSettings | None = None) -> None:
        self._house, self._store, self._rules = house, house.store, house.rules
        self._settings = settings or RunnerSettings()
        self._folder = runs
        self._tracker = Tracker(self._settings.graces)
        self._settling = Settling(house)
        self._runs: dict[DispatchId, Run] = {}
        self._tokens: dict[str, Run] = {}
        self._ended: list[tuple[Run, Outcome]] = []
        self._notes: list[tuple[Run, Note]] = []
        self._lost: dict[
            Run, DispatchId
        ] = {}  # trees that survived SIGKILL, and the lease that holds their units
        self._asked: deque[Callable[[], None]] = deque()
        self._rung = True
        self._claim_at = self._look_at = self._beat_at = self._write_at = 0.0
        self._draining = self._over = False
        self._thread = Thread(target=self._loop, name="penstock-runner", daemon=True)

    # for others, from any thread

    def start(self) -> Self:
        self._folder.take()
        self._folder.end_leftovers()
        self._watch = Watch()
        self._crew = Crew(
            str(self._folder.path),
            self._folder.mark,
            self._settings,
            self._watch,
            asked=self._answer,
            over=self._run_over,
        )
        self._calls = Calls(self._house.desk, self._tracker, self._crew.note, self._told)
        self._door = Door(f"penstock-job-{self._folder.mark}", self._watch, self._visited)
        self._store.on_change(self._ring)
        self._thread.start()
        return self

    def stop(self, timeout_sec: float = 30.0) -> None:
        """
        Nothing more is fetched; what runs is asked to yield and then made to end, all within one timeout. What has not ended by then is
        put back as if it had. A second call, from another thread, with a shorter timeout hurries the first.
        """
        if not self._thread.is_alive():
            return
        self._post(lambda: self._drain(timeout_sec))
        self._thread.join()

    def pids(self) -> list[int]:
        """Of what runs for us, the topmost process of each tree."""
        return self._crew.pids()

    def ask_to_yield(self, dispatch_id: DispatchId) -> None:
        """At its next safe place, if it looks. It may end as it likes; nothing is forced."""
        self._post(lambda: self._carry_out(self._tracker.ask(dispatch_id)))

    def kill(self, dispatch_id: DispatchId) -> None:
        """A run that has been told to stop is not waited for any longer."""

        def hurry() -> None:
            if reason := self._tracker.reason(dispatch_id):
                self._carry_out(self._tracker.terminate(dispatch_id, reason, _now(), at_once=True))

        self._post(self._look)
        self._post(hurry)

    def dispatch_of(self, token: str) -> DispatchId | None:
        """Whose token this is; None once that run is over."""
        run = self._tokens.get(token)
        return None if run is None else run.dispatch_id

    def call(self, token: str, call: Frame) -> Frame:
        """What a run says with its token, however it reached us; NotFound when the token is nobody's."""
        answer: Future[Frame] = Future()

        def reply() -> None:
            run = self._tokens.get(token)
            if run is None:
                answer.set_exception(NotFound("this token belongs to no run"))
            else:
                answer.set_result(self._answer(run, call))

        self._post(reply)
        return answer.result(30)

    def output(self, dispatch_id: DispatchId) -> Output:
        job, _, fence = dispatch_id.rpartition(".")
        if "/" in job or not fence.isdigit():
            raise NotFound(f"there is no dispatch {dispatch_id}", dispatch_id=dispatch_id)
        return Output(self._folder.path / job / fence)

    def _post(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        self._watch.wake()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._watch.wake()

    # the loop

    def _loop(self) -> None:
        try:
            while not self._over:
                self._watch.wait(self._patience())
                while self._asked:
                    self._guarded("what was asked", self._asked.popleft())
                self._guarded("the ladder", lambda: self._carry_out(self._tracker.advance(_now())))
                now = boot_time()
                self._when(now >= self._write_at, "writing down", self._write)
                self._when(now >= self._beat_at, "the heartbeat", self._beat)
                self._when(self._rung and now >= self._look_at, "looking for stops", self._look)
                self._when(now >= self._claim_at and not self._draining, "fetching", self._claim)
                self._guarded("the crew", self._crew.step)
                self._over = self._draining and not self._runs and not self._ended
        finally:
            self._leave()

    def _when(self, due: bool, what: str, do: Callable[[], object]) -> None:
        if due:
            self._guarded(what, do)

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """The loop outlives what it trips over: a store that is full or locked, or a mistake of ours."""
        try:
            do()
        except Unavailable as error:
            log.warning("%s: %s", what, error)
        except Exception:
            log.exception("%s failed", what)

    def _patience(self) -> float:
        now = boot_time()
        wishes = [self._beat_at, self._claim_at]
        if self._rung and not self._draining:
            wishes.append(self._look_at)
        if self._ended or self._notes:
            wishes.append(self._write_at)
        if (alarm := self._tracker.alarm()) is not None:
            wishes.append(alarm / SECOND)
        if (crew := self._crew.step()) is not None:
            wishes.append(now + crew)
        return 0.0 if self._asked else min(wishes) - now

    # fetching and starting

    def _claim(self) -> None:
        self._claim_at = boot_time() + seconds(self._rules.tick)
        functions = sum(run.worker is not None for run in self._runs.values())
        self._fetch(_FUNCTIONS, self._settings.workers - functions)
        self._fetch(_COMMANDS, self._settings.slots - (len(self._runs) - functions))

    def _fetch(self, kinds: Kinds, free: int) -> None:
        if free > 0:
            for claimed in self._house.desk.claim(kinds, free, WORKER):
                self._begin(claimed)
        else:
            # Said anyway, or nobody would seem to come for such jobs and they would be reserved for a stranger.
            self._house.dispatcher.fetch(kinds, 0, WORKER, self._store.now())

    def _begin(self, claimed: Claimed) -> None:
        job, dispatch, checkpoint = claimed
        try:
            work = read(job.intent.job_type, job.intent.payload, self._settings.functions)
        except Refused as error:
            self._ended.append(
                (Run(job, dispatch, Command(argv=()), None), Outcome(End.JOB_ERROR, error=str(error)))
            )
            return
        run = Run(job, dispatch, work, checkpoint)
        if any(lost.job.job_id == job.job_id for lost in self._lost):
            why = "processes of its last attempt survive on this host"
            self._ended.append((run, Outcome(End.START_TIMEOUT, error=why)))
            return
        self._runs[run.dispatch_id] = self._tokens[run.token] = run
        self._tracker.register(run.dispatch_id, listens=isinstance(work, Command) and work.listens)
        self._crew.start(run, self._lease_until(boot_time()), self._told_to(run))

    def _told_to(self, run: Run) -> dict[str, str]:
        """The environment of a command: who it is, and where and as whom it can talk to us."""
        told = {
            "PENSTOCK_JOB_ID": run.job.job_id,
            "PENSTOCK_DISPATCH_ID": run.dispatch_id,
            "PENSTOCK_SOCKET": self._door.address,
            "PENSTOCK_JOB_TOKEN": run.token,
        }
        return told if self._settings.url is None else told | {"PENSTOCK_URL": self._settings.url}

    def _lease_until(self, sent: float) -> float:
        """Well before others may take the job for lost, whoever runs it without having heard from us has ended it."""
        return sent + seconds(self._rules.lease_for) * 2 / 3

    # hearing

    def _visited(self, token: str, call: Frame) -> Frame:
        run = self._tokens.get(token)
        return {"error": "this token belongs to no run"} if run is None else self._answer(run, call)

    def _answer(self, run: Run, call: Frame) -> Frame:
        answer = self._calls.answer(run, call)
        if run.untold:
            self._beat_at = min(self._beat_at, boot_time() + _TOLD_WITHIN)
        return answer

    def _told(self, run: Run, answer: Answer) -> None:
        if answer.stop is not None:
            self._stop_run(run, answer.stop)

    def _stop_run(self, run: Run, reason: End) -> None:
        run.dispatch = replace(run.dispatch, phase=Phase.ENDING, reason=reason)
        self._carry_out(self._tracker.terminate(run.dispatch_id, reason, _now()))

    def _look(self) -> None:
        """Who has been told to stop: by a person, by the keeper, by preemption."""
        self._rung = False
        self._look_at = boot_time() + _BREATH
        self._claim_at = min(self._claim_at, self._look_at)
        for dispatch in self._store.live(phases=[Phase.ENDING]) if self._runs else ():
            run = self._runs.get(dispatch.dispatch_id)
            if run is not None and dispatch.reason is not None:
                run.dispatch = dispatch
                self._carry_out(self._tracker.terminate(dispatch.dispatch_id, dispatch.reason, _now()))

    def _beat(self) -> None:
        sent = boot_time()
        self._beat_at = sent + seconds(self._rules.lease_for) / 3
        until = self._store.now() + self._rules.lease_for
        runs = list(self._runs.values())
        beats = [Beat(dispatch_id=run.dispatch_id, expires_at=until, progress=run.progress) for run in runs]
        beats += [Beat(dispatch_id=held, expires_at=until) for held in self._lost.values()]
        standings = self._store.renew(beats) if beats else []
        for run in runs:
            run.untold = False
        for run, standing in zip(runs, standings, strict=False):
            if standing is None:
                # It has been given up, and may run elsewhere any moment: nothing is gained by being polite.
                self._carry_out(
                    self._tracker.terminate(run.dispatch_id, End.LEASE_EXPIRED, _now(), at_once=True)
                )
            elif standing.phase is Phase.ENDING and standing.reason is not None:
                self._stop_run(run, standing.reason)
            if standing is not None:
                self._crew.renew(run, self._lease_until(sent))

    # ending

    def _carry_out(self, effects: list[Effect]) -> None:
        for dispatch_id, step, reason in effects:
            run = self._runs.get(dispatch_id)
            if run is None:
                continue
            match step:
                case Step.YIELD | Step.CANCEL:
                    self._crew.cancel(run)
                case Step.TERM:
                    self._crew.term(run)
                case Step.KILL:
                    self._crew.kill(run, str(reason))
                case Step.FORCE:
                    self._crew.force(run)
                case Step.LOST:
                    self._give_up(run)
            if step is not Step.LOST:
                self._notes.append((run, Note(Kind.SIGNALED, str(step), {"for": str(reason or "")})))

    def _give_up(self, run: Run) -> None:
        """Its tree outlived SIGKILL. The job moves on; the units stay taken until the tree is gone."""
        self._notes.append((run, Note(Kind.SIGNALED, str(Step.LOST), {})))
        if not self._draining:
            log.error("%s survives SIGKILL; its units stay taken until it is gone", run.dispatch_id)
            self._lost[run] = self._settling.quarantine(run)
        self._settle(run, Outcome(End.WORKER_CRASHED, error="its processes survived SIGKILL"))

    def _run_over(self, run: Run, outcome: Outcome) -> None:
        if held := self._lost.pop(run, None):
            self._house.desk.release(held)
        else:
            self._settle(run, outcome)

    def _settle(self, run: Run, outcome: Outcome) -> None:
        how = self._tracker.settle(run.dispatch_id, outcome.how)
        if how is None:
            return
        del self._runs[run.dispatch_id], self._tokens[run.token]
        self._ended.append((run, outcome._replace(how=how)))

    def _write(self) -> None:
        """Steps before ends, as they happened. What cannot be written now is kept and written later."""
        self._write_at = boot_time() + _AFTER_FAILURE
        if self._notes:
            self._settling.notes(self._notes)
            self._notes.clear()
        if self._ended:
            self._settling.ends(self._ended)
            self._ended.clear()
            self._claim_at = 0.0
        self._write_at = 0.0

    def _drain(self, timeout_sec: float) -> None:
        """What runs is marked as stopping for this reason in one transaction, so that a crash on the way lands it alike."""
        self._draining = True
        self._claim_at = float("inf")
        self._carry_out(self._tracker.drain(_now(), int(timeout_sec * SECOND)))
        now = self._store.now()
        told = [
            change
            for run in self._runs.values()
            if run.dispatch.phase is Phase.LEASED
            and (change := stop(run.dispatch, run.job, End.GRACEFUL_SHUTDOWN, now, grace=self._rules.grace))
        ]
        self._store.apply(told)
        for run in self._runs.values():
            if (dispatch := self._store.dispatch(run.dispatch_id)) is not None:
                run.dispatch = dispatch

    def _leave(self) -> None:
        self._door.close()
        self._crew.close(wait_sec=0.5)
        self._watch.close()
        self._folder.give_back()


def _now() -> Moment:
    """The ladder's clock: how long somebody has waited does not depend on what time it is."""
    return int(boot_time() * SECOND)
