"""One database for several daemons and programs: by the same setting as a file, and without telling anybody its password."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.daemon import Daemon
from tests.waiting import LONG, until

from penstock import Scheduler
from penstock.cli.main import cli
from penstock.cli.top import headline
from penstock.core.errors import StoreFailed
from penstock.core.jobs.types import EndReason
from penstock.settings import BadSettings, describe, load
from penstock.stores.opening import open_postgres, shown
from penstock.stores.postgres.store import PostgresStore

SECRET = "hunter2"
HOME = {"HOME": "/home/ann"}
LEASE_SEC = 3


@pytest.fixture
def daemons(postgres, tmp_path_factory):
    """A function that starts one more on the same database, each with a folder and a name of its own."""
    made = []

    def start(name, *flags):
        folder = tmp_path_factory.mktemp(name)
        flags = (
            f"database={postgres.dsn}",
            f"postgres.schema={postgres.schema}",
            f"host.name={name}",
            *flags,
        )
        made.append(Daemon(folder, f"leases.ttl={LEASE_SEC}s", "order.tick=200ms", *flags))
        return made[-1].start()

    yield start
    for one in made:
        one.close()


@pytest.fixture
def store(postgres):
    store = PostgresStore(postgres.dsn, schema=postgres.schema)
    yield store
    assert [] == store.audit()
    store.close()


def submit(client, count, journal, sec):
    script = f'echo "$PENSTOCK_JOB_ID" >> {journal}; sleep {sec}'
    return [
        client.submit("shell", "penstock.shell", {"script": script}, cost_units=25).job_id
        for _ in range(count)
    ]


def hosts_of(store, jobs):
    return [dispatch.host for job in jobs for dispatch in store.attempts(job)]


# Daemons


def test_jobs_that_one_daemon_takes_run_on_all_of_them(daemons, store, tmp_path):
    one, _two = daemons("one"), daemons("two")

    jobs = submit(one.client, 12, tmp_path / "journal", 0.3)

    assert ["DONE"] * 12 == [one.client.wait(job, LONG).state for job in jobs]
    assert {"one", "two"} == set(hosts_of(store, jobs))
    assert 12 == len((tmp_path / "journal").read_text().split())


@pytest.mark.long
def test_what_a_killed_daemon_ran_is_done_by_another(daemons, store, tmp_path):
    one, two = daemons("one"), daemons("two")
    jobs = submit(one.client, 8, tmp_path / "journal", 1)
    until(lambda: {"one", "two"} <= {d.host for d in store.live() if d.started_at is not None})

    one.process.kill()
    one.process.wait(LONG)

    assert ["DONE"] * 8 == [two.client.wait(job, LONG).state for job in jobs]
    lost = [d for job in jobs for d in store.attempts(job) if d.end is EndReason.LEASE_EXPIRED]
    assert lost
    assert {"one"} == {dispatch.host for dispatch in lost}


def state_of(client, name):
    return {host.host: host.state for host in client.hosts().hosts}.get(name)


def told_of(client):
    """Once both have said where they are: a host is there before it listens."""
    hosts = [(host.host, host.state, host.url) for host in client.hosts().hosts]
    return hosts if all(url for _, _, url in hosts) else None


@pytest.mark.long
def test_a_daemon_that_is_killed_is_shown_as_lost_and_has_its_name_back_at_once(daemons):
    one, two = daemons("one"), daemons("two")
    before = until(lambda: told_of(two.client))

    one.process.kill()
    one.process.wait(LONG)
    until(lambda: "lost" == state_of(two.client, "one"))
    one.start()

    assert [("one", "alive", one.url), ("two", "alive", two.url)] == before
    assert "alive" == state_of(two.client, "one")
    one.end()
    assert state_of(two.client, "one") is None


def test_whoever_is_asked_tells_of_all_hosts(daemons):
    one, _ = daemons("one", "host.labels=gpu"), daemons("two")
    until(lambda: told_of(one.client) and len(told_of(one.client)) == 2)
    capacity, stats = one.client.capacity(), one.client.stats()

    assert "one" == capacity.host
    for hosts in (capacity.hosts, stats.hosts):
        assert [("one", ["gpu"], "alive"), ("two", [], "alive")] == [
            (h.host, h.labels, h.state) for h in hosts
        ]
    both = sum(host.capacity for host in stats.hosts)
    assert f"0/{both} units on 2 hosts" in headline(stats).plain
    assert "two 0/" in headline(stats).plain
    said = CliRunner().invoke(cli, ["capacity"], env={"PENSTOCK_DATA_DIR": str(one.data), "COLUMNS": "120"})
    assert f"This is one, one of 2 hosts: 0 of {both} units in use on all of them" in said.output


def test_a_second_daemon_of_the_same_name_is_refused(daemons):
    daemons("one")

    with pytest.raises(AssertionError, match="has the name one"):
        daemons("one")


@pytest.mark.long
def test_a_drained_host_starts_nothing_more_and_stays_so_over_a_restart(daemons, store, tmp_path):
    one, two = daemons("one"), daemons("two")
    two.client.drain("one")
    until(lambda: one.client.capacity().draining)
    one.end()
    one.start()

    jobs = submit(one.client, 8, tmp_path / "journal", 0.1)
    drained = [one.client.wait(job, LONG).state for job in jobs]
    where = set(hosts_of(store, jobs))
    one.client.undrain("one")
    until(lambda: not one.client.capacity().draining)
    one.client.drain("two")
    until(lambda: two.client.capacity().draining)
    [again] = submit(one.client, 1, tmp_path / "journal", 0.1)

    assert ["DONE"] * 8 == drained
    assert {"two"} == where
    assert "DONE" == one.client.wait(again, LONG).state
    assert ["one"] == hosts_of(store, [again])


def test_the_password_is_in_no_log(daemons, postgres):
    user, _, rest = postgres.dsn.partition("@")
    one = daemons("one", f"database={user}:{SECRET}@{rest}")
    one.end()

    log = one.log.read_text()
    assert "host one of postgresql://penstock:***@" in log
    assert SECRET not in log


# A program


def test_a_scheduler_runs_the_jobs_of_a_database(postgres_server):
    with Scheduler(postgres_server.dsn) as scheduler:
        add = scheduler.job(lambda a, b: a + b, name="add")
        jobs = [add.enqueue(n, 1) for n in range(20)]

        assert [n + 1 for n in range(20)] == [job.result(LONG) for job in jobs]
    scheduler.close()


def test_explain_says_when_no_process_runs_the_jobs_of_a_database(postgres_server):
    scheduler = Scheduler(postgres_server.dsn)
    job = scheduler.job(lambda: 1, name="one").enqueue()
    alone = job.explain().reason
    with Scheduler(postgres_server.dsn):
        accompanied = job.explain().reason
    job.cancel()
    scheduler.close()

    assert "nobody_runs" == alone
    assert "nobody_runs" != accompanied


def test_each_process_is_a_host_of_its_own(postgres_server):
    assert Scheduler(postgres_server.dsn).rules.host != Scheduler(postgres_server.dsn).rules.host


def test_a_scheduler_does_not_show_the_password():
    scheduler = Scheduler(f"postgresql://ann:{SECRET}@db/jobs")

    assert "postgresql://ann:***@db/jobs" == scheduler.where
    assert SECRET not in repr(scheduler)


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://ann:{SECRET}@db/jobs",
        f"postgresql://ann:a@{SECRET}@db/jobs",
        f"postgresql://ann@db/jobs?password={SECRET}&sslmode=require",
        f"postgresql://ann@db/jobs?sslmode=require&sslpassword={SECRET}",
        f"mysql://ann:{SECRET}@db/jobs",
        f"host=db password={SECRET} user=ann",
    ],
)
def test_an_address_is_shown_without_its_password(address):
    assert SECRET not in shown(address)
    assert "ann" in shown(address)
    assert "db" in shown(address)


def test_settings_show_and_refuse_an_address_without_its_password():
    settings = load(environ={**HOME, "PENSTOCK_DATABASE": f"postgresql://ann:{SECRET}@db/jobs"})
    with pytest.raises(BadSettings) as refused:
        load(environ={**HOME, "PENSTOCK_DATABASE": f"mysql://ann:{SECRET}@db/jobs"})

    listed = {one.key: one.value for one in describe(settings)}
    assert "postgresql://ann:***@db/jobs" == listed["database"]
    assert SECRET not in repr(settings)
    assert SECRET not in str(refused.value)


def test_an_address_that_cannot_be_read_is_refused_without_quoting_it():
    with pytest.raises(StoreFailed, match="%40 for an @") as refused:
        open_postgres(f"postgresql://ann:{SECRET}%zz@db/jobs")

    assert SECRET not in str(refused.value)


def test_without_the_driver_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("penstock.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(StoreFailed, match=r"pip install 'penstock\[postgres\]'") as refused:
        open_postgres(f"postgresql://ann:{SECRET}@db/jobs")

    assert SECRET not in str(refused.value)


def test_the_host_is_the_machine_where_jobs_are_shared_and_local_on_a_file():
    shared = load(environ={**HOME, "PENSTOCK_DATABASE": "postgresql://db/jobs"})

    assert Path("/proc/sys/kernel/hostname").read_text().strip() == shared.rules().host
    assert "local" == load(environ=HOME).rules().host
    assert "seven" == load(environ=HOME, flags={"host.name": "seven"}).rules().host
