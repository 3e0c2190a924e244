"""
The page: static files and nothing else. The HTTP layer serves what lies in `static`, the daemon says at which
address.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

__all__ = ["LIBRARIES", "complete", "missing", "static"]

#: What `penstock.web.vendor` puts beside the page, with the licenses, which must travel with the copies.
LIBRARIES: Final = (
    "preact.js", "hooks.js", "htm.js", "signals-core.js", "signals.js", "uPlot.js", "uPlot.min.css", "LICENSES.txt",
)  # fmt: skip


def static() -> Path:
    return Path(str(files(__name__))) / "static"


def complete() -> bool:
    """
    Whether the libraries lie beside the page. They come with the wheel; a checkout fetches them when it is
    set up.
    """
    return not missing()


def missing() -> list[str]:
    """The files of the page's libraries that are not there."""
    return [name for name in LIBRARIES if not (static() / "vendor" / name).is_file()]
