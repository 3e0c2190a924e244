"""Submitting without waiting, handing the dispatch right on, and being told of what another process did."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from threading import Event

import pytest
from tests.contract.conftest import OF_ONE_HOST

from penstock.core.errors import DispatcherHeld, QueueFull
from penstock.core.jobs.intent import Intent
from penstock.stores.api import Depth, Submit

INTENT = Intent(addon_id="a", job_type="t")


def test_a_submit_that_nobody_waits_for_is_as_durable_as_one_that_somebody_does(kit):
    answers = [kit.store.commit(Submit([INTENT] * 2, Depth()))[0] for _ in range(3)]

    receipts = [receipt for answer in answers for receipt in answer.result(60)]

    assert ["QUEUED"] * 6 == [kit.state(receipt.job_id) for receipt in receipts]
    assert 6 == len({receipt.job_id for receipt in receipts})


def test_its_refusal_reaches_whoever_looks_for_the_answer(kit):
    answer = kit.store.commit(Submit([INTENT] * 2, Depth(total=1)))[0]

    with pytest.raises(QueueFull):
        answer.result(60)
    assert [] == kit.store.events(0, 10)


@OF_ONE_HOST
def test_a_dispatcher_that_lets_go_can_be_followed_by_another(kit):
    kit.store.acquire_dispatch("the first")
    kit.store.release_dispatch()
    kit.store.release_dispatch()

    kit.store.acquire_dispatch("the second")

    with pytest.raises(DispatcherHeld, match="the second"):
        kit.store.acquire_dispatch("the third")


def test_who_listens_is_told_of_what_the_dispatching_process_commits(tmp_path):
    from penstock.stores.sqlite.store import SqliteStore

    path = tmp_path / "jobs.db"
    store = SqliteStore(path, lambda: 1)
    program = f"""
        from penstock.core.jobs.intent import Intent
        from penstock.stores.api import Submit, committed
        from penstock.stores.sqlite.store import SqliteStore

        store = SqliteStore({str(path)!r}, lambda: 1)
        store.acquire_dispatch("another process")
        print("ready", flush=True)
        input()
        committed(store, Submit([Intent(addon_id="a", job_type="t")]))
        input()
        store.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        rung = Event()
        store.on_change(rung.set)
        store.listen()
        assert rung.wait(60)  # that it listens now is the first it hears
        rung.clear()

        other.stdin.write("\n")
        other.stdin.flush()

        assert rung.wait(60)
        other.stdin.write("\n")
        other.stdin.flush()
    store.close()
