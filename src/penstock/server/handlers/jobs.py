"""
Handlers for submitters and people: submit, look, cancel, retry, edit, explain.

A client that may submit a command has a shell on the host, so a command takes a scope of its own, and a
script for the shell another. A payload that the runner would refuse is refused at the submit, while its
client waits for the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import UnsetType
from msgspec.structs import replace

from penstock import wire
from penstock.core.errors import BadIntent
from penstock.core.jobs.dependencies import StoredDependency, parse, stored_parents, unknown_parent
from penstock.core.jobs.groups import batch_of, group_of_array, unknown_batch
from penstock.core.jobs.intent import Intent, check, title_of
from penstock.core.jobs.job import Dispatch, Job, outcome_of
from penstock.core.jobs.standing import MOST_BEFORE, recorded_standing, waits_for_turn
from penstock.core.jobs.states import SETTLED, JobState, Move, allowed
from penstock.core.jobs.types import (
    BATCH_TAG,
    AddonId,
    Constraint,
    JobId,
    Moment,
    Money,
    dispatch_id_of,
    moment_of,
    money_of,
    priority_of,
)
from penstock.runner.payload import COMMAND, FUNCTION, JOB_TYPES, SHELL, read
from penstock.server.problems import Forbidden, OverLimit, TooSlow, naming_fields
from penstock.server.request import Request, as_answer, as_json, or_none, text_of
from penstock.stores.api import Query, Receipt
from penstock.wire import MAX_PAGE, Scope

_SCOPES: Final = {
    COMMAND: Scope.JOBS_SUBMIT_COMMAND,
    SHELL: Scope.JOBS_SUBMIT_SHELL,
    FUNCTION: Scope.JOBS_SUBMIT,
}


async def submit(call: Request[None, wire.SubmitBody]) -> wire.Submitted:
    body = call.body
    intent = intent_from(body)
    may_submit(call, intent)
    [receipt] = await _submit(call, [intent], body.wait_sec)
    return as_answer(wire.Submitted, receipt)


async def submit_bulk(call: Request[None, wire.SubmitMany]) -> wire.BulkSubmitted:
    intents = [intent_from(job) for job in call.body.jobs]
    for i, intent in enumerate(intents):
        may_submit(call, intent, f"jobs[{i}].")
    wait_sec = max(call.body.wait_sec, *(job.wait_sec for job in call.body.jobs), 0)
    try:
        receipts = await _submit(call, intents, wait_sec)
    except BadIntent:
        raise _every_problem(call, intents) from None
    return wire.BulkSubmitted([as_answer(wire.Submitted, receipt) for receipt in receipts])


def _every_problem(call: Request[Any, Any], intents: list[Intent]) -> BadIntent:
    """Of all the jobs, each with its place in the list."""
    now, most = call.store.now(), call.app_state.service.rules.capacity.most
    problems: list[tuple[str, str]] = []
    for i, intent in enumerate(intents):
        try:
            check(intent, now, most_units=most)
        except BadIntent as bad:
            problems += [(f"jobs[{i}].{problem['field']}", problem["message"]) for problem in bad.problems]
    return naming_fields(BadIntent, *problems[:100])


def may_submit(call: Request[Any, Any], intent: Intent, at: str = "") -> None:
    check_runner(call, intent, at)
    if not call.owns(intent.addon_id):
        message = f"must be {call.principal.addon_id} with this token"
        raise naming_fields(OverLimit, (f"{at}addon_id", message))
    call.check_limits(intent.cost_units, intent.priority, at)
    if call.principal.addon_id is not None:
        if intent.after:
            _check_parents(call, intent)
        batch = batch_of(intent) if intent.tags else None
        group = None if batch is None else call.store.group(batch)
        if batch is not None and (group is None or not call.owns(group.addon_id)):
            raise unknown_batch(batch)


def _check_parents(call: Request[Any, Any], intent: Intent) -> None:
    """A token that is bound to an addon knows no other addon's jobs, arrays and batches."""
    for job_id in sorted(stored_parents([intent])):
        if not _may_know(call, job_id):
            raise unknown_parent(job_id)


def _may_know(call: Request[Any, Any], parent: JobId) -> bool:
    """Whether the token may know this job, array or batch."""
    bound = call.principal.addon_id
    return bound is None or call.app_state.owners.of_job(parent) == bound


async def _submit(call: Request[Any, Any], intents: list[Intent], wait_sec: float) -> Sequence[Receipt]:
    """
    The writer answers, and no thread waits for it: sixty-four submits at once share a commit. One that waits
    for room leaves the line when its client goes away.
    """
    app_state = call.app_state
    answer = asyncio.wrap_future(app_state.job_service.submit_soon(intents, wait_sec), loop=app_state.loop)
    if wait_sec:
        await asyncio.wait((answer, call.watch()), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise TooSlow("the client went away")
    receipts = await answer
    if any(intent.deadline_at is not None for intent in intents):
        return await call.run(app_state.job_service.explainer.with_forecasts, intents, receipts)
    return receipts


def check_runner(call: Request[Any, Any], intent: Intent, at: str = "") -> None:
    if intent.job_type not in JOB_TYPES:
        return
    scope = _SCOPES[intent.job_type]
    if scope not in call.principal.scopes:
        raise Forbidden(
            f"{at}job_type {intent.job_type} needs a token with the scope {scope}", scope=str(scope)
        )
    try:
        read(intent.job_type, intent.payload, call.app_state.functions)
    except BadIntent as bad:
        problems = [{**problem, "field": f"{at}{problem['field']}"} for problem in bad.problems]
        raise BadIntent(f"{at}{bad}", problems=problems) from None


_FAILED: Final = (JobState.FAILED, JobState.BLOCKED)
_ALLOWED: Final = {state: tuple(str(move) for move in allowed(state)) for state in JobState}
#: Looked up both ways: to combine flags costs more than to decode the rest of a submit.
CONSTRAINT_FLAGS: Final = {
    Constraint(bits): wire.Constraints(
        **{str(flag.name).lower(): bool(flag & Constraint(bits)) for flag in Constraint if flag}
    )
    for bits in range(8)
}
_CONSTRAINTS: Final = {flags: constraint for constraint, flags in CONSTRAINT_FLAGS.items()}


def amount(money: Money) -> float:
    return money / 1_000_000


def _moment(when: datetime | None) -> Moment | None:
    return None if when is None else moment_of(when)


def intent_from(submit: wire.SubmitBody) -> Intent:
    return Intent(
        addon_id=AddonId(submit.addon_id),
        job_type=submit.job_type,
        cost_units=submit.cost_units,
        priority=priority_of(submit.priority),
        constraints=_CONSTRAINTS[submit.constraints],
        run_when=submit.run_when,
        quiet_for_sec=submit.quiet_for_sec,
        expected_duration_sec=submit.expected_duration_sec,
        payload=text_of(submit.payload),
        tags=submit.tags if submit.batch is None else (*submit.tags, f"{BATCH_TAG}{submit.batch}"),
        labels=submit.labels,
        time_sensitive=submit.time_sensitive,
        deadline_at=_moment(submit.deadline_at),
        earliest_start_at=_moment(submit.earliest_start_at),
        max_runtime_sec=submit.max_runtime_sec,
        max_active_sec=submit.max_active_sec,
        # A limit below a millionth is still a limit.
        cost_limit=None if submit.cost_limit is None else max(1, money_of(submit.cost_limit)),
        unit=submit.unit,
        idempotency_key=submit.idempotency_key,
        retry_delays_sec=submit.retry_delays_sec,
        preemptible=submit.preemptible,
        after=tuple(map(parse, submit.after)),
        if_unmet=submit.if_unmet,
    )


async def get(call: Request[wire.WaitQuery, None]) -> wire.JobInfo:
    return await call.poll(
        call.query.wait_sec,
        lambda: call.run(_get, call),
        lambda job: job.state in SETTLED,
        lambda event: event.job_id == call.job_id,
    )


def _get(call: Request[Any, None]) -> wire.JobInfo:
    return _job(call, call.own_job(call.job_id))


def _job(call: Request[Any, Any], job: Job) -> wire.JobInfo:
    last = call.store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
    job = _hidden(call, job)
    end, error = outcome_of(job, last)
    return as_answer(
        wire.JobInfo,
        job,
        job.intent,
        **_derived(call, job, _why(call, job, last, _before(call, [job]).get(job.no, 0))),
        payload=as_json(job.intent.payload),
        checkpoint=as_json(call.store.checkpoint(job.job_id) if job.fence else None),
        result=as_json(None if last is None else last.result),
        error=error,
        end=end,
        worker="" if last is None else last.worker,
    )


def _hidden(call: Request[Any, Any], job: Job) -> Job:
    viewer = call.viewer
    return job if viewer is None else viewer.ended_job(job)


def _before(call: Request[Any, Any], jobs: Sequence[Job]) -> dict[int, int]:
    """By job number: how many jobs are before it in its ready queue, if nothing else tells why it waits."""
    now = call.store.now()
    return call.store.jobs_before([job.no for job in jobs if waits_for_turn(job, now)], MOST_BEFORE)


def _why(call: Request[Any, Any], job: Job, last: Dispatch | None, before: int) -> str:
    """From what was read already: a list must not try out a round for each of its rows."""
    rules = call.app_state.service.rules
    now = call.store.now()
    return recorded_standing(job, now, last, rules.schedules, before)


def _derived(call: Request[Any, Any], job: Job, why: str) -> dict[str, object]:
    """
    The fields that neither the job nor its intent has as they are shown. A parent of another addon has no name here: an
    administrator made the job wait for it.
    """
    limit = job.intent.cost_limit
    return {
        "constraints": CONSTRAINT_FLAGS[job.intent.constraints],
        "cost_limit": None if limit is None else amount(limit),
        "attempts": job.fence,
        "lease_id": job.dispatch_id if job.state is JobState.RUNNING else None,
        "spent": amount(job.spent),
        "denied": job.denied if job.state is JobState.QUEUED else "",
        "why": why,
        "allowed": _ALLOWED[job.state],
        "title": title_of(job.intent),
        "after": tuple(
            str(one) if _may_know(call, one.job_id) else f"another addon:{one.condition}"
            for one in job.intent.after
        ),
    }


#: How many parents and how many children are shown.
_MOST_RELATED: Final = 200


def dependencies(call: Request[None, None]) -> wire.JobDependencies:
    job = call.own_job(call.job_id)
    stored = call.store.dependencies(job.job_id, _MOST_RELATED)
    parents = [each for each in stored if each.child == job.job_id]
    children = [each for each in stored if each.parent == job.job_id]
    ids = {each.parent for each in parents} | {each.child for each in children}
    jobs = {j.job_id: j for j in call.store.jobs(list(ids)) if call.owns(j.intent.addon_id)}

    def related(dependency: StoredDependency, other: JobId) -> wire.RelatedJob:
        j = jobs[other]
        words = (str(dependency.condition), str(dependency.status), j.state, j.intent.job_type)
        return wire.RelatedJob(other, *words, title_of(j.intent))

    def group(dependency: StoredDependency) -> wire.RelatedJob | None:
        """A batch or an array that the job waits for."""
        record = call.store.array(dependency.parent)
        found = call.store.group(dependency.parent) if record is None else group_of_array(record)
        if found is None or not call.owns(found.addon_id):
            return None
        kind, name = ("batch", found.name) if found.is_batch else ("array", found.group_id[-8:])
        title = f"{kind} {name}: {found.ended:,} of {found.total:,} ended"
        words = (str(dependency.condition), str(dependency.status), found.state or JobState.RUNNING, kind)
        return wire.RelatedJob(dependency.parent, *words, title)

    groups = [group(each) for each in parents if each.parent not in jobs]
    return wire.JobDependencies(
        [one for one in groups if one is not None]
        + [related(each, each.parent) for each in parents if each.parent in jobs],
        [related(each, each.child) for each in children if each.child in jobs],
    )


def listing(call: Request[wire.JobsQuery, None]) -> wire.Jobs:
    query = call.query
    search = replace(
        _search(call, query), newest_first=query.newest_first, limit=query.limit, after=query.after
    )
    jobs = [_hidden(call, job) for job in call.store.find(search)]
    # Only these show how their last attempt ended: failed for good, or to be tried again.
    now = call.store.now()
    failed = [
        job for job in jobs if job.state in _FAILED or (job.state == JobState.QUEUED and job.ready_at > now)
    ]
    ended = call.store.dispatches([dispatch_id_of(job.job_id, job.fence) for job in failed if job.fence])
    before = _before(call, jobs)
    summaries = [
        as_answer(
            wire.JobSummary,
            job,
            job.intent,
            **_derived(
                call,
                job,
                _why(call, job, ended.get(dispatch_id_of(job.job_id, job.fence)), before.get(job.no, 0)),
            ),
        )
        for job in jobs
    ]
    return wire.Jobs(summaries, jobs[-1].no if len(jobs) == query.limit else None)


def _search(call: Request[Any, Any], job_filter: wire.JobFilter) -> Query:
    """The filter of a request, among the jobs that its token may see."""
    states = or_none(job_filter.state)
    return Query(
        states=[JobState(name) for name in states.split(",")] if states else (),
        addon_id=call.addon(or_none(job_filter.addon_id)),
        job_type=or_none(job_filter.job_type),
        tag=or_none(job_filter.tag),
        since=_moment(or_none(job_filter.since)),
        before=_moment(or_none(job_filter.before)),
        text=or_none(job_filter.text),
    )


def count(call: Request[wire.JobFilter, None]) -> wire.JobCounts:
    search = replace(_search(call, call.query), states=())
    if search == Query(addon_id=search.addon_id):  # the store keeps these counts
        totals: Counter[JobState] = Counter()
        for addon in call.store.addons():
            if search.addon_id in (None, addon.addon_id):
                totals.update(addon.jobs)
        return wire.JobCounts({state: n for state, n in totals.items() if n})
    return wire.JobCounts(call.store.count(search))


def cancel_bulk(call: Request[None, wire.BulkChange]) -> wire.BulkChanged:
    return _change_all(call, Move.CANCEL, lambda _: None)


def retry_bulk(call: Request[None, wire.BulkChange]) -> wire.BulkChanged:
    return _change_all(call, Move.RETRY, lambda job: check_runner(call, job.intent))


def _change_all(
    call: Request[None, wire.BulkChange], move: Move, check_job: Callable[[Job], None]
) -> wire.BulkChanged:
    search = replace(_search(call, call.body), after=call.body.after, limit=MAX_PAGE)
    changed, refused, following = call.app_state.job_service.change_all(
        move, search, call.principal.name, check_job
    )
    return wire.BulkChanged(changed, [wire.RefusedJob(*each) for each in refused], following)


async def rerun(call: Request[None, wire.Rerun]) -> wire.Submitted:
    body, fields = call.body, dict[str, Any]()
    if not isinstance(body.payload, UnsetType):
        fields["payload"] = text_of(body.payload)
    if not isinstance(body.priority, UnsetType):
        fields["priority"] = priority_of(body.priority)
    for name in ("cost_units", "run_when", "idempotency_key"):
        if not isinstance(value := getattr(body, name), UnsetType):
            fields[name] = value
    if "run_when" in fields:
        fields["quiet_for_sec"] = 0
    intent = await call.run(_rerun_intent, call, fields)
    may_submit(call, intent)
    [receipt] = await _submit(call, [intent], 0)
    return as_answer(wire.Submitted, receipt)


def _rerun_intent(call: Request[None, wire.Rerun], fields: dict[str, Any]) -> Intent:
    call.own_job(call.job_id)
    return call.app_state.job_service.rerun_intent(call.job_id, **fields)


def find(call: Request[wire.FindQuery, None]) -> wire.Found:
    query = call.query
    search = Query(addon_id=call.addon(None), part=query.part, newest_first=True, limit=query.limit)
    return wire.Found([job.job_id for job in call.store.find(search)])


def cancel(call: Request[None, wire.Cancel]) -> wire.JobInfo:
    call.own_job(call.job_id)
    job = call.app_state.job_service.cancel(call.job_id, by=call.principal.name)
    runs = call.app_state.runs
    if call.body.now and runs is not None and job.dispatch_id is not None:
        runs.kill(job.dispatch_id)
    return _job(call, job)


def retry(call: Request[None, None]) -> wire.JobInfo:
    check_runner(call, call.own_job(call.job_id).intent)
    return _job(call, call.app_state.job_service.retry(call.job_id, by=call.principal.name))


def edit(call: Request[None, wire.Edit]) -> wire.JobInfo:
    job, body = call.own_job(call.job_id), call.body
    fields: dict[str, Any] = {}
    if not isinstance(body.priority, UnsetType):
        fields["priority"] = priority_of(body.priority)
        call.check_limits(job.intent.cost_units, fields["priority"])
    for name in ("earliest_start_at", "deadline_at"):
        given = getattr(body, name)
        if not isinstance(given, UnsetType):
            fields[name] = None if given is None else moment_of(given)
    if not fields:
        raise naming_fields(BadIntent, ("body", "must have one of priority, earliest_start_at, deadline_at"))
    return _job(call, call.app_state.job_service.edit(call.job_id, by=call.principal.name, **fields))


def explain(call: Request[None, None]) -> wire.Explained:
    call.own_job(call.job_id)
    explanation = call.app_state.job_service.explain(call.job_id, call.viewer)
    failure, preemption = explanation.last_failure, explanation.preemption
    return as_answer(
        wire.Explained,
        explanation,
        gates=[as_answer(wire.ReasonInfo, one) for one in explanation.gates],
        ahead=[as_answer(wire.AheadInfo, one) for one in explanation.ahead],
        held_by=list(explanation.held_by),
        last_failure=None if failure is None else as_answer(wire.FailureInfo, failure),
        preemption=None if preemption is None else as_answer(wire.YieldInfo, preemption),
        hosts=[as_answer(wire.OtherHost, one) for one in explanation.hosts],
        waited=[as_answer(wire.WaitInfo, one) for one in explanation.waited],
    )
