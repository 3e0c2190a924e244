"""
A tree of processes that do not want to die: they ignore SIGTERM (and what else can be ignored), one has a session of its own, one was
forked twice, one has forgotten its environment; all hold the output open. Each writes its pid into the file that is named first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def stay(path):
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    end = time.monotonic() + 300
    while time.monotonic() < end:
        time.sleep(60)


def child(path, *, session=False, twice=False, bare=False):
    if os.fork():
        return
    if session:
        os.setsid()
    if twice and os.fork():
        os._exit(0)
    if bare:
        os.execve(sys.executable, [sys.executable, __file__, path, "--alone"], {})
    stay(path)
    os._exit(0)


if __name__ == "__main__":
    path, *how = sys.argv[1:]
    if "--alone" not in how:
        child(path)
        child(path, session=True)
        child(path, session=True, twice=True)
        child(path, session=True, twice=True, bare=True)
    if "--leave" not in how:
        stay(path)
        sys.exit()
    while not Path(path).exists() or len(Path(path).read_text().split()) < 4:
        time.sleep(0.01)
