"""Settings: where they come from, and everything that can be wrong with them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from penstock.core.jobs.admission import Budget
from penstock.core.jobs.types import HOUR, MINUTE, SECOND
from penstock.scheduler.rules import SchedulerRules
from penstock.settings import BadSettings, describe, load
from penstock.settings.reading import table
from penstock.settings.settings import ServerSettings

ROOT = Path(__file__).parents[2]
HOME = {"HOME": "/home/ann"}


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return path

    return write


def problems_of(file=None, **given):
    with pytest.raises(BadSettings) as caught:
        load(file, **{"environ": HOME, **given})
    return caught.value.problems


# Where they come from


def test_without_any_source_the_rules_are_the_defaults_of_the_engine():
    assert SchedulerRules() == load(environ=HOME).rules()


def test_no_queue_is_without_a_limit_unless_somebody_says_so():
    depth = load(environ=HOME).rules().depth
    assert (depth.total, depth.per_addon) == (1_000_000, 500_000)

    depth = load(environ=HOME, flags={"depth.total": "none", "depth.per_addon": "none"}).rules().depth
    assert (depth.total, depth.per_addon) == (None, None)


def test_flags_beat_the_environment_which_beats_the_file(file):
    path = file('[leases]\nttl = "10s"\nstart_timeout = "11s"\ngrace = "22s"\n')
    environ = {**HOME, "PENSTOCK_LEASES_TTL": "20s", "PENSTOCK_LEASES_START_TIMEOUT": "21s"}

    leases = load(path, environ=environ, flags={"leases.ttl": "30s"}).leases

    assert (30 * SECOND, 21 * SECOND, 22 * SECOND) == (leases.ttl, leases.start_timeout, leases.grace)


def test_each_value_is_listed_with_its_source(file):
    path = file('# ours\n[leases]\nttl = "10s"\n[addons."my.photos"]\nweight = 200\n')
    environ = {**HOME, "PENSTOCK_CAPS_CONCURRENT": "4"}

    listed = {s.key: s for s in describe(load(path, environ=environ, flags={"log.level": "debug"}))}

    assert ("10s", f"{path}:3") == (listed["leases.ttl"].value, listed["leases.ttl"].source)
    assert ("4", "PENSTOCK_CAPS_CONCURRENT") == (
        listed["caps.concurrent"].value,
        listed["caps.concurrent"].source,
    )
    assert ("debug", "--set") == (listed["log.level"].value, listed["log.level"].source)
    assert ("200", f"{path}:5") == (
        listed['addons."my.photos".weight'].value,
        listed['addons."my.photos".weight'].source,
    )
    assert "default" == listed["leases.grace"].source


def test_an_addon_that_only_a_flag_names_has_its_settings():
    settings = load(environ=HOME, flags={"addons.photos.budget_day": "2.50"})

    assert {"photos"} == set(settings.addons)
    assert 2_500_000 == settings.rules().limits.budgets["photos"].day


def test_what_is_listed_can_be_given_back(file):
    settings = load(environ=HOME)
    given = {s.key: s.value for s in describe(settings) if s.value not in ("", "{}")}

    assert settings.rules() == load(environ=HOME, flags=given).rules()


def test_the_file_is_found_where_xdg_says(tmp_path):
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "penstock.toml").write_text("[caps]\nconcurrent = 3\n")

    assert 3 == load(environ={**HOME, "XDG_CONFIG_HOME": str(tmp_path)}).caps.concurrent


def test_the_data_directory_follows_xdg():
    assert Path("/home/ann/.local/share/penstock") == load(environ=HOME).data_dir
    assert Path("/d/penstock") == load(environ={**HOME, "XDG_DATA_HOME": "/d"}).data_dir
    assert Path("/home/ann/.local/share/penstock") == load(environ={**HOME, "XDG_DATA_HOME": "rel"}).data_dir
    assert Path("/e") == load(environ={**HOME, "XDG_DATA_HOME": "/d", "PENSTOCK_DATA_DIR": "/e"}).data_dir


def test_variables_of_the_client_and_of_others_are_not_settings():
    load(environ={**HOME, "PENSTOCK_URL": "http://x", "PENSTOCK_SOAK": "10", "PENSTOCK_TOKEN": "t"})


# What they become


def test_limits_budgets_and_curves_reach_the_engine(file):
    path = file("""
        [capacity]
        units = 40
        [caps]
        per_addon = 5
        types = { "photos/index" = 1 }
        constraints = { disk_write_heavy = 1 }
        [addons.photos]
        concurrent = 2
        budget_day = 2.5
        [retry]
        crash = ["10s", 60, "1h30m"]
        [depth]
        total = 1000
        """)

    rules = load(path, environ=HOME).rules()

    assert 40 == rules.capacity.most
    assert (2, 5) == (rules.limits.caps.limit("addon", "photos"), rules.limits.caps.limit("addon", "mail"))
    assert 1 == rules.limits.caps.limit("type", "photos/index")
    assert {"disk_write_heavy": 1} == rules.limits.caps.constraints
    assert {"photos": Budget(day=2_500_000)} == rules.limits.budgets
    assert (10 * SECOND, 1 * MINUTE, 90 * MINUTE) == rules.schedules.crash
    assert 1_000 == rules.depth.total


def test_settings_cannot_be_changed_once_read():
    settings = load(environ=HOME)

    with pytest.raises(AttributeError):
        settings.leases.ttl = HOUR


@pytest.mark.parametrize(
    ("written", "read"),
    [("30s", 30 * SECOND), ("1h30m", 90 * MINUTE), ("0.5s", SECOND // 2), ("45", 45 * SECOND), (45, 45 * SECOND), (1.5, 3 * SECOND // 2)],
)  # fmt: skip
def test_a_span_is_written_as_people_write_it(written, read):
    assert read == load(environ=HOME, flags={"order.patience": written}).order.patience


# What can be wrong


def test_every_problem_is_told_at_once_with_key_source_and_fix(file):
    path = file('[leases]\nttl = "soon"\n\n[caps]\nconcurrent = -1\n')

    first, second, third = problems_of(path, environ={**HOME, "PENSTOCK_QUIET_BUSY": "11"})

    assert ("leases.ttl", f"{path}:2", "is 'soon'") == first[:3]
    assert 'must be a span of 1s to 1h, such as "30s" or "1m30s"' == first.fix
    assert ("caps.concurrent", f"{path}:5") == second[:2]
    assert ("quiet.busy", "PENSTOCK_QUIET_BUSY") == third[:2]


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("[lease]\nttl = 3", "lease", "did you mean leases?"),
        ("[leases]\ntlt = 3", "leases.tlt", "did you mean leases.ttl?"),
        ("datadir = '/x'", "datadir", "did you mean data_dir?"),
        ("[leases]\nzzz = 3", "leases.zzz", "leases has: ttl, start_timeout, grace, fetch_for"),
        ("[addons.photos]\nwieght = 3", "addons.photos.wieght", "did you mean addons.photos.weight?"),
        ("zzz = 1", "zzz", "remove it; `penstock settings` lists all settings"),
        ("leases = 3", "leases", "must be a table of settings"),
        ("[addons]\nphotos = 3", "addons.photos", "must be a table of settings"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(file, text, key, fix):
    [problem] = problems_of(file(text))

    assert (key, fix) == (problem.key, problem.fix)


def test_an_unknown_variable_of_a_known_section_is_refused():
    [problem] = problems_of(environ={**HOME, "PENSTOCK_LEASES_TTTL": "3s"})

    assert ("PENSTOCK_LEASES_TTTL", "did you mean PENSTOCK_LEASES_TTL?") == (problem.source, problem.fix)


def test_a_collector_without_the_extra_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    [problem] = problems_of(flags={"telemetry.otlp": "http://127.0.0.1:4318"})

    assert ("telemetry.otlp", "needs OpenTelemetry") == (problem.key, problem.message)
    assert "penstock[otlp]" in problem.fix


def test_an_unknown_flag_is_refused():
    [problem] = problems_of(flags={"leases.ttll": "3s"})

    assert ("--set", "did you mean leases.ttl?") == (problem.source, problem.fix)


WRONG = {
    "database": ["", "relative/path", "mysql://db/jobs", 3],
    "host.name": ["", "a b", "x" * 129, 3],
    "host.labels": [["a b"], [""], [1]],
    "postgres.schema": ["", "A", "a-b", "x" * 64, 3],
    "postgres.connections": [3, 1_001, "many", True],
    "postgres.pooler": ["yes", 1],
    "data_dir": ["relative/path", 3],
    "server.listen": ["127.0.0.1", "127.0.0.1:99999", "unix:/run/p.sock", [], [80], "ho st:80"],
    "server.allowed_hosts": ["ex ample.org"],
    "server.tls_cert": ["relative.pem"],
    "server.tls_key": ["relative.pem"],
    "server.trusted_proxies": ["proxy.example.org"],
    "server.token_file": ["relative"],
    "server.shutdown_timeout": ["-1s", "2h", True],
    "log.format": ["xml", 1],
    "log.level": ["loud"],
    "capacity.units": [101, -1, "some", 1.5, True],
    "capacity.total": [0, 101],
    "capacity.reserve": [-1, 100],
    "capacity.curve": [[], [[2, 1.0], [1, 0.5]], [[1, 2.0]], [[1]], "x", [["a", 1]]],
    "quiet.quiet": [-1, 11, "nan", "inf"],
    "quiet.normal": [11],
    "quiet.busy": [11],
    "quiet.margin": [6],
    "quiet.every": ["1ms"],
    "quiet.fresh_for": ["0s"],
    "quiet.needed": ["cpu, moon"],
    "caps.concurrent": [-1, "many", 1.5],
    "caps.per_addon": [-1],
    "caps.per_type": [-1],
    "caps.types": [3, {"a b": 1}, {"a": -1}],
    "caps.constraints": [{"moon_heavy": 1}],
    "depth.total": [-1],
    "depth.per_addon": [-1],
    "leases.ttl": ["0s", "2h", "30 parsecs", [], None],
    "leases.start_timeout": ["0s"],
    "leases.grace": ["2h"],
    "preemption.threshold": [0, 101, "often"],
    "preemption.patience": ["0s"],
    "runner.cancel_grace": ["2h"],
    "runner.term_grace": ["2h"],
    "leases.fetch_for": ["0s"],
    "order.tick": ["1ms"],
    "order.aging": ["0s"],
    "order.patience": ["2d"],
    "order.slack": ["8d"],
    "order.half_life": ["0s"],
    "retry.crash": ["soon", ["31d"]],
    "retry.unavailable": ["soon"],
    "retry.start": ["soon", []],
    "retention.keep": ["1s"],
    "retention.every": ["0s"],
    "retention.step": [0],
    "runner.enabled": ["perhaps", 1],
    "runner.slots": [-1],
    "runner.workers": [0],
    "runner.functions": ["module.name", "a b:c"],
    "runner.path": ["relative"],
    "runner.pass_on": ["A-B"],
    "runner.users": ["photos", {"photos": ""}, {"photos": "a b"}, {"a b": "nobody"}],
    "alerts.log": ["perhaps"],
    "alerts.command": [[3], [""], [["sh"]]],
    "alerts.webhook": [
        "example.org",
        "ftp://example.org/",
        "https://user:secret@example.org/",
        "https://example.org/#x",
        "https://example.org:22/",
        "https://example.org:99999/",
        "https://",
        "https://[::1/",
        "https://ex ample.org",
        "https://example.org/a b\r\nX: y",
        3,
    ],
    "alerts.webhook_secret_file": ["relative"],
    "alerts.allow_private": [2],
    "alerts.window": ["-1s", "8d"],
    "alerts.retry_for": ["0s", "8d"],
    "telemetry.otlp": ["collector:4318", "ftp://collector/"],
    "telemetry.every": ["0s", "2d"],
}


def test_every_setting_is_tried_with_wrong_values():
    listed = {s.key for s in describe(load(environ=HOME))}

    assert listed == set(WRONG)


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_a_wrong_value_is_refused_by_name(key, value):
    problems = problems_of(flags={key: value})

    assert [key] == [p.key for p in problems]
    assert problems[0].fix.startswith("must be ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight", 0),
        ("concurrent", -1),
        ("budget_day", 0),
        ("budget_month", "much"),
        ("alert_webhook", "here"),
        ("webhook", "mailto:me"),
    ],
)
def test_a_wrong_value_of_an_addon_is_refused_by_name(file, key, value):
    [problem] = problems_of(file(f"[addons.photos]\n{key} = {value!r}\n"))

    assert f"addons.photos.{key}" == problem.key


def test_a_file_that_is_not_there_or_not_toml_is_told(file, tmp_path):
    [missing] = problems_of(tmp_path / "nowhere.toml")
    [broken] = problems_of(file("[leases]\nttl = = 3\n"))

    assert "cannot be read" in missing.message
    assert "line 2" in broken.message


def test_a_file_named_by_the_environment_must_be_there(tmp_path):
    [missing] = problems_of(environ={**HOME, "PENSTOCK_CONFIG": str(tmp_path / "nowhere.toml")})

    assert "cannot be read" in missing.message


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"capacity.reserve": 50, "capacity.total": 50}, "capacity.reserve"),
        ({"quiet.normal": 8}, "quiet.normal"),
        ({"quiet.quiet": 5}, "quiet.quiet"),
        ({"quiet.every": "20s"}, "quiet.every"),
        ({"leases.grace": "14s"}, "leases.grace"),
        ({"runner.cancel_grace": "1m"}, "runner.cancel_grace"),
        ({"runner.term_grace": "6s"}, "runner.term_grace"),
    ],
)
def test_values_that_contradict_each_other_are_refused_where_they_were_written(flags, key):
    [problem] = problems_of(flags=flags)

    assert key == problem.key


def test_where_nothing_is_run_there_is_no_ladder_to_wait_for():
    settings = load(environ=HOME, flags={"leases.grace": "1s", "runner.enabled": False})

    assert settings.leases.grace == SECOND


def test_a_certificate_needs_its_key_and_both_must_exist(tmp_path):
    (tmp_path / "cert.pem").touch()

    alone = problems_of(flags={"server.tls_cert": str(tmp_path / "cert.pem")})
    absent = problems_of(flags={"server.tls_cert": "/no.pem", "server.tls_key": "/no.key"})

    assert ["is given without the other"] == [p.message for p in alone]
    assert ["server.tls_cert", "server.tls_key"] == [p.key for p in absent]


@pytest.mark.parametrize(
    ("flags", "key", "fix"),
    [
        ({"alerts.command": "no-such-program, --now"}, "alerts.command", "name one that can be run"),
        ({"alerts.webhook": "http://127.0.0.1:8000/"}, "alerts.webhook", "or set alerts.allow_private"),
        ({"alerts.webhook": "http://[::1]:8000/"}, "alerts.webhook", "or set alerts.allow_private"),
        ({"alerts.webhook": "http://169.254.169.254/", "alerts.allow_private": "true"}, "alerts.webhook", "name a receiver elsewhere"),
    ],
)  # fmt: skip
def test_an_alert_that_could_not_be_delivered_is_told_of_before_there_is_one(flags, key, fix):
    [problem] = problems_of(flags=flags)

    assert key == problem.key
    assert problem.fix.endswith(fix)


def test_a_webhook_of_an_addon_is_judged_like_that_of_all(file):
    path = file('[addons.photos]\nwebhook = "http://10.0.0.1/"\nalert_webhook = "https://[fe80::1]/"\n')

    assert ["addons.photos.alert_webhook", "addons.photos.webhook"] == [p.key for p in problems_of(path)]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:80", "127.8.8.8:1", "localhost:8420"])
def test_local_addresses_need_nothing_further(address):
    assert address == str(load(environ=HOME, flags={"server.listen": address}).server.listen)


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "192.168.0.7:80", "example.org:80"])
def test_to_listen_beyond_loopback_takes_encryption_and_allowed_hosts(address, tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    tls = {"server.tls_cert": str(tmp_path / "cert.pem"), "server.tls_key": str(tmp_path / "key.pem")}
    hosts = {"server.allowed_hosts": "jobs.example.org"}
    listen = {"server.listen": address}

    assert ["server.listen", "server.allowed_hosts"] == [p.key for p in problems_of(flags=listen)]
    assert ["server.listen"] == [p.key for p in problems_of(flags=listen | hosts)]
    assert ["server.allowed_hosts"] == [p.key for p in problems_of(flags=listen | tls)]
    load(environ=HOME, flags=listen | hosts | tls)
    load(environ=HOME, flags=listen | hosts | {"server.trusted_proxies": "10.0.0.1"})


def test_the_first_page_of_a_new_server_is_loopback_only():
    assert ServerSettings().listen.local


# What is written about them


def test_the_table_in_the_documentation_is_made_from_the_settings():
    page = (ROOT / "docs" / "settings.md").read_text()

    assert re.search(r"^\| setting .*?(?=\n\n|\Z)", page, re.DOTALL | re.MULTILINE)[0].strip() == table()


def test_a_flag_sets_one_entry_of_a_table_and_leaves_the_others(tmp_path):
    """`penstock explain` suggests such flags: a whole table would drop what the file says of other types."""
    path = tmp_path / "penstock.toml"
    path.write_text('[caps]\ntypes = { "mail/send" = 1, resize = 3 }\n')
    flags = {
        "caps.types.mail/send": "2",
        "caps.types.v1.x/thumb.nail": "4",
        "caps.constraints.cpu_heavy": "5",
    }
    caps = load(path, environ=HOME, flags=flags).caps

    assert caps.types == {"mail/send": 2, "resize": 3, "v1.x/thumb.nail": 4}
    assert caps.constraints == {"cpu_heavy": 5}


@pytest.mark.parametrize(
    ("key", "value"), [("caps.types.mail/send", "many"), ("caps.types.", "1"), ("caps.constraints.gpu", "1")]
)
def test_a_wrong_entry_of_a_table_is_refused_under_the_name_of_the_table(key, value):
    [problem] = problems_of(flags={key: value})

    assert problem.key == ".".join(key.split(".")[:2])


def test_a_flag_names_an_addon_with_dots():
    addons = load(environ=HOME, flags={"addons.my.addon.concurrent": "3"}).addons

    assert addons["my.addon"].concurrent == 3
