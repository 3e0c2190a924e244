"""The rules of arrays, by example and beside a plain model."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import IllegalMove
from penstock.core.jobs.arrays import (
    CHUNK,
    MOST_INDICES,
    WINDOW,
    ArrayProgress,
    JobArray,
    advance,
    array_of,
    cancel_array,
    chunks_of,
    indices_in,
    member_id,
    none_again,
    parse_array,
    ranges_in,
    ranges_of,
    retry_array,
    submit_array,
)
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import member_of
from penstock.stores.memory.groups import MemoryIndices

DONE, FAILED, CANCELED = JobState.DONE, JobState.FAILED, JobState.CANCELED


@pytest.mark.parametrize(
    ("text", "canonical", "total", "at_once"),
    [
        ("1-1000%8", "1-1000%8", 1_000, 8),
        ("5", "5", 1, None),
        ("7-9, 0,5", "0,5,7-9", 5, None),
        ("1-3,4-6", "1-6", 6, None),
        ("0-0%1", "0%1", 1, 1),
        (f"1-{MOST_INDICES}", f"1-{MOST_INDICES}", MOST_INDICES, None),
    ],
)
def test_a_spec_has_one_form(text, canonical, total, at_once):
    spec = parse_array(text)

    assert (str(spec), spec.total, spec.at_once) == (canonical, total, at_once)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be indices such as 1-1000"),
        ("1-", "must be indices such as"),
        ("a-b", "must be indices such as"),
        ("-3-5", "must be indices such as"),
        ("1-1000000000", "has index 1000000000; the largest is"),
        (f"0-{MOST_INDICES}", "at most 1,000,000 are allowed"),
        ("9-1", "has the reversed range 9-1: write 1-9"),
        ("1-5,3-9", "has 1-5 and 3-9, which overlap"),
        ("1-5%0", "behind %"),
        ("1-5%", "behind %"),
        ("1-5%x", "behind %"),
        ("1-5%-1", "behind %"),
        (",".join(str(2 * n) for n in range(1_001)), "at most 1000 ranges"),
        ("99999999999", "must be indices such as"),
        ("1%99999999999999999999", "behind %"),
    ],
)
def test_a_bad_spec_is_refused_by_name(text, words):
    with pytest.raises(ValueError, match=words):
        parse_array(text)


def test_a_program_gives_indices_as_numbers():
    assert str(array_of(range(1, 1_001), 8)) == "1-1000%8"
    assert str(array_of([3, 1, 2, 9])) == "1-3,9"
    with pytest.raises(ValueError, match="at least one index"):
        array_of(range(0))
    with pytest.raises(ValueError, match="at_once"):
        array_of([1], 0)
    with pytest.raises(ValueError, match="at_once"):
        array_of([1], "2")
    with pytest.raises(ValueError, match="must be indices"):
        array_of([-1])
    with pytest.raises(ValueError, match="has index 1 twice"):
        array_of([1, 2, 1])
    with pytest.raises(ValueError, match="whole numbers such as range"):
        array_of("1-3")
    with pytest.raises(ValueError, match="more than 1,000,000"):
        array_of(count())
    with pytest.raises(ValueError, match="more than 1,000,000"):
        array_of(range(0, 10**9, 2))


def test_the_job_of_an_index_names_its_array():
    assert member_of(member_id("01a1-e14", 17)) == ("01a1-e14", 17)
    assert member_of("01a1-e14") is None
    assert member_of(member_id("01a1-e14", 17, 3)) == ("01a1-e14", 17)
    assert member_of("01a1_x") is None


@settings(deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 60), st.integers(1, 60))
def test_positions_and_indices_are_the_same_order(indices, position, size):
    spec = array_of(indices)

    assert spec.slice(position, size) == sorted(indices)[position : position + size]
    assert all(index in spec for index in indices)
    assert [spec.position(index) for index in sorted(indices)] == list(range(len(indices)))
    assert 61 not in spec
    assert ",".join(map(str, ranges_of(indices))) == str(spec)


def test_without_a_limit_a_window_of_jobs_exists_at_once():
    progress, made, _ = ArrayProgress().make(parse_array("1-1000"), none_again)

    assert (len(made), progress.waiting(parse_array("1-1000"))) == (WINDOW, 1_000 - WINDOW)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 20), st.sampled_from([DONE, FAILED, CANCELED])),
        st.tuples(st.just("retry"), st.just(0), st.just(DONE)),
        st.tuples(st.just("cancel"), st.just(0), st.just(DONE)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.sets(st.integers(0, 30), min_size=1), st.sampled_from([None, 1, 2, 8]), STEPS)
def test_an_array_does_what_a_plain_model_does(indices, at_once, steps):
    """The model: a list of jobs to run, the jobs that run, and how each index ended."""
    most = at_once or WINDOW
    array = JobArray("x", str(array_of(indices, at_once)), Intent("a", "t"), 0)
    again, fresh, live, ends, stopped = [], sorted(indices), {}, {}, False
    change, stored = submit_array(array), MemoryIndices()
    made = list(change.jobs)
    for what, number, state in [("nothing", 0, DONE), *steps]:
        record = change.record
        if what == "end" and live:
            index = sorted(live)[number % len(live)]
            ends[index] = state
            change = advance(record, {live.pop(index): state}, 1, stored.first_again) or change
            stored.change(change)
            made = change.jobs
        elif what == "retry":
            failed = sorted(index for index, ended in ends.items() if ended is FAILED)
            if stopped or not failed:
                with pytest.raises(IllegalMove):
                    retry_array(record)
                continue
            for index in failed:
                del ends[index]
            again = sorted([*again, *failed])
            change = retry_array(record)
            stored.change(change)
            change = advance(change.record, {}, 1, stored.first_again) or change
            stored.change(change)
            made = change.jobs
        elif what == "cancel":
            cancel = cancel_array(record, 1)
            assert (cancel is None) == (stopped or record.state is not JobState.RUNNING)
            if cancel is None:
                continue
            stopped = True
            ends |= dict.fromkeys([*again, *fresh], CANCELED)
            again, fresh = [], []
            change, made = cancel, cancel.jobs
        elif what == "end":
            continue
        while (again or fresh) and len(live) < most:
            index = again.pop(0) if again else fresh.pop(0)
            live[index] = made.pop(0)
            assert member_of(live[index]) == ("x", index)
        assert not made
        record = change.record
        progress, counts = record.progress, Counter(ends.values())
        assert (progress.done, progress.failed, progress.canceled) == (
            counts[DONE],
            counts[FAILED],
            counts[CANCELED],
        )
        assert indices_in(stored.failed) == sorted(i for i, e in ends.items() if e is FAILED)
        assert sorted(record.live_jobs()) == sorted(live.values())
        expected = (
            CANCELED if stopped else FAILED if counts[FAILED] else CANCELED if counts[CANCELED] else DONE
        )
        assert record.state is (JobState.RUNNING if live or again or fresh else expected)
        assert (progress.ended_at is None) == (record.state is JobState.RUNNING)


def test_each_job_of_an_index_has_an_id_of_its_own_also_after_a_retry():
    first = submit_array(JobArray("x", "1-2", Intent("a", "t"), 0))
    failed = advance(first.record, {"x_1": FAILED, "x_2": DONE}, 1, none_again)
    again = advance(retry_array(failed.record).record, {}, 2, lambda chunk, size: [1])

    assert (list(first.jobs), list(again.jobs)) == (["x_1", "x_2"], ["x_1_2"])
    assert failed.record.state is FAILED
    assert advance(again.record, {"x_1_2": DONE}, 3, none_again).record.state is DONE


def test_a_second_look_at_the_same_ends_changes_nothing():
    first = submit_array(JobArray("x", "1-9%2", Intent("a", "t"), 0))
    after = advance(first.record, {"x_1": DONE}, 1, none_again)

    assert list(after.jobs) == ["x_3"]
    assert advance(after.record, {"x_1": DONE, "x_2": JobState.RUNNING}, 2, none_again) is None


@settings(deadline=None)
@given(st.sets(st.integers(0, 200)))
def test_indices_in_chunks_are_the_same_indices(indices):
    chunks = chunks_of(indices)

    assert [chunk.number for chunk in chunks] == sorted({index // CHUNK for index in indices})
    assert indices_in(chunks) == sorted(indices)
    assert tuple(ranges_in(chunks)) == ranges_of(indices)
