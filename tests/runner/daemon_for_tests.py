"""A scheduler with a runner as a program, to be killed: `python daemon_for_tests.py DATA`."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.runner.conftest import Plant

    plant = Plant(Path(sys.argv[1]))
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not over.wait(0.5):
        pass
    plant.stop(timeout=float(sys.argv[2]) if len(sys.argv) > 2 else 5)
