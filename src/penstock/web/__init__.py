"""
The page: static files and nothing else. The HTTP layer serves what lies in `static`, the daemon says at which
address.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["complete", "static"]


def static() -> Path:
    return Path(str(files(__name__))) / "static"


def complete() -> bool:
    """
    Whether the libraries lie beside the page. They come with the wheel; a checkout fetches them when it is
    set up.
    """
    return (static() / "vendor" / "preact.js").is_file()
