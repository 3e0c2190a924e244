from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("apsw")

from http_kit import ServerKit


@pytest.fixture
def kit(tmp_path):
    """Nothing is dispatched here by itself: the states stand still to be looked at."""
    made = ServerKit(tmp_path, start=False)
    yield made
    made.close()


@pytest.fixture
def client(kit):
    return kit.client


@pytest.fixture
def live(tmp_path):
    """With the dispatcher at work."""
    made = ServerKit(tmp_path)
    yield made
    made.close()
