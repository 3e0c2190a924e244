"""The daemon: the scheduler as a program, started by `run(settings)` or `python -m penstock.daemon`."""

from __future__ import annotations

from penstock.daemon.lifecycle import run, run_program

__all__ = ["run", "run_program"]
