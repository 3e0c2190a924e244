"""The scheduler as a program: `run(settings)`, or `python -m penstock.daemon`."""

from __future__ import annotations

from penstock.daemon.running import run

__all__ = ["run"]
