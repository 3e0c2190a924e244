"""The charts' past: by the minute for seven days, across restarts, with gaps where nothing ran."""

from __future__ import annotations

import stat
import time

from http_kit import ServerKit

from penstock import wire
from penstock.server.stats_history import HISTORY_FILE, KEPT_SEC, MOST_POINTS, StatsHistory

T0 = 1_900_000_020.0  # the first second of a minute


def second(at, **figures):
    plain = dict.fromkeys(wire.StatsSecond.__struct_fields__, 0) | dict.fromkeys(
        ("wait_p50", "wait_p95", "attempt_p50", "attempt_p95")
    )
    return wire.StatsSecond(**plain | {"at": at} | figures)


def fill(history, begin, minutes, **figures):
    for n in range(minutes * 60):
        history.add(second(begin + n, **figures))


def test_a_minute_is_the_mean_of_its_seconds(tmp_path):
    history = StatsHistory(tmp_path / "h")
    for n in range(61):
        history.add(second(T0 + n, done=n % 2, queued=4, wait_p95=float(n)))

    [minute] = history.points(T0 + 60, 60)

    assert (minute.at, minute.done, minute.queued, minute.wait_p95, minute.wait_p50) == (T0, 0.5, 4, 59, None)


def test_the_past_is_there_after_a_restart_and_what_is_too_old_is_gone(tmp_path):
    path = tmp_path / "h"
    first = StatsHistory(path)
    fill(first, T0, 3, done=1)
    second_life = StatsHistory(path)
    second_life.load(T0 + 600)
    much_later = StatsHistory(path)
    much_later.load(T0 + 60 + KEPT_SEC)

    assert [p.done for p in second_life.points(T0 + 300, 300)] == [1, 1, None, None, None]
    assert [p.at for p in much_later.points(T0 + 60 + KEPT_SEC, KEPT_SEC) if p.done is not None] == []
    assert path.read_bytes() == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_time_without_a_scheduler_is_a_gap_and_not_a_line(tmp_path):
    history = StatsHistory(tmp_path / "h")
    fill(history, T0, 2, done=1)
    fill(history, T0 + 3_600, 2, done=2)

    figures = [point.done for point in history.points(T0 + 3_720, 3_720)]

    assert figures[:2] == [1, 1]
    assert set(figures[2:-2]) == {None}
    assert len(figures) == 62


def test_seven_days_are_at_most_so_many_points(tmp_path):
    history = StatsHistory(None)

    assert len(history.points(T0, KEPT_SEC)) <= MOST_POINTS


def test_a_file_that_is_cut_off_or_unwritable_costs_only_its_lines(tmp_path, caplog):
    path = tmp_path / "h"
    history = StatsHistory(path)
    fill(history, T0, 3, done=1)
    path.write_bytes(path.read_bytes()[:-10])
    again = StatsHistory(path)
    again.load(T0 + 300)
    nowhere = StatsHistory(tmp_path / "no" / "such" / "folder")
    fill(nowhere, T0, 3, done=1)

    assert [p.done for p in again.points(T0 + 180, 180)] == [1, None, None]
    assert [p.done for p in nowhere.points(T0 + 120, 120)] == [1, 1]
    assert len([r for r in caplog.records if "history of the charts" in r.message]) == 1


def test_the_api_answers_a_range_by_the_minute_and_refuses_one_that_is_too_long(tmp_path):
    # Before the start: the server adds a second of its own at once, and older ones are left out after it.
    fill(StatsHistory(tmp_path / HISTORY_FILE), time.time() // 60 * 60 - 300, 4, done=2)
    kit = ServerKit(tmp_path, start=False)
    try:
        hour = kit.client.get("/stats/history?range_sec=3600").json
        refused = kit.client.get("/stats/history?range_sec=604801")
    finally:
        kit.close()

    assert 2 in hour["done"]
    assert None in hour["done"]
    assert (refused.status, refused.fields) == (422, ["range_sec"])
