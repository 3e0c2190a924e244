"""
How many connections one listener may have, in all and from one peer, and which one gives way to a new one.

A client that opens connections and says nothing must not lock the others out. So a full listener does not refuse the newcomer: a connection on which no
request is being served gives way, the oldest first, and one whose client has shown a valid token last. What is being served is limited by token, so
only those who may come in anyway can fill a listener for good, and then one peer only up to its own budget.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["ConnectionBudget", "Holder"]


class Holder(Protocol):
    """What holds a place: a connection, or a TLS handshake."""

    @property
    def peer(self) -> str: ...

    @property
    def idle(self) -> bool:
        """No request is being served."""
        ...

    def give_way(self) -> None: ...


class _Held:
    """The places of one peer, the oldest first. Dicts, because these keep their order and forget one quickly."""

    def __init__(self) -> None:
        self.unproven: dict[Holder, None] = {}
        self.proven: dict[Holder, None] = {}

    def __len__(self) -> int:
        return len(self.unproven) + len(self.proven)

    def idle(self) -> Holder | None:
        for holders in (self.unproven, self.proven):
            for holder in holders:
                if holder.idle:
                    return holder
        return None


class ConnectionBudget:
    """`unlimited`: peers that stand for many others, as a declared proxy does; only the whole limits them."""

    def __init__(self, most: int, per_peer: int, unlimited: frozenset[str] = frozenset()) -> None:
        self._most, self._per_peer, self._unlimited = most, per_peer, unlimited
        self._peers: dict[str, _Held] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, holder: Holder) -> bool:
        """Whether it has a place now, perhaps one that another has just given up."""
        own = self._peers.get(holder.peer)
        if own is not None and len(own) >= self._per_peer and holder.peer not in self._unlimited:
            candidates = [own]
        elif self._count >= self._most:
            candidates = sorted(self._peers.values(), key=len, reverse=True)
        else:
            candidates = []
        if candidates and not self._make_room(candidates):
            return False
        self._peers.setdefault(holder.peer, _Held()).unproven[holder] = None
        self._count += 1
        return True

    def _make_room(self, candidates: list[_Held]) -> bool:
        for held in candidates:
            if (holder := held.idle()) is not None:
                self.leave(holder)
                holder.give_way()
                return True
        return False

    def prove(self, holder: Holder) -> None:
        """Its client has shown a valid token. Called with every request, so that the order is that of the last ones."""
        held = self._peers.get(holder.peer)
        if held is not None and (holder in held.unproven or holder in held.proven):
            held.unproven.pop(holder, None)
            held.proven.pop(holder, None)
            held.proven[holder] = None

    def leave(self, holder: Holder) -> None:
        """May be called again."""
        held = self._peers.get(holder.peer)
        if held is None or (holder not in held.unproven and holder not in held.proven):
            return
        held.unproven.pop(holder, None)
        held.proven.pop(holder, None)
        self._count -= 1
        if not held:
            del self._peers[holder.peer]
