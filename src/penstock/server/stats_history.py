"""
The stats history: the live stats of the last seven days by the minute, for the page's charts, in a file.

The server appends each minute as one line of JSON to a file in the data directory: at most 10,080 lines,
about a megabyte. At its start it rewrites the file without the lines that are too old. Nothing but the charts
depends on the file: if it cannot be read or written, the server logs that once, and the charts lose their
past.

A minute in which the scheduler did not run has no line. `points` makes an entry without figures for it, so
that a chart shows a gap.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from penstock import wire
from penstock.scheduler.permissions import replace_file

log = logging.getLogger("penstock.server")

#: The name of the file in the data directory.
HISTORY_FILE: Final = "stats-history.jsonl"
MINUTE: Final = 60.0
KEPT_SEC: Final = 7 * 86_400
#: The most points of a chart, which has no more pixels.
MOST_POINTS: Final = 900
_COUNTS: Final = ("submitted", "started", "done", "failed")
_GAUGES: Final = ("queued", "in_use", "capacity", "busy")
_P50: Final = ("wait_p50", "attempt_p50")
_P95: Final = ("wait_p95", "attempt_p95")

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(wire.StatsPoint).decode


class StatsHistory:
    """The minutes of the last seven days, in memory and in the file."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: keep the figures in memory only."""
        self._path = path
        self._minutes: deque[wire.StatsPoint] = deque(maxlen=int(KEPT_SEC / MINUTE))
        self._seconds: list[wire.StatsSecond] = []
        self._broken = False

    def load(self, now: float) -> None:
        """Read the file, and rewrite it without the lines that are too old."""
        if self._path is None or not self._path.exists():
            return
        try:
            for line in self._path.read_bytes().splitlines():
                try:
                    point = _decode(line)
                except msgspec.DecodeError:  # a line that a crash cut off
                    continue
                if now - KEPT_SEC < point.at <= now:
                    self._minutes.append(point)
            replace_file(self._path, b"".join(_encode(point) + b"\n" for point in self._minutes))
        except OSError as error:
            self._complain(error)

    def add(self, second: wire.StatsSecond) -> None:
        """
        Add a second. The first second of a new minute writes the minute before. A second that is not newer
        than the last one is ignored.
        """
        if self._seconds and second.at <= self._seconds[-1].at:
            return
        if self.is_due(second.at):
            self._finish()
        self._seconds.append(second)

    def is_due(self, now: float) -> bool:
        """Whether a second at this moment is the first of a new minute."""
        return bool(self._seconds) and int(now // MINUTE) != int(self._seconds[0].at // MINUTE)

    def _finish(self) -> None:
        at = self._seconds[0].at // MINUTE * MINUTE
        point = merged(at, [wire.StatsPoint(**msgspec.structs.asdict(one)) for one in self._seconds])
        self._minutes.append(point)
        self._seconds = []
        if self._path is None:
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, _encode(point) + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._broken:
            log.warning("the history of the charts cannot be kept: %s", error)
        self._broken = True

    def points(self, now: float, span_sec: float) -> list[wire.StatsPoint]:
        """
        The last `span_sec` in at most `MOST_POINTS` steps of whole minutes. A step without figures is a gap.
        """
        step = MINUTE * max(1, -(-int(span_sec) // int(MINUTE * MOST_POINTS)))
        first = (now - span_sec) // step
        steps: dict[int, list[wire.StatsPoint]] = {}
        for point in self._minutes:
            if point.at // step >= first:
                steps.setdefault(int(point.at // step), []).append(point)
        return [merged(place * step, steps.get(place, [])) for place in range(int(first), int(now // step))]


def merged(at: float, points: Sequence[wire.StatsPoint]) -> wire.StatsPoint:
    """
    One point for several: the mean of the counts and gauges, the median of the medians, and the highest 95th
    percentile.
    """
    figures: dict[str, float | None] = {}
    for names, of in ((_COUNTS + _GAUGES, _mean), (_P50, median), (_P95, max)):
        for name in names:
            values = [value for point in points if (value := getattr(point, name)) is not None]
            figures[name] = round(float(of(values)), 6) if values else None
    return wire.StatsPoint(at=at, **figures)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
