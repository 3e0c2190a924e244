"""
The pool's side of one worker on a cluster: the link to its actor, and its slot. The methods of a link are
called on the group's Ray thread, because calls into Ray may take a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.cluster.actor import CONCURRENCY_GROUPS, PROTOCOL, Actor
from penstock.cluster.engine import Cluster
from penstock.pools.timers import clock
from penstock.pools.workers.base import Condition, WorkerSlot

#: What a heartbeat's way and two clocks may add to a lease, in seconds.
_SLACK = 0.5

#: Called with the answer of the actor, or with Ray's error.
Answer = Callable[[Any, BaseException | None], object]


def actor_class(ray: Any, terms: Cluster) -> Any:
    """
    Made once a group, because each is registered in the cluster. Ray restarts and retries nothing: the pool
    does.
    """
    return ray.remote(
        num_cpus=terms.cpus,
        num_gpus=terms.gpus,
        resources=dict(terms.resources),
        runtime_env=None if terms.runtime_env is None else dict(terms.runtime_env),
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups=CONCURRENCY_GROUPS,
    )(Actor)


class ActorLink:
    """The connection to one actor."""

    def __init__(self, ray: Any, actors: Any, lease: float, when: Callable[[Any, Answer], None]) -> None:
        """
        `actors` is the result of `actor_class`; `when(ref, answer)` has `answer` called on the Ray thread.
        """
        self._ray = ray
        self._actors = actors
        self._lease = lease
        self._when = when
        self._actor: Any = None
        self._unanswered = False
        self.heartbeat_sent_at: float | None = None  # when the last heartbeat was sent
        self.node: str | None = None  # the machine that it is on
        self.doubted = False  # an error that need not be its death
        self.given_up = False  # only the end of its lease is certain now

    def open(
        self, setup: tuple[list[str], bytes], *, reports_memory: bool, ready: Answer, dead: Answer
    ) -> None:
        actor = self._actors.remote(self._lease)
        self._actor = actor
        self._when(actor.wait_for_release.options(concurrency_group="lifetime").remote(), dead)
        self._when(actor.set_up.remote(PROTOCOL, *setup, reports_memory=reports_memory), ready)

    def call(self, message: tuple[Any, ...], answer: Answer) -> None:
        self._when(self._actor.call.remote(*message), answer)

    def cancel(self, dispatch: int) -> None:
        self._actor.cancel.options(concurrency_group="control").remote(dispatch)

    def heartbeat(self) -> bool:
        """False: it has not answered for so long that its lease is over."""
        if self._unanswered:
            return clock() < self.lease_over()
        self._unanswered = True
        self.heartbeat_sent_at = clock()
        self._when(
            self._actor.heartbeat.options(concurrency_group="control").remote(self.heartbeat_sent_at),
            self._heartbeat_answered,
        )
        return True

    def _heartbeat_answered(self, _: Any, error: BaseException | None) -> None:
        self._unanswered = error is not None

    def lease_over(self) -> float:
        """When it has certainly ended, whatever happened to it."""
        return 0.0 if self.heartbeat_sent_at is None else self.heartbeat_sent_at + self._lease + _SLACK

    def retire(self, gone: Answer) -> None:
        """Let it finish its call and end as a program ends."""
        self._actor.release.options(concurrency_group="control").remote()
        self._when(self._actor.__ray_terminate__.remote(), gone)

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class ClusterWorker(WorkerSlot):
    """
    It has one call at a time. A result that is on its way when the worker dies is lost, so of several calls
    it would not be known which had begun. Other calls wait on the pool's side, for any worker that is free.
    """

    def __init__(self, number: int, end: Callable[[ClusterWorker, ActorLink], object]) -> None:
        """`end(worker, link)` has the actor killed soon."""
        super().__init__(number)
        self._end = end
        self.link: ActorLink | None = None  # to the present actor; answers from another one are late
        self.ready = False
        self.sent = 0  # the dispatch that was sent last
        self.functions_sent: set[int] = set()  # functions that were sent to it
        self.pid: int | None = None
        self.size = 0
        self.cause = ""

    def connect(self, link: ActorLink) -> None:
        self.open()
        self.link = link
        self.ready = False
        self.sent = 0
        self.functions_sent = set()
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
        return self.failure[0] if self.failure is not None else self.cause

    def close(self) -> None:
        super().close()
        self.link, self.ready = None, False

    def memory(self) -> int:
        return self.size
