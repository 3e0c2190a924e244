"""
Bugs that break a promise which `penstock chaos` checks: each must make the check of that promise fail, and not just some test. The name
of that check is in the brackets of the target.
"""

from __future__ import annotations

from tests.mutants.planting import Mutant

KILLS = "tests/chaos/test_kills.py::test_a_promise_holds"
ON_POSTGRES = "tests/chaos/test_kills.py::test_a_promise_holds_on_postgres"

MUTANTS = [
    Mutant(
        "chaos: a restart gives up the jobs that ran",
        "penstock/core/jobs/states.py",
        "",
        "EndReason.SCHEDULER_RESTARTED: (_CRASH, _CRASH),",
        "EndReason.SCHEDULER_RESTARTED: (EndRule(Move.FAIL), EndRule(Move.FAIL)),",
        (f"{KILLS}[lost]",),
    ),
    Mutant(
        "chaos: a command that was killed counts as done",
        "penstock/core/jobs/tracker.py",
        "end_of_exit",
        "    if code < 0:\n        return EndReason.WORKER_CRASHED\n",
        "    if code < 0:\n        return EndReason.COMPLETED\n",
        (f"{KILLS}[undone]",),
    ),
    Mutant(
        "chaos: a function goes on after its lease",
        "penstock/work/leases.py",
        "LeaseKeeper.must_stop",
        "return lease.stop is not None",
        "return False",
        (f"{KILLS}[two-live]",),
    ),
    Mutant(
        "chaos: a command goes on after its lease",
        "penstock/runner/warden.py",
        "Warden._check_times",
        "if self._until is not None and now >= self._until and self._killing is None:",
        "if False:",
        (f"{ON_POSTGRES}[two-live]",),
    ),
    Mutant(
        "chaos: a requeued job forgets its fence",
        "penstock/stores/sqlite/changes.py",
        "_move_job",
        "*(None if waits else job.state, job.fence, events, job.ended_at, job.active),",
        "*(None if waits else job.state, job.fence - 1, events, job.ended_at, job.active),",
        (f"{KILLS}[fences]",),
    ),
    Mutant(
        "chaos: a finished job can be retried",
        "penstock/core/jobs/states.py",
        "",
        "(JobState.FAILED, Move.RETRY): JobState.QUEUED,",
        "(JobState.FAILED, Move.RETRY): JobState.QUEUED,\n    (JobState.DONE, Move.RETRY): JobState.QUEUED,",
        (f"{ON_POSTGRES}[moved-on]",),
    ),
    Mutant(
        "chaos: units are given without a look at those in use",
        "penstock/core/jobs/admission.py",
        "Gates.room_for",
        "room = (self._capacity - ledger.units) // self._cost",
        "room = self._capacity // self._cost",
        (f"{KILLS}[overfull]",),
    ),
    Mutant(
        "chaos: a completion leaves a gap in the trail",
        "penstock/stores/sqlite/changes.py",
        "complete",
        "tx.events.append((now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))",
        "tx.events.append((now, _DONE, job_id, n + 2, _IS_DONE, _COMPLETED, attempt, None))",
        (f"{KILLS}[audit]",),
    ),
]
