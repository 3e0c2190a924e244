from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("apsw")

from http_kit import Place


@pytest.fixture
def place(tmp_path):
    """Nothing is dispatched here by itself: the states stand still to be looked at."""
    made = Place(tmp_path, start=False)
    yield made
    made.close()


@pytest.fixture
def client(place):
    return place.client


@pytest.fixture
def live(tmp_path):
    """With the dispatcher at work."""
    made = Place(tmp_path)
    yield made
    made.close()
