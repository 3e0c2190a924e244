"""How many replies the thread that reads the workers' pipes takes along while it settles."""

from __future__ import annotations

import os
import threading
from collections import deque

import pytest

from penstock.pools.workers.replies import _FEW, ReplyReader
from tests.waiting import until


class Worker:
    def receive(self):
        return [("an answer",)]


class Poller:
    """One pipe is ready as often as it is said to be."""

    def __init__(self, answers):
        self.turns = deque([[(7, 1)]] * answers)

    def ready_pipes(self, timeout=0):
        return self.turns.popleft() if self.turns else []


class Group:
    def __init__(self):
        self.settled = 0
        self.replies_may_come = True

    def settle(self, worker, messages):
        self.settled += len(messages)

    def more_may_come(self):
        return self.replies_may_come


@pytest.fixture
def group():
    return Group()


def read(group, answers):
    """A reader gets the first of these replies, and the others arrive while it is settled."""
    poller = Poller(answers)
    reader = ReplyReader(group, "test", poller)
    reader.workers[7] = Worker()
    reader.read(poller.ready_pipes())


def test_an_answer_that_came_meanwhile_needs_no_wake_up_of_its_own(group):
    read(group, answers=3)

    assert group.settled == 3


def test_whoever_reads_goes_back_to_its_own_work_after_a_few(group):
    read(group, answers=10 * _FEW)

    assert group.settled == _FEW


def test_nobody_looks_for_answers_when_none_can_come(group):
    group.replies_may_come = False

    read(group, answers=3)

    assert group.settled == 1


class BusyLoop:
    """An event loop that runs a callback for long: what it is told waits."""

    def __init__(self):
        self.told = []

    def add_reader(self, fd, fn):
        self.read = fn
        return True

    def remove_reader(self, fd, still, then):
        self.told.append(then)
        return True

    def goes_on(self):
        self.read()  # it had found the pipe ready before its callback began
        while self.told:
            self.told.pop(0)()


class WorkerOfAPipe:
    pidfd = kill_reason = None

    def __init__(self):
        self.outlet, self.other_end = os.pipe()

    def spawn(self):
        pass

    def receive(self):
        """The pipe is closed."""


class GroupOfOne(Group):
    def __init__(self):
        super().__init__()
        self.gone, self.pushed = threading.Event(), threading.Event()

    def push(self, worker):
        self.pushed.set()

    def nothing_in_flight(self):
        return True

    def pipes_are_deep(self):
        return False

    def on_death(self, worker):
        os.close(worker.outlet)


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_loops_that_were_busy_while_their_pool_ended_read_no_closed_pipe():
    group, worker, loops = GroupOfOne(), WorkerOfAPipe(), [BusyLoop(), BusyLoop()]
    reader = ReplyReader(group, "test")
    reader.start(worker)
    until(group.pushed.is_set)
    for loop in loops:
        reader.read_on_loop(loop)
        until(
            lambda loop=loop: loop.told
        )  # the reader thread has taken the pipes back; the loop does not know it
    os.close(worker.other_end)
    reader.close()
    until(group.gone.is_set)

    for loop in loops:
        assert is_open(reader.poller.fd)  # a loop still watches it
        loop.goes_on()
    assert not is_open(reader.poller.fd)
    loops[0].read()  # nothing to read, and no error
