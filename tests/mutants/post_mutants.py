"""Bugs that somebody could write into shared commits: riders, letters, and who commits for whom."""

from __future__ import annotations

from tests.mutants.planting import planter

RIDE = ("tests/contract/test_ride.py",)
FILE = ("tests/contract/test_sqlite.py",)
POST = ("tests/contract/test_post.py",)
RUNNING = ("tests/jobs/test_running.py", "-k", "claim or busy or idle")


planted = planter("post", "penstock/{}.py")

MUTANTS = [
    planted(
        "a rider that fails takes the submit down",
        "stores/writer",
        "if (len(batch) == 1 and not boarding) or _perhaps_written(error):",
        "if len(batch) == 1 or _perhaps_written(error):",
        RIDE,
    ),
    planted(
        "what a failed rider was promised is never told",
        "stores/writer",
        "            _land(riders, [None] * len(riders), None)\n",
        "",
        RIDE,
    ),
    planted(
        "everything takes riders along",
        "stores/writer",
        "boarding = bool(boards) and any(op.brings for op in batch)",
        "boarding = bool(boards)",
        RIDE,
    ),
    planted(
        "a busy crew claims more",
        "jobs/crew",
        "if self._closing or self._free <= 0 or self._over or not self._functions:",
        "if self._closing or not self._functions:",
        RUNNING,
    ),
    planted(
        "a crew that stops goes on claiming",
        "jobs/crew",
        "if self._closing or self._free <= 0 or",
        "if self._free <= 0 or",
        RUNNING,
    ),
    planted(
        "an unanswered letter is written blindly",
        "stores/sqlite_tx",
        "known.update({} if sure else self._written(names))",
        "known.update({})",
        POST,
    ),
    planted(
        "who writes after a lost letter takes new ids",
        "stores/sqlite",
        "return self._writer.soon(_submitting(letter, sure=sure), brings=True).result()",
        "return self.submit_soon(intents, depth).result()",
        POST,
    ),
    planted(
        "a silent post is asked again and again",
        "stores/post",
        "            self._shy_until = time.monotonic() + SHY_SEC\n",
        "",
        POST,
    ),
    planted(
        "a fork keeps the door",
        "stores/post",
        "os.register_at_fork(after_in_child=_after_fork)\n",
        "",
        POST,
    ),
    planted(
        "a stand-in stays for ever",
        "stores/sqlite",
        "elif ring(self._names.wakeups, self._sender) and self._post is not None:",
        "elif ring(self._names.wakeups, self._sender) and False:",
        POST,
    ),
    planted(
        "nobody hears of what a thread stays with",
        "stores/writer",
        "            self._left_untold = True\n",
        "            pass\n",
        POST,
    ),
    planted(
        "every thread that was lent stays for ever",
        "stores/post",
        "if self._closed or self._resting:",
        "if self._closed:",
        POST,
    ),
    planted(
        "a letter is read as the one before it",
        "stores/post",
        "if self._make is None or like != self._like:",
        "if self._make is None:",
        POST,
    ),
    planted(
        "zeros over the end of the log",
        "stores/sqlite_guard",
        "os.pwrite(file, bytes(more), size)",
        "os.pwrite(file, bytes(more), size - 4_096)",
        ("tests/contract/test_sqlite_damage.py",),
    ),
    planted(
        "letters in hand are dropped when the post closes",
        "stores/post",
        "self._shut(self._guests - self._owed)",
        "self._shut(set(self._guests))",
        POST,
    ),
    planted(
        "sums are kept although somebody else has written",
        "stores/sqlite_sums",
        "if self._con.data_version() != self._version:",
        "if self._version is None:",
        FILE,
    ),
    planted(
        "sums survive a rollback",
        "stores/sqlite_tx",
        "        self._demands.forget()\n        self._sums.forget()\n",
        "        self._demands.forget()\n",
        FILE,
    ),
    planted(
        "what SQLite itself has undone stays in the sums",
        "stores/sqlite_tx",
        "            if not stands:\n",
        "            if not stands and self._con.in_transaction:\n",
        ("tests/contract/test_sqlite_damage.py",),
    ),
    planted(
        "nobody knows where a start was told",
        "stores/sqlite_many",
        "phase, n + 2, batch, now, now,",
        "phase, n + 2, None, now, now,",
        ("tests/contract/test_admit.py", "tests/contract/test_apply.py"),
    ),
    planted(
        "nobody knows where an end was told",
        "stores/sqlite_pages",
        "write(self._con, statement, (self.batch, self._now, listed(ended)), len(ended))",
        "write(self._con, statement, (None, self._now, listed(ended)), len(ended))",
        ("tests/contract/test_apply.py", "tests/contract/test_differential.py"),
    ),
    planted(
        "whoever runs a job gets the limits of the one before it",
        "stores/sqlite_started",
        "if self._make is None or like != self._like:",
        "if self._make is None:",
        ("tests/contract/test_admit.py",),
    ),
    planted(
        "what is made ready begins though it was decided otherwise in the end",
        "engine/desk",
        "if made is None or granted is not foreseen:",
        "if made is None:",
        ("tests/engine/test_desk_many.py",),
    ),
    planted(
        "a job that goes on is made ready before its checkpoint is on disk",
        "engine/desk",
        " and all(d.fence == 1 for d in foreseen):",
        ":",
        ("tests/engine/test_desk_many.py",),
    ),
    planted(
        "a lease is completed as it was given, whatever its heartbeats said",
        "stores/sqlite_tx",
        "        self._pages.forget_leases()\n        self._pages.flush_rows()\n        return [renew(",
        "        self._pages.flush_rows()\n        return [renew(",
        ("tests/contract/test_apply.py",),
    ),
    planted(
        "a lease is completed as it was given, whatever was decided since",
        "stores/sqlite_tx",
        "        self._pages.forget_leases()\n        self._pages.flush_rows()\n        jobs = ",
        "        self._pages.flush_rows()\n        jobs = ",
        ("tests/contract/test_apply.py",),
    ),
    planted(
        "an expired lease that was given here still completes",
        "stores/sqlite_pages",
        "if lease and lease[2][2] > now]",
        "if lease]",
        ("tests/contract/test_apply.py",),
    ),
    planted(
        "a lease that was given here can be completed twice",
        "stores/sqlite_pages",
        "self._sums.leases.pop(dispatch_id, None)",
        "self._sums.leases.get(dispatch_id)",
        ("tests/contract/test_apply.py", "tests/contract/test_differential.py"),
    ),
    planted(
        "a job that crashed before is handed out as if it had not",
        "stores/sqlite_started",
        "if crash or unavailable or error else NONE_YET",
        "if unavailable or error else NONE_YET",
        ("tests/contract/test_admit.py",),
    ),
    planted(
        "who is in the file goes before who has just come, whatever their turns",
        "stores/sqlite_floor",
        "merge(jobs, self._new(fresh.pop(key)), key=_by_turn)",
        "iter([*jobs, *self._new(fresh.pop(key))])",
        FILE,
    ),
    planted(
        "who has just come is not in the round of its commit",
        "stores/sqlite_floor",
        "        for key, new in fresh.items():\n            yield self._line(key, self._new(new))\n",
        "",
        RIDE,
    ),
    planted(
        "a line in the file is not looked at because the last commit left none",
        "stores/sqlite_pages",
        "self._jobs_written or queued_here or bool(self._sums.queued)",
        "self._jobs_written or bool(self._sums.queued)",
        FILE,
    ),
    planted(
        "rows of a rolled back submit serve the next one that is like it",
        "stores/sqlite_tx",
        "        self._sums.forget()\n        self._like = None\n",
        "        self._sums.forget()\n",
        FILE,
    ),
    planted(
        "a job waits from when the last one like it came",
        "stores/sqlite_tx",
        "        elif now != self._like_at:\n",
        "        elif now < self._like_at:\n",
        ("tests/contract/test_submit.py", "tests/contract/test_differential.py"),
    ),
]
