"""
What an owner must hear of, whoever carries it there.

An alert is an event like any other, written in the transaction that made it true, so none is lost and none is made up. `key` names
the occasion: however often it is delivered, and by whomever, two alerts with one key are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from penstock.core.jobs.types import AddonId, JobId, Moment, Span

__all__ = ["Alert", "Repeats", "SentAlert"]


class Alert(Struct, frozen=True, kw_only=True):
    """No job: it is about the addon as a whole."""

    kind: str
    addon_id: AddonId
    job_id: JobId | None = None
    key: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "addon_id": self.addon_id,
            "job_id": self.job_id,
            "key": self.key,
            "text": self.text,
            **self.data,
        }


class SentAlert(NamedTuple):
    """That an occasion was told, and what has been held back since."""

    at: Moment
    held: int = 0


class Repeats:
    """Of what happens again and again one is told in a window, and with the next one how many were not."""

    MOST: Final = 10_000

    def __init__(self, window: Span, told: Mapping[str, SentAlert] = MappingProxyType({})) -> None:
        self._window, self.told = window, dict(told)

    def hear(self, key: str, now: Moment) -> int | None:
        """None: it is held back. Else it is told, and with it that so many were not."""
        last = self.told.get(key)
        if last is not None and last.at <= now < last.at + self._window:
            self.told[key] = last._replace(held=last.held + 1)
            return None
        self.told.pop(key, None)  # so that the dict stays in the order of time
        self.told[key] = SentAlert(now)
        return 0 if last is None else last.held

    def forget(self, now: Moment) -> None:
        """What needs no memory, and the oldest when there are too many: keys are made up by jobs, and jobs never end."""
        self.told = {k: t for k, t in self.told.items() if t.held or t.at <= now < t.at + self._window}
        for key in list(self.told)[: max(0, len(self.told) - self.MOST)]:
            del self.told[key]
