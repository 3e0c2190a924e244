"""Errors that cannot be formatted and results that cannot be sent: the caller gets an error, and the pool goes on."""

from __future__ import annotations

import pytest

import penstock
from tests.poison import POISONS, RAISING, neighbour
from tests.waiting import LONG


class _ShyHooks(penstock.QueueHooks):
    """Raises, and cannot be shown."""

    def on_settle(self, call):
        raise ValueError(call)

    def __repr__(self):
        raise ZeroDivisionError("not shown")


class _ShyKey:
    def __repr__(self):
        raise ZeroDivisionError("not shown")

    __str__ = __repr__


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_every_call_ends_and_its_neighbours_notice_nothing(kind):
    with penstock.WorkerPool(2, kind=kind) as pool:
        pool.add_hooks(_ShyHooks())
        calls, beside = {}, []
        for n, (name, poison) in enumerate(POISONS.items()):
            calls[name] = pool.submit(poison)
            beside.append(pool.submit(neighbour, n))

        ended = {name: call.exception(LONG) for name, call in calls.items() if name in RAISING}

        assert [n + 1 for n in range(len(beside))] == [call.result(LONG) for call in beside]
        assert [] == [name for name, error in ended.items() if error is None]
        assert 0 == pool.internals.call_queue.totals.crashed


def test_a_key_that_cannot_be_shown_is_refused_in_words():
    with penstock.WorkerPool(1, kind="thread") as pool:
        key = _ShyKey()
        pool.cancel(key)
        shy = pool.task(neighbour, key_of=lambda _: key)
        with pytest.raises(penstock.CallCanceled, match=r"_ShyKey: repr\(\) raised"):
            shy.submit(1).result(LONG)
