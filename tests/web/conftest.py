"""
One Chromium, one daemon with jobs in every state, and pages that fail the test when the console complains.

They are there for as long as the tests of this folder run and no longer: Playwright's event loop would be in the way of other tests.
"""

from __future__ import annotations

from itertools import count

import pytest

from penstock import web
from tests.web.web_kit import Tab, alive, chromium, populate, scheduler

sync_api = pytest.importorskip("playwright.sync_api")
ADDONS = count(1)


@pytest.fixture(scope="package")
def browser():
    if not web.complete():
        pytest.skip("the page's libraries are not here: python -m penstock.web.vendor")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def daemon():
    # Its jobs spend 5.50: more than 80 % of the day, and little of the month.
    with scheduler("addons.photos.budget_day=6.5", "addons.photos.budget_month=100") as started:
        started.jobs = populate(started.client)
        with alive(started.client, started.jobs["lease"]):
            yield started


@pytest.fixture
def fresh():
    """A daemon of one's own, for tests that turn everything upside down."""
    with scheduler() as started:
        yield started


@pytest.fixture(scope="package")
def opened(browser, daemon):
    return Tab(browser.new_context(viewport={"width": 1360, "height": 900}), daemon).sign_in()


@pytest.fixture
def tab(opened):
    """The same for all tests that leave things as they are; opening one takes longer than most tests do."""
    opened.open("")
    yield opened
    opened.check()


@pytest.fixture(scope="package")
def worked_at(browser):
    with scheduler() as started:
        yield Tab(browser.new_context(viewport={"width": 1360, "height": 900}), started).sign_in()


@pytest.fixture
def home(worked_at):
    """At a daemon for tests that change things: each has an addon of its own, and leaves nothing paused but that."""
    worked_at.open("")
    worked_at.addon = f"mail{next(ADDONS)}"
    yield worked_at
    worked_at.check()


@pytest.fixture
def tabs(browser):
    """A function: a new browser profile, signed in at this daemon."""
    made = []

    def make(daemon, *, width=1360, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": 900 if width > 500 else 844}, color_scheme=scheme, **options
        )
        made.append(Tab(context, daemon))
        return made[-1]

    yield make
    for one in made:
        one.close()
