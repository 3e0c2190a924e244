"""
Turns in interpreters of their own, so that no contestant inherits another's heap, threads, imports or processes.

Before the harness lets one start, it becomes the reaper of orphans: whatever a turn leaves behind, in whatever
session, comes back as a child of ours, is given a moment to end, and is ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36


class TurnFailed(Exception):
    """A contestant has no figures to show; the message is the reason, in a line."""


def fresh(target: str, *arguments: object, seconds: float = 60, tree: Path = ROOT) -> Mapping[str, float]:
    """Call `module:function` of a source tree in a new interpreter and return the figures that it returned."""
    command = [sys.executable, "-m", "bench.turn", target, json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    # Files, not pipes: a pipe stays open as long as any worker that inherited it.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, _no_survivors():
        try:
            code = subprocess.run(
                command, cwd=tree, env=environment, stdout=out, stderr=err, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise TurnFailed(f"no answer in {seconds:.0f} s") from None
        out.seek(0)
        err.seek(0)
        lines = out.read().splitlines()
        if code or not lines:
            raise TurnFailed((err.read().strip() or f"exit code {code}").splitlines()[-1])
        figures: Mapping[str, float] = json.loads(lines[-1])
        return figures


@contextmanager
def _no_survivors(grace: float = 2) -> Iterator[None]:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    known = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        left = set(psutil.Process().children(recursive=True)) - known
        left = {process for process in left if not known.intersection(_parents(process))}
        _, left = psutil.wait_procs(left, timeout=grace)
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it may end by itself at any moment
                process.kill()
        psutil.wait_procs(left, timeout=grace)


def _parents(process: psutil.Process) -> list[psutil.Process]:
    """What a server that runs for the whole bench has started meanwhile is its own business."""
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []
