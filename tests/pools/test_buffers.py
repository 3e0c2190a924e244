"""Large arguments and results: out of band, through shared memory, and given back."""

from __future__ import annotations

import gc
from pathlib import Path

import calls
import numpy as np
import pytest

import penstock
from tests.waiting import until


def shared_bytes():
    """How much shared memory this process maps or holds open."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:penstock " in f"{fd.readlink()} ":
                total += fd.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.fixture
def pool():
    with penstock.WorkerPool(1) as pool:
        yield pool


def test_arrays_come_back_as_they_went(pool):
    array = np.arange(300_000, dtype=np.float64).reshape(300, 1000)

    result = pool.submit(calls.echo, array).result(30)

    assert np.array_equal(array, result)
    assert ((300, 1000), "float64") == pool.submit(calls.shape, array).result(30)


def test_a_large_array_does_not_travel_through_the_socket(pool):
    sent = []
    pool.submit(calls.echo, 0).result(30)
    worker = pool.internals.group.workers[0]
    flush = worker.flush
    worker.flush = lambda: (sent.append(sum(len(str(m)) for m in worker.outbox)), flush())[1]

    pool.submit(calls.echo, np.zeros(4_000_000)).result(30)

    assert max(sent) < 100_000


@pytest.mark.parametrize("make", [bytes, bytearray])
def test_long_bytes_keep_their_type(pool, make):
    data = make(b"ab" * 500_000)

    assert data == pool.submit(calls.echo, data).result(30)
    assert (make.__name__, 1_000_000) == pool.submit(calls.type_and_length, data).result(30)
    assert 2_000_000 == len(pool.submit(calls.make_bytes, 2_000_000).result(30))


def test_long_pickles_travel(pool):
    data = {str(n): [n] for n in range(50_000)}

    assert data == pool.submit(calls.echo, data).result(30)


def test_an_array_that_a_function_keeps_stays_as_it_is(pool):
    sums = [pool.submit(calls.keep_and_sum, np.full(100_000, float(n))).result(30) for n in range(5)]

    assert [100_000.0 * n for n in range(5)] == sums == pool.submit(calls.sum_of_kept).result(30)


def test_a_result_that_the_caller_keeps_stays_as_it_is(pool):
    kept = [pool.submit(calls.echo, np.full(100_000, float(n))).result(30) for n in range(5)]

    assert [float(n) for n in range(5)] == [array[0] for array in kept]
    assert [float(n) for n in range(5)] == [array[-1] for array in kept]


def test_results_can_be_written_to(pool):
    result = pool.submit(calls.echo, np.zeros(100_000)).result(30)
    result += 1

    assert 100_000 == result.sum()


def test_what_a_function_did_to_its_array_does_not_reach_the_next_attempt(tmp_path):
    options = {"crash_policy": "restart-requeue-in-flight", "restart_delay": 0.001}
    with penstock.WorkerPool(1, **options) as pool:
        future = pool.submit(calls.double_in_place_then_die, np.ones(100_000), str(tmp_path / "log"))

        assert 2.0 == future.result(30)
    assert ["2.0", "2.0"] == (tmp_path / "log").read_text().split()


def test_shared_memory_is_reused_and_given_back(pool):
    for _ in range(30):
        pool.submit(calls.echo, np.zeros(500_000)).result(30)
    used = shared_bytes()
    assert used < 20_000_000

    gc.collect()
    pool.internals.group.trim()
    until(lambda: pool.internals.group.packer.arena.kept == 0)
    pool.submit(calls.echo, 1).result(30)
    pool.internals.group.trim()
    assert shared_bytes() < used


def test_a_cancelled_payload_gives_its_memory_back():
    with penstock.WorkerPool(1, max_queue_depth=5) as pool:
        pool.pause()
        futures = [pool.submit(calls.echo, np.zeros(200_000)) for _ in range(5)]
        for future in futures:
            future.cancel()
        gc.collect()

        assert 5 == len(pool.internals.group.packer.arena.returned)
        pool.resume()
