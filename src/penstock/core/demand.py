"""
All that admission looks at, besides the moment.

Two jobs with the same demand get the same decision at the same moment. That is what lets a tick look at the head
of each line and at nothing behind it, so whatever admission comes to depend on must become a field here.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from penstock.core.intent import Intent
from penstock.core.words import SECOND, AddonId, Constraint, Priority, RunWhen, Span

__all__ = ["AdmissionClass", "admission_class_of"]


@dataclass(frozen=True, slots=True)
class AdmissionClass:
    addon_id: AddonId
    job_type: str
    cost_units: int
    constraints: Constraint = Constraint.NONE
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: int = 0
    #: HIGH and up may start on a BUSY machine.
    high: bool = False
    #: Twice as long, one class more: only like durations share a line, so that a long job at the head of it does
    #: not hide the short one behind it that could have slipped past kept room. 0: nobody said.
    duration_class: int = 0
    #: In alphabetical order.
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        *parts, labels = astuple(self)
        words = [str(int(part) if isinstance(part, int) else part) for part in parts]
        return "\x1f".join([*words, " ".join(labels)] if labels else words)

    @property
    def longest(self) -> Span | None:
        """An upper bound for every job of this class."""
        return (1 << self.duration_class) * SECOND if self.duration_class else None


def admission_class_of(intent: Intent, priority: int | None = None) -> AdmissionClass:
    """`priority` when it has been edited since."""
    expected = intent.expected_duration_sec
    return AdmissionClass(
        addon_id=intent.addon_id,
        job_type=intent.job_type,
        cost_units=intent.cost_units,
        constraints=Constraint(intent.constraints),
        run_when=RunWhen(intent.run_when),
        quiet_for_sec=intent.quiet_for_sec,
        high=(intent.priority if priority is None else priority) >= Priority.HIGH,
        duration_class=0 if expected is None else max(1, (int(-(-expected // 1)) - 1).bit_length()),
        labels=tuple(sorted(intent.labels)) if intent.labels else (),
    )
