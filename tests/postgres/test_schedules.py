"""
Four schedulers on one database, killed with kill -9 at random instants: each moment becomes one job, or what its
policy says. The clock is the test's own, so that a thousand days take minutes (`make soak`) and a few take seconds.

The schedulers are programs that fork and step as fast as they can, for many kills in a short time; or they are
daemons, which run commands.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise, takewhile
from pathlib import Path
from time import sleep

import psycopg
import pytest
from msgspec.structs import replace
from tests.daemon import Daemon
from tests.postgres.schedule_clock import ServerClock, SharedClock
from tests.waiting import LONG, until

from penstock.core.jobs import schedules
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.schedules import Missed, Overlap, Schedule
from penstock.core.jobs.types import HOUR, MINUTE, SECOND, when
from penstock.stores.api import ChangeSchedule, Query, committed
from penstock.stores.postgres.admission_view import Heads
from penstock.stores.postgres.store import PostgresStore

SOAK = int(os.environ.get("PENSTOCK_SOAK", "0"))
DAYS = 100 * SOAK or 5  # `make soak`: 1,000
DAEMON_DAYS = 100 * SOAK or 3
T0 = 1_773_500_000 * SECOND  # March 2026: the clocks of Berlin change in two weeks
JOB = Intent("a", "t", cost_units=1)
#: Every policy of overlap and of missed moments.
SCHEDULES = [
    Schedule("every-moment", JOB, cron="30 */4 * * *", zone="Europe/Berlin", overlap=Overlap.QUEUE, missed=Missed.ALL, missed_limit=1_000),
    Schedule("every-n", JOB, every_sec=5 * 3_600, overlap=Overlap.SKIP, missed=Missed.ALL, missed_limit=1_000),
    Schedule("latest", JOB, cron="0 */6 * * *", overlap=Overlap.QUEUE, missed=Missed.LATEST),
    Schedule("skip", JOB, cron="15 * * * *", zone="Asia/Kolkata", overlap=Overlap.SKIP, missed=Missed.SKIP),
    Schedule("cancel", JOB, cron="*/40 0-6 * * *", zone="America/New_York", overlap=Overlap.CANCEL_RUNNING),
]  # fmt: skip
#: The same policies with fewer moments: each becomes a command.
DAEMON_SCHEDULES = [
    replace(schedule, **timing)
    for schedule, timing in zip(
        SCHEDULES,
        [
            {"cron": "30 2,14 * * *"},
            {"every_sec": 11 * 3_600},
            {},
            {"cron": "15 */3 * * *"},
            {"cron": "*/40 2 * * *"},
        ],
        strict=True,
    )
]


class Fleet:
    def __init__(self, place, clock_file):
        program = Path(__file__).with_name("schedule_host.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), place.dsn, place.schema, str(clock_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kills = 0
        self.pids = [self.start() for _ in range(4)]

    def start(self):
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def kill_one(self, dice):
        at = dice.randrange(len(self.pids))
        os.kill(self.pids[at], signal.SIGKILL)
        self.kills += 1
        self.pids[at] = self.start()

    def close(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class DaemonFleet:
    """Four daemons on one database, each with a data directory and a host name of its own."""

    def __init__(self, dsn, folder):
        names = ("one", "two", "three", "four")
        for name in names:
            (folder / name).mkdir()
        flags = [f"database={dsn}", "server.listen=none", "retention.keep=3660d", "leases.ttl=2s"]
        retries = ["0s"] * 1_000  # a job that lost its daemon, or its lease by a jump of the clock
        flags += [f"retry.crash={json.dumps(retries)}", 'retry.start=["0s"]']
        self.daemons = [Daemon(folder / name, *flags, f"host.name={name}") for name in names]
        self.kills = 0
        with ThreadPoolExecutor() as threads:
            list(threads.map(Daemon.start, self.daemons))

    def kill_one(self, dice):
        daemon = dice.choice(self.daemons)
        daemon.end(signal.SIGKILL)
        self.kills += 1
        daemon.start()

    def describe(self):
        """The end of each daemon's log, with what each of its threads does. The daemons end."""
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.end(signal.SIGABRT)
            yield f"{daemon.data.parent.name}: ...{daemon.log.read_text()[-20_000:]}"

    def close(self):
        for daemon in self.daemons:
            daemon.close()


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.timeout(600 + 40 * DAYS)
def test_each_moment_becomes_one_job_however_many_schedulers_are_killed(opened, postgres_emptied, tmp_path):
    clock_file = tmp_path / "clock"
    clock_file.write_bytes(T0.to_bytes(8, "little"))
    clock, dice = SharedClock(clock_file), random.Random(DAYS)
    store = opened(clock)
    for schedule in SCHEDULES:
        committed(store, ChangeSchedule(schedules.add(schedule, T0, "test")))
    fleet = Fleet(postgres_emptied.place, clock_file)
    try:
        while clock() < T0 + DAYS * 24 * HOUR:
            # To the next moment, so that it is fired in time, or past some of them.
            alarm = store.schedule_alarm() if dice.random() < 0.5 else 0
            step = dice.choice([10 * MINUTE, 40 * MINUTE, 3 * HOUR, 9 * HOUR])
            clock.set(alarm if alarm > clock() else clock() + step)
            if dice.random() < 0.3:
                sleep(dice.random() * 0.02)  # a random instant for the kill, and nothing that is waited for
                fleet.kill_one(dice)
            if dice.random() < 0.9:  # else the next moments find the last ones unfired
                settle(store, clock)
        settle(store, clock, everything=True)
    finally:
        fleet.close()

    assert fleet.kills > DAYS / 2
    check(store, T0)


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.timeout(600 + 60 * DAEMON_DAYS)
def test_each_moment_becomes_one_job_however_many_daemons_are_killed(postgres_server, tmp_path):
    journal, dice = tmp_path / "journal", random.Random(DAEMON_DAYS)
    payload = json.dumps({"script": f'echo "$PENSTOCK_DISPATCH_ID" >> {journal}'})
    job = Intent("a", "penstock.shell", cost_units=1, payload=payload)
    with (
        closing(ServerClock(postgres_server, "clocked")) as clock,
        closing(PostgresStore(clock.dsn)) as store,
    ):
        began = clock() // SECOND * SECOND  # the tag of a moment is by the second
        for schedule in DAEMON_SCHEDULES:
            committed(store, ChangeSchedule(schedules.add(replace(schedule, intent=job), began, "test")))
        with closing(DaemonFleet(clock.dsn, tmp_path)) as fleet, explained(store, clock, fleet):
            while clock() < began + DAEMON_DAYS * 24 * HOUR:
                alarm = store.schedule_alarm() if dice.random() < 0.4 else 0
                step = dice.choice([2 * HOUR, 9 * HOUR, 20 * HOUR, 50 * HOUR])
                clock.set(alarm if alarm > clock() else clock() + step)
                if fleet.kills == 0 or dice.random() < 0.3:
                    newest = store.newest()
                    if dice.random() < 0.7:  # just when a moment becomes a job, if one is due
                        until(lambda newest=newest: store.newest() > newest or fired(store, clock))
                    sleep(
                        dice.random() * 0.02
                    )  # a random instant for the kill, and nothing that is waited for
                    fleet.kill_one(dice)
                if dice.random() < 0.9:
                    while_it_goes_on(store, lambda: fired(store, clock))
            while_it_goes_on(store, lambda: fired(store, clock) and not unsettled(store))
        check(store, began)
        begun = set(journal.read_text().split())
        for done in store.find(Query(states=["DONE"], limit=1_000_000)):
            assert f"{done.job_id}.{done.fence}" in begun
        assert fleet.kills >= DAEMON_DAYS / 10
        assert store.audit() == []


def test_a_read_takes_as_long_as_before_when_the_clock_was_moved(postgres_server):
    with (
        closing(ServerClock(postgres_server, "moved")) as clock,
        closing(PostgresStore(clock.dsn)) as store,
    ):
        clock.set(clock() + 89 * 24 * HOUR)
        [last] = store.database.query("heads", {"most": 1})

    assert Heads([last], 1).took_sec < LONG


@contextmanager
def explained(store, clock, fleet):
    """When nothing happens in time: what every part waits for."""
    try:
        yield
    except AssertionError:
        report = [
            f"now {when(clock())}, schedules {store.schedule_alarm()}, leases {store.alarm()}",
            *(f"{r.name} {r.version} {r.state} next {r.next_moment}" for r in store.schedules()),
            *store.find(Query(states=["QUEUED", "DISPATCHING", "RUNNING"], limit=100)),
            *(*store.live(), *store.overdue(100), *store.hosts()),
            *store.events(store.newest() - 60, 60),
        ]
        with psycopg.connect(clock.dsn) as connection:
            for question in (
                "SELECT pid, state, wait_event_type, wait_event, now() - xact_start, query FROM pg_stat_activity",
                "SELECT pid, locktype, relation::regclass, mode, granted, pg_blocking_pids(pid) FROM pg_locks",
            ):
                report += [question, *connection.execute(question)]
        sys.stdout.writelines(f"{line}\n" for line in (*report, *fleet.describe()))
        raise


def fired(store, clock):
    """Whether every moment up to now is dealt with."""
    return store.schedule_alarm() > clock()


def while_it_goes_on(store, true):
    """Until that is true. On a busy machine ten moments that wait for each other take long: each event is a sign of life."""
    while not true():
        newest = store.newest()
        until(lambda newest=newest: store.newest() > newest or true())


def unsettled(store):
    return store.find(Query(states=["QUEUED", "DISPATCHING", "RUNNING"], limit=1))


def settle(store, clock, *, everything=False):
    """Until every moment up to now is dealt with. The lease of a killed scheduler ends by the clock."""
    looks = 0
    while True:
        if fired(store, clock) and not (everything and unsettled(store)):
            return
        looks += 1
        sleep(0.003)  # what is waited for is the store; this leaves the machine to the schedulers
        if looks % 20 == 0:
            clock.set(clock() + 21 * SECOND)


def check(store, began):
    kinds = [kind for kind in EventKind if kind.startswith("SCHEDULE_")]
    events = store.events_of(kinds, 0, 10_000_000)
    trail = store.events(0, 10_000_000)
    ended = {
        event.job_id: event.seq
        for event in trail
        if event.state is not None and event.state in ("DONE", "FAILED", "CANCELED")
    }
    for record in store.schedules():
        own = [event for event in events if event.data["schedule"] == record.name]
        fired = [event for event in own if event.kind is EventKind.SCHEDULE_FIRED]
        skipped = [event.data["moment"] for event in own if event.kind is EventKind.SCHEDULE_SKIPPED]
        missed = sum(event.data["count"] for event in own if event.kind is EventKind.SCHEDULE_MISSED)
        moments = [event.data["moment"] for event in fired]
        came = takewhile(
            lambda m, last=record.state.last_moment: m <= last, record.schedule.timing.moments(began)
        )
        all_moments = [when(moment).isoformat() for moment in came]

        assert set(Counter([*moments, *skipped]).values()) <= {1}, record.name
        assert {*moments, *skipped} <= set(all_moments), record.name
        assert len(all_moments) == len(moments) + len(skipped) + missed, record.name
        if record.name in ("every-moment", "every-n"):
            assert 0 == missed
        if record.name == "every-moment":
            assert moments == all_moments != []
        jobs = store.find(Query(tag=record.schedule.tag, limit=1_000_000))
        assert [event.data["job_id"] for event in fired] == [job.job_id for job in jobs], record.name
        tags = [f"moment:{moment.replace('+00:00', 'Z')}" for moment in moments]
        assert tags == [job.intent.tags[-1] for job in jobs]
        # No job of a schedule is submitted before the one before it has ended.
        for before, after in pairwise(fired):
            assert ended[before.data["job_id"]] < after.seq, record.name
        assert record.name == "cancel" or "CANCELED" not in {job.state for job in jobs}
