"""
The types of the dispatch queue: tickets, their stages, the limits, and the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple


class Policy(StrEnum):
    """What a full queue does with a new call."""

    BLOCK = "block"
    REJECT = "reject"
    DROP_LATEST = "drop-latest"
    DROP_OLDEST = "drop-oldest"


class CancelPhase(StrEnum):
    """Where a call was when it was canceled."""

    WAITING = "waiting"
    QUEUED = "queued"
    IN_FLIGHT = "in-flight"


class Stage(Enum):
    NEW = 0
    WAITING = 1  # its caller is paused; the queue holds no payload
    RESERVED = 2  # it has a place; its caller makes the payload now
    PENDING = 3  # accepted, not started
    IN_FLIGHT = 4  # given to a worker
    ENDING = 5  # its caller was released; its run still has its slot
    SETTLED = 6


class EnterResult(Enum):
    ACCEPTED = 0
    RESERVED = 1
    WAIT = 2
    REFUSED = 3
    CLOSED = 4


# Module constants, because reading a member of an Enum takes longer than the rest of `take`.
NEW: Final = Stage.NEW
WAITING: Final = Stage.WAITING
RESERVED: Final = Stage.RESERVED
PENDING: Final = Stage.PENDING
IN_FLIGHT: Final = Stage.IN_FLIGHT
ENDING: Final = Stage.ENDING
SETTLED: Final = Stage.SETTLED

ACCEPTED: Final = EnterResult.ACCEPTED
WAIT: Final = EnterResult.WAIT
REFUSED: Final = EnterResult.REFUSED
CLOSED: Final = EnterResult.CLOSED


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of a queue, checked when they are made."""

    max_in_flight: int
    max_queue_depth: float = math.inf
    policy: Policy = Policy.BLOCK
    max_attempts: int = 3
    requeue_to_front: bool = True

    def __post_init__(self) -> None:
        check_count("max_in_flight", self.max_in_flight, least=1)
        if self.max_queue_depth != math.inf:
            check_count(
                "max_queue_depth", self.max_queue_depth, least=0, or_else=", or math.inf for no bound"
            )
        check_count("max_attempts", self.max_attempts, least=1)
        try:
            # Convert a plain string to the member, because the queue compares with `is`.
            object.__setattr__(self, "policy", Policy(self.policy))
        except ValueError:
            names = ", ".join(repr(str(policy)) for policy in Policy)
            raise ValueError(f"policy is {self.policy!r}; it must be one of {names}") from None


def check_count(name: str, value: float, *, least: int, or_else: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}{or_else}")


class QueueState(NamedTuple):
    """
    The state of a queue. A tuple, because hooks may need one at every change and a frozen dataclass takes
    four times as long to make.
    """

    in_flight: int
    pending: int
    waiting: int
    reserved: int
    max_in_flight: int
    max_queue_depth: float
    policy: Policy
    paused: bool
    disposed: bool

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.pending or self.waiting or self.reserved)


class Ticket:
    """
    One call in the queue. Subclasses add fields.

    `dispatch` is the number of one attempt and is never reused: a completion with another number is stale
    (DQ-7). `attempt` counts dispatches; `crashes` counts the workers that died *running* this call. A call
    that only waited in the pipe of a dead worker did not cause its crash.
    """

    # Slots, because each attribute is written several times: with class attributes as defaults a ticket is
    # made in half the time, but its way through the queue takes twice as long.
    __slots__ = (
        "attempt", "called_at", "crashes", "dispatch", "eager", "entered_at", "last_wait", "pending_for", "serial", "stage",
        "waiting_for",
    )  # fmt: skip

    #: The caller makes the payload as soon as it has its place. Calls behind it wait for that, so that calls
    #: keep the order of their callers. Not in slots: few tickets set it.
    in_turn: bool = False

    def __init__(self) -> None:
        self.stage: Stage = NEW
        # The payload exists: if the call must wait, it enters by itself when there is room.
        self.eager = False
        self.serial = 0  # the order of acceptance
        self.dispatch = 0
        self.attempt = 0
        self.crashes = 0
        self.called_at = 0.0
        self.entered_at = 0.0  # when it last became pending
        # Seconds before acceptance, including the time in which its caller made the payload.
        self.waiting_for = 0.0
        self.pending_for = 0.0  # seconds from acceptance to dispatch, over all attempts
        self.last_wait = 0.0  # how long its latest dispatch had waited

    @property
    def waited(self) -> float:
        return self.waiting_for + self.pending_for
