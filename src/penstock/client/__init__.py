"""
The other side of the HTTP API: a typed client and the SDK worker. `docs/workers.md` shows how they are used.

The names are imported on first use: a program that only needs the address of the daemon does not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.client import Client as Client
    from penstock.client.worker import Worker as Worker

_HOMES = {
    "Client": "client",
    "Worker": "worker",
}

__all__ = list(_HOMES)  # strings, all of them


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
