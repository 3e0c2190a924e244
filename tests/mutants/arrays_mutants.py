"""Bugs in what an array makes when, and in how it ends."""

from __future__ import annotations

from tests.mutants.planting import Mutant

CORE = ("tests/core/test_arrays.py",)
MEMORY = ("tests/contract/test_arrays.py", "-k", "memory")

MUTANTS = [
    Mutant(
        "arrays: the bits of a chunk are one off",
        "penstock/core/jobs/arrays.py",
        "IndexChunk.ranges",
        "zeros = (bits & -bits).bit_length() - 1",
        "zeros = (bits & -bits).bit_length()",
        CORE,
    ),
    Mutant(
        "arrays: indices that wait for another run are looked for behind them",
        "penstock/core/jobs/arrays.py",
        "ArrayProgress.make",
        "again_from = repeated[-1] // CHUNK if repeated else self.again_from",
        "again_from = repeated[-1] // CHUNK + 1 if repeated else self.again_from",
        ("tests/contract/test_arrays.py", "-k", "sqlite"),
    ),
    Mutant(
        "arrays: an index that has a job again is made once more",
        "penstock/stores/postgres/groups.py",
        "PostgresArrayRows.write",
        '("repeat_indices", change.repeated)',
        '("repeat_indices", ())',
        ("tests/contract/test_arrays.py", "-k", "postgres"),
    ),
    Mutant(
        "arrays: the failed indices of a retry stay as they are",
        "penstock/stores/sqlite/groups.py",
        "SqliteArrayRows.write",
        "if change.retried:",
        "if not change.retried:",
        ("tests/contract/test_arrays.py", "-k", "sqlite"),
    ),
    Mutant(
        "arrays: one job more than may run at once",
        "penstock/core/jobs/arrays.py",
        "ArrayProgress.room",
        "(spec.at_once or WINDOW) - len(self.live)",
        "(spec.at_once or WINDOW) - len(self.live) + 1",
        CORE,
    ),
    Mutant(
        "arrays: a job that runs counts as ended",
        "penstock/core/jobs/arrays.py",
        "advance",
        "for job_id, state in states.items() if state in ENDED}",
        "for job_id, state in states.items()}",
        CORE,
    ),
    Mutant(
        "arrays: a canceled array makes more jobs",
        "penstock/core/jobs/arrays.py",
        "ArrayProgress.waiting",
        "0 if self.stopped else spec.total - self.made + self.again",
        "spec.total - self.made + self.again",
        CORE,
    ),
    Mutant(
        "arrays: a retry makes a job that exists",
        "penstock/core/jobs/arrays.py",
        "ArrayProgress.make",
        "indices = [LiveIndex(index, self.turn) for index in repeated]",
        "indices = [LiveIndex(index, 1) for index in repeated]",
        CORE,
    ),
    Mutant(
        "arrays: the end of a job does not make the next",
        "penstock/stores/common/array_changes.py",
        "advance_arrays",
        "for array_id in sorted(ends):",
        "for array_id in ():",
        MEMORY,
    ),
    Mutant(
        "arrays: a completion on SQLite does not make the next job",
        "penstock/stores/sqlite/changes.py",
        "complete",
        "if with_children or SEPARATOR in job_id:",
        "if with_children:",
        ("tests/contract/test_arrays.py", "-k", "sqlite"),
    ),
    Mutant(
        "arrays: the next job on PostgreSQL waits for another round",
        "penstock/stores/postgres/rounds.py",
        "RoundAttempt.run",
        "new_heads += self._advance_arrays(session, effects, state.arrays)",
        "self._advance_arrays(session, effects, state.arrays)",
        ("tests/contract/test_arrays.py", "-k", "postgres"),
    ),
    Mutant(
        "arrays: an end that no worker reports is not seen",
        "penstock/scheduler/arrays.py",
        "ArrayService.behind",
        "late = {array_id for name, array_id in live.items() if name not in living}",
        "late = set[JobId]()",
        MEMORY,
    ),
    Mutant(
        "arrays: jobs that wait are not canceled with their array",
        "penstock/scheduler/arrays.py",
        "ArrayService.cancel",
        "if all(committed(self._store, Apply(changes))):",
        "if True:",
        MEMORY,
    ),
]
