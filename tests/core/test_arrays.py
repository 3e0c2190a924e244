"""The rules of arrays, by example and beside a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.jobs.arrays import (
    MOST_INDICES,
    WINDOW,
    ArrayProgress,
    array_of,
    member_id,
    member_of,
    parse_array,
    ranges_text,
)
from penstock.core.jobs.states import JobState

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
        ("1-1000000000", "at most"),
        (f"0-{MOST_INDICES}", "at most 1,000,000 are allowed"),
        ("9-1", "reversed: write 1-9"),
        ("1-5,3-9", "1-5 and 3-9 overlap"),
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
    with pytest.raises(ValueError, match="must be indices"):
        array_of([-1])


def test_the_job_of_an_index_names_its_array():
    assert member_of(member_id("01a1-e14", 17)) == ("01a1-e14", 17)
    assert member_of("01a1-e14") is None
    assert member_of("01a1_x") is None


@given(st.sets(st.integers(0, 60), min_size=1))
def test_positions_and_indices_are_the_same_order(indices):
    spec = array_of(indices)

    assert [spec.index_at(position) for position in range(spec.total)] == sorted(indices)
    assert [spec.position_of(index) for index in sorted(indices)] == list(range(len(indices)))
    assert spec.position_of(61) is None
    assert ranges_text(indices) == str(spec)


def test_without_a_limit_a_window_of_jobs_exists_at_once():
    progress, indices = ArrayProgress().make(parse_array("1-1000"), [])

    assert (len(indices), progress.waiting(parse_array("1-1000"))) == (WINDOW, 1_000 - WINDOW)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 20), st.sampled_from([DONE, FAILED, CANCELED])),
        st.tuples(st.just("retry"), st.just(0), st.just(DONE)),
        st.tuples(st.just("cancel"), st.just(0), st.just(DONE)),
    ),
    max_size=60,
)


@given(st.sets(st.integers(0, 30), min_size=1), st.sampled_from([None, 1, 2, 8]), STEPS)
def test_an_array_does_what_a_plain_model_does(indices, at_once, steps):
    spec = array_of(indices, at_once)
    queue, live, states, stopped = sorted(indices), [], {}, False

    def make(progress):
        nonlocal queue
        progress, made = progress.make(spec, [index for index in queue if index in again])
        expected = queue[: (at_once or WINDOW) - len(live)] if len(live) < (at_once or WINDOW) else []
        assert made == expected
        queue = queue[len(made) :]
        live.extend(made)
        return progress

    again: set[int] = set()
    progress = make(ArrayProgress())
    for what, number, state in steps:
        if what == "end" and live:
            index = live.pop(number % len(live))
            states[index] = state
            again.discard(index)
            progress = progress.ended(index, state)
        elif what == "retry" and not stopped:
            failed = sorted(index for index, ended in states.items() if ended is FAILED)
            for index in failed:
                del states[index]
            waiting = [index for index in queue if index in again]
            queue = sorted({*waiting, *failed}) + [index for index in queue if index not in again]
            again |= set(failed)
            progress = progress.retried()
        elif what == "cancel" and not stopped:
            stopped = True
            states |= dict.fromkeys(queue, CANCELED)
            queue, again = [], again & set(live)
            progress = progress.canceled_whole(spec)
        again &= set(queue)
        progress = make(progress)
        counts = [list(states.values()).count(each) for each in (DONE, FAILED, CANCELED)]
        assert [progress.done, progress.failed, progress.canceled] == counts
        assert sorted(progress.live) == sorted(live)
        assert len(live) <= (at_once or WINDOW)
        ended = None if live or queue else FAILED if counts[1] else CANCELED if counts[2] or stopped else DONE
        assert progress.outcome(spec) is ended
