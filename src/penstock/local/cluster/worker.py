"""One place of a cluster crew."""

from __future__ import annotations

from collections.abc import Callable

from penstock.local.cluster.link import ActorLink
from penstock.local.member import Condition, WorkerSlot


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
