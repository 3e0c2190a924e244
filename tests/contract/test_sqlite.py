"""What only a file can break: durability, other processes, schemas, the disk, and the cost of depth."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event

import apsw
import pytest
from msgspec.structs import replace

from penstock.core.errors import DispatcherHeld, QueueFull, SchemaNewer, StoreFailed
from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.changes import end
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, RoundResult, run_round
from penstock.core.jobs.states import JobState, Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import (
    Admit,
    Apply,
    Complete,
    CompletedDispatch,
    Depth,
    Prune,
    Query,
    SetAddon,
    Submit,
    Terms,
    committed,
)
from penstock.stores.common.rows import migrations
from penstock.stores.sqlite import connection
from penstock.stores.sqlite.connection import Presence
from penstock.stores.sqlite.queries import find_sql
from penstock.stores.sqlite.store import SqliteStore
from penstock.stores.sqlite.transaction import WriteLock

SOAK = "PENSTOCK_SOAK" in os.environ
T0 = 1_900_000_000 * SECOND
LATEST = len(connection.migrations("sqlite"))
JOB = Intent(addon_id="a", job_type="t")  # type: ignore[arg-type]  # a plain string will do here


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path):
    store = SqliteStore(path, lambda: T0)
    yield store
    store.close()


def tick(store, capacity=90, offer=Placement.RESERVE):
    def decide(admission_view):
        return run_round(
            RoundInputs(admission_view, Conditions(capacity), AdmissionLimits(), Ordering(), lambda _: offer)
        )

    return [grant.dispatch for grant in committed(store, Admit("here", decide, Terms()))]


SUBMITTER = """
import sys
from penstock.core.jobs.intent import Intent
from penstock.stores.api import Submit, committed
from penstock.stores.sqlite.store import SqliteStore

store = SqliteStore(sys.argv[1], lambda: 1_900_000_000_000_000)
for _ in range(int(sys.argv[2])):
    [receipt] = committed(store, Submit([Intent(addon_id="a", job_type="t")]))
    print(receipt.job_id, flush=True)
"""


def process(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("acknowledged", [1, 7, 40])
def test_what_was_acknowledged_before_a_kill_is_there_after_it(path, acknowledged):
    child = process(SUBMITTER, path, 1_000_000)
    seen = [child.stdout.readline().strip() for _ in range(acknowledged)]
    child.kill()
    seen += [line for line in child.stdout.read().split() if len(line) == 36]
    child.wait()
    child.stdout.close()
    store = SqliteStore(path, lambda: T0)
    kept = {job.job_id for job in store.find(Query(limit=1_000_000))}
    problems = store.audit()
    store.close()

    assert set(seen) <= kept
    assert len(kept) <= len(seen) + 1
    assert problems == []


def test_many_processes_submit_to_one_file(path, store):
    children = [process(SUBMITTER, path, 50) for _ in range(4)]
    ids = [job_id for child in children for job_id in child.communicate()[0].split()]

    assert all(child.returncode == 0 for child in children)
    assert {job.job_id for job in store.find(Query(limit=1_000))} == set(ids)
    assert len(set(ids)) == 200
    assert [event.seq for event in store.events(0, 1_000)] == list(range(1, 201))


def test_submits_that_arrive_together_share_a_commit(store):
    commits = []
    store._con.set_commit_hook(lambda: bool(commits.append(1)))
    busy, go = Event(), Event()

    def hold(_):
        busy.set()
        go.wait(30)
        return RoundResult()

    with ThreadPoolExecutor(33) as pool:
        first = pool.submit(committed, store, Admit("here", hold))
        busy.wait(30)
        waiting = [pool.submit(committed, store, Submit([JOB])) for _ in range(32)]
        while len(store._writer._commits) < 32:
            pass
        go.set()
        first.result()
        assert all(future.result() for future in waiting)

    assert len(commits) == 2  # the one that held them up, and theirs
    assert len(store.find(Query())) == 32


def test_what_a_rolled_back_transaction_had_seen_is_forgotten(store):
    novelty = Intent(addon_id="a", job_type="never seen")

    def fails(_):
        raise RuntimeError("after the first row of its kind")

    submitted, failed = store.commit(Submit([novelty]), Admit("here", fails))
    with pytest.raises(RuntimeError):
        failed.result()
    [receipt] = submitted.result()  # written again, alone
    assert [dispatch.job_id for dispatch in tick(store)] == [receipt.job_id]


def test_a_move_whose_event_cannot_be_written_does_not_happen(store):
    [receipt] = committed(store, Submit([JOB], Depth()))
    store._con.execute(
        "CREATE TEMP TRIGGER mute BEFORE INSERT ON main.trail BEGIN SELECT RAISE(ABORT, 'the trail is full'); END"
    )

    for act in (lambda: committed(store, Submit([JOB], Depth())), lambda: tick(store)):
        with pytest.raises(apsw.ConstraintError, match="trail is full"):
            act()
    store._con.execute("DROP TRIGGER mute")
    assert [(job.job_id, str(job.state)) for job in store.find(Query())] == [(receipt.job_id, "QUEUED")]
    assert store.audit() == []


def test_the_answer_comes_after_the_commit(store):
    order = []
    store._con.set_commit_hook(lambda: bool(order.append("commit")))
    committed(store, Submit([JOB], Depth()))
    order.append("answer")

    assert order == ["commit", "answer"]


def test_a_power_cut_loses_nothing_that_was_answered(store):
    assert store._con.pragma("journal_mode") == "wal"
    assert store._con.pragma("synchronous") == 2  # FULL


def test_a_sqlite_that_can_corrupt_a_wal_is_refused(path, monkeypatch):
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")

    with pytest.raises(StoreFailed, match=r"3\.51\.3"):
        SqliteStore(path, lambda: T0)


def test_a_newer_schema_is_refused_and_left_alone(path, store):
    store._con.execute("PRAGMA user_version = 999")

    with pytest.raises(SchemaNewer, match="upgrade Penstock") as refusal:
        SqliteStore(path, lambda: T0)
    assert refusal.value.data["schema"] == 999


def test_another_programs_database_is_refused_and_left_alone(path):
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE theirs (x)")
    other.close()

    with pytest.raises(StoreFailed, match="another program"):
        SqliteStore(path, lambda: T0)
    assert apsw.Connection(str(path)).execute("SELECT count(*) FROM sqlite_schema").get == 1


def test_a_file_that_is_no_database_is_refused_clearly(path):
    path.write_text("these are not the bytes you are looking for\n" * 100)

    with pytest.raises(StoreFailed, match=r"jobs\.db"):
        SqliteStore(path, lambda: T0)


@pytest.fixture
def next_version(monkeypatch):
    def add(script):
        steps = (*connection.migrations("sqlite"), script)
        monkeypatch.setattr(connection, "migrations", lambda _: steps)

    return add


def test_an_older_schema_moves_forward_after_a_backup(path, next_version):
    old = SqliteStore(path, lambda: T0)
    [receipt] = committed(old, Submit([JOB], Depth()))
    old.close()
    next_version("CREATE TABLE novelty (x INTEGER) STRICT;")
    new = SqliteStore(path, lambda: T0)
    kept = new.job(receipt.job_id)
    new.close()
    backup = apsw.Connection(f"{path}.v{LATEST}.backup")

    assert kept is not None
    assert apsw.Connection(str(path)).pragma("user_version") == LATEST + 1
    assert backup.pragma("user_version") == LATEST
    assert backup.execute("SELECT count(*) FROM job").get == 1


def test_a_migration_that_fails_leaves_the_schema_as_it_was(path, next_version):
    SqliteStore(path, lambda: T0).close()
    next_version("CREATE TABLE novelty (x INTEGER) STRICT; SELECT * FROM nowhere;")

    with pytest.raises(apsw.SQLError):
        SqliteStore(path, lambda: T0)
    con = apsw.Connection(str(path))
    assert con.pragma("user_version") == LATEST
    assert con.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'novelty'").get == 0


def test_what_others_write_counts_in_the_next_round(path, store):
    other = SqliteStore(path, lambda: T0)
    committed(store, Submit([JOB], Depth()))
    [mine] = tick(store, offer=Placement.LEASE)
    committed(other, Submit([JOB], Depth()))
    committed(other, SetAddon("a", paused=True))

    assert tick(store, offer=Placement.LEASE) == []
    committed(other, SetAddon("a", paused=False))
    assert len(tick(other, offer=Placement.LEASE)) == 1
    with pytest.raises(QueueFull):
        committed(other, Submit([JOB] * 3, Depth(total=2)))
    committed(other, Submit([JOB] * 2, Depth(total=2)))
    with pytest.raises(QueueFull):
        committed(store, Submit([JOB], Depth(total=2)))
    assert committed(store, Complete([CompletedDispatch(mine.dispatch_id)])) == [True]
    assert len(tick(other, capacity=20, offer=Placement.LEASE)) == 1
    assert store.audit() == []
    other.close()


def test_what_a_rolled_back_transaction_had_counted_is_forgotten(store):
    committed(store, Submit([JOB], Depth()))

    def fails(_):
        raise RuntimeError("behind everything")

    submitted, ticked, failed = store.commit(
        Submit([JOB], Depth(total=2)), Admit("here", lambda _: RoundResult()), Admit("here", fails)
    )
    with pytest.raises(RuntimeError):
        failed.result()
    assert ([], 1) == (ticked.result(), len(submitted.result()))
    with pytest.raises(QueueFull):
        committed(store, Submit([JOB], Depth(total=2)))
    assert len(tick(store, capacity=20)) == 2
    assert store.audit() == []


def test_a_job_that_goes_back_can_start_again_in_the_same_commit(store):
    committed(store, Submit([JOB], Depth()))
    [first] = tick(store, offer=Placement.LEASE)
    back = end(
        store.job(first.job_id),
        first,
        EndReason.GRACEFUL_SHUTDOWN,
        T0,
        schedules=Schedules(),
        ordering=Ordering(),
    )

    moved, started = store.commit(Apply([back]), reserving())
    [(second, *_)] = started.result()

    assert moved.result() == [True]
    assert (second.job_id, second.fence) == (first.job_id, 2)
    assert store.audit() == []


@pytest.mark.parametrize(("waiting", "comes", "first"), [(20, 50, 1), (50, 20, 0), (50, 50, 0)])
def test_who_has_just_come_takes_its_turn_among_those_in_the_file(store, waiting, comes, first):
    old, new = (replace(JOB, priority=priority, cost_units=60) for priority in (waiting, comes))
    [before] = committed(store, Submit([old], Depth()))

    submitted, started = store.commit(Submit([new]), reserving())
    [after], [(dispatch, *_)] = submitted.result(), started.result()

    assert dispatch.job_id == (before, after)[first].job_id


def reserving():
    return Admit(
        "here",
        lambda admission_view: run_round(
            RoundInputs(admission_view, Conditions(90), AdmissionLimits(), Ordering(), all_alike)
        ),
    )


def all_alike(_):
    return Placement.RESERVE


BEFORE_BATCHES = """
INSERT INTO demand (no, key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class)
VALUES (1, 'k', 'a', 't', 1, 0, 'any', 0, 0, 0);
INSERT INTO job (no, job_id, addon_id, state, demand, line, turn, ready_at, priority, fence, events, created_at)
VALUES (2, 'second', 'a', 'QUEUED', 1, 1, 0, 0, 50, 1, 3, 5), (3, 'third', 'a', 'QUEUED', 1, 1, 0, 0, 50, 0, 1, 5);
INSERT INTO intent (no, payload, unit, time_sensitive) VALUES (2, 'null', 'usd', 0), (3, 'null', 'usd', 0);
INSERT INTO tally VALUES ('a', 'QUEUED', 2);
UPDATE mark SET value = iif(name = 'job', 3, 2001);
INSERT INTO event (seq, at, kind, job_no, n, state, reason, dispatch_id, data)
VALUES (2, 5, 'SUBMITTED', 2, 1, 'QUEUED', '', NULL, NULL), (4, 6, 'RUNNING', 2, 2, 'RUNNING', '', 'second.1', '{"worker":"w"}'),
       (5, 6, 'ADMITTED', NULL, 0, NULL, '', 'loan.0', NULL), (2000, 7, 'REQUEUED', 2, 3, 'QUEUED', 'expired', 'second.1', NULL),
       (2001, 8, 'SUBMITTED', 3, 1, 'QUEUED', '', NULL, NULL);
"""


def test_events_of_a_file_that_had_a_row_for_each_keep_their_numbers(path):
    con = apsw.Connection(str(path))
    for script in (*migrations("sqlite")[:3], BEFORE_BATCHES):
        con.execute(script)
    con.execute(f"PRAGMA user_version = 3; PRAGMA application_id = {connection.APPLICATION_ID}")
    con.close()
    store = SqliteStore(path, lambda: T0)
    [receipt] = committed(store, Submit([JOB], Depth()))

    told = [(event.seq, event.job_id, str(event.kind), event.dispatch_id) for event in store.events(0, 100)]
    assert told == [
        (2, "second", "SUBMITTED", None),
        (4, "second", "RUNNING", "second.1"),
        (5, None, "ADMITTED", "loan.0"),
        (2000, "second", "REQUEUED", "second.1"),
        (2001, "third", "SUBMITTED", None),
        (2002, receipt.job_id, "SUBMITTED", None),
    ]
    assert store.job(receipt.job_id).no == 4
    of_job = store.events(1, 100, "second")
    assert [(event.n, event.reason, event.data) for event in of_job] == [
        (2, "", {"worker": "w"}),
        (3, "expired", {}),
    ]
    assert store.audit() == []
    store.close()


def test_processes_that_open_a_new_file_at_once_make_one_schema(path):
    children = [process(SUBMITTER, path, 1) for _ in range(6)]
    for child in children:
        child.communicate()

    assert [child.returncode for child in children] == [0] * 6


def test_who_opens_a_new_file_while_another_makes_its_schema_waits_and_keeps_no_copy_of_the_half(
    path, monkeypatch
):
    looked, version = Event(), connection.schema_version

    def looks(*args):
        found = version(*args)
        looked.set()
        return found

    presence = Presence(path)
    first = connection.connect(path)
    presence.examine(first)
    first.execute(migrations("sqlite")[0])
    first.execute(f"PRAGMA user_version = 1; PRAGMA application_id = {connection.APPLICATION_ID}")
    lock = WriteLock(path)
    lock.__enter__()
    monkeypatch.setattr(connection, "schema_version", looks)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(SqliteStore, path, lambda: T0)
        assert looked.wait(20)
        for number, script in enumerate(migrations("sqlite")[1:], 2):
            first.execute(script)
            first.execute(f"PRAGMA user_version = {number}")
        lock.__exit__()

        assert committed(second.result(), Submit([JOB], Depth()))
    second.result().close()
    lock.close()
    first.close()
    presence.close()
    assert [] == list(path.parent.glob("*.backup*"))


HOLDER = """
import sys
from penstock.stores.sqlite.store import SqliteStore

store = SqliteStore(sys.argv[1], lambda: 1_900_000_000_000_000)
store.acquire_dispatch("the night shift")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_dispatcher_is_told_who_holds_the_file_and_gets_it_when_that_one_dies(path, store):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DispatcherHeld, match=f"the night shift.*{holder.pid}"):
            store.acquire_dispatch("the day shift")
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    store.acquire_dispatch("the day shift")


def test_a_submit_from_another_process_rings_the_dispatcher(path, store):
    rung = Event()
    store.acquire_dispatch("me")
    store.on_change(rung.set)
    child = process(SUBMITTER, path, 1)
    child.communicate()

    assert rung.wait(30)


def test_a_full_disk_is_a_clear_error_that_loses_nothing_and_passes(store):
    committed(store, Submit([JOB], Depth()))
    size = store._con.pragma("page_count")
    store._con.pragma("max_page_count", size)
    large = Intent(addon_id="a", job_type="t", payload='"' + "x" * 100_000 + '"')

    with pytest.raises(StoreFailed) as refusal:
        committed(store, Submit([large], Depth()))
    assert refusal.value.data["kind"] == "full"
    assert len(store.find(Query())) == 1
    store._con.pragma("max_page_count", 1_000_000)
    assert committed(store, Submit([large], Depth()))
    assert store.audit() == []


BEFORE_PLACES = """
INSERT INTO demand (no, key, addon_id, job_type, cost_units, constraints, run_when, quiet_for_sec, high, duration_class)
VALUES (1, 'k', 'a', 't', 5, 0, 'any', 0, 0, 0);
INSERT INTO job (no, job_id, addon_id, state, demand, line, turn, ready_at, priority, fence, events, created_at, ended_at, active, crash, denied, submitted_in)
VALUES (1, 'waits', 'a', 'QUEUED', 1, 1, 4, 7, 50, 1, 1, 7, NULL, 2, 1, 'no_room', 1), (2, 'reserved', 'a', 'DISPATCHING', 1, NULL, 0, 7, 50, 1, 1, 7, NULL, 0, 0, '', 1),
       (3, 'runs', 'a', 'RUNNING', 1, NULL, 0, 7, 50, 2, 1, 7, NULL, 3, 1, '', 1), (4, 'done', 'a', 'DONE', 1, NULL, 0, 7, 50, 2, 1, 7, 30, 12, 0, '', 1),
       (5, 'failed', 'a', 'FAILED', 1, NULL, 0, 7, 50, 1, 1, 7, 31, 4, 0, '', 1), (6, 'blocked', 'a', 'BLOCKED', 1, NULL, 0, 7, 50, 0, 1, 7, 32, 0, 0, 'budget', 1);
INSERT INTO intent (no, payload, unit, time_sensitive) SELECT no, 'null', 'usd', 0 FROM job;
INSERT INTO dispatch (dispatch_id, job_no, demand, addon_id, host, fence, cost_units, phase, admitted_at, started_at, expires_at, ended_at, how, result)
VALUES ('waits.1', 1, 1, 'a', 'h', 1, 5, 'ended', 10, 10, 90, 12, 'worker_crashed', NULL), ('reserved.1', 2, 1, 'a', 'h', 1, 5, 'reserved', 20, NULL, 90, NULL, NULL, NULL),
       ('runs.1', 3, 1, 'a', 'h', 1, 5, 'ended', 10, 10, 90, 13, 'worker_crashed', NULL), ('runs.2', 3, 1, 'a', 'h', 2, 5, 'leased', 20, 20, 90, NULL, NULL, NULL),
       ('done.1', 4, 1, 'a', 'h', 1, 5, 'ended', 10, 10, 90, 12, 'worker_crashed', NULL), ('done.2', 4, 1, 'a', 'h', 2, 5, 'ended', 20, 20, 90, 30, 'completed', '7'),
       ('failed.1', 5, 1, 'a', 'h', 1, 5, 'ended', 27, 27, 90, 31, 'job_error', NULL), ('loan.0', NULL, 1, 'a', 'h', 0, 5, 'leased', 20, 20, 90, NULL, NULL, NULL),
       ('over.0', NULL, 1, 'a', 'h', 0, 5, 'ended', 20, 20, 90, 21, 'released', NULL), ('older.0', NULL, 1, 'a', 'h', 0, 5, 'ended', 20, 20, 90, 21, 'released', NULL);
INSERT INTO sums (scope, name, units, running, weight, paused, average, held, at, jobs)
VALUES ('host', 'h', 15, 3, NULL, NULL, NULL, NULL, NULL, NULL), ('type', 'a/t', 15, 3, NULL, NULL, NULL, NULL, NULL, NULL),
       ('addon', 'a', 15, 3, 100, 0, 0.0, 15, 20, '{"QUEUED": 1, "DISPATCHING": 1, "RUNNING": 1, "DONE": 1, "FAILED": 1, "BLOCKED": 1}');
INSERT INTO trail (batch, size, jobs, events)
SELECT 1, 6, 6, json_group_array(json_array(7, 'SUBMITTED', job_id, 1, state, '', NULL, NULL)) FROM job;
"""


def test_jobs_of_a_file_from_before_there_were_places_stay_as_they_were(path):
    con = apsw.Connection(str(path))
    for script in (*migrations("sqlite")[:5], BEFORE_PLACES):
        con.execute(script)
    con.execute(f"PRAGMA user_version = 5; PRAGMA application_id = {connection.APPLICATION_ID}")
    con.close()
    store = SqliteStore(path, lambda: 50)
    jobs = {job.job_id: job for job in store.find(Query())}

    assert store.audit() == []
    assert {name: (str(j.state), j.fence, j.active, j.denied, j.ended_at) for name, j in jobs.items()} == {
        "waits": ("QUEUED", 1, 2, "no_room", None),
        "reserved": ("DISPATCHING", 1, 0, "", None),
        "runs": ("RUNNING", 2, 3, "", None),
        "done": ("DONE", 2, 12, "", 30),
        "failed": ("FAILED", 1, 4, "", 31),
        "blocked": ("BLOCKED", 0, 0, "budget", 32),
    }
    assert [(d.fence, str(d.end), d.result) for d in store.attempts("done")] == [
        (1, "worker_crashed", None),
        (2, "completed", "7"),
    ]
    assert {d.dispatch_id for d in store.live()} == {"reserved.1", "runs.2", "loan.0"}
    assert str(store.dispatch("over.0").phase) == "ended"
    assert committed(store, Complete([CompletedDispatch("runs.2")])) == [True]
    assert committed(store, Prune(31, 10)) == 1
    assert store.job("done") is None
    assert store.audit() == []
    store.close()


def test_a_closed_store_says_so(path):
    store = SqliteStore(path, lambda: T0)
    store.close()

    with pytest.raises(StoreFailed, match="closed"):
        committed(store, Submit([JOB], Depth()))


def by_hand(path):
    return apsw.Connection(str(path))


TWIN = """INSERT INTO active_dispatch (no, class_no, host, fence, phase, events, admitted_at, expires_at)
          SELECT no, class_no, host, 9, phase, events, admitted_at, expires_at FROM active_dispatch"""


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("UPDATE totals SET units = -1", "CHECK"),
        ("UPDATE job SET state = 'WAITING'", "CHECK"),
        ("UPDATE job SET priority = 0", "CHECK"),
        ("UPDATE job SET state = 'DONE'", "CHECK"),
        ("UPDATE admission_class SET cost_units = 101", "CHECK"),
        ("UPDATE intent SET payload = '{'", "CHECK"),
        ("UPDATE active_dispatch SET phase = 'ended'", "CHECK"),
        ("UPDATE active_dispatch SET phase = 'ending'", "CHECK"),
        ("UPDATE queue SET line = 3", "CHECK"),
        ("INSERT INTO queue SELECT * FROM queue", "UNIQUE"),
        ("UPDATE trail SET size = 2", "only ever added"),
        (TWIN, "UNIQUE"),
    ],
)
def test_the_database_itself_refuses_what_would_break_an_invariant(path, store, sql, why):
    committed(store, Submit([JOB] * 2, Depth()))
    tick(store, capacity=10)

    with pytest.raises(apsw.ConstraintError, match=why):
        by_hand(path).execute(sql)


def test_a_final_state_cannot_be_left_even_by_hand(path, store):
    committed(store, Submit([JOB] * 2, Depth()))
    [run] = tick(store, capacity=10, offer=Placement.LEASE)
    committed(store, Complete([CompletedDispatch(run.dispatch_id)]))
    con = by_hand(path)
    con.execute("UPDATE job SET state = 'CANCELED', ended_at = 1 WHERE no = 2")

    with pytest.raises(apsw.ConstraintError, match="final"):
        con.execute("UPDATE job SET state = NULL, ended_at = NULL")
    with pytest.raises(apsw.ConstraintError, match="stays so"):
        con.execute("UPDATE ended_dispatch SET how = 'job_error'")
    con.execute("DELETE FROM job")


def test_a_move_that_finds_another_state_than_it_was_decided_on_is_rolled_back(store):
    """Our own statements name the state they leave: were the check before them broken, nothing would be committed."""
    committed(store, Submit([JOB], Depth()))

    with pytest.raises(AssertionError, match="complete"), store._transaction as transaction:
        transaction.write("complete", (1, T0, "[[1, null]]"))
    assert [str(job.state) for job in store.find(Query())] == ["QUEUED"]


def steps_of(store, act):
    """Virtual machine steps of the write connection, in hundreds: work that no noisy neighbour can change."""
    steps = []
    store._con.set_progress_handler(lambda: bool(steps.append(1)), 100)
    act()
    store._con.set_progress_handler(None)
    return len(steps)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capacity", [0, 30])
def test_the_cost_of_a_tick_follows_what_it_starts_and_not_what_waits(tmp_path, capacity):
    costs = []
    for depth in (1_000, 1_000_000) if SOAK else (100, 20_000):
        store = SqliteStore(tmp_path / f"{depth}.db", lambda: T0)
        later = Intent(addon_id="b", job_type="t", priority=100, earliest_start_at=T0 + SECOND)
        for _ in range(0, depth, 10_000):
            committed(store, Submit([JOB, later] * min(depth, 10_000), Depth()))
        tick(store, capacity=10)
        costs.append(steps_of(store, lambda: tick(store, capacity)))  # noqa: B023 - called at once
        store.close()

    assert costs[1] <= costs[0] * 1.2 + 1


@pytest.mark.parametrize(
    "name",
    [
        "in_line",
        "due_jobs",
        "next_line",
        "expired",
        "to_stop",
        "past_deadline",
        "alarm",
        "old_jobs",
        "jobs_by_key",
        "jobs_by_id",
        "dispatches_for_beats",
        "dispatches_by_id",
        "attempts",
        "events",
        "events_of",
        "events_of_job",
        "old_ended_jobs",
        "done_jobs",
        "batches_of",
        "forget_mentions",
    ],
)
def test_no_statement_of_the_hot_path_scans_a_table(store, name):
    sql = connection.SQL[name]
    values = (1,) * sql.count("?") if "?" in sql else Anything()
    plan = [row[3] for row in store._con.execute(f"EXPLAIN QUERY PLAN {sql}", values)]

    # An index, the list of what was asked for, or what is in flight, which is never more than a hundred.
    fine = (
        "(subquery",
        "USING",
        "VIRTUAL TABLE",
        "CONSTANT ROW",
        "SCAN more",
        "SCAN active_dispatch",
        "SCAN l",
        "SCAN d",  # of the view whose parts are searched
    )
    assert not [step for step in plan if step.startswith("SCAN") and not any(word in step for word in fine)]


class Anything(dict):
    def __missing__(self, name):
        return 1


@pytest.mark.parametrize("state", list(JobState))
def test_a_list_of_any_state_is_walked_in_its_order_and_not_sorted(store, state):
    sql, values = find_sql(Query(states=[state], newest_first=True))
    plan = [row[3] for row in store._con.execute(f"EXPLAIN QUERY PLAN {sql}", values)]

    assert not [step for step in plan if "TEMP B-TREE" in step or "SCAN job" in step or "SCAN j" in step]


def test_a_page_of_what_is_done_costs_the_same_wherever_it_begins(store):
    committed(store, Submit([replace(JOB, cost_units=1)] * 2_000, Depth()))
    for _ in range(20):
        runs = tick(store, capacity=100, offer=Placement.LEASE)
        committed(store, Complete([CompletedDispatch(run.dispatch_id) for run in runs]))

    def page(**of):
        sql, values = find_sql(Query(states=[JobState.DONE], limit=10, **of))
        return steps_of(store, lambda: store._con.execute(sql, values).fetchall())

    first = page()
    assert page(after=1_900) <= first + 2
    assert page(after=100, newest_first=True) <= first + 2
    assert page(after=1_900, newest_first=True) <= first + 2
    assert [job.no for job in store.find(Query(states=[JobState.DONE], limit=2, after=1_900))] == [
        1_901,
        1_902,
    ]


def test_what_was_done_together_is_forgotten_one_after_the_other(store):
    committed(store, Submit([replace(JOB, cost_units=1)] * 3, Depth()))
    runs = tick(store, offer=Placement.LEASE)
    committed(store, Complete([CompletedDispatch(run.dispatch_id) for run in runs]))

    for left in (2, 1, 0):
        assert committed(store, Prune(T0 + 1, 1)) == 1
        assert len(store.find(Query(states=[JobState.DONE]))) == left
        assert store.audit() == []
    assert committed(store, Prune(T0 + 1, 1)) == 0


def test_another_process_cannot_complete_under_a_lease_that_has_run_out(path, store):
    committed(store, Submit([JOB], Depth()))
    [run] = tick(store, offer=Placement.LEASE)
    other = SqliteStore(path, lambda: run.expires_at)

    assert committed(other, Complete([CompletedDispatch(run.dispatch_id)])) == [False]
    other.close()


def test_a_backup_on_a_full_disk_names_the_backup_and_leaves_no_half(path, store, monkeypatch):
    target = path.with_name("backup.db")
    connect_copy = connection.apsw.Connection

    def connect_small(name, *args, **options):
        con = connect_copy(name, *args, **options)
        if os.fspath(name) == f"{target}.part":
            con.execute("PRAGMA max_page_count = 2")
        return con

    with monkeypatch.context() as patches:
        patches.setattr(connection.apsw, "Connection", connect_small)
        with pytest.raises(StoreFailed, match=rf"^{target} cannot grow"):
            connection.copy(path, target)

    assert [file.name for file in path.parent.iterdir() if "backup" in file.name] == []


def test_a_new_file_and_its_backup_are_their_owners_alone(tmp_path):
    before = os.umask(0o022)
    try:
        store = SqliteStore(tmp_path / "jobs.db", lambda: T0)
        committed(store, Submit([JOB], Depth()))
        connection.copy(tmp_path / "jobs.db", tmp_path / "copy.db")
        shared = {file.name for file in tmp_path.iterdir() if file.stat().st_mode & 0o077}
        store.close()
    finally:
        os.umask(before)

    assert shared == set()
    assert (tmp_path / "copy.db").exists()


class InterruptedAfterCommit:
    """A connection on which Ctrl-C comes when the first COMMIT has returned."""

    def __init__(self, con):
        self._con = con

    def __getattr__(self, name):
        return getattr(self._con, name)

    def execute(self, sql, *values):
        rows = self._con.execute(sql, *values)
        if sql == "COMMIT":
            raise KeyboardInterrupt
        return rows


def test_a_ctrl_c_behind_a_step_of_the_schema_stays_a_ctrl_c(path):
    with closing(connection.connect(path)) as con, closing(WriteLock(path)) as lock:
        with pytest.raises(KeyboardInterrupt):
            connection.migrate(InterruptedAfterCommit(con), path, lock)
        connection.migrate(con, path, lock)
