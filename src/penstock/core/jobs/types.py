"""
The basic types of the durable scheduler: moments, ids, priorities, constraints.

A moment is an integer, so comparisons are exact and the same in Python and in both SQL dialects, and the
order key of a job (`ordering.order_key`) can be recomputed when a user asks why the job ran when it did.
Names that end in `_sec` are seconds, as the HTTP fields are; every other time in the core is in microseconds.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntFlag, StrEnum
from typing import Final, NewType, TypeAlias

#: Microseconds since 1970-01-01T00:00Z.
Moment: TypeAlias = int
#: Microseconds.
Span: TypeAlias = int
#: Millionths of the unit that the job declares (USD by default): sums stay exact.
Money: TypeAlias = int

MILLISECOND: Final[Span] = 1_000
SECOND: Final[Span] = 1_000_000
MINUTE: Final[Span] = 60 * SECOND
HOUR: Final[Span] = 60 * MINUTE

#: The prefix of the runner's job types. Another worker claims such a job only if it names the type.
OWN_TYPES: Final = "penstock."

JobId = NewType("JobId", str)
AddonId = NewType("AddonId", str)
HostId = NewType("HostId", str)
#: The id of one attempt, and of its lease.
DispatchId = NewType("DispatchId", str)


_MOST_MONEY: Final = 10**12


def money_of(amount: float | str | Decimal) -> Money:
    """
    The amount in millionths of its unit. ValueError: it is no number, not finite, or above 10**12, because an
    integer as large as 1e999999 takes minutes to make.
    """
    try:
        exact = Decimal(str(amount))
    except ArithmeticError:
        raise ValueError(f"{amount!r:.60} is not a sum of money") from None
    if not exact.is_finite() or exact.copy_abs() > _MOST_MONEY:
        raise ValueError(f"{amount!r:.60} is not a sum of money")
    return int((exact * 1_000_000).to_integral_value())


def seconds(span: Span) -> float:
    return span / SECOND


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The year 9999. A moment is shown in any zone, and the clocks of some would show the year 10000 in its last
#: hours.
FAR_MOMENT: Final[Moment] = 253_370_764_800_000_000


def when(moment: Moment) -> datetime:
    return _EPOCH + timedelta(microseconds=moment)


def moment_of(when: datetime) -> Moment:
    return (when - _EPOCH) // timedelta(microseconds=1)


class EndReason(StrEnum):
    """
    Every reason for which a dispatch can end. The runner turns signals and exit codes into one of these.
    """

    COMPLETED = "completed"
    JOB_ERROR = "job_error"  # exit code, exception, a result that is too large, a function that is not there
    UNAVAILABLE = "unavailable"
    WORKER_CRASHED = "worker_crashed"  # a signal, out of memory, no room to log, it could not be started
    LEASE_EXPIRED = "lease_expired"
    HOST_LOST = "host_lost"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    START_TIMEOUT = "start_timeout"
    RELEASED = "released"  # the worker gave the lease back without a result
    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    HARD_CAP_EXCEEDED = "hard_cap_exceeded"
    COST_LIMIT_REACHED = "cost_limit_reached"
    COOPERATIVE_PREEMPTION = "cooperative_preemption"
    PREEMPTION_TIMEOUT = "preemption_timeout"
    GRACEFUL_SHUTDOWN = "graceful_shutdown"
    CANCELED = "canceled"


class Priority:
    """The four named priorities; any integer from 1 to 100 is one."""

    LOW: Final = 25
    NORMAL: Final = 50
    HIGH: Final = 75
    URGENT: Final = 95

    NAMES: Final = {"LOW": LOW, "NORMAL": NORMAL, "HIGH": HIGH, "URGENT": URGENT}
    LEAST: Final = 1
    MOST: Final = 100


def priority_of(word: str | int) -> int:
    """
    The number of a named priority, in upper or lower case; a number stays itself. `check` tests the bounds.
    """
    if isinstance(word, int) and not isinstance(word, bool):
        return word
    try:
        return Priority.NAMES[str(word).upper()]
    except KeyError:
        raise ValueError(
            f"priority must be 1..100 or one of {', '.join(Priority.NAMES)}, not {word!r}"
        ) from None


class Constraint(IntFlag):
    """
    What a job uses heavily: a set in one integer, because an admission class is compared and indexed as a
    whole.
    """

    NONE = 0
    CPU_HEAVY = 1
    DISK_WRITE_HEAVY = 2
    NETWORK_HEAVY = 4

    @property
    def names(self) -> tuple[str, ...]:
        return _CONSTRAINT_NAMES[int(self)]


_CONSTRAINT_NAMES: Final = tuple(
    tuple(str(flag.name).lower() for flag in Constraint if flag and flag.value & bits) for bits in range(8)
)


class RunWhen(StrEnum):
    """In which quiet states of the machine a job may start."""

    ANY = "any"  # in every state but PANIC
    NORMAL = "normal"  # QUIET or NORMAL; HIGH and up also BUSY
    QUIET = "quiet"  # QUIET only, optionally for some time already


def spelled(span: Span, *, nearest: bool = False) -> str:
    """
    For people: whole units, as large as leave a number that says something. `nearest`: of a time to come,
    which would look too short if what is begun did not count: 10 min of delay are not 9 min after a second.
    """
    count = max(0, span) // SECOND
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if count >= 2 * size:
            return f"{(count + size // 2) // size if nearest else count // size} {unit}"
    return f"{count} s"


#: Before the name of a batch: the tag of its jobs, and the tag of its callbacks.
BATCH_TAG: Final = "batch:"
CALLBACK_TAG: Final = "batch-callback:"
#: A tag has at most 64 characters.
MOST_BATCH_NAME: Final = 64 - len(CALLBACK_TAG)
BATCH_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MOST_BATCH_NAME - 1}}}")
BATCH_NAME_WORDS: Final = (
    f"must be 1..{MOST_BATCH_NAME} characters of A-Z a-z 0-9 _ . - and begin with a letter or digit"
)

#: Stands between the id of an array and an index.
SEPARATOR: Final = "_"
#: A fence has fewer digits than this.
_LONG_FENCE: Final = 18


def dispatch_id_of(job_id: JobId, fence: int) -> DispatchId:
    """
    The id of an attempt. The fence is a part of it, so the id of an older attempt never names a newer one.
    """
    return DispatchId(f"{job_id}.{fence}")


def dispatch_parts(dispatch_id: str) -> tuple[str, int]:
    """The job and the fence of a dispatch id. For any other text the fence is -1, which no dispatch has."""
    job_id, _, digits = dispatch_id.rpartition(".")
    fence = int(digits) if digits.isdecimal() and len(digits) < _LONG_FENCE else -1
    return job_id, fence if str(fence) == digits else -1


def member_of(job_id: str) -> tuple[JobId, int] | None:
    """The array and the index of a job that belongs to an array: `X_17`, or `X_17_2` after a retry."""
    array_id, *numbers = job_id.split(SEPARATOR)
    if not numbers or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        return None
    return JobId(array_id), int(numbers[0])
