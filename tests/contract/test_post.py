"""Submits that travel to the process that commits: what arrives, what an answer is worth, and what happens without one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from threading import Event, Thread, current_thread

import pytest
from msgspec.structs import replace
from tests.waiting import until

from penstock.core.errors import KeyConflict, QueueFull
from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering, Placement, run_round
from penstock.core.jobs.types import Constraint, RunWhen
from penstock.stores.api import Depth, Query, Ride, Terms
from penstock.stores.sqlite import submit_relay
from penstock.stores.sqlite.socket_names import SocketNames
from penstock.stores.sqlite.store import SqliteStore
from penstock.stores.sqlite.submit_relay import SubmitRelayClient, SubmitRelayServer, SubmitRequest

T0 = 1_900_000_000_000_000
JOB = Intent(addon_id="a", job_type="t")


@pytest.fixture
def make(tmp_path):
    """Stores as if in processes of their own; `commits` counts what each of them committed itself."""
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
    [receipt] = second.submit([JOB], Depth())

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
    )
    [receipt] = second.submit([intent], Depth())

    assert [] == second.commits
    assert intent == first.job(receipt.job_id).intent


def test_a_refusal_is_the_senders(pair):
    first, second = pair
    second.submit([JOB], Depth())
    with pytest.raises(QueueFull, match="the limit is 1"):
        second.submit([JOB], Depth(total=1))
    second.submit([Intent(addon_id="a", job_type="t", idempotency_key="k")], Depth())
    with pytest.raises(KeyConflict):
        second.submit([Intent(addon_id="a", job_type="u", idempotency_key="k")], Depth())

    assert 2 == len(ids(first))


def test_a_key_that_was_used_is_answered_with_its_job(pair):
    _, second = pair
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    [made], [again] = second.submit([keyed], Depth()), second.submit([keyed], Depth())

    assert (made.job_id, True, False) == (again.job_id, made.created, again.created)


def test_what_is_large_is_written_by_its_sender(pair):
    first, second = pair
    second.submit([JOB] * (submit_relay.MOST_JOBS + 1), Depth())
    second.submit([Intent(addon_id="a", job_type="t", payload=f'"{"x" * submit_relay.MOST_BYTES}"')], Depth())

    assert (0, 2) == (len(first.commits), len(second.commits))


def test_without_a_dispatcher_everybody_writes(pair):
    first, second = pair
    second.submit([JOB], Depth())
    first.release_dispatch()
    second.submit([JOB], Depth())

    assert (1, 1) == (len(first.commits), len(second.commits))
    assert 2 == len(ids(first))


def test_strangers_are_not_let_in_and_not_believed(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(submit_relay, "_is_ours", lambda _: False)
    second.submit([JOB], Depth())

    assert (0, 1) == (len(first.commits), len(second.commits))


def test_nonsense_ends_the_conversation_and_nothing_else(pair, tmp_path):
    _, second = pair
    line = SubmitRelayClient(SocketNames(tmp_path / "jobs.db"))._line()
    line.send(b"nonsense")

    assert b"" == line.recv(100)
    line.close()
    assert 1 == len(second.submit([JOB], Depth()))
    assert [] == second.commits


# without an answer


def test_a_letter_that_was_written_and_not_answered_is_not_doubled(pair, monkeypatch):
    first, second = pair
    written = []

    def mute(self, guest, receipts):
        written.extend(receipts)
        self._part(guest)

    monkeypatch.setattr(SubmitRelayServer, "_answer", mute)
    keyed = Intent(addon_id="a", job_type="t", idempotency_key="k")
    receipts = second.submit([JOB, keyed], Depth())

    assert receipts == written
    assert ids(first) == sorted(receipt.job_id for receipt in receipts)


def test_one_who_does_not_answer_in_time_is_left_alone_for_a_while(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(submit_relay, "PATIENCE_SEC", 0.05)
    monkeypatch.setattr(first, "_take", None)  # its thread is in the middle of something
    first._relay._take = lambda *_: None
    second.submit([JOB], Depth())
    second.submit([JOB], Depth())

    assert (0, 2) == (len(first.commits), len(second.commits))
    assert second._relay_client._shy_until > 0


class Brings:
    """A rider that has the thread which carries its claim stay, until it is told to go on."""

    def __init__(self):
        self.threads, self.go_on = [], Event()

    def __call__(self):
        return Ride("here", self._decide, Terms(worker="idler"), self._landed)

    def _decide(self, admission_view):
        return run_round(
            admission_view,
            Conditions(90),
            AdmissionLimits(),
            Ordering(),
            lambda _: Placement.LEASE,
            most_leases=1,
        )

    def _landed(self, granted, stays):
        return self._stay if stays else None

    def _stay(self):
        self.threads.append(current_thread())
        assert self.go_on.wait(20)


def test_the_thread_that_brings_a_job_may_stay_with_it_and_another_one_serves(pair):
    first, second = pair
    brings = Brings()
    first.ride(brings)
    answered = [second.submit([JOB], Depth())[0].created for _ in range(3)]

    assert [True] * 3 == answered
    assert (3, 0) == (len(first.commits), len(second.commits))
    until(lambda: len(brings.threads) == 3)
    assert 3 == len(set(brings.threads))
    brings.go_on.set()
    until(lambda: sum(thread.is_alive() for thread in brings.threads) == 1)
    second.submit([JOB], Depth())
    second.submit([JOB], Depth())
    until(lambda: len(brings.threads) == 5)
    assert brings.threads[3] in brings.threads[:3] or brings.threads[4] in brings.threads[:4]


def test_while_a_thread_stays_with_a_job_everybody_hears_of_what_it_committed(pair):
    first, second = pair
    brings, rung = Brings(), []
    first.on_change(lambda: rung.append(first.newest()))
    first.ride(brings)
    second.submit([JOB], Depth())
    until(lambda: brings.threads)

    until(lambda: rung and rung[-1] == first.newest() == 3)
    brings.go_on.set()


def test_a_thread_that_stays_with_a_job_keeps_nobody_from_closing(pair):
    first, second = pair
    brings = Brings()
    first.ride(brings)
    second.submit([JOB], Depth())
    until(lambda: brings.threads)
    first.release_dispatch()

    assert brings.threads[0].is_alive()
    brings.go_on.set()
    brings.threads[0].join(20)
    assert not brings.threads[0].is_alive()
    assert second.submit([JOB], Depth())[0].created


def test_letters_that_are_alike_but_not_the_same_arrive_as_they_were_sent(pair):
    first, second = pair
    sent = [
        JOB,
        replace(JOB, payload="[1]"),
        replace(JOB, payload="[1]", priority=70),
        replace(JOB, payload="[1]", constraints=Constraint.CPU_HEAVY),
        JOB,
    ]
    names = [second.submit([intent], Depth())[0].job_id for intent in sent]

    assert 0 == len(second.commits)
    assert sent == [first.job(name).intent for name in names]


def test_a_letter_that_comes_after_its_sender_has_written_changes_nothing(pair):
    first, second = pair
    second._writer.write(lambda tx: tx.submit([JOB], Depth(), ["0190-late"]))
    replies = []
    first._take(SubmitRequest(["0190-late"], [JOB], Depth()), replies.append)
    first.submit([JOB], Depth())

    assert [None] == replies
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
    mine.submit([JOB], Depth())
    answered, stop = [], []

    def submit():
        while not stop:
            answered.extend(mine.submit([JOB] * 2, Depth()))

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


# by a stand-in


def test_processes_that_wait_for_each_other_agree_on_one_that_commits(make):
    first, second = make(), make()
    first._write_lock.contended = True
    first.submit([JOB], Depth())
    second.submit([JOB], Depth())
    second.submit([JOB], Depth())

    assert (3, 0) == (len(first.commits), len(second.commits))


def test_who_has_to_wait_for_the_write_lock_knows_it(make):
    first, second = make(), make()
    with first._write_lock:
        waits = second.submit_soon([JOB], Depth())
        while not second._write_lock.contended:
            time.sleep(0.001)
    waits.result(10)

    assert (False, True) == (first._write_lock.contended, second._write_lock.contended)


def test_a_stand_in_stands_down_for_a_dispatcher(make):
    first, second, third = make(), make(), make()
    first._write_lock.contended = True
    first.submit([JOB], Depth())
    second.submit([JOB], Depth())
    third.acquire_dispatch("the third")
    second.submit([JOB], Depth())  # the stand-in commits it, and hears that somebody dispatches
    second.submit([JOB], Depth())
    first.submit([JOB], Depth())

    assert (3, 0, 2) == (len(first.commits), len(second.commits), len(third.commits))


def test_a_stand_in_that_goes_leaves_nobody_waiting(make):
    first, second = make(), make()
    first._write_lock.contended = True
    first.submit([JOB], Depth())
    second.submit([JOB], Depth())
    first._stand_down()
    second.submit([JOB], Depth())

    assert (2, 1) == (len(first.commits), len(second.commits))


def test_a_fork_does_not_keep_the_door(make, tmp_path):
    first = make()
    first.acquire_dispatch("the parent")
    child = os.fork()
    if child == 0:
        os.read(0, 0)
        os._exit(int(first._relay._listener.fileno() != -1))

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert first._relay._listener.fileno() != -1
