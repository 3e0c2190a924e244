"""
Which kinds of jobs may be reserved on this host: so that a worker who comes need not look where nothing can be.

To look is a read of its own beside every claim, and mostly there is nothing. Who has the right to dispatch makes all the reservations of its host, so it
can tell: those it found when it began, and those it made since. Each is over when its time is, taken up or not. Who has not that
right knows nothing, and looks. So jobs must be claimed where they are dispatched, as all of ours are: a claim elsewhere may reserve what stands before
it in line, which nobody here would know of until its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from penstock.core.demand import AdmissionClass
from penstock.core.job import Dispatch
from penstock.core.words import Moment, Span

__all__ = ["ReservationCache"]


class ReservationCache:
    def __init__(self) -> None:
        #: By kind, the moment when the last of them is over. Replaced and never changed, so it is read without the lock.
        self._until: dict[AdmissionClass, Moment] = {}
        self._alone = False
        self._lock = Lock()

    def begin(self, found: Iterable[Dispatch], now: Moment) -> None:
        """From now on nobody else reserves here; `found` is what they have left."""
        until: dict[AdmissionClass, Moment] = {}
        for dispatch in found:
            until[dispatch.admission_class] = max(dispatch.expires_at, until.get(dispatch.admission_class, 0))
        self.made(until, now)
        self._alone = True

    def end(self) -> None:
        self._alone = False

    def made(self, until: Mapping[AdmissionClass, Moment], now: Moment) -> None:
        """Told before it is written: if that fails, somebody looks in vain for a while, and nobody passes by what is there."""
        with self._lock:
            kept = {admission_class: over for admission_class, over in self._until.items() if over > now}
            self._until = kept | {
                admission_class: max(over, kept.get(admission_class, 0))
                for admission_class, over in until.items()
            }

    def shift(self, by: Span) -> None:
        """The clock is about to be set, and the reservations move with it. Where it is set back, looking for longer is enough."""
        with self._lock:
            self._until = {
                admission_class: until + max(0, by) for admission_class, until in self._until.items()
            }

    def perhaps(self, fits: Callable[[AdmissionClass], bool], now: Callable[[], Moment]) -> bool:
        if not self._alone:
            return True
        until = self._until
        if not until:
            return False
        at = now()
        return any(over > at and fits(admission_class) for admission_class, over in until.items())
