"""`penstock.attach()`: a program's own pools and graphs on the page."""

from __future__ import annotations

import logging
import threading

import pytest

import penstock
from penstock import Client
from tests.waiting import until


@pytest.fixture
def attached(daemon, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TOKEN", daemon.token)
    with penstock.attach(daemon.url, name="thumbnailer", interval=0.1) as attachment:
        yield attachment


def shown(daemon):
    """The tasks of the program, by name."""
    programs = [one for one in daemon.client.programs() if one.name == "thumbnailer"]
    return {task.name: task for program in programs for task in program.tasks}


@pytest.mark.usefixtures("attached")
def test_a_pool_that_is_full_shows_red_and_amber_and_then_empties(tab, daemon):
    go, calls = threading.Event(), []
    with penstock.WorkerPool(workers=2, kind="thread", name="resize", max_queue_depth=5) as pool:
        callers = [threading.Thread(target=lambda: calls.append(pool.submit(go.wait))) for _ in range(10)]
        for caller in callers:
            caller.start()
        try:
            until(lambda: shown(daemon).get("resize") and shown(daemon)["resize"].waiting_queue_depth == 3)
            page = tab.open("pools")
            tab.shows("resize")
            # This process may have other pools: what other tests have left is shown until it is collected.
            mine = page.locator(
                "section[aria-label=thumbnailer] .pool",
                has=page.get_by_role("heading", name="resize", exact=True),
            )
            bars = {
                name: mine.locator(f"[role=img][aria-label^='{name} '] span").get_attribute("data-tone")
                for name in ("in flight", "pending", "waiting")
            }
            received = mine.inner_text()
        finally:
            go.set()
        for caller in callers:
            caller.join()
        mine.get_by_label("waiting 0").wait_for()

    assert bars == {"in flight": "accent", "pending": "warn", "waiting": "bad"}
    assert "2/2" in received
    assert "5/5" in received


@pytest.mark.usefixtures("attached")
def test_a_graph_is_shown_beside_the_pools(daemon):
    graph = penstock.Graph("greeting", env={"name": str})

    @graph.node
    def hello(name):
        return f"Hello, {name}!"

    with penstock.GraphExecutor(name="greeter") as executor:
        executor.run(graph.compile(), {"name": "you"})
        received = until(lambda: shown(daemon).get("greeter"))

    assert (received.kind, received.max_queue_depth) == ("graph", None)


@pytest.mark.usefixtures("attached")
def test_a_run_of_a_graph_is_drawn_as_lanes_while_it_goes_on_and_when_it_is_over(tab):
    go = threading.Event()
    graph = penstock.Graph("album")

    @graph.node
    def decode():
        return 1

    @graph.node(lane="io")
    def publish(decode):
        go.wait(30)

    with penstock.GraphExecutor(name="lab") as executor:
        executor.lanes()
        run = executor.submit(graph.compile())
        page = tab.open("pools")
        try:
            chart = page.get_by_role("figure", name=f"lab: run {run.id} of album")
            chart.get_by_text("running", exact=True).wait_for()
            chart.locator(".lane [data-going]", has_text="publish").wait_for()
            rows = chart.locator(".who").all_inner_texts()
            going = [bar.inner_text() for bar in chart.locator(".lane [data-going]").all()]
        finally:
            go.set()
        chart.get_by_text("ok", exact=True).wait_for()
        bars = [
            (bar.inner_text(), bar.get_attribute("data-tone")) for bar in chart.locator(".lane span").all()
        ]

    assert [row.rpartition(" ")[0] for row in rows] == ["compute", "io"]
    assert going == ["publish"]
    assert bars == [("decode", "accent"), ("publish", "violet")]


def test_a_scheduler_that_is_away_is_told_when_it_is_back_and_nothing_is_said_meanwhile(
    fresh, monkeypatch, caplog
):
    monkeypatch.setenv("PENSTOCK_TOKEN", fresh.token)
    fresh.end()
    with (
        caplog.at_level(logging.INFO, "penstock.client"),
        penstock.attach(fresh.url, interval=0.05) as attached,
    ):
        fresh.start()
        until(lambda: [one.name for one in fresh.client.programs()] == [attached.name])

    assert caplog.records == []


def test_a_token_that_may_not_is_told_of_once(daemon, monkeypatch, caplog):
    monkeypatch.setenv("PENSTOCK_TOKEN", "wrong")
    attempts, attach = [], Client.attach
    monkeypatch.setattr(Client, "attach", lambda *args: attempts.append(1) or attach(*args))
    with (
        caplog.at_level(logging.INFO, "penstock.client"),
        penstock.attach(daemon.url, interval=0.01),
    ):
        until(lambda: len(attempts) >= 5)

    assert len(caplog.records) == 1


@pytest.mark.parametrize("interval", [0, -1, float("inf"), "1"])
def test_an_interval_is_a_number_of_seconds(interval):
    with pytest.raises(ValueError, match="above 0"):
        penstock.attach("http://127.0.0.1:1", interval=interval)
