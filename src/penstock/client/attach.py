"""
`penstock.attach()`: shows this program's pools and graphs on the scheduler's page.

A thread sends a snapshot about once a second, which takes almost no time. While the scheduler is away the
page shows nothing, and the program continues.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final, Self

from penstock import wire
from penstock.client.client import Client
from penstock.core.errors import PenstockError, Unavailable
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.trace import LaneBars
from penstock.telemetry.registry import Registered, TaskSnapshot, registered

log = logging.getLogger("penstock.client")

#: The most that the scheduler shows of one program.
_MOST_TASKS: Final = 100
_MOST_WORKERS: Final = 1_000
_MOST_BARS: Final = 2_000
_LINE: Final = 200
_WORDS: Final = 20_000


def attach(url: str | None = None, *, name: str | None = None, interval: float = 1.0) -> Attachment:
    """
    Show every present and future pool and graph of this process, until `close()` or the end of the process.
    The url and the token have the same defaults as in `Client`; `name` is the name of this program on the
    page.

    For example:

        with penstock.attach(name="thumbnailer"), penstock.WorkerPool(4, name="resize") as pool:
            list(pool.map(thumbnail, paths))
    """
    if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
        raise ValueError(f"interval is {interval!r}; it must be a number of seconds above 0")
    return Attachment(Client(url, timeout=5.0, retry_for=0.0), name or _program(), interval)


class Attachment:
    """Sends snapshots of this program's pools and graphs until it is closed."""

    def __init__(self, client: Client, name: str, interval: float) -> None:
        self.name = name
        self._client, self._interval = client, interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send, name="penstock-attach", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        complained = ""
        while True:
            try:
                self._client.attach(self.name, _tasks(registered()[:_MOST_TASKS]))
                complained = ""
            except Unavailable:
                pass  # the scheduler is away: the pools continue without it
            except PenstockError as refused:
                if complained != refused.code:
                    log.warning("the pools of %s are not shown: %s", self.name, refused)
                complained = refused.code
            if self._closed.wait(self._interval):
                return

    def close(self) -> None:
        """Send no more snapshots. The page removes the program half a minute later."""
        self._closed.set()
        self._client.hang_up()
        self._thread.join()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _program() -> str:
    main = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
    return f"{main[:80]} ({os.getpid()})"


def _tasks(things: list[Registered]) -> list[wire.TaskInfo]:
    """The pools and graphs as the API takes them. The graphs share the limit of bars."""
    graphs = sum(isinstance(thing, GraphExecutor) for thing in things)
    most = _MOST_BARS // max(1, graphs)
    return [
        _task(thing.snapshot(), thing.lanes() if isinstance(thing, GraphExecutor) else None, most)
        for thing in things
    ]


def _task(snapshot: TaskSnapshot, lanes: LaneBars | None, most_bars: int) -> wire.TaskInfo:
    """A snapshot as the API takes it: without infinity, and with at most `_MOST_WORKERS` workers."""
    fields: dict[str, Any] = snapshot._asdict() | {
        "name": _text(snapshot.name, _LINE),
        "max_queue_depth": None if math.isinf(snapshot.max_queue_depth) else snapshot.max_queue_depth,
        "load_by_worker": tuple(snapshot.load_by_worker[:_MOST_WORKERS]),
        "settled_by_worker": tuple(snapshot.settled_by_worker[:_MOST_WORKERS]),
        "last_crash": None if snapshot.last_crash is None else _text(snapshot.last_crash, _WORDS),
        "lanes": None if lanes is None else _lanes(lanes, most_bars),
    }
    return wire.TaskInfo(**fields)


def _lanes(lanes: LaneBars, most: int) -> wire.LanesInfo:
    bars = [
        wire.LaneBar(**bar._asdict() | {"node": _text(bar.node, _LINE), "worker": _text(bar.worker, _LINE)})
        for bar in lanes.bars[-most:]
    ]
    left_out = lanes.left_out + len(lanes.bars) - len(bars)
    return wire.LanesInfo(
        **lanes._asdict() | {"graph": _text(lanes.graph, _LINE), "bars": bars, "left_out": left_out}
    )


def _text(text: str, most: int) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:most]
