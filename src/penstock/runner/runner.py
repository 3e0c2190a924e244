"""
The runner: fetches jobs of its three types from the scheduler, runs them in processes of their own, and always knows how each ends.

One thread does everything here. It runs nobody's code and waits for nothing but its sockets and the store, so heartbeats go out whatever a job
does. Decisions about ending are the tracker's; processes are the supervisor's; this file carries messages between them and the job service.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from secrets import token_urlsafe
from threading import Thread
from typing import Final, Self

from penstock.core.errors import NotFound, Refused, StaleDispatch, Unavailable
from penstock.core.jobs.changes import Note, Renewal, remark, stop
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import AdmissionView, RoundResult
from penstock.core.jobs.spending import Standing
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.tracker import Effect, Step, Tracker
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, seconds
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.control_socket import ControlSocket, RunRequests
from penstock.runner.leftovers import WORKER, Leftovers, OutputCleaner
from penstock.runner.links import ActiveDispatch
from penstock.runner.output import Output
from penstock.runner.payload import FUNCTION, JOB_TYPES, CommandPayload, RunnerOptions, read
from penstock.runner.supervisor import ProcessSupervisor
from penstock.runner.warden import boot_time
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.job_service import Answer, EndReport, GrantedJob
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Admit, Apply, Renew, committed, committed_apart
from penstock.work.leases import REPORT_SEC, ActiveLease, LeaseKeeper, RenewalReply, RenewalRequest
from penstock.work.outcome import Outcome

log = logging.getLogger("penstock.runner")

_ALL: Final = WorkerKinds(job_types=JOB_TYPES)
_FUNCTIONS: Final = WorkerKinds(job_types=frozenset({FUNCTION}))
_COMMANDS: Final = WorkerKinds(job_types=JOB_TYPES - {FUNCTION})
#: After a claim that brought nothing, and after one that failed.
_BREATH: Final = 0.02
_AFTER_FAILURE: Final = 1.0
#: What a stop may take beyond its timeout.
AFTER_STOP: Final = 0.8
#: The longest that something that has ended waits for the other half of its batch.
_SOON: Final = 0.005
#: With these reasons the job goes back to the queue from its checkpoint: its function yields. With others it is canceled.
_YIELDING: Final = {
    None,
    EndReason.COOPERATIVE_PREEMPTION,
    EndReason.PREEMPTION_TIMEOUT,
    EndReason.GRACEFUL_SHUTDOWN,
}


class Runner:
    """
    Made beside its house; `start` after the house's, `stop` before it. The house should be given `runs.survivors()`, so that what a
    runner before this one left is ended before anything is dispatched.
    """

    def __init__(
        self, service: SchedulerService, runs: Leftovers, settings: RunnerOptions | None = None
    ) -> None:
        self._service, self._store, self._rules = service, service.store, service.rules
        self._settings = settings or RunnerOptions()
        self._folder = runs
        self._tracker = Tracker(self._settings.graces)
        self._runs: dict[DispatchId, ActiveDispatch] = {}
        self._leases: LeaseKeeper[ActiveLease] = LeaseKeeper(
            self._renew,
            on_stop=self._stop_lease,
            on_yield=lambda lease: self._ask(lease.dispatch_id),
            together=True,
            clock=boot_time,
        )
        self._tokens: dict[str, ActiveDispatch] = {}
        self._ended: list[tuple[ActiveDispatch, Outcome]] = []
        self._notes: list[tuple[ActiveDispatch, Note]] = []
        #: Trees that survived SIGKILL, and the leases that hold their units.
        self._lost: dict[ActiveDispatch, DispatchId] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._rung = True
        #: Something was committed, or there was more than could be taken, since jobs were last fetched.
        self._news = True
        self._turned_at = self._turn_at = self._look_at = self._beat_at = self._note_at = self._preempt_at = (
            0.0
        )
        self._give_up_at: float | None = (
            None  # when a stop is over, whatever has not ended or cannot be written
        )
        self._over = False
        self._supervisor_at = 0.0
        self._tidy = OutputCleaner(service.store, runs.path)
        self._watch = IoLoop()
        self._supervisor = ProcessSupervisor(
            runs, self._settings, self._watch, answer=self._answer, on_end=self._run_over
        )
        self._calls = RunRequests(service.job_service, self._tracker, self._supervisor.note, self._told)
        self._thread = Thread(target=self._loop, name="penstock-runner", daemon=True)

    # for others, from any thread

    def start(self) -> Self:
        self._folder.take()
        self._folder.end_leftovers()
        self._watch.open()
        self._supervisor.open()
        users = {user.uid for user in self._settings.users.values()}
        self._control_socket = ControlSocket(
            f"penstock-job-{self._folder.mark}-{token_urlsafe()}", self._watch, self._visited, users
        )
        self._store.on_change(self._ring)
        self._service.yields.on_ask(self.ask_to_yield)
        self._thread.start()
        self._tidy.start()
        return self

    def stop(self, timeout_sec: float = 30.0) -> None:
        """
        Nothing more is fetched; what runs is asked to yield and then made to end, all within one timeout. What has not ended by then is
        put back as if it had. A second call, from another thread, with a shorter timeout hurries the first.
        """
        if self._thread.is_alive():
            ends = boot_time() + timeout_sec  # from now, however late the thread comes to hear of it
            self._post(lambda: self._drain(ends))
            # A store that hangs may hold the thread; the caller does not wait for it.
            self._thread.join(timeout_sec + AFTER_STOP)
            self._tidy.stop()

    def pids(self) -> list[int]:
        """Of what runs for us, the topmost process of each tree."""
        return self._supervisor.pids()

    def ask_to_yield(self, dispatch_id: DispatchId) -> None:
        """At its next safe place, if it looks. It may end as it likes; nothing is forced."""
        self._post(lambda: self._ask(dispatch_id))

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

        if not self._thread.is_alive():
            raise NotFound("this token belongs to no run")
        self._post(reply)
        return answer.result(30)

    def output(self, dispatch_id: DispatchId) -> Output:
        return self._folder.output(dispatch_id)

    def _post(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        self._watch.wake()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._watch.wake()

    # the loop

    def _loop(self) -> None:
        while not self._over:
            self._guarded("hearing", lambda: self._watch.wait(self._patience()))
            while self._asked:
                self._guarded("what was asked", self._asked.popleft())
            self._guarded("the ladder", lambda: self._carry_out(self._tracker.advance(_now())))
            now = boot_time()
            # When the time of a stop is over, ends are all that is written: each commit may take long on a busy disk.
            late = self._give_up_at is not None and now >= self._give_up_at - AFTER_STOP / 2
            for due, what, do in (
                (now >= self._note_at and self._notes and not late, "the trail", self._write_notes),
                (now >= self._beat_at and not late, "the heartbeat", self._beat),
                (now >= self._look_at and self._rung, "looking for stops", self._look),
                (now >= self._turn_at, "ending and fetching", self._turn),
            ):
                if due:
                    self._guarded(what, do)
            if (last := self._give_up_at) is not None:
                self._over = not (self._runs or self._ended) or boot_time() >= last
        self._guarded("the last ends", self._end_all)
        self._leave()

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
        wishes = [self._beat_at, self._turn_at]
        if self._rung:
            wishes.append(self._look_at)
        if self._notes:
            wishes.append(self._note_at)
        if (alarm := self._tracker.alarm()) is not None:
            wishes.append(alarm / SECOND)
        self._guarded("upkeep", self._step_supervisor)
        wishes.append(self._supervisor_at)
        if self._give_up_at is not None:
            wishes.append(self._give_up_at)
        return 0.0 if self._asked else min(wishes) - now

    def _step_supervisor(self) -> None:
        """Apart from hearing: when upkeep fails, the runner must still hear how runs end."""
        self._supervisor_at = boot_time() + _AFTER_FAILURE
        wish = self._supervisor.step()
        self._supervisor_at = inf if wish is None else boot_time() + wish

    # ending and fetching

    def _turn(self) -> None:
        """What has ended is written down, and what may start in its place is fetched: one commit, if nobody comes between."""
        self._turned_at = boot_time()
        job_service, ended = self._service.job_service, list(self._ended)
        reports = [EndReport(run.dispatch_id, *outcome) for run, outcome in ended]
        kinds, free = self._free()
        if not (free or ended) or not (ended or self._news or self._service.dispatcher.awaits(kinds)):
            self._turn_at = boot_time() + seconds(self._rules.tick)
            return
        self._turn_at = boot_time() + _AFTER_FAILURE
        if free:
            answers, claimed = job_service.exchange(reports, kinds, free, WORKER)
        else:
            answers, claimed = job_service.end_many(reports), []
        del self._ended[: len(ended)]
        for report, answer in zip(reports, answers, strict=True):
            if isinstance(answer, Refused):
                log.warning("%s ended too late to count: %s", report.dispatch_id, answer)
        for each in claimed:
            self._guarded("starting a job", partial(self._begin, each))
        self._supervisor.functions.feed()
        # As many as there was room for: there may be more, and room of the other kind.
        more = free and len(claimed) == free and self._free()[1]
        # All of this is one thread, so nothing was heard meanwhile.
        self._news = bool(more) if free else self._news
        self._turn_at = 0.0 if more else boot_time() + seconds(self._rules.tick)

    def _free(self) -> tuple[WorkerKinds, int]:
        if self._give_up_at is not None:
            return _ALL, 0
        # Said even when there is no room, or nobody would seem to come for such jobs and they would be reserved for a stranger.
        self._service.fetchers.came(_ALL, self._store.now() + self._rules.fetch_for)
        workers, slots = self._supervisor.functions.free_slots, self._supervisor.slots
        if workers > 0 and slots > 0:
            return _ALL, min(workers, slots)
        return (_FUNCTIONS, workers) if workers > 0 else (_COMMANDS, max(0, slots))

    def _begin(self, claimed: GrantedJob) -> None:
        job, dispatch, checkpoint = claimed
        try:
            work = read(job.intent.job_type, job.intent.payload, self._settings.functions)
        except Refused as error:
            self._end(
                ActiveDispatch(job, dispatch, CommandPayload(argv=()), None, self._turned_at),
                Outcome(EndReason.JOB_ERROR, error=str(error)),
            )
            return
        run = ActiveDispatch(job, dispatch, work, checkpoint, self._turned_at)
        if dispatch.fence > 1 and any(
            one.job.job_id == job.job_id for one in (*self._lost, *self._runs.values())
        ):
            why = "processes of its last attempt survive on this host"
            self._end(run, Outcome(EndReason.START_TIMEOUT, error=why))
            return
        self._runs[run.dispatch_id] = self._leases.live[run.dispatch_id] = run
        run.began_at = boot_time()
        run.until = run.began_at + self._unheard
        # Within REPORT_SEC its process is known.
        self._beat_at = min(self._beat_at, self._leases.due_at(run), run.began_at + REPORT_SEC)
        if isinstance(work, CommandPayload):
            self._tracker.register(run.dispatch_id, listens=work.listens)
            run.token = token_urlsafe(32)
            self._tokens[run.token] = run
            try:
                self._supervisor.start(run, work, self._told_to(run))
            except Exception as error:  # noqa: BLE001  # a dispatch without a process would keep its lease for ever
                log.warning("%s cannot be started: %s", run.dispatch_id, error)
                # Out of descriptors it goes back as it was, for this is not its fault; a mistake of its own is its end.
                how = EndReason.RELEASED if isinstance(error, OSError) else EndReason.JOB_ERROR
                self._settle(run, Outcome(how, error=f"it could not be started: {error}"))
        else:
            self._tracker.register(run.dispatch_id)
            self._supervisor.functions.add(run)

    def _told_to(self, run: ActiveDispatch) -> dict[str, str]:
        """The environment of a command: who it is, and where and as whom it can talk to us."""
        told = {
            "PENSTOCK_JOB_ID": run.job.job_id,
            "PENSTOCK_DISPATCH_ID": run.dispatch_id,
            "PENSTOCK_SOCKET": self._control_socket.address,
            "PENSTOCK_JOB_TOKEN": run.token,
        }
        return told if self._settings.url is None else told | {"PENSTOCK_URL": self._settings.url}

    @property
    def _unheard(self) -> float:
        """Who runs a job without having heard from us for so long ends it: well before others may take it for lost."""
        return seconds(self._rules.lease_for) * 2 / 3

    # hearing

    def _visited(self, token: str, call: Frame) -> Frame:
        run = self._tokens.get(token)
        return {"error": "this token belongs to no run"} if run is None else self._answer(run, call)

    def _answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        answer = self._calls.answer(run, call)
        self._beat_at = min(self._beat_at, self._leases.due_at(run))
        return answer

    def _told(self, run: ActiveDispatch, answer: Answer) -> None:
        if answer.stop is not None:
            self._stop_run(run, answer.stop)

    def _stop_run(self, run: ActiveDispatch, reason: EndReason, *, at_once: bool = False) -> None:
        self._carry_out(self._tracker.terminate(run.dispatch_id, reason, _now(), at_once=at_once))

    def _ask(self, dispatch_id: DispatchId) -> None:
        self._carry_out(self._tracker.ask(dispatch_id))

    def _look(self) -> None:
        """Who has been told to stop: by a person, by the maintenance, by preemption."""
        self._rung, self._news = False, True
        self._look_at = boot_time() + _BREATH
        self._turn_at = min(self._turn_at, self._look_at)
        if self._runs:
            stops = self._store.live(phases=[DispatchPhase.ENDING])
            self._leases.note_stops({dispatch.dispatch_id: dispatch.reason for dispatch in stops})

    def _beat(self) -> None:
        self._beat_at = boot_time() + _AFTER_FAILURE
        self._beat_at = self._leases.step()

    def _renew(self, requests: Sequence[RenewalRequest]) -> list[RenewalReply | Exception]:
        """All leases in one commit. The warden of each run learns how long it may go on."""
        sent, now = boot_time(), self._store.now()
        until = now + self._rules.lease_for
        renewals = [
            Renewal(dispatch_id=each.dispatch_id, expires_at=until, progress=each.progress, pid=each.pid)
            for each in requests
        ]
        standings = committed_apart(self._store, Renew, renewals)
        return [
            each if isinstance(each, Exception) else self._renewed(request.dispatch_id, each, sent, now)
            for request, each in zip(requests, standings, strict=True)
        ]

    def _renewed(
        self, dispatch_id: DispatchId, standing: Standing | None, sent: float, now: Moment
    ) -> RenewalReply | Exception:
        if standing is None:
            return StaleDispatch("this lease has expired, ended or been replaced", dispatch_id=dispatch_id)
        ttl = seconds(standing.expires_at - now)
        if run := self._runs.get(dispatch_id):
            self._supervisor.renew(run, sent + min(ttl, self._unheard))
        return RenewalReply(ttl, standing.reason if standing.phase is DispatchPhase.ENDING else None)

    def _stop_lease(self, lease: ActiveLease) -> None:
        run = self._runs.get(lease.dispatch_id)
        if run is not None and lease.lost:
            # The job may run elsewhere any moment: the ladder begins at its end.
            self._stop_run(run, EndReason.LEASE_EXPIRED, at_once=True)
        elif run is not None and lease.stop is not None:
            self._stop_run(run, lease.stop)

    # ending

    def _carry_out(self, effects: list[Effect]) -> None:
        for dispatch_id, step, reason in effects:
            run = self._runs.get(dispatch_id)
            if run is None:
                continue
            match step:
                case Step.YIELD | Step.CANCEL:
                    self._supervisor.ask_to_stop(run, canceled=reason not in _YIELDING)
                case Step.TERM:
                    run.order("term")
                case Step.KILL:
                    run.order("kill", why=str(reason))
                case Step.FORCE:
                    if run.warden is not None:
                        run.warden.force()
                case Step.LOST:
                    self._give_up(run)
            if step is not Step.LOST:
                self._notes.append((run, Note(EventKind.SIGNALED, str(step), {"for": str(reason or "")})))

    def _give_up(self, run: ActiveDispatch) -> None:
        """Its tree outlived SIGKILL. The job moves on; the units stay taken until the tree is gone."""
        self._notes.append((run, Note(EventKind.SIGNALED, str(Step.LOST), {})))
        if self._give_up_at is None:
            log.error("%s survives SIGKILL; its units stay taken until it is gone", run.dispatch_id)
            held = self._lost[run] = self._quarantine(run)
            lease = ActiveLease(held, boot_time(), seconds(self._rules.lease_for))
            self._leases.live[held] = lease
        self._settle(run, Outcome(EndReason.WORKER_CRASHED, error="its processes survived SIGKILL"))

    def _quarantine(self, run: ActiveDispatch) -> DispatchId:
        """
        Take the units of a tree that does not die once more, by a lease without a job, before its own lease ends: so
        the scheduler cannot give them to another job in between.
        """
        admission_class, rules = run.dispatch.admission_class, self._rules

        def take(view: AdmissionView) -> RoundResult:
            view.ledger.take(admission_class, view.now, rules.ordering.sharing)
            return RoundResult(standalone_lease=admission_class)

        [grant] = committed(self._store, Admit(rules.host, take, rules.terms("quarantine")))
        ids = {"dispatch_id": run.dispatch_id, "held_by": grant.dispatch.dispatch_id}
        self._notes.append((run, Note(EventKind.ALERT, "lost", ids)))
        return grant.dispatch.dispatch_id

    def _run_over(self, run: ActiveDispatch, outcome: Outcome) -> None:
        if held := self._lost.pop(run, None):
            del self._leases.live[held]
            self._service.job_service.release(held)
        else:
            self._settle(run, outcome)

    def _settle(self, run: ActiveDispatch, outcome: Outcome) -> None:
        how = self._tracker.settle(run.dispatch_id, outcome.end)
        if how is not None:
            del self._runs[run.dispatch_id], self._leases.live[run.dispatch_id]
            self._tokens.pop(run.token, None)
            self._end(run, outcome._replace(end=how))

    def _end(self, run: ActiveDispatch, outcome: Outcome) -> None:
        """Half a batch at a time: one half runs while the other is written. Where nothing waits behind it, at once, but for those that end like a hail."""
        self._ended.append((run, outcome))
        since = boot_time() if len(self._ended) < self._supervisor.functions.ahead else self._turned_at
        self._turn_at = min(self._turn_at, since + _SOON)

    def _write_notes(self) -> None:
        """Kept until they are written; what comes meanwhile is for the next time."""
        notes = list(self._notes)
        self._note_at = boot_time() + _AFTER_FAILURE
        now = self._store.now()
        committed(self._store, Apply([remark(run.job, note, now) for run, note in notes]))
        del self._notes[: len(notes)]
        self._note_at = 0.0

    def _drain(self, ends: float) -> None:
        self._give_up_at = ends + AFTER_STOP / 2
        self._carry_out(self._tracker.drain(_now(), max(0, int((ends - boot_time()) * SECOND))))
        # Written down in one transaction, so that a crash on the way lands it alike. Who has been told before keeps the first reason.
        now, grace = self._store.now(), self._rules.grace
        leased = [run for run in self._runs.values() if run.dispatch.phase is DispatchPhase.LEASED]
        told = [stop(run.dispatch, run.job, EndReason.GRACEFUL_SHUTDOWN, now, grace=grace) for run in leased]
        committed(self._store, Apply([change for change in told if change is not None]))

    def _end_all(self) -> None:
        """
        Whatever made the loop late, no dispatch is left with a lease and no end: each that has not ended is given one, and all are
        written in one commit.
        """
        for run in list(self._runs.values()):
            self._settle(
                run,
                Outcome(EndReason.WORKER_CRASHED, error="its processes had not ended when the time was over"),
            )
        if self._ended:
            self._service.job_service.end_many(
                [EndReport(run.dispatch_id, *outcome) for run, outcome in self._ended]
            )
            self._ended.clear()

    def _leave(self) -> None:
        self._control_socket.close()
        self._supervisor.close(wait_sec=AFTER_STOP / 2)
        self._watch.close()
        self._folder.give_back()


def _now() -> Moment:
    """The ladder's clock: how long somebody has waited does not depend on what time it is."""
    return int(boot_time() * SECOND)
