"""Bugs in what explain says of a job."""

from __future__ import annotations

from tests.mutants.planting import Mutant

_TABLE = ("tests/scheduler/test_situations.py::test_every_situation_is_told_in_words_and_as_json",)

MUTANTS = [
    Mutant(
        "explain: only the first gate is named",
        "penstock/core/jobs/refusals.py",
        "_refusals",
        "        world = _without(world, reason, admission_class)",
        "        world = None",
        _TABLE,
    ),
    Mutant(
        "explain: a pause of everything hides the pause of an addon",
        "penstock/core/jobs/refusals.py",
        "_without",
        "paused=account.paused and addon_id != scope",
        "paused=False",
        _TABLE,
    ),
    Mutant(
        "explain: a job that cannot start is named as ahead",
        "penstock/core/jobs/forecast.py",
        "_ahead",
        "        and _needs_units_alone(inputs, line, head)\n",
        "",
        _TABLE,
    ),
    Mutant(
        "explain: a job that no worker takes up is named as ahead",
        "penstock/core/jobs/forecast.py",
        "_needs_units_alone",
        "if late and not inputs.take_place(line.admission_class):",
        "if False:",
        _TABLE,
    ),
    Mutant(
        "explain: a higher priority is offered though it changes nothing",
        "penstock/core/jobs/explain.py",
        "_way_out",
        "(findings.preemption is not None or not findings.priority_helps)",
        "False",
        _TABLE,
    ),
    Mutant(
        "explain: the delay before a retry is taken for an earliest start",
        "penstock/core/jobs/explain.py",
        "_way_out",
        "reason is None or (retried and isinstance(reason, NotReady))",
        "reason is None",
        _TABLE,
    ),
    Mutant(
        "explain: attempts are counted over all kinds of failures",
        "penstock/core/jobs/standing.py",
        "last_failure",
        "getattr(job.counters, category) or 1",
        "job.fence",
        ("tests/core/test_explain.py",),
    ),
    Mutant(
        "explain: a worker that has gone counts as never seen",
        "penstock/scheduler/dispatcher.py",
        "PullingWorkers._remember_gone",
        "            self._gone |= {kinds: until for kinds, until in workers.items() if until <= now}",
        "            pass",
        _TABLE,
    ),
    Mutant(
        "explain: another addon's job is named as the one that units are kept for",
        "penstock/core/jobs/reasons.py",
        "UnitsKept.hidden",
        "return replace(self, kept_for=hides.job(self.kept_for))",
        "return self",
        ("tests/core/test_admission.py",),
    ),
    Mutant(
        "explain: known types of other addons are named",
        "penstock/scheduler/dispatcher.py",
        "PullingWorkers.types_asked_for",
        "if addon_id is None or kinds.addon_id == addon_id",
        "if True",
        ("tests/scheduler/test_explain.py",),
    ),
    Mutant(
        "explain: jobs of other addons are named as holders",
        "penstock/core/jobs/explain.py",
        "Findings.seen_by",
        "            holders=tuple(map(viewer.job, self.holders)),\n",
        "",
        ("tests/scheduler/test_explain.py",),
    ),
    Mutant(
        "explain: a wait ends with the next event of any kind",
        "penstock/core/jobs/waits.py",
        "_begun_by",
        '        case kind if kind in _OVER:\n            return [_Part(event.at, "")]\n        case _:\n            return []',
        '        case _:\n            return [_Part(event.at, "")]',
        ("tests/core/test_waits.py",),
    ),
    Mutant(
        "explain: a delay that an event cut short counts in full",
        "penstock/core/jobs/waits.py",
        "waits_of",
        "max(0, min(following.at, now) - part.at)",
        "max(0, now - part.at)",
        ("tests/core/test_waits.py",),
    ),
    Mutant(
        "lists: an old denial is shown while a job waits for its time",
        "penstock/core/jobs/standing.py",
        "recorded_reason",
        "job.denied not in REASONS or job.ready_at > now",
        "job.denied not in REASONS",
        ("tests/core/test_waits.py",),
    ),
]
