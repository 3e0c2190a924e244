"""
Commands and functions, run by the scheduler itself in processes of their own.

The names are imported on first use: a warm worker needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runner.leftovers import Leftovers as Leftovers
    from penstock.runner.payload import Functions as Functions
    from penstock.runner.payload import RunnerOptions as RunnerOptions
    from penstock.runner.runner import Runner as Runner

_HOMES = {
    "Functions": "payload",
    "Runner": "runner",
    "RunnerOptions": "payload",
    "Leftovers": "leftovers",
}

__all__ = [  # noqa: PLE0604  # of texts, though not written out: the table above is the one list
    *_HOMES
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"penstock.runner.{_HOMES[name]}"), name)
