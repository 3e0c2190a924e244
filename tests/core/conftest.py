from __future__ import annotations

import pytest

from penstock.core.calls.queue import DispatchQueue
from penstock.core.calls.ticket import EnterResult, Policy, QueueLimits, Ticket


@pytest.fixture
def make_scene():
    return Scene


class Scene:
    """A queue and its calls by name: `enter("a b")` makes two. Time passes only where a test says so."""

    def __init__(self, in_flight=1, depth=1, policy=Policy.BLOCK, **limits):
        self.queue: DispatchQueue[Call] = DispatchQueue(
            QueueLimits(max_in_flight=in_flight, max_queue_depth=depth, policy=policy, **limits)
        )
        self.calls: dict[str, Call] = {}
        self.now = 0.0

    def __getitem__(self, name):
        return self.calls[name]

    def enter(self, names):
        """Calls whose payload exists."""
        return self._come(names, eager=True)

    def reserve(self, names):
        """Callers that make their payload when they have a place."""
        return self._come(names, eager=False)

    def _come(self, names, *, eager):
        verdicts = []
        for name in names.split():
            self.calls[name] = Call(name)
            self.calls[name].eager = eager
            verdicts.append(self.queue.enter(self[name], self.now))
        return verdicts[0] if len(verdicts) == 1 else verdicts

    def start(self, names):
        """Enter and hand out, as a shell does."""
        for name in names.split():
            assert self.enter(name) is EnterResult.ACCEPTED
            assert self.take() == name

    def fill(self, name):
        return self.queue.fill(self[name], self.now)

    def take(self):
        return getattr(self.queue.take(self.now), "name", None)

    def pump(self):
        return " ".join(iter(self.take, None))

    def settle(self, name, dispatch=None):
        return self.queue.settle(self[name], dispatch or self[name].dispatch, self.now)

    def cancel(self, name):
        return self.queue.cancel(self[name], self.now)

    def requeue_lost(self, names, *, blame=""):
        lost, blamed = ([self[name] for name in some.split()] for some in (names, blame))
        return spell(self.queue.requeue_lost(lost, self.now, blame=blamed))

    def collect(self, which):
        """What the shell finds in `granted` or `evicted`."""
        found = getattr(self.queue, which)
        setattr(self.queue, which, [])
        return spell(found)

    def clear(self):
        return spell(self.queue.clear())

    def dispose(self):
        return spell(self.queue.dispose())

    @property
    def pending(self):
        return spell(self.queue)

    @property
    def waiting(self):
        return spell(self.queue.waiters())

    @property
    def counts(self):
        """In flight, pending, waiting, reserved."""
        return self.queue.state()[:4]

    def everything(self):
        """All that can be seen from outside, to show that nothing has changed."""
        calls = {name: (dict(call.__dict__), call.stage) for name, call in self.calls.items()}
        return self.queue.state(), self.pending, self.waiting, spell(self.queue.granted), calls


def spell(calls):
    return " ".join(call.name for call in calls)


class Call(Ticket):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def __repr__(self):
        return self.name
