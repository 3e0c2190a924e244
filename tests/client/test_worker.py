"""The SDK worker against the scheduler over HTTP: what a function sees, and how its job ends."""

from __future__ import annotations

import os
import threading
import time

import pytest
from tests.client.conftest import LEASE
from tests.waiting import LONG, until

from penstock import AccessDenied, JobStopped, Unavailable, Worker
from penstock.core.errors import StaleDispatch
from penstock.core.jobs.types import EndReason

#: The longest that a request for jobs may wait.
WHOLE_POLL_SEC = 60.0


class ThreadedWorker:
    """A worker that runs in a thread of the test."""

    def __init__(self, scheduler):
        self.worker = Worker(scheduler.url, addon="photos", token=scheduler.secret)
        self._service = scheduler.service
        self._thread = None

    def start(self, concurrency=2, **options):
        self._thread = threading.Thread(
            target=self.worker.run, args=(concurrency,), kwargs={"stop_within": LONG, **options}, daemon=True
        )
        self._thread.start()
        return self

    def waits(self):
        """Wait until the worker has asked for jobs and got none."""
        until(lambda: self._service.pulling_workers.at(self._service.store.now()))

    def stop(self, within=LONG):
        self.worker.stop()
        if self._thread is not None:
            self.ends(within)

    def ends(self, within):
        self._thread.join(within)
        assert not self._thread.is_alive()

    def close(self):
        self.stop()
        self.worker.client.close()
        self.worker.fetcher.close()


@pytest.fixture
def make_worker(scheduler):
    made = []

    def make():
        made.append(ThreadedWorker(scheduler))
        return made[-1]

    yield make
    for one in made:
        one.close()


def submit(client, job_type="work", payload=None, **fields):
    return client.submit("photos", job_type, payload, **{"cost_units": 1, **fields}).job_id


def result_of(job):
    return bytes(job.result).decode()


def test_a_job_is_run_and_its_result_kept(client, make_worker):
    one = make_worker()
    seen = []

    @one.worker.job("thumbnail")
    def thumbnail(job, path, size=128):
        seen.append((job.addon, job.job_type, job.fence, job.tags, job.checkpoint))
        return {"path": path, "size": size}

    job_id = submit(client, "thumbnail", {"path": "a.jpg"}, tags=("new",))
    one.start()

    job = client.wait(job_id, LONG)

    assert ("DONE", '{"path":"a.jpg","size":128}') == (job.state, result_of(job))
    assert [("photos", "thumbnail", 1, ("new",), None)] == seen


def test_a_worker_that_waits_gets_a_job_as_soon_as_there_is_one(client, make_worker):
    one = make_worker()
    one.worker.job("work")(lambda job: None)
    requests, claim = [], one.worker.fetcher.claim
    one.worker.fetcher.claim = lambda **options: requests.append(1) or claim(**options)
    one.worker.poll_sec = WHOLE_POLL_SEC
    one.start().waits()

    job = client.wait(submit(client), LONG)

    assert "DONE" == job.state
    assert 1 == job.attempts
    assert (
        len(requests) <= 2
    )  # the request that waited brought the job, and perhaps another one waits already


def test_many_jobs_take_few_requests(client, make_worker, scheduler):
    one = make_worker()
    one.worker.job("work")(lambda job: None)
    ids = [submit(client) for _ in range(150)]
    requests, claim = [], one.worker.fetcher.claim
    one.worker.fetcher.claim = lambda **options: requests.append(1) or claim(**options)

    one.worker.run(4, prefetch=50, until_idle=True)

    assert ["DONE"] * 150 == [client.job(job_id).state for job_id in ids]
    assert len(requests) < 20


def test_no_more_functions_run_at_once_than_the_concurrency_allows(client, make_worker):
    one = make_worker()
    running, most = [], []
    lock = threading.Lock()

    @one.worker.job("work")
    def work(job):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.02)
        with lock:
            running.pop()

    for _ in range(20):
        submit(client)
    one.worker.run(3, prefetch=5, until_idle=True)

    assert 20 == len(most)
    assert max(most) <= 3


@pytest.mark.long
def test_a_busy_function_keeps_its_lease(client, make_worker):
    one = make_worker()

    @one.worker.job("work")
    def work(job):
        ends = time.monotonic() + LEASE + 1
        while time.monotonic() < ends:
            sum(range(1_000))
        return job.fence

    one.start()

    job = client.wait(submit(client), LONG)

    assert ("DONE", "1", 1) == (job.state, result_of(job), job.attempts)


def test_progress_spending_and_checkpoints_are_seen_while_it_runs(client, make_worker):
    one = make_worker()
    go = threading.Event()

    @one.worker.job("work")
    def work(job):
        job.progress(0.5)
        job.spend(0.25)
        job.spend(0.25)
        job.save_checkpoint({"page": 3})
        go.wait(LONG)

    job_id = submit(client)
    one.start()

    until(lambda: client.job(job_id).spent == 0.5)
    job = client.job(job_id)
    go.set()

    assert (0.5, b'{"page":3}') == (job.progress, bytes(job.checkpoint))
    assert os.getpid() == job.pid


def test_a_cancel_is_seen_by_the_function_and_the_job_is_canceled_whatever_it_returns(client, make_worker):
    one = make_worker()
    begun = threading.Event()

    @one.worker.job("work")
    def work(job):
        begun.set()
        until(lambda: job.canceled)
        return "too late"

    job_id = submit(client)
    one.start()
    begun.wait(LONG)
    client.cancel(job_id)

    assert "CANCELED" == client.wait(job_id, LONG).state


def test_a_spending_limit_stops_the_function(client, make_worker):
    one = make_worker()

    @one.worker.job("work")
    def work(job):
        while True:
            job.spend(1)
            time.sleep(0.1)
            job.check()

    job_id = submit(client, cost_limit=2.0)
    one.start()

    assert "BLOCKED" == client.wait(job_id, LONG).state


def test_each_kind_of_error_has_its_own_end(client, make_worker):
    one = make_worker()

    @one.worker.job("broken")
    def broken(job):
        raise KeyError("colour")

    @one.worker.job("away")
    def away(job):
        raise Unavailable("the disk is not mounted")

    @one.worker.job("again")
    def again(job):
        if job.fence == 1:
            raise OSError("once")
        return "twice"

    ids = [submit(client, "broken"), submit(client, "away"), submit(client, "again", retry_delays_sec=(0,))]
    one.start()
    done = [client.wait(job_id, LONG) for job_id in ids]

    assert ["FAILED", "BLOCKED", "DONE"] == [job.state for job in done]
    assert "KeyError: 'colour'" in done[0].error
    assert 3 == done[1].attempts


def test_a_stop_lets_functions_yield_and_the_next_worker_goes_on_from_the_checkpoint(client, make_worker):
    first, second = make_worker(), make_worker()
    begun = threading.Event()

    def pages(job):
        first = job.checkpoint
        for page in range(first or 0, 5):
            job.save_checkpoint(page + 1)
            begun.set()
            if job.fence == 1:
                until(lambda: job.should_yield)
            job.check()
        return first

    for one in (first, second):
        one.worker.job("work")(pages)
    job_id = submit(client)
    first.start()
    begun.wait(LONG)
    first.stop()
    given_back = client.job(job_id)
    second.start()

    job = client.wait(job_id, LONG)

    assert given_back.state in ("QUEUED", "DISPATCHING")
    assert ("DONE", "1") == (job.state, result_of(job))
    assert job.attempts >= 2


def test_a_preempted_function_is_asked_to_yield_and_goes_on_from_its_checkpoint(client, make_worker):
    one = make_worker()
    begun, order = threading.Event(), []

    @one.worker.job("work")
    def work(job, name):
        order.append(f"{name} from {job.checkpoint}")
        if name == "low" and job.checkpoint is None:
            job.save_checkpoint(7)
            begun.set()
            until(lambda: job.should_yield)
            assert not job.canceled
            job.check()

    one.start()
    low = submit(client, payload={"name": "low"}, cost_units=100, priority=10)
    begun.wait(LONG)
    high = submit(client, payload={"name": "high"}, cost_units=100, priority=80)

    assert ["DONE", "DONE"] == [client.wait(job, LONG).state for job in (high, low)]
    assert ["low from None", "high from None", "low from 7"] == order
    kinds = [str(event.kind) for event in client.events(job_id=low).events]
    assert (1, 2) == (kinds.count("PREEMPT_REQUESTED"), kinds.count("RUNNING"))


def test_a_stop_releases_prefetched_jobs_that_have_not_begun(client, make_worker):
    one = make_worker()
    begun, go = threading.Event(), threading.Event()
    ran = []

    @one.worker.job("work")
    def work(job):
        ran.append(job.id)
        begun.set()
        go.wait(LONG)

    ids = [submit(client) for _ in range(5)]
    one.start(1, prefetch=10)
    begun.wait(LONG)
    until(lambda: [client.job(job_id).state for job_id in ids] == ["RUNNING"] * 5)
    one.worker.stop()
    go.set()
    one.stop()

    states = [client.job(job_id).state for job_id in ids]
    assert 1 == len(ran) == states.count("DONE")
    assert "RUNNING" not in states


def test_an_idle_worker_stops_at_once(client, make_worker):
    one = make_worker()
    one.worker.job("work")(lambda job: None)
    one.worker.poll_sec = WHOLE_POLL_SEC
    one.start().waits()

    one.stop(WHOLE_POLL_SEC / 2)


def test_a_worker_that_is_about_to_ask_for_jobs_stops_at_once(client, make_worker):
    one = make_worker()
    one.worker.job("work")(lambda job: None)
    one.worker.poll_sec = WHOLE_POLL_SEC
    claim = one.worker.fetcher.claim
    one.worker.fetcher.claim = lambda **options: one.worker.stop() or claim(**options)
    one.start().ends(WHOLE_POLL_SEC / 2)


def test_without_answers_the_function_must_stop_and_its_result_is_not_reported(client, make_worker):
    """`tests/work/test_leases.py` shows without a clock that it must stop in time."""
    one = make_worker()
    stopped = []

    @one.worker.job("work")
    def work(job):
        if job.fence == 1:
            until(lambda: job.canceled)
            stopped.append(job.id)
            return "of the first"
        return "of the second"

    one.worker.client.transport = _NoNetwork(one.worker.client.transport)
    job_id = submit(client)
    one.start(1)
    until(lambda: stopped)
    one.worker.client.transport = one.worker.client.transport.inner

    job = client.wait(job_id, LONG)

    assert ("DONE", '"of the second"') == (job.state, result_of(job))


class _NoNetwork:
    """A transport whose requests never arrive."""

    def __init__(self, inner):
        self.inner = inner

    def request(self, *_, **__):
        from penstock import Unreachable

        raise Unreachable("the cable is out", sent=True)


def test_a_late_completion_is_refused_and_changes_nothing(client):
    job_id = submit(client)
    [mine] = client.claim(addon_id="photos").jobs
    [others] = until(lambda: client.claim(addon_id="photos", wait_sec=5).jobs)

    with pytest.raises(StaleDispatch):
        client.complete(job_id, mine.lease_id, "mine")

    client.complete(job_id, others.lease_id, "theirs")
    assert '"theirs"' == result_of(client.job(job_id))
    assert others.fence > mine.fence


def test_a_wrong_token_ends_the_worker_with_the_reason(scheduler):
    worker = Worker(scheduler.url, addon="photos", token="pst_wrong_token")
    worker.job("work")(lambda job: None)

    with pytest.raises(AccessDenied):
        worker.run()
    worker.client.close()
    worker.fetcher.close()


def test_a_worker_of_one_addon_gets_no_job_of_another(client, make_worker):
    one = make_worker()
    one.worker.job("work")(lambda job: None)
    client.submit("mail", "work", None, cost_units=1)

    assert 0 == one.worker.run(1, until_idle=True)


def test_two_functions_for_one_type_and_none_at_all_are_mistakes(scheduler):
    worker = Worker(scheduler.url, token=scheduler.secret)
    with pytest.raises(ValueError, match="no functions"):
        worker.run()
    worker.job("work")(lambda job: None)
    with pytest.raises(ValueError, match="has a function already"):
        worker.job("work")(lambda job: None)
    with pytest.raises(ValueError, match="at least 1"):
        worker.run(0)


# Functions in processes of their own


def stuck(job):
    while True:
        time.sleep(1)


def dies(job):
    if job.fence == 1:
        os.abort()
    return job.fence


def reports_all(job):
    job.progress(1.0)
    job.spend(0.5)
    job.save_checkpoint("saved")
    return os.getpid()


def holds_the_interpreter(job):
    """One call into C that keeps the interpreter: no thread of its process runs meanwhile."""
    import ctypes

    ctypes.PyDLL(None).sleep(LEASE + 1)
    return job.fence


def looks(job):
    until(lambda: job.should_yield)
    raise JobStopped("as asked")


def test_a_function_in_a_process_can_report_all_that_one_in_a_thread_can(client, make_worker):
    one = make_worker()
    one.worker.job("work")(reports_all)
    job_id = submit(client)

    one.worker.run(1, processes=True, until_idle=True)

    job = client.job(job_id)
    assert "DONE" == job.state
    assert result_of(job) != str(os.getpid())
    assert (0.5, b'"saved"') == (job.spent, bytes(job.checkpoint))


def test_a_stuck_function_in_a_process_is_ended_and_the_next_job_runs(client, make_worker):
    one = make_worker()
    one.worker.job("stuck")(stuck)
    one.worker.job("work")(reports_all)
    job_id = submit(client, "stuck")
    one.start(1, processes=True)
    until(lambda: client.job(job_id).state == "RUNNING")
    client.cancel(job_id)
    next_id = submit(client)

    assert "CANCELED" == client.wait(job_id, LONG).state
    assert "DONE" == client.wait(next_id, LONG).state


def test_a_process_that_dies_is_a_crash_of_its_job_alone(client, make_worker):
    one = make_worker()
    one.worker.job("work")(dies)
    job_id = submit(client)
    one.start(1, processes=True)

    job = client.wait(job_id, LONG)

    assert ("DONE", "2") == (job.state, result_of(job))


@pytest.mark.long
def test_a_process_that_holds_its_interpreter_for_longer_than_the_lease_keeps_it(client, make_worker):
    one = make_worker()
    one.worker.job("work")(holds_the_interpreter)
    job_id = submit(client)
    one.start(1, processes=True)

    job = client.wait(job_id, LONG)

    assert ("DONE", "1") == (job.state, result_of(job))


def test_a_stop_reaches_a_function_in_a_process(client, make_worker):
    one = make_worker()
    one.worker.job("work")(looks)
    job_id = submit(client)
    one.start(1, processes=True)
    until(lambda: client.job(job_id).state == "RUNNING")

    one.stop()

    assert client.job(job_id).state in ("QUEUED", "DISPATCHING")


@pytest.mark.parametrize("reason", [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT])
def test_a_cancel_while_another_stop_is_under_way_is_the_end_of_the_job(
    client, make_worker, scheduler, reason
):
    one = make_worker()
    runs, stopped, canceled = [], threading.Event(), threading.Event()

    @one.worker.job("work")
    def work(job):
        runs.append(job.id)
        until(lambda: job.canceled)
        stopped.set()
        canceled.wait(LONG)

    job_id = submit(client)
    one.start()
    until(lambda: runs)
    scheduler.service.job_service.stop(scheduler.service.store.job(job_id).dispatch_id, reason)
    assert stopped.wait(LONG)
    client.cancel(job_id)
    canceled.set()

    assert "CANCELED" == client.wait(job_id, LONG).state
    assert runs == [job_id]
