"""`python -m examples.demo`"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import signal
import sys
import time
from typing import Any, Protocol

from examples.demo.lab import Lab
from examples.demo.ledger import Diary
from examples.demo.plain import PlainDisplay
from examples.demo.story import Story

import penstock


def main() -> int:
    options = _options()
    plain = options.plain or not _can_draw()
    if not plain and importlib.util.find_spec("rich") is None:
        sys.stderr.write("The live picture needs rich: pip install 'penstock[demo]'. Without it: --plain\n")
        return 2
    return asyncio.run(_show(options.seconds, plain=plain))


def _can_draw() -> bool:
    encoding = (sys.stdout.encoding or "").lower()
    return sys.stdout.isatty() and encoding.startswith("utf") and os.environ.get("TERM") != "dumb"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="A photo lab of three worker pools under load."
    )
    parser.add_argument("--seconds", type=_seconds, default=22.0, help="about how long it takes (22)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of a live picture")
    return parser.parse_args()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


class Display(Protocol):
    interval: float

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def draw(self, snapshots: list[Any]) -> None: ...

    def summarize(self, *, interrupted: bool) -> None: ...


async def _show(seconds: float, *, plain: bool) -> int:
    lab = Lab(Diary())
    story = Story(lab, seconds)
    display = _display(lab, story, plain=plain)
    loop = asyncio.get_running_loop()
    telling = asyncio.create_task(story.tell())
    loop.add_signal_handler(signal.SIGINT, telling.cancel)
    loop.add_signal_handler(signal.SIGTERM, telling.cancel)
    with display:
        while not telling.done():
            await asyncio.wait([telling], timeout=_draw(display))
        interrupted = telling.cancelled()
        await lab.close(now=interrupted or telling.exception() is not None)
    if not interrupted:
        telling.result()
    display.summarize(interrupted=interrupted)
    return 0 if lab.balanced else 1


def _draw(display: Display) -> float:
    """Draw once and return the seconds until the next time: a slow terminal gets fewer pictures, not a slower lab."""
    began = time.perf_counter()
    display.draw(penstock.snapshot())
    return max(display.interval, 3 * (time.perf_counter() - began))


def _display(lab: Lab, story: Story, *, plain: bool) -> Display:
    if plain:
        return PlainDisplay(lab, story)
    from examples.demo.screen import LiveDisplay  # noqa: PLC0415  # rich is an extra

    return LiveDisplay(lab, story)


if __name__ == "__main__":
    sys.exit(main())
