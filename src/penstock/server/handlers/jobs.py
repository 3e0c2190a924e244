"""
Handlers for jobs: submit, list, get, cancel, retry, edit, explain.

A client that may submit a command can run any program on the host, so commands need a scope of their own, and
shell scripts another. A payload that the runner would refuse is refused at the submit, where the client sees
it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import UnsetType
from msgspec.structs import replace

from penstock import wire
from penstock.core.errors import BadIntent
from penstock.core.jobs.dependencies import StoredDependency, batch_of, parse, stored_parents, unknown_parent
from penstock.core.jobs.groups import group_of_array, unknown_batch
from penstock.core.jobs.intent import Intent, check, title_of
from penstock.core.jobs.job import Dispatch, Job, outcome_of
from penstock.core.jobs.states import SETTLED, JobState, Move, allowed
from penstock.core.jobs.types import (
    BATCH_TAG,
    AddonId,
    Constraint,
    DispatchId,
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
from penstock.server.request import Request, as_answer, json_text, or_none, raw_json
from penstock.stores.api import Query, Receipt
from penstock.wire import MAX_PAGE, Scope

_SCOPES: Final = {
    COMMAND: Scope.JOBS_SUBMIT_COMMAND,
    SHELL: Scope.JOBS_SUBMIT_SHELL,
    FUNCTION: Scope.JOBS_SUBMIT,
}


async def submit(request: Request[None, wire.SubmitBody]) -> wire.Submitted:
    body = request.body
    intent = intent_from(body)
    check_submit(request, intent)
    [receipt] = await _submit(request, [intent], body.wait_sec)
    return as_answer(wire.Submitted, receipt)


async def submit_bulk(request: Request[None, wire.SubmitMany]) -> wire.BulkSubmitted:
    intents = [intent_from(job) for job in request.body.jobs]
    for i, intent in enumerate(intents):
        check_submit(request, intent, f"jobs[{i}].")
    wait_sec = max(request.body.wait_sec, *(job.wait_sec for job in request.body.jobs), 0)
    try:
        receipts = await _submit(request, intents, wait_sec)
    except BadIntent as bad:
        raise _every_problem(request, intents) or bad from None
    return wire.BulkSubmitted([as_answer(wire.Submitted, receipt) for receipt in receipts])


def _every_problem(request: Request[Any, Any], intents: list[Intent]) -> BadIntent | None:
    """
    One error with the problems of all jobs, each with its position in the list; None: no job alone is wrong.
    """
    now, most = request.store.now(), request.app_state.service.rules.capacity.most
    problems: list[tuple[str, str]] = []
    for i, intent in enumerate(intents):
        try:
            check(intent, now, most_units=most)
        except BadIntent as bad:
            problems += [(f"jobs[{i}].{problem['field']}", problem["message"]) for problem in bad.problems]
    return naming_fields(BadIntent, *problems[:100]) if problems else None


def check_submit(request: Request[Any, Any], intent: Intent, at: str = "") -> None:
    """Refuse a job that the token may not submit. `at`: where in the body the job's fields are."""
    check_runner(request, intent, at)
    if not request.owns(intent.addon_id):
        message = f"must be {request.principal.addon_id} with this token"
        raise naming_fields(OverLimit, (f"{at}addon_id", message))
    request.check_limits(intent.cost_units, intent.priority, at)
    if request.principal.addon_id is not None:
        if intent.after:
            _check_parents(request, intent)
        batch = batch_of(intent) if intent.tags else None
        group = None if batch is None else request.store.group(batch)
        if batch is not None and (group is None or not request.owns(group.addon_id)):
            raise unknown_batch(batch)


def _check_parents(request: Request[Any, Any], intent: Intent) -> None:
    """Refuse parents that the token may not see."""
    for job_id in sorted(stored_parents([intent])):
        if not _may_see(request, job_id):
            raise unknown_parent(job_id)


def _may_see(request: Request[Any, Any], parent: JobId) -> bool:
    """Whether the token may see this job, array or batch."""
    bound = request.principal.addon_id
    return bound is None or request.app_state.event_addons.of_job(parent) == bound


async def _submit(request: Request[Any, Any], intents: list[Intent], wait_sec: float) -> Sequence[Receipt]:
    """
    Submit without a thread that waits: the writer answers, and many submits share a commit. A submit that
    waits for room is dropped when its client goes away.
    """
    app_state = request.app_state
    answer = asyncio.wrap_future(app_state.job_service.submit_soon(intents, wait_sec), loop=app_state.loop)
    if wait_sec:
        await asyncio.wait((answer, request.watch()), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise TooSlow("the client went away")
    receipts = await answer
    if any(intent.deadline_at is not None for intent in intents):
        return await request.run(app_state.job_service.explainer.with_forecasts, intents, receipts)
    return receipts


def check_runner(request: Request[Any, Any], intent: Intent, at: str = "") -> None:
    """Refuse a command, script or function that the token may not submit, or that the runner would refuse."""
    if intent.job_type not in JOB_TYPES:
        return
    scope = _SCOPES[intent.job_type]
    if scope not in request.principal.scopes:
        raise Forbidden(
            f"{at}job_type {intent.job_type} needs a token with the scope {scope}", scope=str(scope)
        )
    try:
        read(intent.job_type, intent.payload, request.app_state.functions)
    except BadIntent as bad:
        problems = [{**problem, "field": f"{at}{problem['field']}"} for problem in bad.problems]
        raise BadIntent(f"{at}{bad}", problems=problems) from None


_FAILED: Final = (JobState.FAILED, JobState.BLOCKED)
_ALLOWED: Final = {state: tuple(str(move) for move in allowed(state)) for state in JobState}
#: Tables for both directions: combining flags would cost more than decoding the rest of a submit.
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
        payload=json_text(submit.payload),
        tags=submit.tags if submit.batch is None else (*submit.tags, f"{BATCH_TAG}{submit.batch}"),
        labels=submit.labels,
        time_sensitive=submit.time_sensitive,
        deadline_at=_moment(submit.deadline_at),
        earliest_start_at=_moment(submit.earliest_start_at),
        max_runtime_sec=submit.max_runtime_sec,
        max_active_sec=submit.max_active_sec,
        # Rounded up: a limit below a millionth must not become 0.
        cost_limit=None if submit.cost_limit is None else max(1, money_of(submit.cost_limit)),
        unit=submit.unit,
        idempotency_key=submit.idempotency_key,
        retry_delays_sec=submit.retry_delays_sec,
        preemptible=submit.preemptible,
        after=tuple(map(parse, submit.after)),
        if_unmet=submit.if_unmet,
    )


async def get(request: Request[wire.WaitQuery, None]) -> wire.JobInfo:
    return await request.poll(
        request.query.wait_sec,
        lambda: request.run(_get, request),
        lambda job: job.state in SETTLED,
        lambda event: event.job_id == request.job_id,
    )


def _get(request: Request[Any, None]) -> wire.JobInfo:
    return _job(request, request.own_job(request.job_id))


def _job(request: Request[Any, Any], job: Job) -> wire.JobInfo:
    last = request.store.dispatch(dispatch_id_of(job.job_id, job.fence)) if job.fence else None
    job = _without_foreign_names(request, job)
    end, error = outcome_of(job, last)
    [why] = _standings(request, [job], {} if last is None else {last.dispatch_id: last})
    return as_answer(
        wire.JobInfo,
        job,
        job.intent,
        **_derived_fields(request, job, why),
        payload=raw_json(job.intent.payload),
        checkpoint=raw_json(request.store.checkpoint(job.job_id) if job.fence else None),
        result=raw_json(None if last is None else last.result),
        error=error,
        end=end,
        worker="" if last is None else last.worker,
    )


def _standings(
    request: Request[Any, Any], jobs: Sequence[Job], last: Mapping[DispatchId, Dispatch]
) -> list[str]:
    return request.app_state.service.job_service.explainer.standings(jobs, last, request.viewer)


def _without_foreign_names(request: Request[Any, Any], job: Job) -> Job:
    viewer = request.viewer
    return job if viewer is None else viewer.ended_job(job)


def _derived_fields(request: Request[Any, Any], job: Job, why: str) -> dict[str, object]:
    """
    The fields that are computed for the answer. A parent of another addon, which an administrator added, is
    shown without its name.
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
            str(one) if _may_see(request, one.job_id) else f"another addon:{one.condition}"
            for one in job.intent.after
        ),
    }


#: The most parents and the most children in an answer.
_MOST_RELATED: Final = 200


def dependencies(request: Request[None, None]) -> wire.JobDependencies:
    job = request.own_job(request.job_id)
    stored = request.store.dependencies(job.job_id, _MOST_RELATED)
    parents = [each for each in stored if each.child == job.job_id]
    children = [each for each in stored if each.parent == job.job_id]
    ids = {each.parent for each in parents} | {each.child for each in children}
    jobs = {j.job_id: j for j in request.store.jobs(list(ids)) if request.owns(j.intent.addon_id)}

    def related(dependency: StoredDependency, other: JobId) -> wire.RelatedJob:
        j = jobs[other]
        words = (str(dependency.condition), str(dependency.status), j.state, j.intent.job_type)
        return wire.RelatedJob(other, *words, title_of(j.intent))

    def group(dependency: StoredDependency) -> wire.RelatedJob | None:
        """The batch or array that the job waits for; None: it does not exist, or the token may not see it."""
        record = request.store.array(dependency.parent)
        parent_group = request.store.group(dependency.parent) if record is None else group_of_array(record)
        if parent_group is None or not request.owns(parent_group.addon_id):
            return None
        kind, name = (
            ("batch", parent_group.name) if parent_group.is_batch else ("array", parent_group.group_id[-8:])
        )
        title = f"{kind} {name}: {parent_group.ended:,} of {parent_group.total:,} ended"
        words = (
            str(dependency.condition),
            str(dependency.status),
            parent_group.state or JobState.RUNNING,
            kind,
        )
        return wire.RelatedJob(dependency.parent, *words, title)

    groups = [group(each) for each in parents if each.parent not in jobs]
    return wire.JobDependencies(
        [one for one in groups if one is not None]
        + [related(each, each.parent) for each in parents if each.parent in jobs],
        [related(each, each.child) for each in children if each.child in jobs],
    )


def listing(request: Request[wire.JobsQuery, None]) -> wire.Jobs:
    query = request.query
    search = replace(
        _search(request, query), newest_first=query.newest_first, limit=query.limit, after=query.after
    )
    jobs = [_without_foreign_names(request, job) for job in request.store.find(search)]
    # Only the standing of these jobs says how their last attempt ended.
    failed = [job for job in jobs if job.state in _FAILED or job.state is JobState.QUEUED]
    ended = request.store.dispatches([dispatch_id_of(job.job_id, job.fence) for job in failed if job.fence])
    summaries = [
        as_answer(wire.JobSummary, job, job.intent, **_derived_fields(request, job, why))
        for job, why in zip(jobs, _standings(request, jobs, ended), strict=True)
    ]
    return wire.Jobs(summaries, jobs[-1].no if len(jobs) == query.limit else None)


def _search(request: Request[Any, Any], job_filter: wire.JobFilter) -> Query:
    """The query for a filter, limited to the jobs that the token may see."""
    states = or_none(job_filter.state)
    return Query(
        states=[JobState(name) for name in states.split(",")] if states else (),
        addon_id=request.addon(or_none(job_filter.addon_id)),
        job_type=or_none(job_filter.job_type),
        tag=or_none(job_filter.tag),
        since=_moment(or_none(job_filter.since)),
        before=_moment(or_none(job_filter.before)),
        text=or_none(job_filter.text),
    )


def count(request: Request[wire.JobFilter, None]) -> wire.JobCounts:
    search = replace(_search(request, request.query), states=())
    if search == Query(addon_id=search.addon_id):  # the store has these counts
        totals: Counter[JobState] = Counter()
        for addon in request.store.addons():
            if search.addon_id in (None, addon.addon_id):
                totals.update(addon.jobs)
        return wire.JobCounts({state: n for state, n in totals.items() if n})
    return wire.JobCounts(request.store.count(search))


def cancel_bulk(request: Request[None, wire.BulkChange]) -> wire.BulkChanged:
    return _change_all(request, Move.CANCEL, lambda _: None)


def retry_bulk(request: Request[None, wire.BulkChange]) -> wire.BulkChanged:
    return _change_all(request, Move.RETRY, lambda job: check_runner(request, job.intent))


def _change_all(
    request: Request[None, wire.BulkChange], move: Move, check_job: Callable[[Job], None]
) -> wire.BulkChanged:
    search = replace(_search(request, request.body), after=request.body.after, limit=MAX_PAGE)
    changed, refused, following = request.app_state.job_service.change_all(
        move, search, request.principal.name, check_job
    )
    return wire.BulkChanged(changed, [wire.RefusedJob(*each) for each in refused], following)


async def rerun(request: Request[None, wire.Rerun]) -> wire.Submitted:
    body, fields = request.body, dict[str, Any]()
    if not isinstance(body.payload, UnsetType):
        fields["payload"] = json_text(body.payload)
    if not isinstance(body.priority, UnsetType):
        fields["priority"] = priority_of(body.priority)
    for name in ("cost_units", "run_when", "idempotency_key"):
        if not isinstance(value := getattr(body, name), UnsetType):
            fields[name] = value
    if "run_when" in fields:
        fields["quiet_for_sec"] = 0
    intent = await request.run(_rerun_intent, request, fields)
    check_submit(request, intent)
    [receipt] = await _submit(request, [intent], 0)
    return as_answer(wire.Submitted, receipt)


def _rerun_intent(request: Request[None, wire.Rerun], fields: dict[str, Any]) -> Intent:
    request.own_job(request.job_id)
    return request.app_state.job_service.rerun_intent(request.job_id, **fields)


def find(request: Request[wire.FindQuery, None]) -> wire.FoundJobs:
    query = request.query
    search = Query(addon_id=request.addon(None), part=query.part, newest_first=True, limit=query.limit)
    return wire.FoundJobs([job.job_id for job in request.store.find(search)])


def cancel(request: Request[None, wire.Cancel]) -> wire.JobInfo:
    request.own_job(request.job_id)
    job = request.app_state.job_service.cancel(request.job_id, by=request.principal.name)
    runner = request.app_state.runner
    if request.body.now and runner is not None and job.dispatch_id is not None:
        runner.kill(job.dispatch_id)
    return _job(request, job)


def retry(request: Request[None, None]) -> wire.JobInfo:
    check_runner(request, request.own_job(request.job_id).intent)
    return _job(request, request.app_state.job_service.retry(request.job_id, by=request.principal.name))


def edit(request: Request[None, wire.Edit]) -> wire.JobInfo:
    job, body = request.own_job(request.job_id), request.body
    fields: dict[str, Any] = {}
    if not isinstance(body.priority, UnsetType):
        fields["priority"] = priority_of(body.priority)
        request.check_limits(job.intent.cost_units, fields["priority"])
    for name in ("earliest_start_at", "deadline_at"):
        given = getattr(body, name)
        if not isinstance(given, UnsetType):
            fields[name] = None if given is None else moment_of(given)
    if not isinstance(body.run_when, UnsetType):
        fields["run_when"] = body.run_when
    if not isinstance(body.quiet_for_sec, UnsetType):
        fields["quiet_for_sec"] = body.quiet_for_sec
    if not fields:
        names = ", ".join(body.__struct_fields__)
        raise naming_fields(BadIntent, ("body", f"must have one of {names}"))
    return _job(
        request, request.app_state.job_service.edit(request.job_id, by=request.principal.name, **fields)
    )


def explain(request: Request[None, None]) -> wire.Explained:
    request.own_job(request.job_id)
    explanation = request.app_state.job_service.explain(request.job_id, request.viewer)
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
