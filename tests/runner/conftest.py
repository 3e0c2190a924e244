"""Nothing that a runner starts is left behind after any test."""

from __future__ import annotations

import pytest

pytest.importorskip("apsw")

from tests.waiting import until

from .plant import Plant


@pytest.fixture
def plants(tmp_path):
    """To make one or more, one after the other; the last is stopped."""
    made = []

    def make(**more):
        made.append(Plant(tmp_path / "data", **more))
        return made[-1]

    (tmp_path / "data").mkdir()
    yield make
    made[-1].stop()
    until(lambda: not made[-1].ours(), what="the end of all processes")


@pytest.fixture
def plant(plants):
    return plants()
