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
from penstock.core.jobs.changes import Note, Renewal, remark, stop
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.round import AdmissionView, RoundResult
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.tracker import Effect, Step, Tracker
from penstock.core.jobs.types import SECOND, DispatchId, EndReason, Moment, member_of, seconds
from penstock.core.jobs.workers import SOON, Batching, WorkerKinds
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.control_socket import ControlSocket, RunRequests
from penstock.runner.folder import WORKER, OutputCleaner, RunnerFolder
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
#: Seconds between two checks for stops, and after a failure.
_STOPS_SEC: Final = 0.02
_AFTER_FAILURE: Final = 1.0
#: Seconds that a stop may take beyond its timeout.
AFTER_STOP: Final = 0.8
#: For these reasons the job goes back to the queue, so its function is asked to yield. For all other reasons
#: its function is canceled.
_YIELDING: Final = {
    None,
    EndReason.COOPERATIVE_PREEMPTION,
    EndReason.PREEMPTION_TIMEOUT,
    EndReason.GRACEFUL_SHUTDOWN,
}


class Runner:
    """
    Runs the jobs of the runner's three types.

    Start it after its scheduler service, and stop it before. Give `folder.survivors()` to the service: then
    the service ends the processes of an earlier runner before it dispatches anything.
    """

    def __init__(
        self, service: SchedulerService, folder: RunnerFolder, settings: RunnerOptions | None = None
    ) -> None:
        self._service, self._store, self._rules = service, service.store, service.rules
        self._settings = settings or RunnerOptions()
        self._folder = folder
        self._tracker = Tracker(self._settings.graces)
        self._attempts: dict[DispatchId, ActiveDispatch] = {}
        self._leases: LeaseKeeper[ActiveLease] = LeaseKeeper(
            self._renew,
            on_stop=self._stop_lease,
            on_yield=lambda lease: self._ask_to_yield(lease.dispatch_id),
            together=True,
            clock=boot_time,
        )
        self._tokens: dict[str, ActiveDispatch] = {}
        self._ended: list[tuple[ActiveDispatch, Outcome]] = []
        self._notes: list[tuple[ActiveDispatch, Note]] = []
        #: Attempts whose processes survived SIGKILL, and the leases that hold their units.
        self._survivors: dict[ActiveDispatch, DispatchId] = {}
        self._requests: deque[Callable[[], None]] = deque()
        #: The store has changed since the last check for stops.
        self._store_changed = True
        #: Since the last fetch there was a commit, or the fetch left jobs that may start.
        self._fetch_worthwhile = True
        #: When each part of the loop is due, and the time of the last exchange (`boot_time`).
        self._exchange_at = self._stops_at = self._leases_at = self._note_at = self._supervisor_at = 0.0
        self._exchanged_at = 0.0
        #: When a stop ends, even if some attempts have not ended or the store cannot be written.
        self._give_up_at: float | None = None
        self._finished = False
        self._cleaner = OutputCleaner(service.store, folder.path)
        self._io = IoLoop()
        self.batching = Batching(
            self._settings.workers,
            round(self._settings.ahead_sec * SECOND),
            expensive=service.store.shared,
            threads=False,
        )
        self.supervisor = ProcessSupervisor(
            folder, self._settings, self._io, self.batching, answer=self._answer, on_end=self._on_end
        )
        self._calls = RunRequests(service.job_service, self._tracker, self.supervisor.note, self._read_reply)
        self._thread = Thread(target=self._loop, name="penstock-runner", daemon=True)

    # from any thread

    def start(self) -> Self:
        self._folder.lock()
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
        Fetch no more jobs; ask the running attempts to yield, then end them, all within one timeout. An
        attempt that has not ended by then goes back to the queue as if it had. A second call, from another
        thread and with a shorter timeout, shortens the first.
        """
        if self.running:
            ends = boot_time() + timeout_sec  # from now, however late the thread gets to it
            self.call_soon(lambda: self._drain(ends))
            # A store that hangs may hold the thread; the caller does not wait for it.
            self._thread.join(timeout_sec + AFTER_STOP)
            self._cleaner.stop()

    @property
    def running(self) -> bool:
        """Whether the runner's thread is alive."""
        return self._thread.is_alive()

    @property
    def address(self) -> str:
        """The address of the control socket."""
        return self._control_socket.address

    def pids(self) -> list[int]:
        """The topmost process of each attempt and of each warm worker."""
        return self.supervisor.pids()

    def ask_to_yield(self, dispatch_id: DispatchId) -> None:
        """Ask a dispatch to stop at its next safe place. Nothing forces it to."""
        self.call_soon(lambda: self._ask_to_yield(dispatch_id))

    def kill(self, dispatch_id: DispatchId) -> None:
        """Kill at once a dispatch that must stop."""

        def kill_now() -> None:
            if reason := self._tracker.reason(dispatch_id):
                self._carry_out(self._tracker.terminate(dispatch_id, reason, _now(), at_once=True))

        self.call_soon(self.look_for_stops)
        self.call_soon(kill_now)

    def dispatch_of(self, token: str) -> DispatchId | None:
        """The dispatch with this token. None: no such dispatch runs."""
        attempt = self._tokens.get(token)
        return None if attempt is None else attempt.dispatch_id

    def call(self, token: str, call: Frame) -> Frame:
        """Answer a request of the running dispatch with this token. Raises NotFound if there is none."""
        answer: Future[Frame] = Future()

        def reply() -> None:
            attempt = self._tokens.get(token)
            if attempt is None:
                answer.set_exception(NotFound("no running job has this token"))
            else:
                answer.set_result(self._answer(attempt, call))

        if not self.running:
            raise NotFound("no running job has this token")
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
        while not self._finished:
            self._guarded("reading messages", lambda: self._io.wait(self._wait_sec()))
            while self._requests:
                self._guarded("a request", self._requests.popleft())
            self._guarded("the ladder", lambda: self._carry_out(self._tracker.advance(_now())))
            now = boot_time()
            # When the time of a stop is over, only ends are written: each commit may take long on a busy
            # disk.
            late = self._give_up_at is not None and now >= self._give_up_at - AFTER_STOP / 2
            for due, what, do in (
                (now >= self._note_at and self._notes and not late, "the trail", self._write_notes),
                (now >= self._leases_at and not late, "the heartbeat", self._step_leases),
                (now >= self._stops_at and self._store_changed, "looking for stops", self.look_for_stops),
                (now >= self._exchange_at, "ending and fetching", self.exchange),
            ):
                if due:
                    self._guarded(what, do)
            if (last := self._give_up_at) is not None:
                self._finished = not (self._attempts or self._ended) or boot_time() >= last
        self._guarded("the last ends", self._end_all)
        self._close()

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        """Call `do` and log any error, so that the loop survives a full or locked store, or a bug."""
        try:
            do()
        except Unavailable as error:
            log.warning("%s: %s", what, error)
        except Exception:
            log.exception("%s failed", what)

    def _wait_sec(self) -> float:
        now = boot_time()
        moments = [self._leases_at, self._exchange_at]
        if self._store_changed:
            moments.append(self._stops_at)
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
        """The supervisor's upkeep. If it fails, the runner must still read how attempts end."""
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
        reports = [EndReport(attempt.dispatch_id, *outcome) for attempt, outcome in ended]
        kinds, free = (_ALL, 0) if stopping else self._free(plan.claim, self.supervisor.slots)
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
        # The store granted as many as requested: there may be more jobs, and room for the other kind.
        more = free > 0 and len(claimed) == free
        if more:  # the rounds of other workers know of that room while the jobs are started
            functions = sum(grant.job.intent.job_type == FUNCTION for grant in claimed)
            self._free(plan.claim - functions, self.supervisor.slots - len(claimed) + functions)
        for grant in claimed:
            self._guarded("starting a job", partial(self._begin, grant))
        self.supervisor.functions.feed()
        # No change can have been noted meanwhile, because this thread notes them.
        self._fetch_worthwhile = more if free else self._fetch_worthwhile
        self._exchange_at = 0.0 if more else self._next_exchange()

    def _next_exchange(self) -> float:
        return boot_time() + seconds(SOON if self._ended else self._rules.tick)

    def _free(self, calls: int, slots: int) -> tuple[WorkerKinds, int]:
        """
        Which jobs to claim, and how many. `calls`: how many functions there is room for; `slots`: how many commands.
        """
        # Tell the scheduler even without room; otherwise it would reserve these jobs for workers that poll.
        self._service.pulling_workers.came(_ALL, self._store.now() + self._rules.fetch_for)
        slots = max(0, slots)
        if calls and slots:
            free = _ALL, min(calls, slots)
        else:
            free = (_FUNCTIONS, calls) if calls else (_COMMANDS, slots)
        self._service.pulling_workers.has_room(WORKER, *free, FOR_EVER)
        return free

    def _begin(self, claimed: GrantedJob) -> None:
        job, dispatch, _, checkpoint, parents = claimed
        try:
            work = read(job.intent.job_type, job.intent.payload, self._settings.functions)
        except Refused as error:
            self._queue_report(
                ActiveDispatch(job, dispatch, CommandPayload(argv=()), None, self._exchanged_at),
                Outcome(EndReason.JOB_ERROR, error=str(error)),
            )
            return
        attempt = ActiveDispatch(job, dispatch, work, checkpoint, self._exchanged_at, parents=parents)
        others = (*self._survivors, *self._attempts.values())
        if dispatch.fence > 1 and any(other.job.job_id == job.job_id for other in others):
            why = "processes of its last attempt survive on this host"
            self._queue_report(attempt, Outcome(EndReason.START_TIMEOUT, error=why))
            return
        self._attempts[attempt.dispatch_id] = self._leases.live[attempt.dispatch_id] = attempt
        attempt.began_at = boot_time()
        attempt.until = attempt.began_at + self._silence_sec
        # The first renewal, within REPORT_SEC, reports the process id.
        self._leases_at = min(self._leases_at, self._leases.due_at(attempt), attempt.began_at + REPORT_SEC)
        if isinstance(work, CommandPayload):
            self._tracker.register(attempt.dispatch_id, listens=work.listens)
            attempt.token = token_urlsafe(32)
            self._tokens[attempt.token] = attempt
            try:
                self.supervisor.start(attempt, work, self._variables(attempt))
            except Exception as error:  # noqa: BLE001  # a dispatch without a process would keep its lease for ever
                log.warning("%s cannot be started: %s", attempt.dispatch_id, error)
                # Out of descriptors: the job goes back to the queue unchanged. Any other error ends the
                # attempt.
                end = EndReason.RELEASED if isinstance(error, OSError) else EndReason.JOB_ERROR
                self._settle(attempt, Outcome(end, error=f"it could not be started: {error}"))
        else:
            self._tracker.register(attempt.dispatch_id)
            self.supervisor.functions.add(attempt)

    def _variables(self, attempt: ActiveDispatch) -> dict[str, str]:
        """
        The environment variables of a command: its ids, and the address and token of the control socket.
        """
        variables = {
            "PENSTOCK_JOB_ID": attempt.job.job_id,
            "PENSTOCK_DISPATCH_ID": attempt.dispatch_id,
            "PENSTOCK_SOCKET": self._control_socket.address,
            "PENSTOCK_JOB_TOKEN": attempt.token,
        }
        if (member := member_of(attempt.job.job_id)) is not None:
            array_id, index = member
            variables |= {"PENSTOCK_ARRAY_ID": array_id, "PENSTOCK_ARRAY_INDEX": str(index)}
        return variables if self._settings.url is None else variables | {"PENSTOCK_URL": self._settings.url}

    @property
    def _silence_sec(self) -> float:
        """
        A warden without a renewal for this long kills its job, well before the scheduler counts the job as
        lost.
        """
        return seconds(self._rules.lease_for) * 2 / 3

    # messages

    def _answer_token(self, token: str, call: Frame) -> Frame:
        attempt = self._tokens.get(token)
        return {"error": "no running job has this token"} if attempt is None else self._answer(attempt, call)

    def _answer(self, attempt: ActiveDispatch, call: Frame) -> Frame:
        answer = self._calls.answer(attempt, call)
        self._leases_at = min(self._leases_at, self._leases.due_at(attempt))
        return answer

    def _read_reply(self, attempt: ActiveDispatch, answer: Answer) -> None:
        if answer.stop is not None:
            self._stop_attempt(attempt, answer.stop)

    def _stop_attempt(self, attempt: ActiveDispatch, reason: EndReason, *, at_once: bool = False) -> None:
        self._carry_out(self._tracker.terminate(attempt.dispatch_id, reason, _now(), at_once=at_once))

    def _ask_to_yield(self, dispatch_id: DispatchId) -> None:
        self._carry_out(self._tracker.ask(dispatch_id))

    def look_for_stops(self) -> None:
        """Read which dispatches must stop, because of a person, the maintenance or preemption."""
        self._store_changed, self._fetch_worthwhile = False, True
        self._stops_at = boot_time() + _STOPS_SEC
        self._exchange_at = min(self._exchange_at, self._stops_at)
        if self._attempts:
            stops = self._store.live(phases=[DispatchPhase.ENDING])
            self._leases.note_stops({dispatch.dispatch_id: dispatch.reason for dispatch in stops})

    def _step_leases(self) -> None:
        self._leases_at = boot_time() + _AFTER_FAILURE
        self._leases_at = self._leases.step()

    def _renew(self, requests: Sequence[RenewalRequest]) -> list[RenewalReply | Exception]:
        """Renew all leases in one commit, and tell the warden of each attempt its new end."""
        sent, now = boot_time(), self._store.now()
        until = now + self._rules.lease_for
        renewals = [
            Renewal(dispatch_id=each.dispatch_id, expires_at=until, progress=each.progress, pid=each.pid)
            for each in requests
        ]
        renewed = committed_apart(self._store, Renew, renewals)
        return [
            one if isinstance(one, Exception) else self._renewed(request.dispatch_id, one, sent, now)
            for request, one in zip(requests, renewed, strict=True)
        ]

    def _renewed(
        self, dispatch_id: DispatchId, renewed: RenewedDispatch | None, sent: float, now: Moment
    ) -> RenewalReply | Exception:
        if renewed is None:
            return StaleDispatch("this lease has expired, ended or been replaced", dispatch_id=dispatch_id)
        ttl = seconds(renewed.expires_at - now)
        if attempt := self._attempts.get(dispatch_id):
            self.supervisor.renew(attempt, sent + min(ttl, self._silence_sec))
        return RenewalReply(ttl, renewed.reason if renewed.phase is DispatchPhase.ENDING else None)

    def _stop_lease(self, lease: ActiveLease) -> None:
        attempt = self._attempts.get(lease.dispatch_id)
        if attempt is not None and lease.lost:
            # Another host may start the job at any moment, so begin with the last step: SIGKILL.
            self._stop_attempt(attempt, EndReason.LEASE_EXPIRED, at_once=True)
        elif attempt is not None and lease.stop is not None:
            self._stop_attempt(attempt, lease.stop)

    # ending

    def _carry_out(self, effects: list[Effect]) -> None:
        for dispatch_id, step, reason in effects:
            attempt = self._attempts.get(dispatch_id)
            if attempt is None:
                continue
            match step:
                case Step.YIELD | Step.CANCEL:
                    self.supervisor.ask_to_stop(attempt, canceled=reason not in _YIELDING)
                case Step.TERM:
                    attempt.order("term")
                case Step.KILL:
                    attempt.order("kill", why=str(reason))
                case Step.FORCE:
                    if attempt.warden is not None:
                        attempt.warden.force()
                case Step.LOST:
                    self._give_up(attempt)
            if step is not Step.LOST:
                self._notes.append((attempt, Note(EventKind.SIGNALED, str(step), {"for": str(reason or "")})))

    def _give_up(self, attempt: ActiveDispatch) -> None:
        """
        End an attempt whose processes survived SIGKILL. Its units stay taken until the processes are gone.
        """
        self._notes.append((attempt, Note(EventKind.SIGNALED, str(Step.LOST), {})))
        if self._give_up_at is None:
            log.error("%s survives SIGKILL; its units stay taken until it is gone", attempt.dispatch_id)
            held = self._survivors[attempt] = self._quarantine(attempt)
            lease = ActiveLease(held, boot_time(), seconds(self._rules.lease_for))
            self._leases.live[held] = lease
        self._settle(attempt, Outcome(EndReason.WORKER_CRASHED, error="its processes survived SIGKILL"))

    def _quarantine(self, attempt: ActiveDispatch) -> DispatchId:
        """
        Take the units of the surviving processes a second time, by a lease without a job, before their own
        lease ends. So the scheduler cannot give the units to another job in between.
        """
        admission_class, rules = attempt.dispatch.admission_class, self._rules

        def take(view: AdmissionView) -> RoundResult:
            view.ledger.take(admission_class, view.now, rules.ordering.sharing)
            return RoundResult(standalone_lease=admission_class)

        [grant] = committed(self._store, self._service.dispatcher.admit(take, "quarantine"))
        ids = {"dispatch_id": attempt.dispatch_id, "held_by": grant.dispatch.dispatch_id}
        self._notes.append((attempt, Note(EventKind.ALERT, "lost", ids)))
        return grant.dispatch.dispatch_id

    def _on_end(self, attempt: ActiveDispatch, outcome: Outcome) -> None:
        if attempt.peak_memory:
            self._service.learner.saw_peak(attempt.job.job_id, attempt.peak_memory)
        if held := self._survivors.pop(attempt, None):
            del self._leases.live[held]
            self._service.job_service.release(held)
        else:
            self._settle(attempt, outcome)

    def _settle(self, attempt: ActiveDispatch, outcome: Outcome) -> None:
        end = self._tracker.settle(attempt.dispatch_id, outcome.end)
        if end is not None:
            del self._attempts[attempt.dispatch_id], self._leases.live[attempt.dispatch_id]
            self._tokens.pop(attempt.token, None)
            self._queue_report(attempt, outcome._replace(end=end))

    def _queue_report(self, attempt: ActiveDispatch, outcome: Outcome) -> None:
        """Report the end now, or soon together with others: `batching` decides."""
        self._ended.append((attempt, outcome))
        is_full = self.batching.is_full(self.supervisor.functions.ahead, len(self._ended))
        # A commit for each end would keep this one thread from its other work.
        since = self._exchanged_at if is_full else boot_time()
        self._exchange_at = min(self._exchange_at, since + seconds(SOON))

    def _write_notes(self) -> None:
        """Write the notes into the trail. They are kept until they are committed."""
        notes = list(self._notes)
        self._note_at = boot_time() + _AFTER_FAILURE
        now = self._store.now()
        committed(self._store, Apply([remark(attempt.job, note, now) for attempt, note in notes]))
        del self._notes[: len(notes)]
        self._note_at = 0.0

    def _drain(self, ends: float) -> None:
        self._give_up_at = ends + AFTER_STOP / 2
        self._service.pulling_workers.has_room(WORKER, _ALL, 0, FOR_EVER)
        self._carry_out(self._tracker.drain(_now(), max(0, int((ends - boot_time()) * SECOND))))
        # All stops in one transaction: a crash on the way has the same result. An earlier reason stays.
        now, grace = self._store.now(), self._rules.grace
        leased = [
            attempt for attempt in self._attempts.values() if attempt.dispatch.phase is DispatchPhase.LEASED
        ]
        stops = [
            stop(attempt.dispatch, attempt.job, EndReason.GRACEFUL_SHUTDOWN, now, grace=grace)
            for attempt in leased
        ]
        committed(self._store, Apply([change for change in stops if change is not None]))

    def _end_all(self) -> None:
        """
        End every dispatch that is still open, all in one commit. No dispatch keeps its lease, however late
        the loop is.
        """
        late = Outcome(EndReason.WORKER_CRASHED, error="its processes had not ended when the time was over")
        for attempt in list(self._attempts.values()):
            self._settle(attempt, late)
        if self._ended:
            self._service.job_service.end_many(
                [EndReport(attempt.dispatch_id, *outcome) for attempt, outcome in self._ended]
            )
            self._ended.clear()

    def _close(self) -> None:
        self._control_socket.close()
        self.supervisor.close(wait_sec=AFTER_STOP / 2)
        self._io.close()
        self._folder.unlock()


def _now() -> Moment:
    """The tracker's clock, which does not depend on the wall clock."""
    return int(boot_time() * SECOND)
