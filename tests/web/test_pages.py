"""Every page in a real browser: it loads, it is live, everything has a name, and what users wrote stays text."""

from __future__ import annotations

import re
from pathlib import Path

import axe_playwright_python
import pytest

from penstock import Client
from tests import ROOT
from tests.waiting import until
from tests.web.web_kit import MARK

PAGES = {
    "overview": ("", "Jobs by state"),
    "jobs": ("jobs", "photos"),
    "job": ("jobs/{done}", "Request"),
    "command": ("jobs/{command}", "Output"),
    "schedules": ("schedules", "nightly"),
    "arrays": ("arrays", "0 of 100 done"),
    "batches": ("batches", "0 of 3 done"),
    "batch": ("batches/nightly", "When all have ended"),
    "machine": ("machine", "Units by job"),
    "addons": ("addons", "photos"),
    "pools": ("pools", "encode"),
    "workers": ("workers", "thumbnail"),
    "alerts": ("alerts", "What happened"),
}
SHOTS = ROOT / "build" / "screenshots"


def address(name, daemon):
    path, _ = PAGES[name]
    return path.format(**daemon.jobs)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_a_word_from_the_console(tab, daemon, name):
    tab.open(address(name, daemon))

    assert tab.shows(PAGES[name][1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 390])
def test_every_page_fits_wide_and_narrow_and_is_kept_as_a_picture(tabs, daemon, scheme, width):
    tab = tabs(daemon, width=width, scheme=scheme).sign_in()
    SHOTS.mkdir(parents=True, exist_ok=True)
    too_wide = []

    for name in PAGES:
        tab.open(address(name, daemon))
        tab.shows(PAGES[name][1])
        if tab.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(name)
        tab.picture(SHOTS / f"{name}-{scheme}-{width}.png")

    assert too_wide == []


AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_on_any_page(tabs, daemon, scheme):
    tab = tabs(daemon, scheme=scheme).sign_in()
    violations = []

    for name in PAGES:
        tab.open(address(name, daemon))
        tab.shows(PAGES[name][1])
        tab.page.evaluate(AXE)
        found = tab.page.evaluate("rules => axe.run({ runOnly: rules })", RULES)["violations"]
        violations += [(name, each["id"], node["html"][:150]) for each in found for node in each["nodes"]]

    assert not violations, "\n".join(map(str, violations))


def test_dark_and_light_follow_the_system_and_the_key_turns_it_round(tabs, daemon):
    tab = tabs(daemon, scheme="dark").sign_in()

    def light():
        colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[4:-1].split(","))) > 3 * 128

    was = light()
    tab.page.keyboard.press("t")
    turned = light()
    tab.page.reload()
    tab.live()

    assert (was, turned, light()) == (False, True, True)


NAMELESS = """() => [...document.querySelectorAll("a, button, input, select, [role=img], [role=dialog], dialog")].filter((one) => {
  const label = one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.labels?.[0]?.innerText || one.innerText;
  return !label?.trim();
}).map((one) => one.outerHTML)"""


@pytest.mark.parametrize("name", PAGES)
def test_everything_that_can_be_used_has_a_name(tab, daemon, name):
    page = tab.open(address(name, daemon))
    tab.shows(PAGES[name][1])

    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("document.querySelectorAll('main').length") == 1
    assert page.evaluate("document.querySelectorAll('nav[aria-label]').length") == 1
    assert page.evaluate("document.documentElement.lang") == "en"


#: What a reader may do: look, search, keep a copy.
READERS_MAY = (
    r"\? Keys|t Dark or light|15 min|1 h|6 h|24 h|7 days|Download|Close|More|[A-Z]+ [\d,.k]+|Sign out"
)
CONTROLS = """() => [...document.querySelectorAll("button, input, select, textarea")].filter((one) => one.checkVisibility())
    .map((one) => one.innerText?.trim() || one.getAttribute("aria-label") || one.outerHTML)"""
READERS_FIELDS = {
    "Search in ids, names, arguments, tags and errors",
    "Addon",
    "Job type",
    "Search in the output",
}


def test_a_session_that_may_not_write_sees_no_control_that_writes(tabs, daemon):
    tab = tabs(daemon)
    tab.page.goto(daemon.client.login(read_only=True).url)
    tab.live()
    tab.until("document.documentElement.hasAttribute('data-read-only')")
    writing = []

    for name in PAGES:
        tab.open(address(name, daemon))
        tab.shows(PAGES[name][1])
        writing += [
            (name, words)
            for words in tab.page.evaluate(CONTROLS)
            if not re.fullmatch(READERS_MAY, " ".join(words.split())) and words not in READERS_FIELDS
        ]

    assert writing == []


def test_a_session_sees_the_controls_of_its_own_rights_alone(tabs, daemon):
    made = daemon.client.make_token("canceler", ["jobs:read", "jobs:cancel", "admin:tokens"])
    with Client(daemon.url, token=made.secret) as client:
        tab = tabs(daemon)
        tab.page.goto(client.login().url)
        tab.live()
        tab.until("document.documentElement.dataset.may === 'cancel'")
        tab.open(f"jobs/{daemon.jobs['blocked']}")
        tab.shows("Request")
        of_job = tab.page.evaluate(CONTROLS)
        tab.open("machine")
        tab.shows("Units by job")
        of_machine = tab.page.evaluate(CONTROLS)

    assert "Cancel" in of_job
    assert not {"Retry", "Run again…"} & set(of_job)
    assert "Pause everything" not in of_machine


@pytest.mark.parametrize("name", ["jobs", "job", "command", "machine", "addons", "pools"])
def test_html_from_users_stays_text(tab, daemon, name):
    page = tab.open(address(name, daemon))
    tab.shows(PAGES[name][1])
    if name in ("job", "command", "machine", "pools"):
        tab.shows(MARK)

    assert (
        page.evaluate("document.querySelectorAll('#planted, img[src=x], main script, svg[onload]').length")
        == 0
    )
    assert page.evaluate("window.pwned") is None


def test_an_addon_shows_what_it_spent_of_its_budgets_and_amber_from_eighty_per_cent(tab):
    page = tab.open("addons")
    bars = {
        words: page.get_by_role("img", name=words).locator("span").get_attribute("data-tone")
        for words in ("photos spent 5.50 of 6.50 this day", "photos spent 5.50 of 100.00 this month")
    }

    assert list(bars.values()) == ["warn", "good"]


def test_a_jobs_page_has_all_of_its_story(tab, daemon):
    page = tab.open(f"jobs/{daemon.jobs['done']}")
    tab.shows("submitted")
    titles = page.locator("main h2, main h3").all_inner_texts()

    assert titles == [
        "Why", "Timeline", "Request", "Payload", "Result", "Value", "Checkpoint", "Attempts (1)", "Events",
    ]  # fmt: skip
    assert tab.shows("DONE ")
    assert page.locator("main table tbody tr").count() == 1


def test_what_failed_shows_why(tab, daemon):
    tab.open(f"jobs/{daemon.jobs['failed']}")

    assert tab.shows("Traceback: <img src=x onerror=\"window.pwned='img'")
    assert tab.shows(MARK)


def test_output_comes_without_the_control_codes_of_a_terminal(tab, daemon):
    page = tab.open(f"jobs/{daemon.jobs['command']}")
    tab.shows("oops", "pre.log")

    assert page.inner_text("pre.log").split("\n")[:2] == ["red", MARK]
    assert page.inner_text("pre.log [data-stream=stderr]") == "oops\n"
    assert "99 %" in page.inner_text("pre.log")
    assert "10 %" not in page.inner_text("pre.log")


def test_a_jobs_page_draws_the_jobs_before_and_after_it(tab, daemon):
    client = daemon.client
    parent = client.submit("family", "nobody").job_id
    middle = client.submit("family", "nobody", after=(parent,)).job_id
    children = [client.submit("family", "nobody", after=(f"{middle}:done",)).job_id for _ in range(10)]

    page = tab.open(f"jobs/{middle}")
    assert tab.shows("and 2 more")

    hrefs = page.locator("main svg a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert f"#/jobs/{parent}" in hrefs
    assert sum(f"#/jobs/{child}" in hrefs for child in children) == 8
    client.cancel(parent)


def test_output_is_shown_while_the_job_still_runs(tab, daemon, tmp_path):
    go_on = tmp_path / "go on"
    script = f"echo first; until [ -e '{go_on}' ]; do sleep 0.05; done; echo second"
    job = daemon.client.submit("me", "penstock.shell", {"script": script}, cost_units=1)
    tab.open(f"jobs/{job.job_id}")
    tab.shows("first", "pre.log")
    before = daemon.client.job(job.job_id).state
    go_on.touch()

    assert before == "RUNNING"
    assert tab.shows("second", "pre.log")
    assert tab.shows("DONE", ".jobhead")


def test_the_machine_shows_what_was_learned_about_job_types(tab, daemon):
    until(daemon.client.types, what="the learner")
    learned = next(one for one in daemon.client.types() if one.attempts)
    page = tab.open("machine")
    tab.shows("In range")

    row = page.locator("tr", has=page.locator("[data-label='In range']"), has_text=learned.job_type).first
    assert learned.addon_id in row.inner_text()
