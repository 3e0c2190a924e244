"""One actor and what is said to it. Whoever calls a method here is the courier: Ray's own calls may take a while.

One place of a cluster crew.
"""

#: What a beat's way and two clocks may add to a lease, in seconds.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.cluster.actor import LINES, PROTOCOL, Actor
from penstock.cluster.engine import Cluster
from penstock.pools.timers import clock
from penstock.pools.workers.base import Condition, WorkerSlot

_SLACK = 0.5

#: What becomes of a call to the actor: its answer, or Ray's error.
Answer = Callable[[Any, BaseException | None], object]


def actor_class(ray: Any, terms: Cluster) -> Any:
    """Made once a crew: each of these is put down in the cluster's books. Ray restarts and retries nothing: we do."""
    return ray.remote(
        num_cpus=terms.cpus,
        num_gpus=terms.gpus,
        resources=dict(terms.resources),
        runtime_env=None if terms.runtime_env is None else dict(terms.runtime_env),
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups=LINES,
    )(Actor)


class ActorLink:
    def __init__(self, ray: Any, actors: Any, lease: float, when: Callable[[Any, Answer], None]) -> None:
        """`actors` is what `actor_class` made; `when(ref, answer)` has `answer` called by the courier."""
        self._ray = ray
        self._actors = actors
        self._lease = lease
        self._when = when
        self._actor: Any = None
        self._unanswered = False
        self.beaten_at: float | None = None  # when the last beat was sent
        self.node: str | None = None  # where it is
        self.doubted = False  # something went wrong that need not be its death
        self.given_up = False  # whatever is said of it from now on, only its lease ends it for sure

    def open(
        self, setup: tuple[list[str], bytes], *, reports_memory: bool, ready: Answer, dead: Answer
    ) -> None:
        actor = self._actors.remote(self._lease)
        self._actor = actor
        self._when(actor.hold.options(concurrency_group="hold").remote(), dead)
        self._when(actor.set_up.remote(PROTOCOL, *setup, reports_memory=reports_memory), ready)

    def call(self, message: tuple[Any, ...], answer: Answer) -> None:
        self._when(self._actor.call.remote(*message), answer)

    def cancel(self, dispatch: int) -> None:
        self._actor.cancel.options(concurrency_group="control").remote(dispatch)

    def beat(self) -> bool:
        """False: it has not answered for so long that its lease is over."""
        if self._unanswered:
            return clock() < self.lease_over()
        self._unanswered = True
        self.beaten_at = clock()
        self._when(self._actor.beat.options(concurrency_group="control").remote(self.beaten_at), self._beaten)
        return True

    def _beaten(self, _: Any, error: BaseException | None) -> None:
        self._unanswered = error is not None

    def lease_over(self) -> float:
        """When it has surely ended, whatever happened to it."""
        return 0.0 if self.beaten_at is None else self.beaten_at + self._lease + _SLACK

    def dismiss(self, gone: Answer) -> None:
        """Let it finish what it does and end as a program ends."""
        self._actor.let_go.options(concurrency_group="control").remote()
        self._when(self._actor.__ray_terminate__.remote(), gone)

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class ClusterWorker(WorkerSlot):
    """
    It has one call at a time. An answer that is on its way when the worker dies is lost, so of several calls nobody
    could say which had begun; what waits for it waits on our side instead, and goes to whoever is free.
    """

    def __init__(self, place: int, end: Callable[[ClusterWorker, ActorLink], object]) -> None:
        """`end(worker, link)` has the actor killed, soon."""
        super().__init__(place)
        self._end = end
        self.link: ActorLink | None = None  # to the present actor; whatever comes by another one is late
        self.ready = False
        self.sent = 0  # the dispatch that was sent last
        self.known: set[int] = set()  # functions that it was told of
        self.pid: int | None = None
        self.size = 0
        self.cause = ""

    def connect(self, link: ActorLink) -> None:
        self.open()
        self.link = link
        self.ready = False
        self.sent = 0
        self.known = set()
        self.pid = None
        self.size = 0
        self.cause = ""

    @property
    def running(self) -> int:
        return self.sent

    @property
    def free(self) -> bool:
        return self.ready and not self.calls and self.condition is Condition.LIVE

    @property
    def coming(self) -> bool:
        return self.condition is Condition.LIVE and not self.ready

    def kill(self, why: str) -> None:
        super().kill(why)
        if self.link is not None:
            self._end(self, self.link)

    def reap(self) -> str:
        return self.last_words[0] if self.last_words is not None else self.cause

    def close(self) -> None:
        super().close()
        self.link, self.ready = None, False

    def memory(self) -> int:
        return self.size
