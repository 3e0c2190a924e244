"""
Where a daemon and its clients meet when nobody says otherwise. Both sides ask here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["config_file", "data_dir", "local_url", "token_of"]


def data_dir(environ: Mapping[str, str]) -> Path:
    told = environ.get("PENSTOCK_DATA_DIR")
    return Path(told).expanduser() if told else _xdg(environ, "XDG_DATA_HOME", ".local/share") / "penstock"


def config_file(environ: Mapping[str, str]) -> Path:
    return _xdg(environ, "XDG_CONFIG_HOME", ".config") / "penstock" / "penstock.toml"


def local_url(environ: Mapping[str, str]) -> str:
    return f"unix://{data_dir(environ) / 'penstock.sock'}"


def token_of(environ: Mapping[str, str]) -> str:
    """Nothing where there is no file: through the socket of one's own daemon none is needed."""
    if token := environ.get("PENSTOCK_TOKEN"):
        return token.strip()
    file = Path(environ.get("PENSTOCK_TOKEN_FILE") or data_dir(environ) / "token")
    try:
        return file.read_text("ascii").strip()
    except FileNotFoundError:
        return ""


def _xdg(environ: Mapping[str, str], name: str, otherwise: str) -> Path:
    """The standard says that a relative path in these variables must be ignored."""
    told = environ.get(name, "")
    return Path(told) if told.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / otherwise
