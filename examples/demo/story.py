"""The five acts of the demo. Each act waits for its own event, so a slow machine shows the same, only longer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count

from examples.demo.lab import IN_PROGRESS, Lab

from penstock.flow.parallel import parallel_limit

ACTS = ("backpressure", "kill -9", "cancel by key", "a burst", "drain")


class Story:
    def __init__(self, lab: Lab, seconds: float) -> None:
        self._lab = lab
        self._say = lab.diary.say
        self._seconds = seconds
        self._feeding = True
        self.act = 0

    async def tell(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed())
            for act in (self._backpressure, self._crash, self._cancel, self._burst, self._drain):
                self.act += 1
                await act()

    async def _feed(self) -> None:
        """Take photos all the time: `parallel_limit` pulls the next number when a photo is finished."""
        async with parallel_limit(self._numbers(), IN_PROGRESS, self._lab.develop) as photos:
            async for _ in photos:
                pass

    def _numbers(self) -> Iterator[int]:
        numbers = count(1)
        while self._feeding:
            yield next(numbers)

    # The acts

    async def _backpressure(self) -> None:
        lab = self._lab
        self._say(f"{IN_PROGRESS} photos at a time, {lab.places} places for them")
        await self._until(lambda: lab.decode.state.waiting > 0)
        self._say("the rest wait, and make nothing before", "good")
        await self._pause(0.26)

    async def _crash(self) -> None:
        lab = self._lab
        await self._until(lambda: lab.decoder is not None and lab.decode.state.in_flight > 2)
        assert lab.decoder is not None
        before = lab.decode.snapshot().totals["crashed"]
        os.kill(lab.decoder, signal.SIGKILL)
        self._say(f"kill -9 {lab.decoder}, a worker with calls in hand", "bad")
        await self._until(lambda: lab.decode.snapshot().totals["crashed"] > before)
        self._say(f"decode: {lab.decode.snapshot().last_crash}", "warn")
        await self._pause(0.22)

    async def _cancel(self) -> None:
        lab, album = self._lab, "holiday"
        lab.album = album
        self._say(f"photos now belong to the album {album!r}")
        await self._pause(0.05)
        await self._until(lambda: lab.latest is not None and lab.latest.photo.album == album)
        before = lab.photos.canceled.copy()
        ended = lab.cancel(album)
        lab.album = None
        self._say(f"cancel({album!r}) ended {ended} calls at once", "warn")
        await self._until(lambda: (lab.photos.canceled - before).total() >= ended)
        phases = ", ".join(f"{number} {phase}" for phase, number in (lab.photos.canceled - before).items())
        self._say(f"photos: {phases}")
        lab.clear(album)
        await self._pause(0.18)

    async def _burst(self) -> None:
        lab = self._lab
        await self._until(lambda: lab.latest is not None)
        assert lab.latest is not None
        before = lab.photos.shed
        async with asyncio.TaskGroup() as group:
            for wave in (1, 2, 3):
                self._say(f"wave {wave}: 40 more for analyse, all at once", "warn")
                for _ in range(40):
                    group.create_task(lab.look_again(lab.latest.photo))
                await self._pause(0.06)
        self._say(f"{lab.photos.shed - before} shed, the oldest first; no caller waited", "good")
        await self._pause(0.04)

    async def _drain(self) -> None:
        self._feeding = False
        self._say("the camera rests, the lab finishes its work")
        await self._until(lambda: all(pool.state.idle for pool in self._lab.pools))

    # Time

    async def _pause(self, share: float) -> None:
        await asyncio.sleep(self._seconds * share)

    @staticmethod
    async def _until(true: Callable[[], bool]) -> None:
        while not true():  # noqa: ASYNC110  # other processes make it true; there is no event to await
            await asyncio.sleep(0.01)
