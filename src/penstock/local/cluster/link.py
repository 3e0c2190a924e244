"""One actor and what is said to it. Whoever calls a method here is the courier: Ray's own calls may take a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.local.cluster.actor import LINES, PROTOCOL, Actor
from penstock.local.cluster.options import Cluster
from penstock.local.timers import clock

#: What a beat's way and two clocks may add to a lease, in seconds.
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
