"""Bugs that somebody could write into jobs that wait for other jobs."""

from __future__ import annotations

from tests.mutants.planting import Mutant

RESOLVING = "penstock/stores/common/dependencies.py"
CORE = "penstock/core/jobs/dependencies.py"
CONTRACT = ("tests/contract/test_dependencies.py", "-k", "memory or sqlite")

MUTANTS = [
    Mutant(
        "dependencies: a child starts when its first parent is done",
        RESOLVING,
        "_Resolution._write",
        "if not child.unmet and child.row.unmet]",
        "if child.met and child.row.unmet]",
        CONTRACT,
    ),
    Mutant(
        "dependencies: the children of a canceled child are not told",
        RESOLVING,
        "_Resolution._judge",
        "self._next.append(EndedJob(row.child_no, row.child_id, state))",
        "pass",
        CONTRACT,
    ),
    Mutant(
        "dependencies: what is beyond the bound is forgotten",
        RESOLVING,
        "_Resolution._write",
        "if postponed:\n            rows.postpone(postponed)",
        "pass",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a retried child does not wait again",
        RESOLVING,
        "resolve",
        "if move.state is JobState.QUEUED)",
        "if False)",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a canceled child keeps its parents from being pruned",
        RESOLVING,
        "_Resolution._write",
        "if self._void:",
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a child waits for a retry of a canceled parent",
        CORE,
        "",
        "Verdict.IMPOSSIBLE: {\n        IfUnmet.CANCEL: Fate.CANCEL,\n        IfUnmet.FAIL: Fate.FAIL,\n        IfUnmet.WAIT: Fate.CANCEL,",
        "Verdict.IMPOSSIBLE: {\n        IfUnmet.CANCEL: Fate.CANCEL,\n        IfUnmet.FAIL: Fate.FAIL,\n        IfUnmet.WAIT: Fate.WAIT,",
        ("tests/core/test_dependencies.py",),
    ),
    Mutant(
        "dependencies: a blocked parent counts as ended",
        CORE,
        "",
        "(JobState.QUEUED, JobState.DISPATCHING, JobState.RUNNING, JobState.BLOCKED), Verdict.UNDECIDED",
        "(JobState.QUEUED, JobState.DISPATCHING, JobState.RUNNING, JobState.BLOCKED), Verdict.MET",
        ("tests/core/test_dependencies.py",),
    ),
    Mutant(
        "dependencies: an edit puts a waiting child into line",
        "penstock/stores/memory/tables.py",
        "MemoryQueues.put",
        "WAITS_FOR_PARENTS if job.unmet else place.line(now)",
        "place.line(now)",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a released child keeps the age of its submit",
        "penstock/core/jobs/ordering.py",
        "released_place",
        "max(place.ready_at, now)",
        "place.ready_at",
        CONTRACT,
    ),
    Mutant(
        "dependencies: completions on SQLite do not release children",
        "penstock/stores/sqlite/changes.py",
        "complete",
        "if tx.has_dependencies or SEPARATOR in reports[at].dispatch_id",
        "if SEPARATOR in reports[at].dispatch_id",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a child on PostgreSQL that was canceled with its parent is released",
        "penstock/stores/postgres/dependencies.py",
        "PostgresDependencyRows.children",
        "if row.child_id not in changed or changed[row.child_id].state is JobState.QUEUED",
        "if True",
        ("tests/contract/test_dependencies.py", "-k", "postgres and one_operation"),
    ),
    Mutant(
        "dependencies: a parent that a child waits for is pruned",
        "penstock/stores/memory/store.py",
        "MemoryStore._prune",
        " and not self._awaited(job)",
        "",
        CONTRACT,
    ),
    Mutant(
        "dependencies: a token of one addon waits for jobs of another",
        "penstock/server/handlers/jobs.py",
        "_check_parents",
        "if call.owns(job.intent.addon_id)",
        "if True",
        ("tests/server/test_dependencies.py",),
    ),
    Mutant(
        "dependencies: results of parents are read before they are on disk",
        "penstock/scheduler/job_service.py",
        "_needs_no_reads",
        " and not (grant.job is not None and grant.job.intent.after)",
        "",
        ("tests/library/test_dependencies.py",),
    ),
]
