"""How many replies the thread that reads the workers' pipes takes along while it settles."""

from __future__ import annotations

from collections import deque

import pytest

from penstock.pools.workers.replies import _FEW, ReplyReader


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
