"""
The web page: static files only. The HTTP server serves the folder `static`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

__all__ = ["LIBRARIES", "complete", "missing", "static"]

#: The files that `penstock.web.vendor` puts beside the page, including the licenses of the copies.
LIBRARIES: Final = (
    "preact.js", "hooks.js", "htm.js", "signals-core.js", "signals.js", "uPlot.js", "uPlot.min.css", "LICENSES.txt",
)  # fmt: skip


def static() -> Path:
    return Path(str(files(__name__))) / "static"


def complete() -> bool:
    """
    Whether the page's libraries are there. They come with the wheel; a checkout fetches them when it is set
    up.
    """
    return not missing()


def missing() -> list[str]:
    """The missing files of the page's libraries."""
    return [name for name in LIBRARIES if not (static() / "vendor" / name).is_file()]
