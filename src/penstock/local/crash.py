"""What a pool does when one of its worker processes dies unasked (PL-4)."""

from __future__ import annotations

from enum import StrEnum


class CrashPolicy(StrEnum):
    """
    In each case only the dead worker's calls are touched, and a call that it had not begun yet goes back to the front
    of the queue: it has done nothing, so running it now is not running it twice.
    """

    RESTART_FAIL = "restart-fail-in-flight"  # the call that it ran fails
    RESTART_REQUEUE = (
        "restart-requeue-in-flight"  # the call that it ran is tried again, `max_attempts` times at most
    )
    FAIL_TASK = "fail-task"  # everything fails, and the pool halts until somebody restarts it
