"""
Explain: why a job is in its state, what must happen next, and one command that would change it; in words and
as JSON (SPEC EX-1 to EX-3).

`recorded` says whether the reason is the one that a round has recorded for the job; otherwise the same
decision was made anew. `gates` has every reason that holds, the main one first. The words are made last, from
the same fields as the JSON, so both say the same. `core/jobs/viewer.py` removes what a reader must not learn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from penstock.core.jobs.dependencies import VERDICTS, ParentCondition, Verdict
from penstock.core.jobs.forecast import NOTHING_HOLDS, Ahead, Outlook
from penstock.core.jobs.job import DEADLINE_PASSED, DEPENDENCY_UNMET, Dispatch, Job, outcome_of
from penstock.core.jobs.reason_base import due_in, named, units_of
from penstock.core.jobs.reasons import NotReady, QueuedAhead, Reason, UnitsKept, retry_after_sec
from penstock.core.jobs.standing import LastFailure, end_words, last_failure, last_line, standing
from penstock.core.jobs.start_ranges import StartRange
from penstock.core.jobs.states import DEFAULT, SETTLED, DispatchPhase, JobState, Schedules, allowed
from penstock.core.jobs.types import SECOND, EndReason, JobId, Moment, member_of, seconds, spelled
from penstock.core.jobs.viewer import Viewer
from penstock.core.jobs.waits import Waited, wait_words
from penstock.core.jobs.worker_reasons import NoWorkerSeen


class GateInfo(Struct, frozen=True):
    """One reason that holds the job back. `way_out`: a command that would change it."""

    reason: str
    data: dict[str, Any]
    text: str
    way_out: str


class PreemptionInfo(Struct, frozen=True):
    """
    A request to an attempt to yield to a waiting job. `until`: when the request is repeated, or the attempt
    is stopped.
    """

    victim: JobId | None  # None: a job that the reader may not know
    wanted_by: JobId | None
    asked: int  # 1 or 2 requests
    until: Moment
    #: When the victim is stopped if it does not yield.
    forced_at: Moment
    #: Whether the victim has a checkpoint; without one its attempt starts again from the beginning.
    checkpoint: bool


class HostStanding(Struct, frozen=True):
    """How another host stands to the job. `reason`: why it does not start the job; empty: it could."""

    host: str
    reason: str
    text: str


class Findings(Struct, frozen=True):
    """What explain needs besides the job, its last attempt and its outlook."""

    #: Every reason that holds, the main one included.
    gates: tuple[Reason, ...] = ()
    #: Jobs that hold the cap, the units or the workers that the job waits for.
    holders: tuple[JobId | None, ...] = ()
    preemption: PreemptionInfo | None = None
    hosts: tuple[HostStanding, ...] = ()
    waits: tuple[Waited, ...] = ()
    deadline_reachable: bool | None = None
    #: Whether the job would start earlier with the highest priority.
    priority_helps: bool = True
    #: A job of `holders` that would yield to this one, but is not preemptible.
    unyielding: JobId | None = None
    #: Why no worker takes up a reserved job.
    worker: Reason | None = None
    #: The attempt before the last one.
    before: Dispatch | None = None
    schedules: Schedules = DEFAULT

    def seen_by(self, viewer: Viewer) -> Findings:
        preemption = self.preemption
        if preemption is not None:
            preemption = replace(
                preemption,
                victim=viewer.job(preemption.victim),
                wanted_by=viewer.job(preemption.wanted_by),
            )
        return replace(
            self,
            gates=tuple(map(viewer.reason, self.gates)),
            holders=tuple(map(viewer.job, self.holders)),
            preemption=preemption,
            unyielding=viewer.job(self.unyielding),
            worker=None if self.worker is None else viewer.reason(self.worker),
        )


NOTHING_FOUND: Final = Findings()


class Explanation(Struct, frozen=True, kw_only=True):
    """
    Why a job is in its state, and what it waits for; `str()` is the sentence for people.

    For example:

        explanation = job.explain()
        print(explanation)  # "It needs 30 units; 12 of 90 are free ..."
    """

    job_id: JobId
    state: JobState
    text: str
    #: `text` as one clause of at most 60 characters, for lists.
    short: str = ""
    waiting_sec: float | None = None
    reason: str = ""
    reason_data: dict[str, Any] | None = None
    gates: tuple[GateInfo, ...] = ()
    retry_after_sec: float | None = None
    recorded: bool = True
    ahead: tuple[Ahead, ...] = ()
    line_ahead: int = 0  # jobs before it in its own ready queue
    likely_start_at: Moment | None = None
    #: In 8 of 10 cases the job starts between these two. None: too little was learned.
    likely_start_low_at: Moment | None = None
    likely_start_high_at: Moment | None = None
    next_when_ends: JobId | None = None  # the running job whose end is expected to free what this job needs
    #: What must happen next, and when that is expected.
    next_step: str = ""
    next_at: Moment | None = None
    #: One command that would change the job's situation.
    way_out: str = ""
    held_by: tuple[JobId | None, ...] = ()
    last_failure: LastFailure | None = None
    preemption: PreemptionInfo | None = None
    deadline_at: Moment | None = None
    deadline_reachable: bool | None = None
    hosts: tuple[HostStanding, ...] = ()
    #: How long the job waited, by reason.
    waited: tuple[Waited, ...] = ()
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"job {self.job_id[-8:]}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        lists = ("ahead", "gates", "hosts", "waited")
        parts = ("last_failure", "preemption")
        return (
            asdict(self)
            | {name: [asdict(one) for one in getattr(self, name)] for name in lists}
            | {name: None if (part := getattr(self, name)) is None else asdict(part) for name in parts}
        )


def explain(
    job: Job,
    now: Moment,
    last: Dispatch | None = None,
    outlook: Outlook = NOTHING_HOLDS,
    *,
    viewer: Viewer | None = None,
    findings: Findings = NOTHING_FOUND,
) -> Explanation:
    """
    Explain the job. `last`: its last dispatch. `outlook`: how a queued job stands. `viewer`: an addon that
    must not learn the names of other addons' jobs; they are removed before any words are made.
    """
    if viewer is not None:
        outlook, findings = viewer.outlook(outlook), findings.seen_by(viewer)
    if job.state is JobState.QUEUED:
        explanation = _queued(job, last, outlook, findings, now)
    elif job.state in SETTLED:
        explanation = _settled(job, last, findings, now)
    else:
        explanation = _in_flight(job, last, findings, now)
    return replace(
        explanation,
        deadline_at=job.intent.deadline_at,
        waited=findings.waits,
        allowed=tuple(str(move) for move in allowed(job.state)),
    )


# queued


def _queued(
    job: Job, last: Dispatch | None, outlook: Outlook, findings: Findings, now: Moment
) -> Explanation:
    reason = outlook.reason
    failure = last_failure(job, last, findings.schedules)
    held = [] if reason is None else [reason, *_other_gates(reason, findings)]
    since = job.ready_at  # an attempt that was interrupted keeps its turn, and so this moment
    if last is not None and last.ended_at is not None:
        since = max(since, last.ended_at)
    lead = [f"Waiting for {spelled(now - since)}."] if since <= now else []
    sentences = list(_waiting_words(job, last, outlook, findings, now))
    way_out = _way_out(job, reason, findings, retried=failure is not None)
    text = " ".join([*lead, *sentences])
    if not way_out.startswith("penstock cancel") and f"`{way_out}`" not in text:
        text += f" `{way_out}` changes that."
    next_at = outlook.likely_start_at if reason is None else reason.next_at() or outlook.likely_start_at
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=text,
        short="starts with the next round"
        if reason is None
        else standing(job, now, reason, last=last, schedules=findings.schedules),
        waiting_sec=seconds(max(0, now - since)),
        reason="" if reason is None else reason.code,
        reason_data=None if reason is None else asdict(reason),
        gates=tuple(
            GateInfo(
                gate.code, asdict(gate), gate.words(now), _way_out(job, gate, findings, failure is not None)
            )
            for gate in held
        ),
        retry_after_sec=None if reason is None else retry_after_sec(reason, now),
        recorded=outlook.head and reason is not None and reason.code == job.denied,
        ahead=outlook.ahead,
        line_ahead=outlook.line_ahead,
        likely_start_at=outlook.likely_start_at,
        likely_start_low_at=None if outlook.start_range is None else outlook.start_range.low_at,
        likely_start_high_at=None if outlook.start_range is None else outlook.start_range.high_at,
        next_when_ends=outlook.next_when_ends,
        next_step="the next round starts it" if reason is None else reason.next_step(),
        next_at=next_at,
        way_out=way_out,
        held_by=findings.holders,
        last_failure=failure,
        preemption=findings.preemption,
        deadline_reachable=findings.deadline_reachable,
        hosts=findings.hosts,
    )


#: Reasons that say nothing if no program runs the jobs, or none has the function.
_OF_A_RUNNING_PROGRAM: Final = frozenset(
    {"awaits_worker", "worker_elsewhere", "workers_full", "no_worker", "worker_gone", "queued_ahead"}
)


def held_by_program(explanation: Explanation, reason: Reason, now: Moment) -> Explanation:
    """The explanation with another main reason, which only a program with an embedded scheduler knows."""
    gate = GateInfo(reason.code, asdict(reason), reason.words(now), reason.way_out(explanation.job_id[-8:]))
    others = [one for one in explanation.gates if one.reason not in _OF_A_RUNNING_PROGRAM]
    return replace(
        explanation,
        text=" ".join([gate.text, *(f"Besides: {one.text}" for one in others)]),
        short=reason.short(now),
        reason=reason.code,
        reason_data=gate.data,
        gates=(gate, *others),
        likely_start_at=None,
        likely_start_low_at=None,
        likely_start_high_at=None,
        next_step=reason.next_step(),
        next_at=None,
        way_out=gate.way_out,
    )


def _other_gates(reason: Reason, findings: Findings) -> list[Reason]:
    """The gates without the one of the main reason, which may have more details than that gate."""
    gates = list(findings.gates)
    main = next((place for place, gate in enumerate(gates) if gate.code == reason.code), None)
    if main is not None:
        del gates[main]
    return gates


def _way_out(job: Job, reason: Reason | None, findings: Findings, retried: bool) -> str:
    name = job.job_id[-8:]
    if reason is None or (retried and isinstance(reason, NotReady)):  # no edit ends the delay of a retry
        return f"penstock cancel {name}"
    way_out = reason.way_out(name, job.intent.cost_units)
    if "--priority" in way_out and any(isinstance(gate, NoWorkerSeen) for gate in findings.gates):
        return f"penstock cancel {name}"  # whatever goes first and ends, no worker runs it
    if "--priority" in way_out and (findings.preemption is not None or not findings.priority_helps):
        holder = next((one for one in findings.holders if one is not None), job.job_id)
        return f"penstock cancel {holder[-8:]}"
    return way_out


#: Why another job goes first, by the code in `Ahead.why`.
GOES_FIRST: Final = {
    "band": "higher priority",
    "urgent": "near its deadline",
    "share": "its addon is further below its fair share",
    "turn": "queued before",
}
#: What the jobs do that this one waits for: words for one job, and for several.
_HOLD: Final = {
    "no_room": ("uses the rest", "use the rest"),
    "cap_reached": ("counts for it", "count for it"),
    "workers_full": ("runs there", "run there"),
}
#: Words for ends of an attempt that are no failure of the job.
_INTERRUPTED: Final = {
    EndReason.COOPERATIVE_PREEMPTION: "yielded to another job",
    EndReason.PREEMPTION_TIMEOUT: "was stopped for another job",
    EndReason.GRACEFUL_SHUTDOWN: "was interrupted by a shutdown",
    EndReason.RELEASED: "was given back by its worker",
}


def _waiting_words(
    job: Job, last: Dispatch | None, outlook: Outlook, findings: Findings, now: Moment
) -> Iterator[str]:
    reason, failure = outlook.reason, last_failure(job, last, findings.schedules)
    if failure is not None:
        yield failure.words
    elif last is not None and last.end in _INTERRUPTED:
        yield f"Its last attempt {_INTERRUPTED[last.end]}."
    if reason is None:
        yield "Nothing is in its way: it starts with the next round."
    else:
        if failure is not None and isinstance(reason, NotReady):
            what = "Next reservation" if failure.end == EndReason.START_TIMEOUT else "Next attempt"
            yield f"{what} {due_in(reason.until, now)}."
        else:
            yield reason.words(now)
        if findings.holders:
            one, many = _HOLD.get(reason.code, ("holds it", "hold it"))
            yield f"{_listed(findings.holders)} {one if len(findings.holders) == 1 else many}."
        if findings.unyielding is not None:
            yield f"{named(findings.unyielding).capitalize()} is not preemptible, so it is not asked to yield."
        for gate in _other_gates(reason, findings):
            yield f"Besides: {gate.words(now)}"
    if outlook.line_ahead == 1:
        yield "1 job of the same kind is before it."
    elif outlook.line_ahead:
        yield f"{outlook.line_ahead} jobs of the same kind are before it."
    if outlook.ahead and not isinstance(reason, QueuedAhead | UnitsKept):  # those name it already
        first, *others = outlook.ahead
        more = f"; then {len(others)} more" if others else ""
        addon = "" if first.addon_id is None else f" of {first.addon_id}"
        yield f"{named(first.job_id).capitalize()}{addon} goes first ({GOES_FIRST[first.why]}){more}."
    if findings.preemption is not None:
        yield _wanted_words(findings.preemption, now)
    yield from _host_words(findings.hosts)
    yield from _moment_words(job, outlook, findings, now)


def _moment_words(job: Job, outlook: Outlook, findings: Findings, now: Moment) -> Iterator[str]:
    likely = outlook.likely_start_at
    if outlook.start_range is not None:
        yield f"Likely start {due_between(outlook.start_range, now)}."
    elif likely is not None and likely > now and not isinstance(outlook.reason, NotReady):
        when = "" if outlook.next_when_ends is None else f", when {named(outlook.next_when_ends)} ends"
        yield f"Likely start {due_in(likely, now)}{when}."
    deadline = job.intent.deadline_at
    if deadline is not None and findings.deadline_reachable is False:
        yield f"It is not expected to meet its deadline, which is {due_in(deadline, now)}."


def due_between(start: StartRange, now: Moment) -> str:
    """Such as `in 3 to 7 min`; the unit stands once if both ends have it."""
    low, high = spelled(start.low_at - now), spelled(start.high_at - now)
    if low == high:
        return f"in about {low}" if start.high_at > now else "now"
    if start.low_at - now < SECOND:
        return f"within {high}"
    return f"in {low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"


def _listed(jobs: tuple[JobId | None, ...]) -> str:
    """The first two names, and how many more. Jobs that the reader may not know are only counted."""
    names = [f"job {job_id[-8:]}" for job_id in jobs if job_id is not None]
    shown = names[:2]
    if remaining := len(jobs) - len(shown):
        shown.append(f"{remaining} {'more' if shown else 'other'} job{'s' * (remaining > 1)}")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return text[0].upper() + text[1:]


def _host_words(hosts: tuple[HostStanding, ...]) -> Iterator[str]:
    able = [host.host for host in hosts if not host.reason]
    if able:
        yield f"Host {' or '.join(able[:2])} could run it."
        return
    for host in hosts[:2]:
        yield f"Host {host.host}: {host.text}."
    if remaining := len(hosts[2:]):
        yield f"{remaining} more host{'s' * (remaining > 1)} cannot run it now."


def _wanted_words(preemption: PreemptionInfo, now: Moment) -> str:
    """The sentence for the waiting job."""
    cost = "goes on from its checkpoint" if preemption.checkpoint else "starts over: it has no checkpoint"
    return (
        f"{named(preemption.victim).capitalize()} was asked to yield ({_request(preemption)}), and is stopped "
        f"{due_in(preemption.forced_at, now)} at the latest; it then {cost}."
    )


def _yield_words(preemption: PreemptionInfo, now: Moment) -> str:
    """The sentences for the victim."""
    cost = (
        "It will go on from its last checkpoint."
        if preemption.checkpoint
        else "It has no checkpoint: what this attempt has done is lost, and it will start over."
    )
    return (
        f"It was asked to yield to {named(preemption.wanted_by)} ({_request(preemption)}), and is stopped "
        f"{due_in(preemption.forced_at, now)} at the latest. {cost} `--no-preempt` at submit prevents that."
    )


def _request(preemption: PreemptionInfo) -> str:
    return f"request {preemption.asked} of 2"


# in flight


def _in_flight(job: Job, dispatch: Dispatch | None, findings: Findings, now: Moment) -> Explanation:
    failure = last_failure(job, findings.before, findings.schedules)
    sentences: list[str] = []
    step, moment, reason, way_out = "its attempt ends", None, "", f"penstock cancel {job.job_id[-8:]}"
    if dispatch is None:
        sentences.append(f"{job.state}.")
    elif dispatch.phase is DispatchPhase.RESERVED:
        remaining = spelled(dispatch.expires_at - now)
        units = dispatch.admission_class.cost_units
        verb = "is" if units == 1 else "are"
        sentences.append(
            f"{units_of(units)} {verb} reserved; its worker has {remaining} to ask for the lease."
        )
        step, moment, reason = "its worker asks for the lease", dispatch.expires_at, "reserved"
        if findings.worker is not None:
            sentences.append(findings.worker.words(now))
            reason, way_out = findings.worker.code, findings.worker.way_out(job.job_id[-8:])
    else:
        sentences += _running_words(dispatch, now)
        moment = dispatch.ends_at or dispatch.stop_at
        if dispatch.phase is DispatchPhase.ENDING:
            step, moment, reason = "its worker stops", dispatch.expires_at, str(dispatch.reason)
            way_out = f"penstock cancel --now {job.job_id[-8:]}"
    if findings.preemption is not None:
        sentences.append(_yield_words(findings.preemption, now))
        step, moment, reason = "it yields", findings.preemption.forced_at, "asked_to_yield"
        if findings.preemption.wanted_by is not None:
            way_out = f"penstock cancel {findings.preemption.wanted_by[-8:]}"
    if failure is not None:
        sentences.append(f"Before that: {failure.words[0].lower()}{failure.words[1:]}")
    before = tuple(
        wait for wait in findings.waits if job.state is JobState.RUNNING or wait.reason != "reserved"
    )
    if waited := wait_words(before):
        sentences.append(waited)
    if not way_out.startswith("penstock cancel"):
        sentences.append(f"`{way_out}` changes that.")
    short = standing(job, now, None, last=dispatch, schedules=findings.schedules)
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=" ".join(sentences),
        short="asked to yield to another job" if findings.preemption is not None else short,
        reason=reason,
        reason_data=None if findings.worker is None else asdict(findings.worker),
        next_step=step,
        next_at=moment,
        way_out=way_out,
        last_failure=failure,
        preemption=findings.preemption,
    )


def _running_words(dispatch: Dispatch, now: Moment) -> Iterator[str]:
    since = spelled(now - (dispatch.started_at or dispatch.admitted_at))
    if dispatch.phase is DispatchPhase.ENDING:
        remaining = spelled(dispatch.expires_at - now)
        why = str(dispatch.reason).replace("_", " ")
        yield f"Running for {since} and told to stop ({why}); given up in {remaining} at the latest."
        return
    worker = f" on worker {dispatch.worker}" if dispatch.worker else ""
    if dispatch.host != "local":  # the name of the only host of a file
        worker += f"{' of' if worker else ' on'} host {dispatch.host}"
    expected = ""
    if dispatch.ends_at is not None:
        expected = f", expected to end in {spelled(dispatch.ends_at - now)}"
    yield f"Running for {since}{worker}{expected}."
    if dispatch.stop_at is not None:
        why = str(dispatch.stop_for).replace("_", " ")
        yield f"It is stopped {due_in(dispatch.stop_at, now)} at the latest ({why})."


# settled


def _retry_command(job: Job) -> str:
    """The command that retries a failed job. A job of an array is not retried alone, but with its array."""
    member = member_of(job.job_id)
    if member is None or job.state is not JobState.FAILED:
        return f"penstock retry {job.job_id[-8:]}"
    return f"penstock array retry {member[0][-8:]}"


def _is_impossible(job: Job) -> bool:
    """Whether a parent ended so that a retry of this job would fail at once."""
    if job.denied != DEPENDENCY_UNMET:
        return False
    data = json.loads(job.denied_data)
    verdict = VERDICTS[ParentCondition(data["condition"])][JobState(data["state"])]
    return verdict is Verdict.IMPOSSIBLE


def _settled(job: Job, last: Dispatch | None, findings: Findings, now: Moment) -> Explanation:
    """How the last attempt ended, or how the job ended in the queue: by its deadline or a cancel."""
    ended = "" if job.ended_at is None else f" {spelled(now - job.ended_at)} ago"
    end, raised = outcome_of(job, last)
    code, error = end or "", ""
    if (
        raised and code != DEADLINE_PASSED and last_line(raised) != end_words(code)
    ):  # else it repeats the code
        error = last_line(raised)
    failed = job.state in (JobState.FAILED, JobState.BLOCKED)
    failure = last_failure(job, last, findings.schedules) if failed else None
    text = f"{job.state}{ended}"
    if code not in ("", EndReason.COMPLETED, EndReason.CANCELED):  # those say no more than the state
        text += f" ({end_words(code)})"
    sentences = [f"{text}: {error}" if error else text]
    if failure is not None and failure.of is not None:
        sentences.append(f"That was attempt {failure.attempt} of {failure.of}")
    limit, spent = job.intent.cost_limit, job.spent - job.spent_before
    if code == EndReason.COST_LIMIT_REACHED:
        unit = job.intent.unit
        sentences.append(
            f"It has spent {spent / 1e6:.2f} of {limit / 1e6:.2f} {unit}"
            if limit is not None and spent >= limit
            else "A budget of its addon is spent"
        )
    text = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)
    waited = wait_words(findings.waits)
    way_out, effect = _retry_command(job) if failed else "", "queues it again"
    if job.state is JobState.FAILED and _is_impossible(job):
        way_out, effect = f"penstock rerun {job.job_id[-8:]}", "submits it again, to run after no other job"
    retry = f"`{way_out}` {effect}." if way_out else ""
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=" ".join(filter(None, [text, waited, retry])),
        short=standing(job, now, None, last=last, schedules=findings.schedules),
        reason=code,
        reason_data={"error": error} if error else None,
        next_step="a person retries it" if failed else "",
        way_out=way_out,
        last_failure=failure,
    )
