"""New ids. UUIDv7: they sort by time, so an index of a million of them grows at its end."""

from __future__ import annotations

import uuid_utils

__all__ = ["uuid7"]


def uuid7() -> str:
    return str(uuid_utils.uuid7())
