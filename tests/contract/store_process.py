"""
A store in a process of its own, which the test kills with SIGKILL in the middle of an operation. The test calls the
store through a pipe. A fork server makes the processes: that is quicker than to start an interpreter.
"""

from __future__ import annotations

import multiprocessing
from functools import partial
from time import perf_counter

from tests.contract.conftest import ManualClock, StoreKit

from penstock.core.errors import PenstockError
from penstock.stores.api import committed
from penstock.stores.common import dependencies
from penstock.stores.common.group_commit import answered

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "penstock.stores.sqlite.store", "penstock.stores.postgres.store"])


class Killed(Exception):
    """The process of the store was killed before it answered."""


def serve(pipe, open_store, most_resolved):
    """Answer what comes through the pipe: the moment, the name of a method, and its arguments."""
    dependencies.MOST_RESOLVED = most_resolved
    clock = ManualClock()
    kit = StoreKit(open_store(clock), clock)
    while True:
        clock.now, name, values, fields = pipe.recv()
        try:
            if name == "commit":
                answer = committed(kit.store, *values)
            elif name == "tick":
                answer = kit.tick(**fields)
            else:
                answer = getattr(kit.store, name)(*values, **fields)
        except PenstockError as error:
            answer = error
        pipe.send(answer)
        if name == "close":
            return


class StoreProcess:
    """`open_store`: opens the store in the process; a function of a module, with its arguments."""

    def __init__(self, open_store, clock, most_resolved):
        self.clock, self.dies_in = clock, None
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=serve, args=(theirs, open_store, most_resolved), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, name, *values, **fields):
        self._pipe.send((self.clock.now, name, values, fields))
        if self.dies_in is not None:
            self._kill()
            raise Killed
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _kill(self):
        until = perf_counter() + self.dies_in  # a random instant, and nothing that is waited for
        while perf_counter() < until:
            pass
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def commit(self, operation, **_):
        return [answered(self.call("commit", operation))]

    def tick(self, **fields):
        return self.call("tick", **fields)

    def close(self):
        if self._process.is_alive():
            self.call("close")
            self._process.join()
            self._pipe.close()

    def __getattr__(self, name):
        return partial(self.call, name)


def sqlite(path, clock):
    from penstock.stores.sqlite.store import SqliteStore

    return SqliteStore(path, clock)


def postgres(dsn, schema, clock):
    from penstock.stores.postgres.store import PostgresStore

    return PostgresStore(dsn, clock, schema=schema)
