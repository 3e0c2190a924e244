"""Which Penstock answers, as it was installed."""

from __future__ import annotations

from importlib import metadata
from typing import Final


def _installed() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+source"


VERSION: Final = _installed()
