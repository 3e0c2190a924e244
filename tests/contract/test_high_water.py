"""The high-water mark beside a SQLite file: it survives a kill, and a restore can reset it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest

from penstock.stores.sqlite.guard import HighWater, HighWaterMark, mark_file, read_mark, reset_mark


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


def test_a_mark_is_read_as_it_was_set_and_forgotten_by_a_reset(path):
    assert read_mark(path) is None
    with closing(HighWaterMark(path)) as mark:
        assert mark.current() is None
        mark.set(HighWater(7, 1, 2))
        mark.set(HighWater(9, 3, 4))

    assert read_mark(path) == HighWater(9, 3, 4)
    reset_mark(path)
    reset_mark(path)
    assert read_mark(path) is None


def test_a_mark_survives_the_kill_of_its_process(path):
    code = (
        "import os, sys; from pathlib import Path; from penstock.stores.sqlite.guard import HighWater, HighWaterMark\n"
        "mark = HighWaterMark(Path(sys.argv[1])); mark.set(HighWater(41)); mark.set(HighWater(42)); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9

    assert read_mark(path) == HighWater(42)


def test_a_mark_that_was_removed_is_written_again_under_its_name(path):
    with closing(HighWaterMark(path)) as mark:
        mark.set(HighWater(5))
        reset_mark(path)
        mark.secure(HighWater(6))

    assert read_mark(path) == HighWater(6)


def test_a_mark_that_cannot_be_read_counts_as_none(path, caplog):
    mark_file(path).write_bytes(b"rubbish")

    assert read_mark(path) is None
    assert "is damaged" in caplog.text
