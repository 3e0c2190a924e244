"""Submits that travel to the process that commits: what arrives, what an answer is worth, and what happens without one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Thread

import pytest
from msgspec.structs import replace
from tests.waiting import LONG, until

from penstock.core.errors import KeyConflict, QueueFull
from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, run_round
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import Constraint, JobId, RunWhen
from penstock.stores.api import Admit, Depth, Query, Receipt, Submit, Terms, committed
from penstock.stores.sqlite import submit_relay
from penstock.stores.sqlite.store import SqliteStore
from penstock.stores.sqlite.submit_relay import NamedSubmit, SubmitRelayClient, SubmitRelayServer
from penstock.stores.sqlite.wakeups import SocketNames

T0 = 1_900_000_000_000_000
JOB = Intent(addon_id="a", job_type="t")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Stores as if in processes of their own; `commits` counts what each of them committed itself."""
    monkeypatch.setattr(submit_relay, "PATIENCE_SEC", LONG)  # on a busy machine an answer takes its time
    made = []

    def make():
        store = SqliteStore(tmp_path / "jobs.db", lambda: T0)
        store.commits = []
        store._con.set_commit_hook(lambda: bool(store.commits.append(1)))
        made.append(store)
        return store

    yield make
    problems = made[0].audit()
    for store in made:
        store.close()
    assert problems == []


@pytest.fixture
def pair(make):
    """The dispatcher, and one who submits."""
    first, second = make(), make()
    first.acquire_dispatch("the first")
    return first, second


def ids(store):
    return sorted(job.job_id for job in store.find(Query(limit=100_000)))


# by the dispatcher


def test_who_does_not_dispatch_lets_the_dispatcher_commit(pair):
    first, second = pair
    [receipt] = committed(second, Submit([JOB], Depth()))

    assert (1, 0) == (len(first.commits), len(second.commits))
    assert (receipt.created, "QUEUED", [receipt.job_id]) == (True, receipt.state, ids(second))


def test_an_intent_arrives_as_it_was_sent(pair):
    first, second = pair
    intent = Intent(
        addon_id="a",
        job_type="t",
        cost_units=7,
        priority=75,
        constraints=Constraint.CPU_HEAVY | Constraint.NETWORK_HEAVY,
        run_when=RunWhen.QUIET,
        quiet_for_sec=60,
        expected_duration_sec=1.5,
        payload='{"text": "ä\\u0000"}',
        tags=("x", "y"),
        time_sensitive=True,
        deadline_at=T0 + 9_000_000_000,
        earliest_start_at=T0 + 1,
        max_runtime_sec=10,
        max_active_sec=20,
        cost_limit=5,
        unit="EUR",
        idempotency_key="k",
        retry_delays_sec=(1, 2),
        labels=("arch=arm64", "gpu"),
        preemptible=False,
    )
    [receipt] = committed(second, Submit([intent], Depth()))

    assert [] == second.commits
    assert intent == first.job(receipt.job_id).intent


def test_a_refusal_is_the_senders(pair):
    first, second = pair
    committed(second, Submit([JOB], Depth()))
    with pytest.raises(QueueFull, match="the limit is 1"):
        committed(second, Submit([JOB], Depth(total=1)))
    committed(second, Submit([Intent(addon_id="a", job_type="t", idempotency_key="k")], Depth()))
    with pytest.raises(KeyConflict):
        committed(second, Submit([Intent(addon_id="a", job_type="u", idempotency_key="k")], Depth()))

    assert 2 == len(ids(first))


def test_a_key_that_was_used_is_answered_with_its_job(pair):
    _, second = pair
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    [made], [again] = committed(second, Submit([keyed], Depth())), committed(second, Submit([keyed], Depth()))

    assert (made.job_id, True, False) == (again.job_id, made.created, again.created)


def test_what_is_large_is_written_by_its_sender(pair):
    first, second = pair
    committed(second, Submit([JOB] * (submit_relay.MOST_JOBS + 1), Depth()))
    committed(
        second,
        Submit([Intent(addon_id="a", job_type="t", payload=f'"{"x" * submit_relay.MOST_BYTES}"')], Depth()),
    )

    assert (0, 2) == (len(first.commits), len(second.commits))


def test_without_a_dispatcher_everybody_writes(pair):
    first, second = pair
    committed(second, Submit([JOB], Depth()))
    first.release_dispatch()
    committed(second, Submit([JOB], Depth()))

    assert (1, 1) == (len(first.commits), len(second.commits))
    assert 2 == len(ids(first))


def test_strangers_are_not_let_in_and_not_believed(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(submit_relay, "_has_same_user", lambda _: False)
    committed(second, Submit([JOB], Depth()))

    assert (0, 1) == (len(first.commits), len(second.commits))


def test_nonsense_ends_the_conversation_and_nothing_else(pair, tmp_path):
    _, second = pair
    line = SubmitRelayClient(SocketNames(tmp_path / "jobs.db"))._line()
    line.send(b"nonsense")

    assert b"" == line.recv(100)
    line.close()
    assert 1 == len(committed(second, Submit([JOB], Depth())))
    assert [] == second.commits


# without an answer


def test_a_submit_that_was_written_and_not_answered_is_not_doubled(pair, monkeypatch):
    first, second = pair
    written = []

    def mute(self, sender, answer):
        written.extend(answer.result())
        self._remove(sender)

    monkeypatch.setattr(SubmitRelayServer, "_answer", mute)
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    receipts = committed(second, Submit([JOB, keyed], Depth()))

    assert receipts == written
    assert ids(first) == sorted(receipt.job_id for receipt in receipts)


def test_one_who_does_not_answer_in_time_is_left_alone_for_a_while(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(submit_relay, "PATIENCE_SEC", 0.05)
    first._relay._relay = lambda submits, *, stays: None  # it is in the middle of something
    committed(second, Submit([JOB], Depth()))
    committed(second, Submit([JOB], Depth()))

    assert (0, 2) == (len(first.commits), len(second.commits))
    assert second._relay_client._avoid_until > 0


def test_a_relay_that_closes_answers_the_submits_it_has_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(submit_relay, "PATIENCE_SEC", LONG)
    database = tmp_path / "jobs.db"
    database.touch()
    names = SocketNames(database)
    names.make()
    taken, answer = SimpleQueue(), Future()
    answer.set_result([Receipt(JobId("0190-taken"), JobState.QUEUED, True)])
    server = SubmitRelayServer(names.relay, lambda submits, *, stays: taken.put(submits))
    client = SubmitRelayClient(names)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.deliver, NamedSubmit([JOB], job_ids=["0190-taken"]), client.line(1))
        [submit] = taken.get(timeout=LONG)
        server.close()
        submit.on_answer(answer)

        assert (answer.result(), True) == sent.result()
    client.close()


def test_a_relay_that_has_closed_leaves_no_thread(tmp_path):
    database = tmp_path / "jobs.db"
    database.touch()
    names = SocketNames(database)
    names.make()
    before = set(threading.enumerate())
    left = []
    for _ in range(100):
        SubmitRelayServer(names.relay, lambda submits, *, stays: None).close()
        left += set(threading.enumerate()) - before

    assert [] == left


def test_a_dispatcher_may_commit_relayed_submits_itself_and_claim_with_them(make):
    first, second = make(), make()
    grants = []

    def relay(submits, *, stays):
        *_, admitted = first.commit(*submits, Admit("here", take_one, Terms(worker="w")), wait=True)
        grants.extend(admitted.result())

    first.acquire_dispatch("the first", relay)
    [receipt] = committed(second, Submit([JOB]))
    until(lambda: grants)

    assert (1, 0) == (len(first.commits), len(second.commits))
    assert [receipt.job_id] == [grant.job.job_id for grant in grants]
    assert "RUNNING" == first.job(receipt.job_id).state


def test_submits_are_taken_while_the_thread_that_took_one_runs_its_job(make):
    first, second = make(), make()
    stayed, began, go_on = [], Event(), Event()

    def function():
        began.set()
        go_on.wait(LONG)

    def relay(submits, *, stays):
        first.commit(*submits, wait=True)
        stayed.append(stays)
        return function if stays else None

    first.acquire_dispatch("the first", relay)
    committed(second, Submit([JOB]))
    began.wait(LONG)
    committed(second, Submit([JOB]))
    first.release_dispatch()  # does not wait for the function either
    go_on.set()

    assert ([True, False], 0) == (stayed, len(second.commits))


def take_one(admission_view):
    return run_round(
        RoundInputs(admission_view, Conditions(90), AdmissionLimits(), Ordering(), lambda _: Placement.LEASE),
        most_leases=1,
    )


def test_jobs_that_are_alike_but_not_the_same_arrive_as_they_were_sent(pair):
    first, second = pair
    sent = [
        JOB,
        replace(JOB, payload="[1]"),
        replace(JOB, payload="[1]", priority=70),
        replace(JOB, payload="[1]", constraints=Constraint.CPU_HEAVY),
        JOB,
    ]
    names = [committed(second, Submit([intent], Depth()))[0].job_id for intent in sent]

    assert 0 == len(second.commits)
    assert sent == [first.job(name).intent for name in names]


def test_a_submit_that_comes_after_its_sender_has_written_changes_nothing(pair):
    first, second = pair
    late = NamedSubmit([JOB], job_ids=["0190-late"])
    second._writer.commit([late])[0].result()
    [relayed] = first.commit(late)
    committed(first, Submit([JOB], Depth()))

    assert relayed.exception() is not None
    assert 2 == len(ids(first))


def test_a_dispatcher_that_is_killed_takes_no_answered_submit_with_it(make, tmp_path):
    program = f"""
        import time
        from penstock.stores.sqlite.store import SqliteStore

        store = SqliteStore({str(tmp_path / "jobs.db")!r}, lambda: {T0})
        store.acquire_dispatch("short-lived")
        print("ready", flush=True)
        time.sleep(60)
    """
    mine = make()
    committed(mine, Submit([JOB], Depth()))
    answered, stop = [], []

    def submit():
        while not stop:
            answered.extend(committed(mine, Submit([JOB] * 2, Depth())))

    threads = [Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        other = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
        )
        other.stdout.readline()
        seen = len(answered)
        while len(answered) < seen + 20:
            time.sleep(0.001)
        other.kill()
        other.wait()
        other.stdout.close()
    stop.append(True)
    for thread in threads:
        thread.join()

    kept = ids(mine)
    assert len(kept) == 1 + len(answered)
    assert {receipt.job_id for receipt in answered} <= set(kept)


def test_a_dispatcher_that_has_just_begun_or_goes_sends_no_submit_on(make, monkeypatch):
    """
    Its relay takes submits a moment before the store knows of the relay, and a moment after. The submit went to the
    relay once more, to itself, with other ids; its sender lost patience and wrote it too: two jobs.
    """
    monkeypatch.setattr(submit_relay, "PATIENCE_SEC", 0.2)
    first, second = make(), make()
    first.acquire_dispatch("the first", lambda submits, *, stays: first.commit(*submits, wait=True) and None)
    relay, first._relay = first._relay, None
    [receipt] = committed(second, Submit([JOB], Depth()))
    first._relay = relay
    committed(first, Submit([], Depth()))  # behind all that was under way

    assert [receipt.job_id] == ids(second)


# by a stand-in


def test_processes_that_wait_for_each_other_agree_on_one_that_commits(make):
    first, second = make(), make()
    first._write_lock.contended = True
    committed(first, Submit([JOB], Depth()))
    committed(second, Submit([JOB], Depth()))
    committed(second, Submit([JOB], Depth()))

    assert (3, 0) == (len(first.commits), len(second.commits))


def test_who_has_to_wait_for_the_write_lock_knows_it(make):
    first, second = make(), make()
    with first._write_lock:
        waits = second.commit(Submit([JOB], Depth()))[0]
        while not second._write_lock.contended:
            time.sleep(0.001)
    waits.result(10)

    assert (False, True) == (first._write_lock.contended, second._write_lock.contended)


def test_a_stand_in_stands_down_for_a_dispatcher(make):
    first, second, third = make(), make(), make()
    first._write_lock.contended = True
    committed(first, Submit([JOB], Depth()))
    committed(second, Submit([JOB], Depth()))
    stand_in = first._relay
    third.acquire_dispatch("the third")
    # The stand-in learns of the dispatcher behind one of its answers: this one, or the one before.
    committed(second, Submit([JOB], Depth()))
    until(lambda: stand_in._closed and not stand_in._lock.locked())
    before = len(third.commits)
    committed(second, Submit([JOB], Depth()))
    committed(first, Submit([JOB], Depth()))

    assert before + 2 == len(third.commits)
    assert 5 == len(first.commits) + len(second.commits) + len(third.commits)


def test_a_stand_in_that_goes_leaves_nobody_waiting(make):
    first, second = make(), make()
    first._write_lock.contended = True
    committed(first, Submit([JOB], Depth()))
    committed(second, Submit([JOB], Depth()))
    first._stand_down()
    committed(second, Submit([JOB], Depth()))

    assert (2, 1) == (len(first.commits), len(second.commits))


def test_a_fork_does_not_keep_the_sockets(make, tmp_path):
    first = make()
    first.acquire_dispatch("the parent")
    child = os.fork()
    if child == 0:
        os.read(0, 0)
        os._exit(int(first._relay._listener.fileno() != -1))

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert first._relay._listener.fileno() != -1
