"""Behind a real PgBouncer in transaction mode, which hands every transaction to whichever server connection is free."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep

import psycopg
import pytest
from tests.postgres.conftest import JOB, tick
from tests.waiting import until

from penstock.core.jobs.load import Capacity
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import EndReport
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Complete, CompletedDispatch, Depth, Query, Submit, committed
from penstock.stores.postgres.pipeline import ConnectionOptions
from penstock.stores.postgres.store import PostgresStore

BINARY = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
#: Fewer than the connections of one store, so that each client meets what others left on a server connection.
SERVER_CONNECTIONS = 3


@pytest.fixture(scope="module")
def pooled(postgres_server):
    """The address behind the pooler."""
    if BINARY is None:
        pytest.skip("no PgBouncer here: apt-get install pgbouncer")
    folder = postgres_server._folder / "pooler"
    folder.mkdir()
    os.chown(folder, *postgres_server._owner)
    (folder / "pgbouncer.ini").write_text(f"""
[databases]
penstock = host={postgres_server._folder} port={postgres_server.port} dbname=penstock user=penstock
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
pool_mode = transaction
default_pool_size = {SERVER_CONNECTIONS}
""")
    command = [*postgres_server._as_owner("--pdeathsig", "KILL"), BINARY, "-q", str(folder / "pgbouncer.ini")]
    pooler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    until(lambda: pooler.poll() is not None or (folder / ".s.PGSQL.6432").exists())
    assert pooler.poll() is None
    yield f"postgresql://penstock@/penstock?host={folder}&port=6432"
    pooler.kill()
    pooler.wait()


@pytest.fixture
def opened(pooled, postgres_emptied):
    schema, stores = postgres_emptied().schema, []

    def one_more():
        stores.append(PostgresStore(pooled, schema=schema, options=ConnectionOptions(pooler=True)))
        return stores[-1]

    yield one_more
    for store in stores:
        store.close()


def test_many_at_once_submit_claim_and_complete(opened):
    """So often that a statement prepared on one server connection would long have been missed on another."""
    stores = [opened(), opened()]
    houses = [
        SchedulerService(store, SchedulerRules(host=f"host-{n}", capacity=Capacity(fixed=20)), reserves=False)
        for n, store in enumerate(stores)
    ]

    def work(number):
        service, done = houses[number % 2], 0
        service.job_service.submit([JOB] * 25)
        while claimed := service.job_service.claim(WorkerKinds(), 5):
            done += len(claimed)
            service.job_service.end_many([EndReport(c.dispatch.dispatch_id) for c in claimed])
        return done

    with ThreadPoolExecutor(8) as pool:
        ran = sum(pool.map(work, range(8)))
    ran += work(0)  # what somebody submitted after the others had looked

    assert {"DONE"} == {job.state for job in stores[0].find(Query(limit=1_000))}
    assert ran == len(stores[0].find(Query(limit=1_000)))
    assert [] == stores[1].audit()


def test_what_another_process_commits_is_noticed_without_a_notice(opened):
    here, there = opened(), opened()
    told = Event()
    here.on_change(told.set)
    here.listen()
    sleep(1.5)
    told.clear()

    committed(there, Submit([JOB], Depth()))

    assert told.wait(60)


def test_a_setting_of_ours_stays_with_our_transaction(opened, pooled):
    """Others use the same server connections."""
    store = opened()
    for _ in range(10):
        committed(store, Submit([JOB], Depth()))
    [*dispatches] = tick(store)
    committed(store, Complete([CompletedDispatch(d.dispatch_id) for d in dispatches]))

    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as con:
        found = {con.execute("SHOW statement_timeout").fetchone()[0] for _ in range(20)}
    assert {"0"} == found
