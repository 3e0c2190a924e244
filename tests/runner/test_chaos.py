"""
kill -9 of anything at random instants: the scheduler, its launcher, wardens, warm workers, jobs and what they started.

The jobs keep a journal outside of the scheduler: every few milliseconds each says that it runs. From that it is seen, and not from what the
scheduler believes, that no job ran twice at once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.runner.folder import RunnerFolder
from penstock.runner.process_tree import DISPATCH_MARK, RUNNER_MARK, find_marked
from tests.waiting import until

from .plant import HERE, SOAK, Plant

#: Kills in one part, and parts: whoever has time takes the next one.
KILLS, PARTS = (100, 1) if SOAK == 1 else (200, SOAK)
#: The journal is written by a grandchild in a session of its own. Uptime counts in hundredths of a second.
SCRIPT = """
setsid sh -c 'i=0; while [ $i -lt 8 ]; do
  read up _ < /proc/uptime; echo "$PENSTOCK_DISPATCH_ID $up" >> {journal}; sleep 0.01; i=$((i+1)); done' & wait
"""


class Scheduler:
    """One life after the other."""

    def __init__(self, data):
        command = [sys.executable, str(HERE / "daemon_for_tests.py"), str(data), "again"]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start()

    def start(self):
        self._parent.stdin.write("another\n")
        self._parent.stdin.flush()
        self.pid = int(self._parent.stdout.readline())
        self._ready = False

    def up(self):
        self._ready = self._ready or self._parent.stdout.readline() == "ready\n"
        assert self._ready

    def restart(self):
        """After a kill: it may have become ready before that."""
        while (said := self._parent.stdout.readline()) == "ready\n":
            pass
        assert int(said) == -signal.SIGKILL
        self.start()

    def stop(self):
        self.up()
        os.kill(self.pid, signal.SIGTERM)
        assert int(self._parent.stdout.readline()) == 0
        self._parent.stdin.close()
        assert self._parent.wait(20) == 0
        self._parent.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(600 + 3 * KILLS)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_killed_nothing_is_lost_nothing_runs_twice_at_once_and_nothing_is_left(tmp_path, part):
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    data, journal = tmp_path / "data", tmp_path / "journal"
    data.mkdir()
    scheduler = Scheduler(data)
    scheduler.up()
    people = Plant(data, dispatch=False)
    jobs, killed = [], Counter()
    while killed.total() < KILLS:
        unsettled = [job for job in jobs[-40:] if people.state(job) in ("QUEUED", "DISPATCHING", "RUNNING")]
        for _ in range(8 - len(unsettled)):
            jobs.append(submit(people, journal, chance))
        now = kill(victims(scheduler, data, chance), chance)
        killed += now
        if now["scheduler"]:
            scheduler.restart()
            if chance.random() < 0.8:
                scheduler.up()  # else it is killed while it starts, perhaps

    for job in jobs:
        until(lambda job=job: people.state(job) == "DONE", what=f"{job} of seed {seed}")
    assert people.units() == 0
    assert people.store.audit() == []
    scheduler.stop()
    until(lambda: not people.ours(), what="the end of all processes")
    people.store.close()
    assert overlaps(journal) == []
    assert {line.split(".")[0] for line in journal.read_text().split("\n") if line} == set(jobs)
    assert set(killed) == {"scheduler", "launcher", "warden", "job"}


def submit(people, journal, chance):
    if chance.random() < 0.5:
        return people.function("journal", str(journal))
    return people.submit("shell", {"script": SCRIPT.format(journal=journal)})


def victims(scheduler, data, chance):
    """
    Some, because it takes longer to find them than to kill them. The kind first, so that each has its share; and mostly not
    before a job runs, which on a crowded machine takes its time.
    """
    found = processes(scheduler, data)
    if chance.random() < 0.7:
        until = time.monotonic() + 5
        while not found["job"] and time.monotonic() < until:
            time.sleep(0.01)
            found = processes(scheduler, data)
    shares = {"scheduler": 1, "launcher": 1, "warden": 4, "job": 5}
    kinds = [kind for kind, pids in found.items() if pids]
    chosen = chance.choices(kinds, [shares[kind] for kind in kinds], k=chance.randint(1, 5))
    return {chance.choice(found[what]): what for what in chosen}


def kill(pids, chance):
    """Each at an instant of its own. Some end by themselves before that."""
    killed = Counter()
    for pid, what in pids.items():
        time.sleep(chance.uniform(0, 0.04))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed[what] += 1
    return killed


def processes(scheduler, data):
    found = defaultdict(list, scheduler=[scheduler.pid])
    for process, _ in find_marked(RUNNER_MARK, {RunnerFolder(data).mark}):
        if DISPATCH_MARK.encode() in environment(process.pid):
            found["job"].append(process.pid)
        else:
            what = "launcher" if process.parent == scheduler.pid else "warden"
            found[what].append(process.pid)
    return found


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def overlaps(journal):
    """Attempts of one job that were heard of after the next had begun."""
    heard = defaultdict(dict)
    for line in journal.read_text().splitlines():
        dispatch, at = line.split()
        job, _, fence = dispatch.rpartition(".")
        first, last = heard[job].get(int(fence), (float(at), float(at)))
        heard[job][int(fence)] = (min(first, float(at)), max(last, float(at)))
    return [
        (job, before, after)
        for job, attempts in heard.items()
        for (_, before), (_, after) in pairwise(sorted(attempts.items()))
        if before[1] > after[0] + 0.01  # what uptime cannot tell apart
    ]


def test_the_journal_would_show_it(tmp_path):
    journal = tmp_path / "journal"
    journal.write_text("a.1 1.00\na.1 1.50\na.2 1.40\na.2 1.60\nb.1 1.00\nb.2 1.20\n")

    assert [job for job, *_ in overlaps(journal)] == ["a"]
