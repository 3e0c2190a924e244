"""A scheduler with a runner as a program, to be killed: `python daemon_for_tests.py DATA`. SIGTERM ends it in order."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from penstock.core.retry import Schedules
    from penstock.runner.trees import die_with_the_parent
    from tests.runner.plant import Plant

    die_with_the_parent(os.getppid())
    faulthandler.dump_traceback_later(30, exit=True)  # it says where it hangs, if it does
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    at_once = Schedules(crash=(10_000,) * 1_000)
    plant = Plant(Path(sys.argv[1]), rules={"schedules": at_once, "tick": 100_000}, workers=3, slots=6)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM})
    plant.stop(2)
