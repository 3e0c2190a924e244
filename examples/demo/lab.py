"""
The photo lab: three worker pools, and the way of one photo through them.

    decode    2 workers, `block`: callers wait for a place; calls of a lost worker run again
    resize    1 worker,  `block`
    analyse   1 worker,  `drop-oldest`: under a burst, the newest photos matter most
"""

from __future__ import annotations

import asyncio
from typing import Final

from examples.demo import stages
from examples.demo.ledger import Diary, PhotoBook, StageBook
from examples.demo.photo import Negative, Photo, take

from penstock import CallCanceled, PenstockError, PoolClosedError, QueueDropError, WorkerPool

#: Photos in progress at once: more than the first stage has places, so that some always wait.
IN_PROGRESS: Final = 20


class Lab:
    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self.photos = PhotoBook()
        self.ledger = {name: StageBook(name, diary) for name in ("decode", "resize", "analyse")}
        self.decode = WorkerPool(
            2,
            name="decode",
            max_in_flight=4,
            max_queue_depth=8,
            crash_policy="restart-requeue-in-flight",
            restart_delay=1.0,  # ten times the default, for the eye
            start="eager",
            hooks=self.ledger["decode"],
        )
        self.resize = WorkerPool(
            1,
            name="resize",
            max_in_flight=2,
            max_queue_depth=4,
            key_of=_album_of,
            start="eager",
            hooks=self.ledger["resize"],
        )
        self.analyse = WorkerPool(
            1,
            name="analyse",
            max_in_flight=2,
            max_queue_depth=6,
            policy="drop-oldest",
            key_of=_album_of,
            start="eager",
            hooks=self.ledger["analyse"],
        )
        self.pools = (self.decode, self.resize, self.analyse)
        self.places = 4 + 8  # of the first stage
        self.album: str | None = None
        self.decoder: int | None = None  # the process that decoded the last photo
        self.latest: stages.Report | None = None

    async def develop(self, number: int) -> None:
        """Take one photo through all stages. Its outcome is counted once."""
        album = self.album
        with _Outcome(self):
            async with self.decode.reserve(key=album) as place:  # waits here, before the photo exists
                developed = await place.call(stages.decode, self._negative(number, album))
            self.decoder = developed.pid
            if developed.attempt > 1:
                self.photos.retried += 1
                self.diary.say(f"photo {number} decoded at attempt {developed.attempt}", "good")
            small = await self.resize.call(stages.resize, developed.photo)
            self.latest = await self.analyse.call(stages.analyse, small)

    def _negative(self, number: int, album: str | None) -> Negative:
        self.photos.negatives += 1
        self.photos.most_negatives = max(self.photos.most_negatives, self.in_memory)
        return take(number, album)

    @property
    def in_memory(self) -> int:
        """Negatives that exist and whose call has not ended."""
        return self.photos.negatives - self.ledger["decode"].ended

    async def look_again(self, photo: Photo) -> None:
        with _Outcome(self):
            await self.analyse.call(stages.analyse, photo)

    def cancel(self, album: str) -> int:
        return sum(pool.cancel(album, "the album was canceled") for pool in self.pools)

    def clear(self, album: str) -> None:
        for pool in self.pools:
            pool.clear(album)

    async def close(self, *, now: bool) -> None:
        """Close the pools after their work, or now: then every remaining call fails and the workers are killed."""
        if now:
            await asyncio.gather(*(asyncio.to_thread(pool.dispose) for pool in self.pools))
        else:
            await asyncio.gather(*(pool.aclose() for pool in self.pools))

    @property
    def balanced(self) -> bool:
        return self.photos.balanced and all(book.balanced for book in self.ledger.values())


def _album_of(photo: Photo) -> str | None:
    return photo.album


class _Outcome:
    """Counts the outcome of a photo. It stops errors of a pool here; any other error is a bug and passes."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __enter__(self) -> None:
        self._lab.photos.taken += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        photos = self._lab.photos
        match error:
            case None:
                photos.analysed += 1
            case CallCanceled():
                photos.canceled[str(error.phase)] += 1
            case QueueDropError():
                photos.shed += 1
            case PoolClosedError() | asyncio.CancelledError():
                photos.canceled["closing"] += 1
            case _:
                photos.failed += 1
                self._lab.diary.say(f"{type(error).__name__}: {error}", "bad")
        return isinstance(error, PenstockError)
