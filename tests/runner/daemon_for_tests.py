"""
A scheduler with a runner as a program, to be killed: `python daemon_for_tests.py DATA`. SIGTERM ends it in order.

With `again` as a second argument it is the parent of such schedulers: for each line that it reads it makes one, and says its pid and later how it ended. To import
everything costs more than all the rest of a short life, and nobody has threads yet when they part.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from penstock.core.jobs.states import Schedules
    from penstock.runner.process_tree import die_with_the_parent
    from tests.runner.plant import Plant

    def run(data):
        faulthandler.dump_traceback_later(30, exit=True)  # it says where it hangs, if it does
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        at_once = Schedules(crash=(10_000,) * 1_000)
        plant = Plant(Path(data), rules={"schedules": at_once, "tick": 100_000}, workers=3, slots=6)
        faulthandler.cancel_dump_traceback_later()
        say("ready")
        signal.sigwait({signal.SIGTERM})
        plant.stop(2)

    def say(words):
        os.write(1, f"{words}\n".encode())

    die_with_the_parent(os.getppid())
    if sys.argv[2:] != ["again"]:
        run(sys.argv[1])
    else:
        for _ in sys.stdin:
            me, go = os.getpid(), os.pipe()
            if (pid := os.fork()) == 0:
                die_with_the_parent(me)
                os.read(go[0], 1)
                run(sys.argv[1])
                os._exit(0)
            say(pid)
            os.write(go[1], b"1")
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            for fd in go:
                os.close(fd)
