"""
The runner: fetches jobs of its three types from the scheduler, runs them in processes of their own, and
always knows how each ends.

One thread does everything here. It runs no foreign code and waits for nothing but its sockets and the store,
so heartbeats go out whatever a job does. The tracker decides how attempts are ended, the supervisor has the
processes; this file carries messages between them and the job service.
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
from penstock.core.jobs.batching import SOON, Batching
from penstock.core.jobs.changes import Note, Renewal, remark, stop
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.round import AdmissionView, RoundResult
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.tracker import Effect, Step, Tracker
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, member_of, seconds
from penstock.core.jobs.workers import WorkerKinds
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.control_socket import ControlSocket, RunRequests
from penstock.runner.leftovers import WORKER, Leftovers, OutputCleaner
from penstock.runner.links import ActiveDispatch
from penstock.runner.output import Output
from penstock.runner.payload import FUNCTION, JOB_TYPES, CommandPayload, RunnerOptions, read
from penstock.runner.supervisor import ProcessSupervisor
from penstock.runner.warden import boot_time
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.job_service import Answer, EndReport, GrantedJob
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Apply, Renew, committed, committed_apart
from penstock.work.leases import REPORT_SEC, ActiveLease, LeaseKeeper, RenewalReply, RenewalRequest
from penstock.work.outcome import Outcome

log = logging.getLogger("penstock.runner")

_ALL: Final = WorkerKinds(job_types=JOB_TYPES)
_FUNCTIONS: Final = WorkerKinds(job_types=frozenset({FUNCTION}))
_COMMANDS: Final = WorkerKinds(job_types=JOB_TYPES - {FUNCTION})
#: Seconds between two looks for stops, and after a failure.
_BREATH: Final = 0.02
_AFTER_FAILURE: Final = 1.0
#: Seconds that a stop may take beyond its timeout.
AFTER_STOP: Final = 0.8
#: With these reasons the job goes back to the queue, so its function is asked to yield. With others it is
#: canceled.
_YIELDING: Final = {
    None,
    EndReason.COOPERATIVE_PREEMPTION,
    EndReason.PREEMPTION_TIMEOUT,
    EndReason.GRACEFUL_SHUTDOWN,
}


class Runner:
    """
    Start it after its scheduler service, and stop it before. Give `runs.survivors()` to the service: then
    what an earlier runner left is ended before anything is dispatched.
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
        self._requests: deque[Callable[[], None]] = deque()
        #: The store has changed since the last look for stops.
        self._store_changed = True
        #: Since jobs were last fetched, something was committed, or there was more than could be taken.
        self._fetch_worthwhile = True
        #: When each part of the loop is due (`boot_time`), and when the last exchange was.
        self._exchange_at = self._look_at = self._beat_at = self._note_at = self._supervisor_at = 0.0
        self._exchanged_at = 0.0
        #: When a stop is over, whatever has not ended or cannot be written.
        self._give_up_at: float | None = None
        self._over = False
        self._cleaner = OutputCleaner(service.store, runs.path)
        self._io = IoLoop()
        self.batching = Batching(
            self._settings.workers,
            round(self._settings.ahead_sec * SECOND),
            expensive=service.store.shared,
            threads=False,
        )
        self.supervisor = ProcessSupervisor(
            runs, self._settings, self._io, self.batching, answer=self._answer, on_end=self._run_over
        )
        self._calls = RunRequests(service.job_service, self._tracker, self.supervisor.note, self._read_reply)
        self._thread = Thread(target=self._loop, name="penstock-runner", daemon=True)

    # from any thread

    def start(self) -> Self:
        self._folder.take()
        self._folder.end_leftovers()
        self._io.open()
        self.supervisor.open()
        users = {user.uid for user in self._settings.users.values()}
        self._control_socket = ControlSocket(
            f"penstock-job-{self._folder.mark}-{token_urlsafe()}", self._io, self._answer_token, users
        )
        self._store.on_change(self._note_change)
        self._service.yields.on_ask(self.ask_to_yield)
        self._thread.start()
        self._cleaner.start()
        return self

    def stop(self, timeout_sec: float = 30.0) -> None:
        """
        Fetch nothing more; ask what runs to yield, then end it, all within one timeout. A dispatch that has
        not ended by then goes back to the queue as if it had. A second call, from another thread, with a
        shorter timeout hurries the first.
        """
        if self.running:
            ends = boot_time() + timeout_sec  # from now, however late the thread gets to it
            self.call_soon(lambda: self._drain(ends))
            # A store that hangs may hold the thread; the caller does not wait for it.
            self._thread.join(timeout_sec + AFTER_STOP)
            self._cleaner.stop()

    @property
    def running(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    @property
    def address(self) -> str:
        """Of the control socket."""
        return self._control_socket.address

    def pids(self) -> list[int]:
        """The topmost process of each tree."""
        return self.supervisor.pids()

    def ask_to_yield(self, dispatch_id: DispatchId) -> None:
        """Ask a dispatch to stop at its next safe place. It is not forced to."""
        self.call_soon(lambda: self._ask(dispatch_id))

    def kill(self, dispatch_id: DispatchId) -> None:
        """Do not wait any longer for a run that must stop."""

        def hurry() -> None:
            if reason := self._tracker.reason(dispatch_id):
                self._carry_out(self._tracker.terminate(dispatch_id, reason, _now(), at_once=True))

        self.call_soon(self.look_for_stops)
        self.call_soon(hurry)

    def dispatch_of(self, token: str) -> DispatchId | None:
        """The dispatch that has this token; None once it is over."""
        run = self._tokens.get(token)
        return None if run is None else run.dispatch_id

    def call(self, token: str, call: Frame) -> Frame:
        """Answer a request of the run with this token. NotFound: no run has it."""
        answer: Future[Frame] = Future()

        def reply() -> None:
            run = self._tokens.get(token)
            if run is None:
                answer.set_exception(NotFound("this token belongs to no run"))
            else:
                answer.set_result(self._answer(run, call))

        if not self.running:
            raise NotFound("this token belongs to no run")
        self.call_soon(reply)
        return answer.result(30)

    def output(self, dispatch_id: DispatchId) -> Output:
        return self._folder.output(dispatch_id)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` in the runner's thread."""
        self._requests.append(fn)
        self._io.wake()

    def _note_change(self) -> None:
        if not self._store_changed:
            self._store_changed = True
            self._io.wake()

    # the loop

    def _loop(self) -> None:
        while not self._over:
            self._guarded("reading messages", lambda: self._io.wait(self._wait_sec()))
            while self._requests:
                self._guarded("a request", self._requests.popleft())
            self._guarded("the ladder", lambda: self._carry_out(self._tracker.advance(_now())))
            now = boot_time()
            # When the time of a stop is over, ends are all that is written: each commit may take long on a
            # busy disk.
            late = self._give_up_at is not None and now >= self._give_up_at - AFTER_STOP / 2
            for due, what, do in (
                (now >= self._note_at and self._notes and not late, "the trail", self._write_notes),
                (now >= self._beat_at and not late, "the heartbeat", self._beat),
                (now >= self._look_at and self._store_changed, "looking for stops", self.look_for_stops),
                (now >= self._exchange_at, "ending and fetching", self.exchange),
            ):
                if due:
                    self._guarded(what, do)
            if (last := self._give_up_at) is not None:
                self._over = not (self._runs or self._ended) or boot_time() >= last
        self._guarded("the last ends", self._end_all)
        self._close()

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """The loop survives any error: a store that is full or locked, or a bug."""
        try:
            do()
        except Unavailable as error:
            log.warning("%s: %s", what, error)
        except Exception:
            log.exception("%s failed", what)

    def _wait_sec(self) -> float:
        now = boot_time()
        moments = [self._beat_at, self._exchange_at]
        if self._store_changed:
            moments.append(self._look_at)
        if self._notes:
            moments.append(self._note_at)
        if (alarm := self._tracker.alarm()) is not None:
            moments.append(alarm / SECOND)
        self._guarded("upkeep", self._step_supervisor)
        moments.append(self._supervisor_at)
        if self._give_up_at is not None:
            moments.append(self._give_up_at)
        return 0.0 if self._requests else min(moments) - now

    def _step_supervisor(self) -> None:
        """Apart from reading messages: when upkeep fails, the runner must still learn how runs end."""
        self._supervisor_at = boot_time() + _AFTER_FAILURE
        pause = self.supervisor.step()
        self._supervisor_at = inf if pause is None else boot_time() + pause

    # ending and fetching

    def exchange(self) -> None:
        """Report what has ended and fetch what may start in its place, in one commit if possible."""
        claimed_at, self._exchanged_at = self._exchanged_at, boot_time()
        stopping = self._give_up_at is not None
        plan = self.supervisor.functions.plan(
            _now(), len(self._ended), 0 if stopping else int(claimed_at * SECOND)
        )
        job_service, ended = self._service.job_service, self._ended[: plan.report]
        reports = [EndReport(run.dispatch_id, *outcome) for run, outcome in ended]
        kinds, free = (_ALL, 0) if stopping else self._free(plan.claim)
        if not (free or ended) or not (
            ended or self._fetch_worthwhile or self._service.dispatcher.awaits(kinds)
        ):
            self._exchange_at = self._next_exchange()
            return
        self._exchange_at = boot_time() + _AFTER_FAILURE
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
        self.supervisor.functions.feed()
        # As many as were asked for: there may be more, and room for the other kind.
        more = free > 0 and len(claimed) == free
        # No change was noted meanwhile: this is the thread that notes them.
        self._fetch_worthwhile = more if free else self._fetch_worthwhile
        self._exchange_at = 0.0 if more else self._next_exchange()

    def _next_exchange(self) -> float:
        return boot_time() + seconds(SOON if self._ended else self._rules.tick)

    def _free(self, calls: int) -> tuple[WorkerKinds, int]:
        """Which jobs to claim, and how many. `calls`: how many functions there is room for."""
        # Reported even when there is no room: such jobs would otherwise be reserved for workers that poll.
        self._service.fetchers.came(_ALL, self._store.now() + self._rules.fetch_for)
        slots = max(0, self.supervisor.slots)
        if calls and slots:
            free = _ALL, min(calls, slots)
        else:
            free = (_FUNCTIONS, calls) if calls else (_COMMANDS, slots)
        self._service.fetchers.has_room(WORKER, *free, FOR_EVER)
        return free

    def _begin(self, claimed: GrantedJob) -> None:
        job, dispatch, _, checkpoint, parents = claimed
        try:
            work = read(job.intent.job_type, job.intent.payload, self._settings.functions)
        except Refused as error:
            self._end(
                ActiveDispatch(job, dispatch, CommandPayload(argv=()), None, self._exchanged_at),
                Outcome(EndReason.JOB_ERROR, error=str(error)),
            )
            return
        run = ActiveDispatch(job, dispatch, work, checkpoint, self._exchanged_at, parents=parents)
        others = (*self._lost, *self._runs.values())
        if dispatch.fence > 1 and any(other.job.job_id == job.job_id for other in others):
            why = "processes of its last attempt survive on this host"
            self._end(run, Outcome(EndReason.START_TIMEOUT, error=why))
            return
        self._runs[run.dispatch_id] = self._leases.live[run.dispatch_id] = run
        run.began_at = boot_time()
        run.until = run.began_at + self._silence_sec
        # Within REPORT_SEC its process is known.
        self._beat_at = min(self._beat_at, self._leases.due_at(run), run.began_at + REPORT_SEC)
        if isinstance(work, CommandPayload):
            self._tracker.register(run.dispatch_id, listens=work.listens)
            run.token = token_urlsafe(32)
            self._tokens[run.token] = run
            try:
                self.supervisor.start(run, work, self._variables(run))
            except Exception as error:  # noqa: BLE001  # a dispatch without a process would keep its lease for ever
                log.warning("%s cannot be started: %s", run.dispatch_id, error)
                # Out of descriptors: not its fault, so it goes back as it was. Any other error is its end.
                how = EndReason.RELEASED if isinstance(error, OSError) else EndReason.JOB_ERROR
                self._settle(run, Outcome(how, error=f"it could not be started: {error}"))
        else:
            self._tracker.register(run.dispatch_id)
            self.supervisor.functions.add(run)

    def _variables(self, run: ActiveDispatch) -> dict[str, str]:
        """For the environment of a command: its ids, and how it reaches the runner."""
        variables = {
            "PENSTOCK_JOB_ID": run.job.job_id,
            "PENSTOCK_DISPATCH_ID": run.dispatch_id,
            "PENSTOCK_SOCKET": self._control_socket.address,
            "PENSTOCK_JOB_TOKEN": run.token,
        }
        if (member := member_of(run.job.job_id)) is not None:
            array_id, index = member
            variables |= {"PENSTOCK_ARRAY_ID": array_id, "PENSTOCK_ARRAY_INDEX": str(index)}
        return variables if self._settings.url is None else variables | {"PENSTOCK_URL": self._settings.url}

    @property
    def _silence_sec(self) -> float:
        """
        A warden that gets no renewal for this long kills its job: well before the scheduler counts it as
        lost.
        """
        return seconds(self._rules.lease_for) * 2 / 3

    # messages

    def _answer_token(self, token: str, call: Frame) -> Frame:
        run = self._tokens.get(token)
        return {"error": "this token belongs to no run"} if run is None else self._answer(run, call)

    def _answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        answer = self._calls.answer(run, call)
        self._beat_at = min(self._beat_at, self._leases.due_at(run))
        return answer

    def _read_reply(self, run: ActiveDispatch, answer: Answer) -> None:
        if answer.stop is not None:
            self._stop_run(run, answer.stop)

    def _stop_run(self, run: ActiveDispatch, reason: EndReason, *, at_once: bool = False) -> None:
        self._carry_out(self._tracker.terminate(run.dispatch_id, reason, _now(), at_once=at_once))

    def _ask(self, dispatch_id: DispatchId) -> None:
        self._carry_out(self._tracker.ask(dispatch_id))

    def look_for_stops(self) -> None:
        """Read which dispatches must stop: by a person, by the maintenance, by preemption."""
        self._store_changed, self._fetch_worthwhile = False, True
        self._look_at = boot_time() + _BREATH
        self._exchange_at = min(self._exchange_at, self._look_at)
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
        renewed = committed_apart(self._store, Renew, renewals)
        return [
            each if isinstance(each, Exception) else self._renewed(request.dispatch_id, each, sent, now)
            for request, each in zip(requests, renewed, strict=True)
        ]

    def _renewed(
        self, dispatch_id: DispatchId, renewed: RenewedDispatch | None, sent: float, now: Moment
    ) -> RenewalReply | Exception:
        if renewed is None:
            return StaleDispatch("this lease has expired, ended or been replaced", dispatch_id=dispatch_id)
        ttl = seconds(renewed.expires_at - now)
        if run := self._runs.get(dispatch_id):
            self.supervisor.renew(run, sent + min(ttl, self._silence_sec))
        return RenewalReply(ttl, renewed.reason if renewed.phase is DispatchPhase.ENDING else None)

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
                    self.supervisor.ask_to_stop(run, canceled=reason not in _YIELDING)
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
        Take the units of a tree that does not die once more, by a lease without a job, before its own lease
        ends: so the scheduler cannot give them to another job in between.
        """
        admission_class, rules = run.dispatch.admission_class, self._rules

        def take(view: AdmissionView) -> RoundResult:
            view.ledger.take(admission_class, view.now, rules.ordering.sharing)
            return RoundResult(standalone_lease=admission_class)

        [grant] = committed(self._store, self._service.dispatcher.admit(take, "quarantine"))
        ids = {"dispatch_id": run.dispatch_id, "held_by": grant.dispatch.dispatch_id}
        self._notes.append((run, Note(EventKind.ALERT, "lost", ids)))
        return grant.dispatch.dispatch_id

    def _run_over(self, run: ActiveDispatch, outcome: Outcome) -> None:
        if run.peak:
            self._service.learner.saw_peak(run.job.job_id, run.peak)
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
        """The batching machine says whether it is reported now, or soon with others."""
        self._ended.append((run, outcome))
        is_full = self.batching.is_full(self.supervisor.functions.ahead, len(self._ended))
        # Workers are processes: a commit for each end would take the time of this thread from all others.
        since = self._exchanged_at if is_full else boot_time()
        self._exchange_at = min(self._exchange_at, since + seconds(SOON))

    def _write_notes(self) -> None:
        """Notes are kept until they are committed."""
        notes = list(self._notes)
        self._note_at = boot_time() + _AFTER_FAILURE
        now = self._store.now()
        committed(self._store, Apply([remark(run.job, note, now) for run, note in notes]))
        del self._notes[: len(notes)]
        self._note_at = 0.0

    def _drain(self, ends: float) -> None:
        self._give_up_at = ends + AFTER_STOP / 2
        self._service.fetchers.has_room(WORKER, _ALL, 0, FOR_EVER)
        self._carry_out(self._tracker.drain(_now(), max(0, int((ends - boot_time()) * SECOND))))
        # In one transaction, so that a crash on the way has the same result. An earlier reason stays.
        now, grace = self._store.now(), self._rules.grace
        leased = [run for run in self._runs.values() if run.dispatch.phase is DispatchPhase.LEASED]
        stops = [stop(run.dispatch, run.job, EndReason.GRACEFUL_SHUTDOWN, now, grace=grace) for run in leased]
        committed(self._store, Apply([change for change in stops if change is not None]))

    def _end_all(self) -> None:
        """
        Give every dispatch that has not ended an end, all in one commit: however late the loop is, no
        dispatch keeps its lease.
        """
        late = Outcome(EndReason.WORKER_CRASHED, error="its processes had not ended when the time was over")
        for run in list(self._runs.values()):
            self._settle(run, late)
        if self._ended:
            self._service.job_service.end_many(
                [EndReport(run.dispatch_id, *outcome) for run, outcome in self._ended]
            )
            self._ended.clear()

    def _close(self) -> None:
        self._control_socket.close()
        self.supervisor.close(wait_sec=AFTER_STOP / 2)
        self._io.close()
        self._folder.give_back()


def _now() -> Moment:
    """The tracker's clock: graces do not depend on the wall clock."""
    return int(boot_time() * SECOND)
