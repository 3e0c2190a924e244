"""What somebody does with the page: look for jobs, change them, use the keyboard, sign in, keep it open over a restart."""

from __future__ import annotations

import hashlib
import hmac
import re
import signal
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.client.client import job_of
from tests.waiting import until
from tests.web.web_kit import Tab


def queued(tab, number=1, **fields):
    """Jobs that nobody takes."""
    addon = getattr(tab, "addon", "mail")
    return [tab.daemon.client.submit(addon, "send", {"n": n}, **fields).job_id for n in range(number)]


def running(tab):
    queued(tab)
    return tab.daemon.client.claim(addon_id=tab.addon, wait_sec=30).jobs[0]


def rows(tab):
    return tab.page.locator("tbody tr").count()


# live


def test_an_empty_scheduler_says_so_on_every_page(fresh, tabs):
    tab = tabs(fresh).sign_in()
    for path, words in [
        ("", "No jobs yet"),
        ("jobs", "No jobs yet"),
        ("machine", "Nothing is in flight"),
        ("addons", "No addon has submitted anything yet"),
        ("pools", "No program is attached"),
        ("schedules", "No schedules."),
        ("arrays", "No arrays."),
        ("batches", "No batches."),
    ]:
        tab.open(path)

        assert tab.shows(words)


def test_a_worker_that_waits_for_a_job_is_on_the_page_of_workers(home):
    client = home.daemon.client
    claim = threading.Thread(
        target=lambda: client.claim(worker="patient", addon_id=home.addon, limit=3, wait_sec=60)
    )
    claim.start()

    def shown():
        home.open("workers")
        return home.page.get_by_text("patient").count()

    until(shown)
    assert home.shows(f"3 more: of {home.addon}")
    queued(home)  # ends the wait
    claim.join()


def test_what_happens_elsewhere_shows_without_a_reload(home):
    home.page.evaluate("window.same = true")
    home.open(f"jobs?addon={home.addon}")
    home.shows("No matching jobs")
    [job] = queued(home)
    home.shows(job[-8:])
    home.daemon.client.cancel(job)
    home.shows("CANCELED", "tbody")
    home.open("")

    assert home.shows("canceled", ".activity")
    assert home.shows(f"{home.addon} · send", ".activity")
    assert home.page.evaluate("window.same")


def test_a_running_jobs_progress_moves_though_no_event_tells_of_it(home):
    client, run = home.daemon.client, running(home)
    home.open(f"jobs/{run.job_id}")
    home.shows("RUNNING", ".jobhead")
    client.heartbeat(run.lease_id, progress=0.42)

    assert home.shows("42 %", ".progress")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_page_that_stays_open_over_a_restart_goes_on_with_what_is_true_then(fresh, tabs, number):
    tab = tabs(fresh).sign_in()
    [before] = queued(tab)
    tab.page.evaluate("window.same = true")
    tab.open("jobs")
    tab.shows(before[-8:])
    fresh.end(number)
    tab.page.wait_for_selector(".connection[data-state=away]")
    words = tab.page.inner_text(".connection")
    fresh.start()
    [after] = queued(tab)
    tab.live()

    assert words == "reconnecting…"
    assert tab.shows(after[-8:])
    assert tab.shows(before[-8:])
    assert tab.page.evaluate("window.same")
    until(lambda: tab.page.locator(".problem").count() == 0)
    tab.expect("ERR_", "503")  # nobody answered, and no more


# finding


def test_filters_are_in_the_address_and_survive_a_reload(tab):
    page = tab.open("jobs")
    tab.shows("DONE", "tbody")
    page.get_by_role("button", name="FAILED").click()
    page.get_by_role("button", name="BLOCKED").click()
    page.get_by_label("Addon").fill("photos")
    page.keyboard.press("Enter")
    tab.until("location.hash === '#/jobs?state=FAILED%2CBLOCKED&addon=photos'")
    page.reload()
    tab.live()
    tab.until("document.querySelectorAll('tbody tr').length === 2")

    assert page.get_by_role("button", name="FAILED").get_attribute("aria-pressed") == "true"
    assert page.get_by_label("Addon").input_value() == "photos"
    page.get_by_role("link", name="clear").click()
    tab.until("document.querySelectorAll('tbody tr').length > 2")


def test_a_job_is_found_by_part_of_its_id_or_by_a_tag(tab, daemon):
    page = tab.open("jobs")
    for asked, found in [
        (daemon.jobs["failed"][-8:], {"failed"}),
        (daemon.jobs["failed"], {"failed"}),
        ("tagged", {"done", "running"}),
        ("no such thing", set()),
    ]:
        box = page.get_by_role("searchbox")
        box.fill(asked)
        box.press("Enter")  # a page that has just opened takes the focus; a person would not be that quick
        tab.until(
            "ids => [...document.querySelectorAll('main td a.id')].map((one) => one.title).sort().join() === ids.sort().join()",
            [daemon.jobs[name] for name in found],
        )

    assert tab.shows("No matching jobs")


def test_what_is_being_typed_is_not_taken_away_by_the_next_beat(home):
    home.daemon.client.set_addon(home.addon, paused=True, create=True)
    queued(home, 40)
    page = home.open("addons")
    field = page.get_by_label(f"Weight of {home.addon}", exact=True)
    field.fill("7")
    queued(home, 1)
    home.until("[...document.querySelectorAll('td.n')].some((one) => one.textContent === '41')")

    assert field.input_value() == "7"


# changing


def test_many_jobs_are_canceled_after_a_question_and_only_then(home):
    client = home.daemon.client
    client.set_addon(home.addon, paused=True, create=True)
    client.submit_many([job_of(home.addon, "send")] * 300)
    page = home.open(f"jobs?addon={home.addon}")
    home.until("document.querySelectorAll('tbody tr').length === 100")
    for _ in range(2):
        count = rows(home)
        page.get_by_role("button", name="More").click()
        home.until("count => document.querySelectorAll('tbody tr').length > count", count)
    page.get_by_label("Select all shown").check()
    page.get_by_role("toolbar").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Back").click()
    kept = client.stats().addons[home.addon]
    page.get_by_role("toolbar").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel 300 jobs").click()
    home.shows("Canceled 300 jobs", ".toasts")

    assert {state: count for state, count in kept.items() if count} == {"QUEUED": 300}
    assert client.stats().addons[home.addon]["CANCELED"] == 300


def test_many_jobs_are_retried_after_a_question(home):
    client, runs = home.daemon.client, [running(home) for _ in range(2)]
    for run in runs:
        client.fail(run.job_id, run.lease_id, "no")
    client.set_addon(home.addon, paused=True, create=True)
    page = home.open(f"jobs?addon={home.addon}")
    home.until("document.querySelectorAll('tbody tr').length === 2")
    page.get_by_label("Select all shown").check()
    page.get_by_role("toolbar").get_by_role("button", name="Retry").click()
    asked = client.stats().addons[home.addon]["FAILED"]
    page.get_by_role("button", name="Retry 2 jobs").click()
    home.shows("Retried 2 jobs", ".toasts")

    assert asked == 2
    assert client.stats().addons[home.addon]["QUEUED"] == 2


def test_all_jobs_that_match_are_canceled_not_only_those_shown(home):
    client = home.daemon.client
    client.set_addon(home.addon, paused=True, create=True)
    client.submit_many([job_of(home.addon, "send", {"to": "needle"})] * 150)
    other = client.submit(home.addon, "send", {"to": "hay"}).job_id
    page = home.open(f"jobs?addon={home.addon}&q=NEEDLE")
    home.until("document.querySelector('button.chip[aria-pressed]').innerText.includes('150')")
    page.get_by_role("button", name="Cancel all 150").click()
    page.get_by_role("button", name="Cancel 150 jobs").click()
    home.shows("Canceled 150 jobs", ".toasts")

    assert client.stats().addons[home.addon]["CANCELED"] == 150
    assert client.job(other).state == "QUEUED"


def test_a_job_is_submitted_from_the_page(home):
    page = home.open("jobs")
    page.get_by_role("button", name="Submit a job").click()
    page.get_by_role("textbox", name="Command").fill("echo from the page")
    page.get_by_label("Addon", exact=True).last.fill(home.addon)
    page.get_by_role("button", name="Submit", exact=True).click()

    assert home.shows("echo from the page")


def test_a_job_runs_again_with_other_arguments_as_a_new_job(home):
    client = home.daemon.client
    client.set_addon(home.addon, paused=True, create=True)
    first = client.submit(home.addon, "send", {"to": "wrong"}).job_id
    client.cancel(first)
    page = home.open(f"jobs/{first}")
    page.get_by_role("button", name="Run again").click()
    page.get_by_label("Payload").fill("{not json")
    page.get_by_role("button", name="Submit", exact=True).click()
    refused = home.shows("That is not JSON", "dialog[open]")
    page.get_by_label("Payload").fill('{"to": "right"}')
    page.get_by_role("button", name="Submit", exact=True).click()
    home.shows("send(to='right')")

    assert refused
    assert client.job(first).state == "CANCELED"


def test_a_read_only_link_opens_a_page_that_can_change_nothing(tabs, daemon):
    tab = tabs(daemon)
    tab.page.goto(daemon.client.login(read_only=True).url)
    tab.live()
    tab.until("document.documentElement.hasAttribute('data-read-only')")
    tab.open("jobs")
    tab.shows("photos")
    buttons = tab.page.get_by_role("button", name="Submit a job").count()
    answer = tab.page.evaluate(
        """() => fetch('/api/system/scheduler/pause', {method: 'POST', credentials: 'same-origin',
        headers: {'X-Penstock-Session': sessionStorage.getItem('penstock-session'), 'Content-Type': 'application/json'},
        body: '{}'}).then((answer) => answer.status)"""
    )
    tab.complaints.clear()  # Chromium reports the refusal

    assert buttons == 0
    assert answer == 403


def test_the_error_of_each_attempt_is_in_the_open(home):
    run = running(home)
    home.daemon.client.fail(run.job_id, run.lease_id, "OSError: the disk is full")
    home.open(f"jobs/{run.job_id}")

    assert home.until("document.querySelector('.attempt-error')?.innerText.includes('the disk is full')")


def test_a_job_whose_time_has_not_come_says_so_in_the_list(home):
    queued(home, earliest_start_at=datetime.now(UTC) + timedelta(hours=3))
    home.open(f"jobs?addon={home.addon}")

    assert home.shows("starts in ")


def test_a_failed_job_is_retried(home):
    client, run = home.daemon.client, running(home)
    client.fail(run.job_id, run.lease_id, "no")
    client.set_addon(home.addon, paused=True, create=True)
    page = home.open(f"jobs/{run.job_id}")
    page.get_by_role("button", name="Retry").click()

    assert home.shows("QUEUED", ".jobhead")
    assert client.job(run.job_id).state == "QUEUED"


def test_a_job_is_canceled_from_its_own_page(home):
    [job] = queued(home)
    page = home.open(f"jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    home.shows("CANCELED", ".jobhead")

    assert home.daemon.client.job(job).state == "CANCELED"


def test_priority_is_changed_and_nonsense_is_not_sent(home):
    client = home.daemon.client
    client.set_addon(home.addon, paused=True, create=True)
    [job] = queued(home)
    page = home.open(f"jobs/{job}")
    field = page.get_by_label("Priority")
    field.fill("900")
    field.press("Enter")
    refused = client.job(job).priority
    field.fill("90")
    field.press("Enter")
    home.shows("Priority changed", ".toasts")

    assert (refused, client.job(job).priority) == (50, 90)


def test_the_load_at_which_a_queued_job_may_start_is_changed(home):
    client = home.daemon.client
    client.set_addon(home.addon, paused=True, create=True)
    [job] = queued(home)
    page = home.open(f"jobs/{job}")
    page.get_by_label("Run when").select_option("any")
    home.shows("Load changed", ".toasts")

    assert "any" == client.job(job).run_when


def test_everything_is_paused_and_resumed(home):
    page = home.open("machine")
    page.get_by_role("button", name="Pause everything").click()
    page.get_by_role("button", name="Resume").wait_for()
    paused = home.daemon.client.stats().paused
    home.open("jobs")
    home.shows("Everything is paused: no job starts.")
    page.get_by_role("link", name="Resume").click()
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause everything").wait_for()

    assert (paused, home.daemon.client.stats().paused) == (True, False)


def test_a_host_is_drained_after_a_question_and_taken_up_again(home):
    client = home.daemon.client
    host = client.hosts().here
    page = home.open("machine")
    row = page.locator("tr", has=page.get_by_text("(here)"))
    row.get_by_role("button", name=f"Drain {host}").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    row.get_by_text("alive, draining").wait_for()
    [drained] = client.hosts().hosts
    row.get_by_role("button", name=f"Undrain {host}").click()
    row.get_by_text("alive", exact=True).wait_for()
    [taken_up] = client.hosts().hosts
    # How many units depends on what runs at this moment.
    in_use = re.compile(rf"{host}: \d+ of {taken_up.capacity} units in use")
    row.get_by_role("img", name=in_use).wait_for()

    assert (drained.draining, taken_up.draining) == (True, False)


def test_an_addons_weight_and_pause_are_set(home):
    queued(home)
    row = home.open("addons").locator("tr", has=home.page.get_by_role("link", name=home.addon, exact=True))
    weight = row.get_by_role("spinbutton")
    weight.fill("250")
    weight.press("Enter")
    home.shows(f"{home.addon} changed", ".toasts")
    row.get_by_role("button", name="Pause").click()
    row.get_by_role("button", name="Resume").wait_for()
    row.get_by_text("paused", exact=True).wait_for()
    [reported] = [one for one in home.daemon.client.addons().addons if one.addon_id == home.addon]

    assert (reported.weight, reported.paused) == (250, True)
    assert weight.input_value() == "250"


# keys


def test_keys_lead_to_pages_to_the_search_and_to_help(tab):
    page = tab.page

    def at_the_machine():
        """On a busy machine the second key may come too late, as it may from a person."""
        page.keyboard.press("g")
        page.keyboard.press("m")
        return page.evaluate("location.hash") == "#/machine"

    until(at_the_machine)
    page.keyboard.press("/")
    tab.until("document.activeElement.type === 'search' && location.hash === '#/jobs'")
    page.keyboard.type("g m")
    typed = page.get_by_role("searchbox").input_value()
    page.keyboard.press("Escape")
    tab.until("document.activeElement.type !== 'search'")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")

    assert typed == "g m"
    assert page.url.endswith("#/jobs")


def test_the_key_for_the_search_holds_while_the_page_before_is_still_arriving(tab):
    tab.page.evaluate(
        """() => {
            addEventListener("hashchange", () => setTimeout(() =>
                document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }))), { once: true });
            location.hash = "#/machine";
        }"""
    )

    tab.until("location.hash === '#/jobs' && document.activeElement.type === 'search'")


# coming in


def test_without_a_session_there_is_only_the_way_to_get_one(tabs, daemon):
    tab = tabs(daemon)
    tab.page.goto(daemon.url)
    tab.shows("penstock login")
    everything = tab.page.inner_text("body")
    tab.page.get_by_label("Link or code").fill(daemon.client.login().url)
    tab.page.get_by_role("button", name="Open").click()
    tab.live()

    assert "photos" not in everything


def test_a_link_opens_the_page_once(browser, daemon, tabs):
    link = daemon.client.login().url
    first, second = tabs(daemon), tabs(daemon)
    first.page.goto(link)
    first.live()
    second.page.goto(link)
    second.shows("has been used")

    assert "code=" not in first.page.url
    second.expect("401")


def test_a_session_that_is_revoked_is_over_at_once(fresh, tabs):
    tab = tabs(fresh).sign_in()
    [page] = [token for token in fresh.client.tokens() if token.name == "page"]
    fresh.client.revoke_token(page.token_id)
    tab.open("jobs")

    assert tab.shows("penstock login")
    tab.expect("401")


def test_a_session_survives_a_reload_and_reaches_the_tabs_beside_it(fresh, tabs):
    tab = tabs(fresh).sign_in()
    tab.page.reload()
    tab.live()
    beside = Tab(tab.context, fresh)
    beside.page.goto(fresh.url)
    beside.live()
    beside.sign_in()  # a new session: the one cookie that both tabs share is another one now
    beside.open("jobs")
    tab.open("jobs")
    tab.page.reload()
    tab.live()

    beside.check()


def test_another_server_on_this_host_gets_a_cookie_that_opens_nothing(fresh, tabs):
    """Cookies ignore ports: this one hands whatever a browser sends it to the test."""
    tab = tabs(fresh).sign_in()
    received = []

    class Thief(BaseHTTPRequestHandler):
        def do_GET(self):
            received.append(self.headers.get("cookie", ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Thief) as thief:
        serving = threading.Thread(target=thief.serve_forever)
        serving.start()
        page = tab.context.new_page()
        page.goto(f"http://127.0.0.1:{thief.server_port}/")
        thief.shutdown()
        serving.join()
    stolen = received[0]
    name, _, value = stolen.partition("=")
    stored = page.evaluate("[...Object.values(localStorage), ...Object.values(sessionStorage)]")
    half = hmac.new(value.encode(), b"penstock page", hashlib.sha256).hexdigest()

    assert name.startswith("penstock-")
    assert stored == []
    for headers in (
        {"Cookie": stolen},
        {"Cookie": stolen, "X-Penstock-Session": half},
        {"Cookie": stolen, "X-Penstock-Session": value},
        {"Authorization": f"Bearer {value}"},
    ):
        request = urllib.request.Request(f"{fresh.url}/api/system/scheduler/tokens", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)
    tab.page.reload()
    tab.live()


def test_a_page_whose_session_is_revoked_shows_nothing_more_without_being_touched(fresh, tabs):
    tab = tabs(fresh).sign_in()
    [page] = [token for token in fresh.client.tokens() if token.name == "page"]
    fresh.client.revoke_token(page.token_id)

    assert tab.shows("penstock login")
    tab.expect("401", "ERR_")


# schedules


def test_a_schedule_shows_its_moments_and_can_be_run_paused_and_resumed(fresh, tabs):
    fresh.client.pause()  # no units are kept for the job, so it stays QUEUED
    fresh.client.add_schedule("nightly", job_of("a", "t"), cron="0 6 * * *", zone="Asia/Kolkata")
    tab = tabs(fresh).sign_in()
    tab.open("schedules")
    tab.shows("0 6 * * *")
    assert [" 06:00"] * 5 == [
        text[-6:] for text in tab.page.locator("td[data-label=Next] .mono").all_inner_texts()
    ]

    tab.page.get_by_role("button", name="Run nightly now").click()
    tab.shows("QUEUED", "td[data-label='Last jobs']")
    [fired] = fresh.client.schedule("nightly").last
    tab.shows(fired.job_id[-8:])
    tab.page.get_by_role("button", name="Pause nightly").click()
    tab.shows("paused", "td[data-label=Next]")
    assert fresh.client.schedule("nightly").paused
    tab.page.get_by_role("button", name="Resume nightly").click()
    tab.shows("06:00", "td[data-label=Next]")
    assert not fresh.client.schedule("nightly").paused
    tab.page.get_by_role("link", name="nightly", exact=True).click()
    tab.shows(fired.job_id[-8:])


def test_a_long_name_in_the_list_of_jobs_ends_in_an_ellipsis(fresh, tabs):
    fresh.client.submit("a", "t", {"words": "long " * 60})
    tab = tabs(fresh).sign_in()
    tab.open("jobs")
    tab.page.locator("td.what a").wait_for()
    style = (
        "a => [getComputedStyle(a).textOverflow, getComputedStyle(a).display, a.scrollWidth > a.clientWidth]"
    )

    assert ["ellipsis", "block", True] == tab.page.locator("td.what a").evaluate(style)


# arrays


def test_an_array_is_canceled_from_its_row(fresh, tabs):
    array_id = fresh.client.submit_array("1-50%2", job_of("a", "t")).array_id
    tab = tabs(fresh).sign_in()
    tab.open("arrays")

    assert tab.shows("0 of 50 done, 2 at once")
    tab.page.get_by_role("button", name="Cancel array").click()
    assert tab.shows("which is final", "dialog")
    assert fresh.client.array(array_id).state == "RUNNING"
    tab.page.get_by_role("button", name="Cancel the array").click()
    assert tab.shows("50 canceled")
    assert fresh.client.array(array_id).state == "CANCELED"
    assert tab.page.get_by_role("progressbar").get_attribute("aria-valuenow") == "100"


# batches


def test_a_batch_is_closed_and_canceled_from_its_page(fresh, tabs):
    job = job_of("a", "t")
    fresh.client.submit_batch("nightly", "a", [job, job], on_end=job, open=True)
    tab = tabs(fresh).sign_in()
    tab.open("batches")

    assert tab.shows("0 of 2 done, 2 live")
    tab.page.get_by_role("link", name="nightly").click()
    assert tab.shows("does not end before it is closed")
    assert tab.shows("When all have ended")
    tab.page.get_by_role("button", name="Close batch nightly").click()
    assert tab.shows("RUNNING")
    assert not fresh.client.batch("nightly").open
    tab.page.get_by_role("button", name="Cancel batch nightly").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Cancel the batch").click()
    assert tab.shows("2 canceled")
    assert fresh.client.batch("nightly").state == "CANCELED"
    assert tab.page.get_by_role("progressbar").get_attribute("aria-valuenow") == "100"


def test_a_job_that_waits_for_a_batch_links_to_it(fresh, tabs):
    fresh.client.submit_batch("nightly", "a", [job_of("a", "t")])
    child = fresh.client.submit("a", "t", after=("batch:nightly",))
    tab = tabs(fresh).sign_in()
    tab.open(f"jobs/{child.job_id}")

    tab.page.locator(".family").get_by_role("link", name="batch nightly").click()
    assert tab.shows("0 of 1 done, 1 live")
