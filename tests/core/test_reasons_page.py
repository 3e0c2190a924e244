"""`docs/reasons.md` has every reason with its words and its way out, as the code makes them."""

from __future__ import annotations

from tests import ROOT

from penstock.core.jobs.load import QuietState
from penstock.core.jobs.reasons import (
    REASONS,
    BudgetSpent,
    CapReached,
    Draining,
    LabelMissing,
    NotEnoughUnits,
    NotQuiet,
    NotQuietLongEnough,
    NotReady,
    Paused,
    QueuedAhead,
    UnitsKept,
    WaitsForParents,
)
from penstock.core.jobs.types import HOUR, MINUTE, SECOND
from penstock.core.jobs.waits import PARTS
from penstock.core.jobs.worker_reasons import (
    AwaitsWorker,
    NoFunction,
    NotDispatched,
    NoWorkerSeen,
    RunnerDisabled,
    WorkerElsewhere,
    WorkerGone,
    WorkersFull,
)

NOW = 1_900_000_000 * SECOND
JOB = "0b48c001"
EXAMPLES = [
    WaitsForParents(("01900000-0000-7000-8000-00005d2f10aa",), ("ok",), ("FAILED",), 1),
    LabelMissing(("gpu",), ("render-1",)),
    Draining("local"),
    Paused("photos"),
    NotReady(NOW + 10 * MINUTE),
    NotQuiet(QuietState.BUSY, QuietState.NORMAL, 6.2, "cpu"),
    NotQuietLongEnough(12.0, 600),
    CapReached("addon", "photos", 2),
    BudgetSpent("day", 5_100_000, 5_000_000, NOW + 6 * HOUR, "photos"),
    NotEnoughUnits(30, 12, 90, NOW + 19 * SECOND),
    UnitsKept("0190-7c3e-5d2f10aa", 60, NOW + 40 * SECOND),
    QueuedAhead("0190-7c3e-5d2f10aa", 75),
    AwaitsWorker(NOW - 2 * SECOND),
    WorkerElsewhere(("render-1",), 2),
    WorkersFull("w1", 4),
    NoWorkerSeen("thumnail", ("resize", "thumbnail")),
    WorkerGone(NOW - 5 * MINUTE, 2),
    RunnerDisabled("local"),
    NotDispatched("jobs.db"),
    NoFunction("thumnail", ("thumbnail",)),
]


def rows() -> str:
    return "\n".join(
        f"| `{reason.code}` | {reason.words(NOW)} | {reason.short(NOW)} | {reason.next_step()} | {way_out(reason)} |"
        for reason in EXAMPLES
    )


def way_out(reason) -> str:
    return f"`{reason.way_out(JOB)}`"


def waits() -> str:
    named = {code: kind.waited for code, kind in REASONS.items()} | PARTS
    return "\n".join(f"| `{code}` | {words} |" for code, words in named.items())


def test_every_reason_has_an_example_on_the_page():
    assert [example.code for example in EXAMPLES] == list(dict.fromkeys(example.code for example in EXAMPLES))
    assert {example.code for example in EXAMPLES} == set(REASONS)


def test_the_page_has_the_words_of_the_code():
    page = (ROOT / "docs" / "reasons.md").read_text("utf-8")

    assert rows() in page, f"docs/reasons.md needs these rows:\n{rows()}"
    assert waits() in page, f"docs/reasons.md needs these rows:\n{waits()}"
