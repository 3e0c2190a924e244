"""Bugs that somebody could write into the scheduler as a library, and into its test kit."""

from __future__ import annotations

CREW = ("tests/jobs/test_crew.py",)
RUNNING = ("tests/jobs/test_running.py",)
PROCESSES = ("tests/jobs/test_processes.py",)
ARGUMENTS = ("tests/jobs/test_arguments.py",)
VIRTUAL = ("tests/testing/test_virtual.py",)


def jobs(
    file: str, name: str, old: str, new: str, tests: tuple[str, ...] = RUNNING
) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"jobs: {name}", f"penstock/jobs/{file}.py", old, new, tests


MUTANTS = [
    # What travels
    jobs(
        "arguments",
        "what comes back is not compared",
        "            if not _same(value, getattr(back, name)):\n",
        "            if False:\n",
        ARGUMENTS,
    ),
    jobs(
        "arguments",
        "a default is written down with the call",
        "bind(*args, **kwargs).arguments",
        "bind(*args, **kwargs).arguments | {p.name: p.default for p in self._signature.parameters.values() if p.default is not p.empty and p.name not in kwargs}",
        ARGUMENTS,
    ),
    jobs(
        "attempt",
        "a result of any size is kept",
        "    if len(text) > MAX_PAYLOAD:\n",
        "    if False:\n",
        ARGUMENTS,
    ),
    # Running
    jobs(
        "crew",
        "more is claimed than there is room for",
        "        if self._mean_sec >= AHEAD_SEC:\n            return 0\n",
        "",
    ),
    jobs(
        "crew",
        "what waits for a thread waits for ever",
        "            self._give_back([a for a in list(self._waiting.values()) if a.claimed_at < since])",
        "            pass",
    ),
    jobs(
        "crew",
        "what is given back is run as well",
        "        if self._waiting.pop(attempt.facts.dispatch_id, None) is None:\n            return False\n",
        "        self._waiting.pop(attempt.facts.dispatch_id, None)\n",
    ),
    jobs(
        "beats",
        "a cancel is seen with the next renewal only",
        "        if self._changed and long:\n            self._look(long)\n",
        "",
    ),
    jobs(
        "beats",
        "a cancel of what has just begun is overlooked",
        "        self._changed = self._changed and len(long) < len(running)\n",
        "        self._changed = False\n",
    ),
    jobs(
        "beats",
        "leases are not renewed",
        "        due = left < self._lease_for * 2 // 3 or left > self._lease_for\n",
        "        due = False\n",
    ),
    jobs("crew", "the place of a lost run is lost with it", "        self.hands.give_up(attempt)\n", ""),
    jobs(
        "hands",
        "a thread leaves when the function found its lease lost",
        "            if attempt.given_up:\n",
        "            if attempt.lost:\n",
    ),
    jobs(
        "hands",
        "a coroutine is not canceled",
        "            self._loop.call_soon_threadsafe(task.cancel)",
        "            pass",
    ),
    jobs(
        "attempt",
        "a lease that ran out is no reason to stop",
        "        return self.stop is not None or self.lost or self._now() >= self.expires_at",
        "        return self.stop is not None",
    ),
    jobs(
        "attempt",
        "an exit takes the thread along",
        "    except BaseException as error:  # noqa: BLE001  # whatever a job raises is its outcome, SystemExit too",
        "    except Exception as error:",
    ),
    jobs(
        "crew",
        "a ring by our own commit splits the batch that it brought",
        "            if self._in_one and now < held:\n",
        "            if False:\n",
        CREW,
    ),
    jobs(
        "crew",
        "a batch that hangs is waited for to its end",
        "            if self._in_one and now < held:\n",
        "            if self._in_one:\n",
        CREW,
    ),
    jobs(
        "crew",
        "what is told while somebody looks is not looked for",
        "            self._looked = False\n        self._ring()\n",
        "            pass\n        self._ring()\n",
        CREW,
    ),
    jobs(
        "crew",
        "where one who looks fails nobody looks",
        "to wait before it asks again\n            self._looked = False\n",
        "to wait before it asks again\n            pass\n",
        CREW,
    ),
    jobs(
        "crew",
        "one who looks in vain tells nobody",
        "            if not brought:  # else its commit has rung\n                self._ring()\n",
        "",
        CREW,
    ),
    # Stopping
    jobs(
        "crew",
        "nobody is asked to yield",
        "                attempt.yielding = True\n",
        "                pass\n",
    ),
    jobs(
        "attempt",
        "yielding is a failure",
        "    if asked and is_kind(error, JobStopped):\n",
        "    if False:\n",
    ),
    jobs(
        "crew",
        "what will not stop stays in flight",
        "        self._desk.end_many([Report(a.facts.dispatch_id, End.GRACEFUL_SHUTDOWN) for a in left])\n",
        "",
    ),
    jobs(
        "crew",
        "a stop waits for ever",
        "            if left <= 0 or not (self.running or self._waiting):",
        "            if not (self.running or self._waiting):",
    ),
    jobs(
        "crew",
        "a stop does not wait",
        "            if left <= 0 or not (self.running or self._waiting):",
        "            if True:",
    ),
    jobs(
        "work",
        "a program that was killed leaves its runs to their leases",
        "survivors=workers_named(WORKER),",
        "survivors=None,",
        PROCESSES,
    ),
    jobs(
        "scheduler",
        "a program that just ends stops nothing",
        "    for scheduler in list(_running):\n        scheduler.stop()\n",
        "    pass\n",
        PROCESSES,
    ),
    # Waiting
    jobs(
        "waits",
        "who waits elsewhere is not told",
        "                self._store.listen()\n",
        "                pass\n",
        PROCESSES,
    ),
    jobs(
        "waits",
        "a wait that was given up is kept",
        "                crowd.remove(waiting)\n",
        "                pass\n",
    ),
    jobs(
        "waits",
        "an earlier attempt counts as the end",
        "last if last is not None and last.ended_at == job.ended_at else None",
        "None",
    ),
    # Processes
    jobs(
        "processes",
        "a canceled process is taken for gone at once",
        '            call.cancel("the job was told to stop")',
        "            pass",
        PROCESSES,
    ),
    jobs(
        "processes",
        "a crash is the job's own error",
        "Outcome(End.WORKER_CRASHED, error=safe_str(error))",
        "failure(error)",
        PROCESSES,
    ),
    jobs(
        "processes",
        "processes are not asked to yield",
        "        self._yield_file.touch()",
        "        pass",
        PROCESSES,
    ),
    # Options
    jobs(
        "options",
        "a moment without a zone is taken for UTC",
        "        if value.tzinfo is None:\n",
        "        if False:\n",
        ("tests/jobs/test_options.py",),
    ),
    jobs(
        "function",
        "other times make another job",
        "            return self._first(conflict, intent)\n        return self._handle(receipt)\n\n    async",
        "            raise\n        return self._handle(receipt)\n\n    async",
    ),
    jobs(
        "scheduler",
        "a job that nobody runs says that it starts soon",
        "        if not self._dispatched():\n",
        "        if False:\n",
    ),
    # The test kit
    (
        "jobs: time does not pass inside a job",
        "penstock/testing/virtual.py",
        "            self.clock._passing.append(self._pass)\n",
        "",
        VIRTUAL,
    ),
    (
        "jobs: drain stops at the first job",
        "penstock/testing/virtual.py",
        "            runs += 1\n            if runs",
        "            runs += 1\n            return runs\n            if runs",
        VIRTUAL,
    ),
    (
        "jobs: inline swallows the error",
        "penstock/testing/virtual.py",
        "                    raise error\n",
        "                    pass\n",
        VIRTUAL,
    ),
    (
        "jobs: any call will do",
        "penstock/testing/calls.py",
        "(payload is None or plain(job.intent.payload) == plain(payload))",
        "True",
        VIRTUAL,
    ),
]
