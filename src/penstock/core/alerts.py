"""
What an owner must hear of, whoever carries it there.

An alert is an event like any other, written in the transaction that made it true, so none is lost and none is made up. `key` names
the occasion: however often it is delivered, and by whomever, two alerts with one key are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.words import AddonId, JobId

__all__ = ["Alert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
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
