"""Text and objects of user code: whatever they are, what comes out can be stored and shown."""

from __future__ import annotations

import json

import pytest
from tests.poison import RAISING, RETURNING

from penstock.core.text import (
    MAX_ERROR,
    error_line,
    error_text,
    is_storable,
    json_text,
    parsed,
    safe_repr,
    safe_str,
    shortened,
    storable,
    storable_json,
)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("plain", "plain"),
        ("é\U0001f600", "é\U0001f600"),
        ("caf\udce9", "caf\ufffd"),
        ("\ud800a\udfff", "\ufffda\ufffd"),
        (b"caf\xe9", "caf\ufffd"),
        ("a\0b", "a\u2400b"),
    ],
)
def test_each_character_that_cannot_be_stored_becomes_a_visible_sign(text, stored):
    assert stored == storable(text)
    assert is_storable(storable(text))


def test_a_long_text_keeps_its_beginning_and_its_end():
    short = shortened("first" + "x" * 1_000_000 + "last", 1_000)

    assert len(short) <= 1_000
    assert short.startswith("first")
    assert short.endswith("last")
    assert "characters left out" in short


@pytest.mark.parametrize("name", RAISING)
def test_every_exception_has_a_text(name):
    try:
        RAISING[name]()
    except BaseException as error:  # that is what they are for
        texts = [error_text(error), error_line(error), safe_str(error), safe_repr(error)]

    assert all(is_storable(text) and len(text) <= MAX_ERROR for text in texts)


def test_every_object_has_a_text():
    for name, returns in RETURNING.items():
        value = returns()
        assert is_storable(safe_repr(value) + safe_str(value)), name


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (r'["\ud83d\ude00", "\\udce9"]', ["\U0001f600", "\\udce9"]),
        (r'["\udce9", "\ud83d"]', ["\ufffd", "\ufffd"]),
        ('["caf\udce9"]', ["caf\ufffd"]),
    ],
)
def test_json_from_outside_keeps_all_but_lone_surrogates(text, stored):
    assert stored == json.loads(storable_json(text))


def test_json_without_lone_surrogates_stays_as_it_was_written():
    text = r'{ "a" : "\ud83d\ude00", "b":1e2 }'

    assert text == storable_json(text)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_number_is_refused_by_name(word):
    with pytest.raises(ValueError, match=f"it holds {word}: JSON has no NaN"):
        parsed(f"[{word}]")
    with pytest.raises(ValueError, match=r"the result holds -?(NaN|infinity) at \[0\]"):
        json_text([float(word)])
