"""
Dependencies: a job, the child, waits for the end of other jobs, its parents (SPEC TD-2).

Two tables decide, and `docs/dependencies.md` is made from them. `VERDICTS` says what the state of a parent
means for a condition; `FATES` says what becomes of the child. A BLOCKED parent has not ended: a user will
retry or cancel it. A FAILED parent can be retried, so a child with `if_unmet="wait"` still waits. A DONE or
CANCELED parent stays so, and no child waits for it in vain.

A dependency that was met stays met, even if its parent is retried later. The dependencies of a child that
failed and is retried are judged again, as if it were submitted at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import BATCH_TAG, JobId

if TYPE_CHECKING:
    from penstock.core.jobs.intent import Intent

#: How many parents a job may have.
MOST_PARENTS: Final = 10_000
#: `#3` names the job at position 3 of the same submit.
LOCAL: Final = "#"


class ParentCondition(StrEnum):
    """How a parent must end."""

    OK = "ok"  # the parent is DONE
    DONE = "done"  # the parent has ended, in whatever way
    FAILED = "failed"  # the parent is FAILED


class IfUnmet(StrEnum):
    """What becomes of the child if a parent ends and the condition on it does not hold."""

    CANCEL = "cancel"
    FAIL = "fail"
    WAIT = "wait"  # for a retry of the parent, if it can be retried
    ANY = "any"  # one parent that ends as it must is enough; the child is canceled if none does


class Dependency(Struct, frozen=True, gc=False):
    """
    One parent and the condition on it. `job_id`: a job, an array, or `batch:NAME`; or `#n`, the job at
    position n of the same submit. `named`: how the submit named a parent of its own, which is not stored.
    """

    job_id: JobId
    condition: ParentCondition = ParentCondition.OK
    named: str = ""

    def __str__(self) -> str:
        return f"{self.job_id}:{self.condition}"


class DependencyStatus(StrEnum):
    OPEN = "open"
    MET = "met"
    VOID = "void"  # it no longer matters: the child was canceled, or another parent was enough


class StoredDependency(Struct, frozen=True, gc=False):
    """A dependency between two stored jobs."""

    parent: JobId
    child: JobId
    condition: ParentCondition
    status: DependencyStatus


class Verdict(StrEnum):
    """What the state of a parent means for a condition on it."""

    UNDECIDED = "undecided"  # the parent has not ended
    MET = "met"
    UNMET = "unmet"  # a retry of the parent may change that
    IMPOSSIBLE = "impossible"  # the parent stays as it is, so it will never be met


class Fate(StrEnum):
    """What becomes of the child."""

    WAIT = "wait"
    MEET = "meet"  # it waits for one parent less; after the last one it is ready
    CANCEL = "cancel"
    FAIL = "fail"
    DROP = "drop"  # this parent no longer matters; after the last one the child is canceled


_RUNS: Final = dict.fromkeys(
    (JobState.QUEUED, JobState.DISPATCHING, JobState.RUNNING, JobState.BLOCKED), Verdict.UNDECIDED
)
VERDICTS: Final[Mapping[ParentCondition, Mapping[JobState, Verdict]]] = {
    ParentCondition.OK: _RUNS
    | {
        JobState.DONE: Verdict.MET,
        JobState.FAILED: Verdict.UNMET,
        JobState.CANCELED: Verdict.IMPOSSIBLE,
    },
    ParentCondition.DONE: _RUNS
    | {JobState.DONE: Verdict.MET, JobState.FAILED: Verdict.MET, JobState.CANCELED: Verdict.MET},
    ParentCondition.FAILED: _RUNS
    | {
        JobState.DONE: Verdict.IMPOSSIBLE,
        JobState.FAILED: Verdict.MET,
        JobState.CANCELED: Verdict.IMPOSSIBLE,
    },
}

FATES: Final[Mapping[Verdict, Mapping[IfUnmet, Fate]]] = {
    Verdict.UNDECIDED: dict.fromkeys(IfUnmet, Fate.WAIT),
    Verdict.MET: dict.fromkeys(IfUnmet, Fate.MEET),
    Verdict.UNMET: {
        IfUnmet.CANCEL: Fate.CANCEL,
        IfUnmet.FAIL: Fate.FAIL,
        IfUnmet.WAIT: Fate.WAIT,
        IfUnmet.ANY: Fate.DROP,
    },
    Verdict.IMPOSSIBLE: {
        IfUnmet.CANCEL: Fate.CANCEL,
        IfUnmet.FAIL: Fate.FAIL,
        IfUnmet.WAIT: Fate.CANCEL,
        IfUnmet.ANY: Fate.DROP,
    },
}


def fate(condition: ParentCondition, parent: JobState, if_unmet: IfUnmet) -> Fate:
    return FATES[VERDICTS[condition][parent]][if_unmet]


# within one submit


def position(job_id: str) -> int | None:
    """The position that `#n` names; None for the id of a job."""
    digits = job_id.removeprefix(LOCAL)
    return int(digits) if digits != job_id and digits.isdecimal() and len(digits) < 10 else None


def _one_spelling(job_id: JobId) -> str:
    """One spelling for each parent: `#01` becomes `#1`."""
    at = position(job_id)
    return job_id if at is None else f"{LOCAL}{at}"


def submit_order(intents: Sequence[Intent], waiting: Iterable[tuple[JobId, JobId]] = ()) -> Sequence[int]:
    """
    The positions of a submit as given, except that parents come before their children: jobs that may start
    at once start in the order given. BadIntent: a position is not in this submit, or jobs wait for each other.

    A stored job does not wait for new jobs, but a stored batch begins to wait for its new members. So
    `waiting` has pairs: a batch that gets members, and a stored parent of this submit that waits for that
    batch, directly or through others.
    """
    graph: TopologicalSorter[int | JobId] = TopologicalSorter()
    ordered, named = False, set[JobId]()
    for at, intent in enumerate(intents):
        parents = list(_local_parents(at, intent, len(intents)))
        stored = stored_parents([intent])
        graph.add(at, *parents, *stored)
        named |= stored
        batch = batch_of(intent)
        if batch is not None:
            graph.add(batch, at)
            named.add(batch)
        ordered = ordered or bool(parents) or batch is not None
    if not ordered:
        return range(len(intents))
    for parent, child in waiting:
        graph.add(child, parent)
    try:
        graph.prepare()
    except CycleError as error:
        ring = [at for at in reversed(error.args[1]) if isinstance(at, int) or at in named]
        names = " -> ".join(f"{LOCAL}{at}" if isinstance(at, int) else at for at in ring)
        raise BadIntent.of(("after", f"makes jobs of this submit wait for each other: {names}")) from None
    order: list[int] = []
    ready: list[int] = []
    while graph.is_active():
        while nodes := graph.get_ready():
            for node in nodes:
                if isinstance(node, int):
                    heappush(ready, node)
                else:  # a stored parent or a batch
                    graph.done(node)
        if ready:
            order.append(at := heappop(ready))
            graph.done(at)
    return order


def batch_of(intent: Intent) -> JobId | None:
    """The batch that the job is a member of."""
    for tag in intent.tags:
        if tag.startswith(BATCH_TAG):
            return JobId(tag)
    return None


def _local_parents(at: int, intent: Intent, size: int) -> Iterator[int]:
    for dependency in intent.after:
        parent = position(dependency.job_id)
        if parent is None:
            continue
        if parent >= size:
            raise BadIntent.of(
                ("after", f"of job {LOCAL}{at} names {dependency.job_id}, but the submit has {size} jobs")
            )
        yield parent


def stored_parents(intents: Iterable[Intent]) -> set[JobId]:
    """The parents that must exist before this submit."""
    return {d.job_id for intent in intents for d in intent.after if position(d.job_id) is None}


def unknown_parent(job_id: str) -> NotFound:
    """The error for a parent that does not exist, or that the caller may not know."""
    what = f"batch {job_id.removeprefix(BATCH_TAG)}" if job_id.startswith(BATCH_TAG) else f"job {job_id}"
    return NotFound(f"after: there is no {what}", field="after", job_id=job_id)


# bounds


def problems(after: Sequence[Dependency], if_unmet: IfUnmet) -> Iterator[tuple[str, str]]:
    if len(after) > MOST_PARENTS:
        yield "after", f"must name at most {MOST_PARENTS} jobs"
    names = Counter(_one_spelling(dependency.job_id) for dependency in after)
    if len(names) < len(after):
        yield "after", f"names job {names.most_common(1)[0][0]} twice"
    for dependency in after:
        if not 0 < len(dependency.job_id) <= 64 or not dependency.job_id.isascii():
            yield (
                "after",
                f"must name jobs by their ids, or by {LOCAL} and a position, not {dependency.job_id!r:.80}",
            )
            break
        if dependency.condition not in list(ParentCondition):
            yield (
                "after",
                f"needs one of {', '.join(ParentCondition)} as condition, not {dependency.condition!r:.40}",
            )
            break
    if if_unmet not in list(IfUnmet):
        yield "if_unmet", f"must be one of {', '.join(IfUnmet)}"


def parse(text: str) -> Dependency:
    """
    `JOB`, `JOB:ok`, `JOB:done` or `JOB:failed`; `batch:NAME` is a JOB too. ValueError for another condition.
    """
    prefix = BATCH_TAG if text.startswith(BATCH_TAG) else ""
    job_id, colon, word = text.removeprefix(prefix).partition(":")
    job_id = prefix + job_id
    if colon and word not in list(ParentCondition):
        raise ValueError(f"{text!r}: the condition must be one of {', '.join(ParentCondition)}")
    return Dependency(JobId(job_id), ParentCondition(word) if colon else ParentCondition.OK)
